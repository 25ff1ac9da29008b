//! The text that `ddprun check` shows.
use super::compute::median;
use super::measured::{Measured, Node, Verdict, nodes};
use super::network::{Link, SIZES};
use crate::view::status::{UNKNOWN, or_unknown, table};

/// The measurements of all ranks, and the verdict.
pub(super) fn text(ranks: &[Measured], verdict: &Verdict) -> String {
    let header = ["rank", "node", "host", "cores", "GFLOP/s", "copy GB/s", "latency us", "messages GB/s"];
    let mut text = table(header, ranks.iter().map(|rank| rank_row(ranks, rank)));
    let nodes = nodes(ranks);
    let header =
        ["node", "clock", "memory GiB", "/dev/shm GiB", "open files", "locked memory", "ports", "cores", "processor"];
    text += &table(header, nodes.iter().map(node_row));
    let header = ["node", "ddprun", "kernel", "NCCL", "driver", "GPUs"];
    text += &table(header, nodes.iter().map(versions_row));
    text += &all_reduce(ranks);
    for note in &verdict.notes {
        text += &format!("\nnote: {note}\n");
    }
    match verdict.outliers.len() {
        0 => text += "\nno outliers\n",
        count => {
            text += &format!("\n{count} outlier(s):\n");
            verdict.outliers.iter().for_each(|outlier| text += &format!("- {outlier}\n"));
        }
    }
    text
}

fn rank_row(ranks: &[Measured], rank: &Measured) -> [String; 8] {
    let cores: Vec<String> = rank.products.iter().filter_map(|(core, _)| *core).map(|core| core.to_string()).collect();
    let cores = match &cores[..] {
        [] if rank.products.is_empty() => UNKNOWN.to_string(),
        [] => "shared".to_string(),
        [one] => one.clone(),
        [first, .., last] => format!("{first}..{last}"),
    };
    let (node, product, copy) = (rank.node_rank.to_string(), rank.product(), rank.copy);
    let of = |value: fn(&Link) -> f64, digits: usize| {
        let [own, others] = [true, false].map(|own| {
            let is_own = |peer: usize| ranks.get(peer).is_some_and(|peer| peer.host_id == rank.host_id);
            let values: Vec<f64> = rank.links.iter().filter(|link| is_own(link.peer) == own).map(value).collect();
            (!values.is_empty()).then(|| format!("{:.digits$}", median(values)))
        });
        match (own, others) {
            (Some(own), Some(others)) => format!("{own}, {others}"),
            (own, others) => own.or(others).unwrap_or_else(|| UNKNOWN.to_string()),
        }
    };
    let (latency, bandwidth) = (of(|link| link.latency, 1), of(|link| link.bandwidth, 2));
    let [product, copy] = [product, copy].map(|speed| or_unknown((speed > 0.0).then(|| format!("{speed:.1}"))));
    [rank.rank.to_string(), node, rank.host.clone(), cores, product, copy, latency, bandwidth]
}

fn node_row((first, facts): &Node<'_>) -> [String; 9] {
    let gib = |bytes: Option<u64>| or_unknown(bytes.map(|bytes| format!("{:.1}", bytes as f64 / f64::from(1 << 30))));
    let limit = |limit: Option<u64>| limit.map_or_else(|| "unlimited".to_string(), |limit| limit.to_string());
    [
        first.node_rank.to_string(),
        or_unknown(first.clock.map(|seconds| format!("{:+.1} ms", seconds * 1e3))),
        gib(facts.memory),
        gib(facts.shm),
        limit(facts.nofile),
        limit(facts.memlock),
        or_unknown(facts.ports),
        facts.cores.to_string(),
        facts.cpu.clone(),
    ]
}

fn versions_row((first, facts): &Node<'_>) -> [String; 6] {
    let gpus = match &facts.gpus[..] {
        [] => UNKNOWN.to_string(),
        [first, ..] => format!("{} x {}", facts.gpus.len(), first.name),
    };
    let (nccl, driver) = (or_unknown(facts.nccl.as_ref()), or_unknown(facts.driver.as_ref()));
    [first.node_rank.to_string(), facts.ddprun.clone(), facts.kernel.clone(), nccl, driver, gpus]
}

/// On the slowest rank.
fn all_reduce(ranks: &[Measured]) -> String {
    let worst = |size: usize| ranks.iter().filter_map(|rank| rank.all_reduce.get(size).copied()).max_by(f64::total_cmp);
    let shown = SIZES.iter().enumerate().filter_map(|(index, (bytes, name))| {
        let time = worst(index)?;
        let speed = *bytes as f64 / (time.max(1e-3) * 1e3);
        let speed = if *bytes < 1 << 20 { String::new() } else { format!(" ({speed:.2} GB/s)") };
        let time = if time < 1e4 { format!("{time:.1} us") } else { format!("{:.1} ms", time / 1e3) };
        Some(format!("{name} {time}{speed}"))
    });
    let shown: Vec<String> = shown.collect();
    if shown.is_empty() {
        return String::new();
    }
    format!("\nall-reduce over {} rank(s): {}\n", ranks.len(), shown.join(", "))
}
