//! One rank of a check.
use super::compute::{self, Effort};
use super::facts::Facts;
use super::group::Group;
use super::measured::{Measured, Report};
use super::network;
use super::outliers;
use super::table;
use crate::command::Manner;
use crate::console::{Console, Target, message};
use crate::error::Result;
use crate::numa;
use crate::tail::plain;
use candle_ddp_base::file::{PreparedFile, Progress};
use candle_ddp_base::host::{host_identity, host_name};
use candle_ddp_env::PROCESS;
use candle_ddp_rendezvous::error::FILE_VARIABLE;
use candle_ddp_rendezvous::json::encode;

/// Measures as one rank. Returns the exit code.
pub(crate) fn work(manner: &Manner) -> Result<u8> {
    let effort = if manner.quick { Effort::QUICK } else { Effort::FULL };
    let effort = Effort { most_bytes: manner.most_bytes, ..effort };
    let group = Group::join()?;
    let own = measure(&group, effort, manner.joint)?;
    let leads = own.facts.is_some();
    let ranks = group.all_gather("measured", &own)?;
    let report = Report { verdict: outliers::judge(&ranks, manner.tolerance.factor()), ranks };
    let is_shown = !manner.joint || !report.verdict.outliers.is_empty();
    if group.rank == 0 && !is_shown {
        report.verdict.notes.iter().for_each(message);
    }
    if group.rank == 0 && is_shown {
        let text = match manner.json {
            true => [encode(&report), vec![b'\n']].concat(),
            false => plain(&table::text(&report.ranks, &report.verdict)).into_bytes(),
        };
        // The text is lost if stdout has no reader.
        let _ = Console::get().show(0, Target::Stdout, text);
    }
    // No rank ends while another one needs it.
    group.barrier()?;
    if report.verdict.outliers.is_empty() || !leads {
        return Ok(0);
    }
    let Some(file) = PROCESS.path(FILE_VARIABLE) else { return Ok(1) };
    let text = report.verdict.outliers.join("\n");
    let prepared = PreparedFile::create_over_links(&file)?;
    prepared.fill(&Progress::default(), |to| to.write_all(text.as_bytes()))?;
    prepared.commit()?;
    Ok(u8::from(manner.joint))
}

/// With `is_joint`, only what each machine has not measured alone.
fn measure(group: &Group, effort: Effort, is_joint: bool) -> Result<Measured> {
    let rank = group.rank;
    let node_rank: usize = PROCESS.raw("GROUP_RANK").and_then(|text| text.parse().ok()).unwrap_or(0);
    // Nodes may have different numbers of ranks.
    let nodes = group.all_gather("node", &node_rank)?;
    let host_id = format!("{:x}", host_identity(None));
    let (products, copy, all_reduce) = match is_joint {
        true => Default::default(),
        false => {
            let (products, copy) = processors(group, &host_id, effort)?;
            (products, copy, network::all_reduce(group, effort)?)
        }
    };
    let mut leaders: Vec<usize> = (0..nodes.len()).collect();
    leaders.dedup_by_key(|rank| nodes.get(*rank));
    let mut links = Vec::new();
    if is_joint {
        links.extend(network::links(group, &leaders, effort)?);
    } else if group.world_size <= network::MOST_PAIRED {
        links.extend(network::links(group, &(0..group.world_size).collect::<Vec<_>>(), effort)?);
    } else {
        let own: Vec<usize> = (0..nodes.len()).filter(|rank| nodes.get(*rank) == Some(&node_rank)).collect();
        links.extend(network::links(group, &own, effort)?);
        links.extend(network::links(group, &leaders, effort)?);
    }
    let clock = network::clock(group, &leaders)?;
    let mut facts = leaders.contains(&rank).then(Facts::of_this_node);
    if is_joint {
        // The machine has said it already.
        facts.iter_mut().for_each(|facts| facts.load = None);
    }
    let host = host_name();
    Ok(Measured { rank, node_rank, host, host_id, products, copy, links, all_reduce, clock, facts })
}

/// The GFLOP/s of this rank's cores, and the GB/s of its copies of memory.
fn processors(group: &Group, host_id: &str, effort: Effort) -> Result<(compute::Products, f64)> {
    // Ranks of one host that may use the same processors share them.
    let cpus: Vec<usize> = numa::allowed().unwrap_or_default().into_iter().collect();
    let place = (host_id.to_string(), format!("{cpus:?}"));
    let places = group.all_gather("place", &place)?;
    let sharers = |ranks: &[(String, String)]| ranks.iter().filter(|other| **other == place).count();
    let own = compute::share(&cpus, sharers(places.get(..group.rank).unwrap_or_default()), sharers(&places));
    group.barrier()?;
    let products = compute::products(&own, effort);
    group.barrier()?;
    let copy = compute::copy(own.first().copied(), effort);
    group.barrier()?;
    Ok((products, copy))
}
