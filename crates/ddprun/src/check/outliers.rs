//! Which ranks, connections and nodes differ from the others, or lack what a run needs.
use super::facts::Facts;
use super::measured::{Measured, Node, Verdict, nodes};
use super::network::Link;
use std::collections::BTreeMap;

/// Connections differ more than cores do.
const OF_LINKS: f64 = 2.0;
/// Microseconds by which an outlier's latency is above the others', at least.
const LATENCY: f64 = 50.0;
/// Seconds that clocks may differ: the first failure is found by the times at which ranks failed.
const CLOCK: f64 = 0.1;
/// Bytes of memory that each rank should have free.
const MEMORY: u64 = 512 << 20;
/// Bytes of /dev/shm that NCCL may need.
const SHM: u64 = 512 << 20;
/// GB/s between hosts that are worth a note, however many have no more: less than half of gigabit Ethernet.
const NETWORK: f64 = 0.05;
/// Ports that should be free: most connections need one.
const PORTS: u64 = 1000;
/// The part of a GPU's memory that may be in use before the run, as by a display.
const GPU_MEMORY: u64 = 20;

/// What a node says about something.
type Text = fn(&Facts) -> Option<String>;

/// Judges all ranks, by rank.
pub(super) fn judge(ranks: &[Measured], tolerance: f64) -> Verdict {
    let mut verdict = Verdict::default();
    verdict.outliers.extend(cores(ranks, tolerance));
    verdict.outliers.extend(copies(ranks, tolerance));
    for own_host in [true, false] {
        verdict.outliers.extend(connections(ranks, own_host, tolerance * OF_LINKS));
    }
    let nodes = nodes(ranks);
    for node in &nodes {
        verdict.outliers.extend(needs(*node, ranks));
    }
    let texts: [(_, Text); 2] = [("ddprun", |facts| Some(facts.ddprun.clone())), ("NCCL", |facts| facts.nccl.clone())];
    verdict.outliers.extend(texts.into_iter().filter_map(|(name, of)| differences(&nodes, name, of)));
    let texts: [(_, Text); 4] = [
        ("the kernel", |facts| Some(facts.kernel.clone())),
        ("the processor", |facts| Some(format!("{} ({} cores)", facts.cpu, facts.cores))),
        ("the GPUs' driver", |facts| facts.driver.clone()),
        ("the list of GPUs", |facts| Some(facts.gpus.iter().map(|gpu| &gpu.name[..]).collect::<Vec<_>>().join(", "))),
    ];
    verdict.notes.extend(texts.into_iter().filter_map(|(name, of)| differences(&nodes, name, of)));
    let busy = |(first, facts): &Node<'_>| {
        let (name, cores) = (first.node_name(), facts.cores);
        let load = facts.load.filter(|load| *load > cores as f64 / 2.0)?;
        Some(format!("{name}: its load is {load:.1} on {cores} core(s): other processes ran in the last minute"))
    };
    verdict.notes.extend(nodes.iter().filter_map(busy));
    let is_between =
        |rank: &Measured, link: &Link| ranks.get(link.peer).is_some_and(|peer| peer.host_id != rank.host_id);
    let between = ranks.iter().flat_map(|rank| rank.links.iter().filter(move |link| is_between(rank, link)));
    if let Some(best) = between.map(|link| link.bandwidth).max_by(f64::total_cmp).filter(|best| *best < NETWORK) {
        verdict.notes.push(format!(
            "no connection between hosts carries more than {best:.3} GB/s, less than half of gigabit Ethernet: look at the \
             speed of the adapters (`ethtool`), and whether the address of the store is one of the fast network"
        ));
    }
    if ranks.iter().any(|rank| rank.products.iter().any(|(core, _)| core.is_none())) {
        verdict.notes.push("a node has more ranks than cores: their products are not compared".to_string());
    }
    verdict
}

/// The speed of most: at least half of them reach it. Two have the faster one's.
pub(super) fn of_most(mut speeds: Vec<f64>) -> Option<f64> {
    speeds.sort_by(|a, b| b.total_cmp(a));
    speeds.get(speeds.len().saturating_sub(1) / 2).copied()
}

