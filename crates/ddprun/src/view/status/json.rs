//! The document that `ddprun status --json` shows. Its fields keep their names and meanings; new ones may be added.
use super::document::Phase;
use super::snapshot::Snapshot;
use crate::verdict::{How, Verdict};
use serde::Serialize;
use std::collections::BTreeMap;

/// A run. Times are seconds since 1970, or seconds; what is unknown is null.
#[derive(Serialize)]
struct Run<'a> {
    /// Raised when a field changes its meaning or is removed.
    schema: u32,
    run_id: &'a str,
    /// `meeting`, `running`, `restarting` or `ending`.
    phase: &'static str,
    /// How often all workers were restarted.
    attempt: u64,
    /// The newest generation, if the ranks run elastically.
    generation: Option<u64>,
    restarts: u32,
    max_restarts: u32,
    nodes: Vec<Node<'a>>,
    ranks: Vec<Rank<'a>>,
    /// How many more ranks take part.
    unlisted_ranks: usize,
    last_failure: Option<Failure<'a>>,
}

#[derive(Serialize)]
struct Node<'a> {
    /// `null` while it waits.
    node_rank: Option<usize>,
    host: &'a str,
    alive: bool,
}

#[derive(Serialize)]
struct Rank<'a> {
    rank: usize,
    host: Option<&'a str>,
    pid: Option<u32>,
    generation: Option<u64>,
    steps: Option<u64>,
    steps_per_second: Option<f64>,
    last_step_time: Option<f64>,
    training_seconds: Option<f64>,
    waiting_seconds: Option<f64>,
    waiting_share: Option<f64>,
    /// The values of `put_metric`; `null` for one that is not finite.
    metrics: BTreeMap<&'a str, Option<f64>>,
}

#[derive(Serialize)]
struct Failure<'a> {
    time: f64,
    text: &'a str,
    rank: Option<usize>,
    node_rank: Option<usize>,
    host: Option<&'a str>,
    /// As in `verdict.json`.
    how: How,
    exit: Option<i32>,
    signal: Option<i32>,
    cause: Option<&'a str>,
}

impl<'a> Failure<'a> {
    fn of(verdict: &'a Verdict) -> Self {
        let Verdict { at, rank, node, how, exit, signal, ref host, ref cause, ref text, .. } = *verdict;
        let (host, cause) = (host.as_deref(), cause.as_deref());
        Self { time: seconds(at), text, rank, node_rank: node, host, how, exit, signal, cause }
    }
}

/// The name of a phase.
pub(super) fn phase(phase: Phase) -> &'static str {
    match phase {
        Phase::Meeting => "meeting",
        Phase::Running => "running",
        Phase::Restarting => "restarting",
        Phase::Ending => "ending",
    }
}

/// Milliseconds as seconds.
pub(super) fn seconds(milliseconds: u64) -> f64 {
    milliseconds as f64 / 1000.
}

/// Shows `snapshot` as JSON, and ends the line.
pub(super) fn text(snapshot: &Snapshot) -> String {
    let run = &snapshot.run;
    let nodes = run.nodes.iter().map(|node| Node { node_rank: node.node_rank, host: &node.host, alive: node.is_alive });
    let ranks = snapshot.ranks.iter().map(|(rank, told)| {
        let told = told.as_ref();
        let metrics = told.into_iter().flat_map(|told| &told.metrics);
        let number = |text: &String| text.parse().ok().filter(|value: &f64| value.is_finite());
        Rank {
            rank: *rank,
            host: snapshot.host(*rank, told),
            pid: told.map(|told| told.pid),
            generation: told.and_then(|told| told.generation),
            steps: told.map(|told| told.steps),
            steps_per_second: told.and_then(|told| told.steps_per_second),
            last_step_time: told.and_then(|told| told.last_step).map(seconds),
            training_seconds: told.map(|told| told.trained),
            waiting_seconds: told.and_then(|told| told.waited),
            waiting_share: told.and_then(|told| told.waiting),
            metrics: metrics.map(|(name, value)| (name.as_str(), number(value))).collect(),
        }
    });
    let document = Run {
        schema: 1,
        run_id: &run.run_id,
        phase: phase(run.phase),
        attempt: run.attempt,
        generation: snapshot.generation,
        restarts: run.restarts,
        max_restarts: run.max_restarts,
        nodes: nodes.collect(),
        ranks: ranks.collect(),
        unlisted_ranks: snapshot.unlisted,
        last_failure: run.last_failure.as_ref().map(Failure::of),
    };
    let json = String::from_utf8(candle_ddp_rendezvous::json::encode(&document)).unwrap_or_default();
    json + "\n"
}

#[cfg(test)]
mod tests {
    use super::super::tests::snapshot;

    #[test]
    fn the_document_of_a_run() {
        let expected = concat!(
            r#"{"schema":1,"run_id":"night","phase":"running","attempt":1,"generation":2,"restarts":1,"max_restarts":3,"#,
            r#""nodes":[{"node_rank":0,"host":"node0","alive":true},{"node_rank":1,"host":"other","alive":false},"#,
            r#"{"node_rank":null,"host":"spare","alive":true}],"#,
            r#""ranks":[{"rank":0,"host":"node0","pid":4711,"generation":2,"steps":812,"steps_per_second":40.125,"#,
            r#""last_step_time":951827693.5,"training_seconds":20.0,"waiting_seconds":5.0,"waiting_share":0.25,"#,
            r#""metrics":{"a \"b\"\\":null,"loss":0.5}},"#,
            r#"{"rank":1,"host":"node0","pid":4711,"generation":null,"steps":0,"steps_per_second":null,"#,
            r#""last_step_time":null,"training_seconds":0.0,"waiting_seconds":null,"waiting_share":null,"metrics":{}},"#,
            r#"{"rank":2,"host":"other","pid":null,"generation":null,"steps":null,"steps_per_second":null,"#,
            r#""last_step_time":null,"training_seconds":null,"waiting_seconds":null,"waiting_share":null,"metrics":{}}],"#,
            r#""unlisted_ranks":0,"#,
            r#""last_failure":{"time":951827696.0,"text":"rank 1 was killed by SIGKILL","rank":1,"node_rank":0,"host":"node0","#,
            r#""how":"signal","exit":null,"signal":9,"cause":null}}"#,
            "\n"
        );
        assert_eq!(super::text(&snapshot()), expected);
    }
}
