//! The text that `ddprun status` shows.
use super::document::{NodeStatus, Phase};
use super::snapshot::Snapshot;
use crate::time;
use candle_ddp_rendezvous::{RankStatus, milliseconds};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Stands for an unknown value.
const UNKNOWN: &str = "-";

/// Shows `snapshot`, which was taken at `now`.
pub(super) fn text(snapshot: &Snapshot, now: SystemTime) -> String {
    let run = &snapshot.run;
    let phase = match run.phase {
        Phase::Meeting => "waiting for nodes",
        Phase::Running => "running",
        Phase::Restarting => "ending the workers, to restart them",
        Phase::Ending => "ending",
    };
    let turn = match snapshot.generation {
        Some(generation) => format!("generation {generation}"),
        None => format!("attempt {}", run.attempt),
    };
    let mut text =
        format!("run {}: {phase}, {turn}, {} of {} restarts used\n", run.run_id, run.restarts, run.max_restarts);
    if !run.nodes.is_empty() {
        text += &table(["node", "host", "state"], run.nodes.iter().map(node));
    }
    if !snapshot.ranks.is_empty() {
        let header = ["rank", "host", "pid", "generation", "steps", "steps/s", "last step"];
        text += &table(header, snapshot.ranks.iter().map(|(rank, told)| rank_row(snapshot, *rank, told.as_ref(), now)));
    }
    if snapshot.unlisted > 0 {
        text += &format!("and {} more ranks\n", snapshot.unlisted);
    }
    match &run.last_failure {
        None => text + "\nno failure so far\n",
        Some(failure) => {
            let at = time::readable(UNIX_EPOCH + Duration::from_millis(failure.at));
            text + &format!("\nlast failure, {at}: {}\n", failure.text)
        }
    }
}

fn node(node: &NodeStatus) -> [String; 3] {
    let state = match (node.is_alive, node.node_rank) {
        (false, _) => "lost",
        (true, Some(_)) => "alive",
        (true, None) => "waiting",
    };
    [or_unknown(node.node_rank), node.host.clone(), state.to_string()]
}

fn rank_row(snapshot: &Snapshot, rank: usize, told: Option<&RankStatus>, now: SystemTime) -> [String; 7] {
    let run = &snapshot.run;
    let node_rank = rank / run.workers.max(1);
    let node = run.nodes.iter().find(|node| node.node_rank == Some(node_rank));
    let host = told.map(|told| &told.host).or(node.map(|node| &node.host));
    let ago = |at: u64| format!("{} s ago", milliseconds(now).saturating_sub(at) / 1000);
    [
        rank.to_string(),
        or_unknown(host),
        or_unknown(told.map(|told| told.pid)),
        or_unknown(told.and_then(|told| told.generation)),
        or_unknown(told.map(|told| told.steps)),
        or_unknown(told.and_then(|told| told.steps_per_second).map(|speed| format!("{speed:.2}"))),
        or_unknown(told.and_then(|told| told.last_step).map(ago)),
    ]
}

fn or_unknown(value: Option<impl ToString>) -> String {
    value.map_or_else(|| UNKNOWN.to_string(), |value| value.to_string())
}

/// Lines of columns, after an empty line.
pub(crate) fn table<const N: usize>(header: [&str; N], rows: impl Iterator<Item = [String; N]>) -> String {
    let rows: Vec<[String; N]> = std::iter::once(header.map(str::to_string)).chain(rows).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let line = |row: &[String; N]| {
        let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        format!("{}\n", cells.join("  ").trim_end())
    };
    format!("\n{}", rows.iter().map(line).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::document::{LastFailure, RunStatus};

    #[test]
    fn a_run_in_words() {
        let now = UNIX_EPOCH + Duration::from_secs(951_827_696);
        let node = |host: &str, node_rank, is_alive| NodeStatus { host: host.to_string(), node_rank, is_alive };
        let told = RankStatus {
            host: "node0".to_string(),
            pid: 4711,
            generation: Some(2),
            steps: 812,
            steps_per_second: Some(40.123),
            last_step: Some(milliseconds(now) - 2500),
        };
        let fresh = RankStatus { generation: None, steps: 0, steps_per_second: None, last_step: None, ..told.clone() };
        let run = RunStatus {
            run_id: "night".to_string(),
            phase: Phase::Running,
            attempt: 1,
            restarts: 1,
            max_restarts: 3,
            workers: 2,
            nodes: vec![node("node0", Some(0), true), node("other", Some(1), false), node("spare", None, true)],
            last_failure: Some(LastFailure { at: milliseconds(now), text: "rank 1 was killed by SIGKILL".to_string() }),
        };
        let mut snapshot = Snapshot {
            run,
            generation: Some(2),
            ranks: vec![(0, Some(told)), (1, Some(fresh)), (2, None)],
            unlisted: 0,
        };
        let expected = "\
run night: running, generation 2, 1 of 3 restarts used

node  host   state
0     node0  alive
1     other  lost
-     spare  waiting

rank  host   pid   generation  steps  steps/s  last step
0     node0  4711  2           812    40.12    2 s ago
1     node0  4711  -           0      -        -
2     other  -     -           -      -        -

last failure, 2000-02-29 12:34:56 UTC: rank 1 was killed by SIGKILL
";
        assert_eq!(text(&snapshot, now), expected);
        (snapshot.generation, snapshot.ranks, snapshot.run.last_failure) = (None, Vec::new(), None);
        (snapshot.run.nodes, snapshot.run.phase) = (Vec::new(), Phase::Meeting);
        let expected = "run night: waiting for nodes, attempt 1, 1 of 3 restarts used\n\nno failure so far\n";
        assert_eq!(text(&snapshot, now), expected);
    }
}