fn cores(ranks: &[Measured], tolerance: f64) -> Vec<String> {
    let all = ranks.iter().flat_map(|rank| &rank.products).filter(|(core, _)| core.is_some());
    let Some(most) = of_most(all.map(|(_, speed)| *speed).collect()) else { return Vec::new() };
    let of = |rank: &Measured| {
        let slow = rank.products.iter().filter(|(_, speed)| speed * tolerance < most);
        let slow = slow.filter_map(|(core, speed)| Some(((*core)?.to_string(), *speed)));
        let (names, speeds): (Vec<String>, Vec<f64>) = slow.unzip();
        let worst = speeds.into_iter().min_by(f64::total_cmp)?;
        Some(format!(
            "{}: core {} multiplies matrices at {worst:.1} GFLOP/s, others at {most:.1} ({:.1} times as fast). Another \
             process may run there (`ps -eLo psr,pcpu,comm | sort -n`), or the core is throttled by heat, power or its \
             virtual machine's host (`turbostat`; `st` in `top`)",
            rank.name(),
            names.join(", "),
            most / worst
        ))
    };
    ranks.iter().filter_map(of).collect()
}

fn copies(ranks: &[Measured], tolerance: f64) -> Vec<String> {
    let Some(most) = of_most(ranks.iter().map(|rank| rank.copy).collect()) else { return Vec::new() };
    let of = |rank: &Measured| {
        (rank.copy * tolerance < most).then(|| {
            format!(
                "{}: memory is copied at {:.1} GB/s, elsewhere at {most:.1} ({:.1} times as fast). Another process may use \
                 the memory's bandwidth, the memory may be on another NUMA node (`--numa-binding node`), or modules of \
                 memory are missing or slow (`dmidecode -t memory`)",
                rank.name(),
                rank.copy,
                most / rank.copy
            )
        })
    };
    ranks.iter().filter_map(of).collect()
}

/// The slow connections within hosts, or between them. A rank whose connections are all slow is named itself.
fn connections(ranks: &[Measured], own_host: bool, tolerance: f64) -> Vec<String> {
    let host = |rank: usize| ranks.get(rank).map(|rank| &rank.host_id);
    let all: Vec<(&Measured, &Link)> = ranks
        .iter()
        .flat_map(|rank| rank.links.iter().map(move |link| (rank, link)))
        .filter(|(rank, link)| (host(rank.rank) == host(link.peer)) == own_host)
        .collect();
    let pairs: Vec<&(&Measured, &Link)> = all.iter().filter(|(rank, link)| rank.rank < link.peer).collect();
    let mut speeds: Vec<f64> = pairs.iter().map(|(_, link)| link.bandwidth).collect();
    speeds.sort_by(|a, b| b.total_cmp(a));
    let mut latencies: Vec<f64> = pairs.iter().map(|(_, link)| link.latency).collect();
    latencies.sort_by(f64::total_cmp);
    // All connections of one rank in three are more than half of them.
    let at = pairs.len().saturating_sub(1) / 4;
    let (Some(&speed), Some(&latency)) = (speeds.get(at), latencies.get(at)) else { return Vec::new() };
    let is_slow = |link: &Link| {
        link.bandwidth * tolerance < speed || (link.latency > latency * tolerance && link.latency > latency + LATENCY)
    };
    let is_culprit = |rank: &Measured| {
        let mut own = all.iter().filter(|(other, _)| other.rank == rank.rank).peekable();
        own.peek().is_some() && own.all(|(_, link)| is_slow(link))
    };
    // With a single pair there is nothing to compare.
    let culprits: Vec<&Measured> = ranks.iter().filter(|rank| is_culprit(rank)).collect();
    let place = if own_host { "its host" } else { "other hosts" };
    let figures = |link: &Link| {
        format!(
            "{:.2} GB/s and {:.0} µs, where others have {speed:.2} GB/s and {latency:.0} µs",
            link.bandwidth, link.latency
        )
    };
    let advice = if own_host {
        "Another process may run on its core"
    } else {
        "Look at the adapter's speed and errors (`ethtool`, `ip -s link`) and at the switch"
    };
    let of_rank = |rank: &&Measured| {
        let own = all.iter().filter(|(other, _)| other.rank == rank.rank);
        let (_, best) = own.max_by(|(_, a), (_, b)| a.bandwidth.total_cmp(&b.bandwidth))?;
        Some(format!("{}: every connection to {place} is slow, at best {}. {advice}", rank.name(), figures(best)))
    };
    let of_pair = |(rank, link): &&(&Measured, &Link)| {
        let is_named = culprits.iter().any(|culprit| [rank.rank, link.peer].contains(&culprit.rank));
        let peer = ranks.get(link.peer).filter(|_| is_slow(link) && !is_named)?;
        Some(format!("{} and {}: their connection is slow: {}. {advice}", rank.name(), peer.name(), figures(link)))
    };
    culprits.iter().filter_map(of_rank).chain(pairs.iter().filter_map(of_pair)).collect()
}

