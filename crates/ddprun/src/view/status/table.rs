//! The text that `ddprun status` shows.
use super::document::{NodeStatus, Phase};
use super::snapshot::Snapshot;
use crate::tail::line;
use crate::time;
use candle_ddp_rendezvous::{RankStatus, milliseconds};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Stands for an unknown value.
pub(crate) const UNKNOWN: &str = "-";

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
        format!("run {}: {phase}, {turn}, {} of {} restarts used\n", line(&run.run_id), run.restarts, run.max_restarts);
    if !run.nodes.is_empty() {
        text += &table(["node", "host", "state"], run.nodes.iter().map(node));
    }
    if !snapshot.ranks.is_empty() {
        let header = ["rank", "host", "pid", "generation", "steps", "steps/s", "waiting", "last step"];
        text += &table(header, snapshot.ranks.iter().map(|(rank, told)| rank_row(snapshot, *rank, told.as_ref(), now)));
    }
    if snapshot.unlisted > 0 {
        text += &format!("and {} more ranks\n", snapshot.unlisted);
    }
    match &run.last_failure {
        None if matches!(run.phase, Phase::Restarting | Phase::Ending) => {
            text + "\na failure is judged when all workers have ended\n"
        }
        None => text + "\nno failure so far\n",
        Some(failure) => {
            let at = time::readable(UNIX_EPOCH + Duration::from_millis(failure.at));
            text + &format!("\nlast failure, {at}: {}\n", line(&failure.text))
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

fn rank_row(snapshot: &Snapshot, rank: usize, told: Option<&RankStatus>, now: SystemTime) -> [String; 8] {
    let ago = |at: u64| format!("{} s ago", milliseconds(now).saturating_sub(at) / 1000);
    [
        rank.to_string(),
        or_unknown(snapshot.host(rank, told)),
        or_unknown(told.map(|told| told.pid)),
        or_unknown(told.and_then(|told| told.generation)),
        or_unknown(told.map(|told| told.steps)),
        or_unknown(told.and_then(|told| told.steps_per_second).map(|speed| format!("{speed:.2}"))),
        or_unknown(told.and_then(|told| told.waiting).map(|waiting| format!("{:.0} %", 100. * waiting))),
        or_unknown(told.and_then(|told| told.last_step).map(ago)),
    ]
}

pub(crate) fn or_unknown(value: Option<impl ToString>) -> String {
    value.map_or_else(|| UNKNOWN.to_string(), |value| value.to_string())
}

/// Lines of columns, after an empty line.
pub(crate) fn table<const N: usize>(header: [&str; N], rows: impl Iterator<Item = [String; N]>) -> String {
    // Hosts and ranks have told what is in a cell.
    let rows = rows.map(|row| row.map(|cell| line(&cell)));
    let rows: Vec<[String; N]> = std::iter::once(header.map(str::to_string)).chain(rows).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let shown = |row: &[String; N]| {
        let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        format!("{}\n", cells.join("  ").trim_end())
    };
    format!("\n{}", rows.iter().map(shown).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::status::tests::{now, snapshot};

    #[test]
    fn a_run_in_words() {
        let (now, mut snapshot) = (now(), snapshot());
        let expected = "\
run night: running, generation 2, 1 of 3 restarts used

node  host   state
0     node0  alive
1     other  lost
-     spare  waiting

rank  host   pid   generation  steps  steps/s  waiting  last step
0     node0  4711  2           812    40.12    25 %     2 s ago
1     node0  4711  -           0      -        -        -
2     other  -     -           -      -        -        -

last failure, 2000-02-29 12:34:56 UTC: rank 1 was killed by SIGKILL
";
        assert_eq!(text(&snapshot, now), expected);
        (snapshot.generation, snapshot.ranks, snapshot.run.last_failure) = (None, Vec::new(), None);
        (snapshot.run.nodes, snapshot.run.phase) = (Vec::new(), Phase::Meeting);
        let expected = "run night: waiting for nodes, attempt 1, 1 of 3 restarts used\n\nno failure so far\n";
        assert_eq!(text(&snapshot, now), expected);
    }

    /// Whoever writes to the store of a run without a secret chooses these texts.
    #[test]
    fn line_breaks_in_the_document_begin_no_line() {
        let mut snapshot = snapshot();
        let expected = text(&snapshot, now()).lines().count();
        let forged = "a\nddprun: all is well".to_string();
        (snapshot.run.run_id, snapshot.run.nodes[0].host) = (forged.clone(), forged.clone());
        snapshot.run.last_failure.as_mut().unwrap().text = forged.clone();
        snapshot.ranks[0].1.as_mut().unwrap().host = forged;
        let shown = text(&snapshot, now());
        assert_eq!(shown.lines().count(), expected, "{shown}");
        assert!(
            shown.starts_with(r"run a\nddprun: all is well: running") && shown.ends_with("a\\nddprun: all is well\n")
        );
    }
}