/// The resources of which a node has too little.
fn needs((first, facts): Node<'_>, all: &[Measured]) -> Vec<String> {
    let (name, world_size) = (first.node_name(), all.len());
    let ranks = all.iter().filter(|rank| rank.node_rank == first.node_rank).count() as u64;
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let mut lacks = Vec::new();
    if let Some(seconds) = first.clock.filter(|seconds| seconds.abs() > CLOCK) {
        let way = if seconds > 0.0 { "ahead of" } else { "behind" };
        lacks.push(format!(
            "its clock is {:.1} s {way} that of node 0: synchronise it (chrony), or the wrong rank may be called the first that \
             failed, and timelines do not fit together",
            seconds.abs()
        ));
    }
    if let Some(memory) = facts.memory.filter(|memory| *memory < MEMORY * ranks) {
        lacks.push(format!("it has {:.1} GiB of free memory for {ranks} rank(s): end what else uses it", gib(memory)));
    }
    if !facts.memfd && ranks > 1 {
        lacks.push(
            "the system forbids memfd_create, so its ranks exchange data over TCP instead of shared memory: change the \
             container's seccomp profile"
                .to_string(),
        );
    }
    let files = 64 + 3 * world_size as u64;
    if let Some(limit) = facts.nofile.filter(|limit| *limit < files) {
        lacks.push(format!(
            "a process may open {limit} files, and {world_size} ranks may need {files}: raise the hard limit (`ulimit -Hn`)"
        ));
    }
    if let Some(ports) = facts.ports.filter(|ports| *ports < PORTS) {
        lacks.push(format!(
            "it has {ports} free ports for connections: end what has them (`ss -s`), or widen net.ipv4.ip_local_port_range"
        ));
    }
    if !facts.gpus.is_empty() {
        if let Some(shm) = facts.shm.filter(|shm| *shm < SHM) {
            lacks.push(format!(
                "/dev/shm has {:.2} GiB free, and NCCL may need more: give the container a larger one (--shm-size=8g)",
                gib(shm)
            ));
        }
        if let Some(limit) = facts.memlock.filter(|limit| facts.has_rdma && *limit < 1 << 30) {
            lacks.push(format!(
                "{limit} bytes of memory can be locked, too few for its adapters: `ulimit -l unlimited`"
            ));
        }
    }
    lacks.extend(facts.gpu_error.iter().map(|error| format!("its GPUs cannot be listed: {error}")));
    for gpu in &facts.gpus {
        let mut of_gpu = |text: String| lacks.push(format!("GPU {} {text}", gpu.index));
        if gpu.is_slowed {
            of_gpu("is slowed down by heat or power (`nvidia-smi -q -d PERFORMANCE`): look at its cooling".to_string());
        }
        if gpu.memory_errors > 0 {
            of_gpu(format!("has had {} uncorrected errors of its memory: reset or replace it", gpu.memory_errors));
        }
        if gpu.used > gpu.memory / GPU_MEMORY {
            of_gpu(format!(
                "has {} of {} MiB in use: end the process that uses it (`nvidia-smi`)",
                gpu.used, gpu.memory
            ));
        }
    }
    lacks.into_iter().map(|text| format!("{name}: {text}")).collect()
}

/// Nodes with another value than most, or than the first.
fn differences(nodes: &[Node<'_>], what: &str, of: Text) -> Option<String> {
    let value = |(_, facts): &Node<'_>| of(facts).filter(|text| !text.is_empty()).unwrap_or("absent".to_string());
    let values: Vec<String> = nodes.iter().map(value).collect();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    values.iter().for_each(|value| *counts.entry(value).or_default() += 1);
    let most = counts.values().max()?;
    let common = values.iter().find(|value| counts.get(value.as_str()) == Some(most))?;
    let others = nodes.iter().zip(&values).filter(|(_, value)| *value != common);
    let others: Vec<String> = others.map(|((first, _), value)| format!("{value} on {}", first.node_name())).collect();
    (!others.is_empty()).then(|| format!("{what} is {}, but {common} elsewhere", others.join(", ")))
}
