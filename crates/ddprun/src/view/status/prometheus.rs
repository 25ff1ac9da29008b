//! The status of a run in the text format of Prometheus, version 0.0.4.
use super::json::{phase, seconds};
use super::snapshot::Snapshot;
use candle_ddp_rendezvous::RankStatus;
use std::fmt::Write;

/// A number of a rank, if it is known.
type Value = fn(&RankStatus) -> Option<f64>;

/// The numbers of each rank: the metric's name, its type, its meaning.
const OF_RANKS: [(&str, &str, &str, Value); 7] = [
    ("ddprun_rank_steps_total", "counter", "Training steps of this process.", |told| Some(told.steps as f64)),
    ("ddprun_rank_steps_per_second", "gauge", "Training steps a second, over the last seconds.", |told| {
        told.steps_per_second
    }),
    ("ddprun_rank_last_step_timestamp_seconds", "gauge", "When the last step was complete, since 1970.", |told| {
        told.last_step.map(seconds)
    }),
    ("ddprun_rank_training_seconds_total", "counter", "Time since the first step.", |told| Some(told.trained)),
    (
        "ddprun_rank_waiting_seconds_total",
        "counter",
        "Time in which the program stood still because other ranks had not come to a collective.",
        |told| told.waited,
    ),
    ("ddprun_rank_waiting_ratio", "gauge", "The share of the last seconds in which it did so.", |told| told.waiting),
    ("ddprun_rank_generation", "gauge", "The generation that this process has joined.", |told| {
        told.generation.map(|generation| generation as f64)
    }),
];

/// Shows `snapshot`.
pub(crate) fn text(snapshot: &Snapshot) -> String {
    let run = &snapshot.run;
    let mut text = Text::default();
    let labels = [("run_id", run.run_id.as_str()), ("version", env!("CARGO_PKG_VERSION"))];
    text.single("ddprun_info", "gauge", "The run, and the version of ddprun.", &labels, 1.);
    let labels = [("phase", phase(run.phase))];
    text.single("ddprun_phase", "gauge", "The phase of the run: meeting, running, restarting or ending.", &labels, 1.);
    text.single("ddprun_restarts_total", "counter", "How many restarts were used.", &[], run.restarts.into());
    text.single("ddprun_max_restarts", "gauge", "How many restarts may be used.", &[], run.max_restarts.into());
    text.single("ddprun_attempt", "gauge", "How often all workers were restarted.", &[], run.attempt as f64);
    if let Some(generation) = snapshot.generation {
        text.single("ddprun_generation", "gauge", "The newest generation of an elastic run.", &[], generation as f64);
    }
    let nodes = run.nodes.iter().filter(|node| node.is_alive).count();
    text.single("ddprun_nodes", "gauge", "Nodes that are alive.", &[], nodes as f64);
    let ranks = snapshot.ranks.len() + snapshot.unlisted;
    text.single("ddprun_ranks", "gauge", "Ranks that take part.", &[], ranks as f64);
    if let Some(failure) = &run.last_failure {
        let help = "When a worker or a node last failed, since 1970.";
        let number = |number: Option<usize>| number.map(|number| number.to_string()).unwrap_or_default();
        let (rank, host, how) = (number(failure.rank), failure.host.as_deref().unwrap_or(""), failure.how.name());
        let labels = [("rank", rank.as_str()), ("host", host), ("how", &how)];
        text.single("ddprun_last_failure_timestamp_seconds", "gauge", help, &labels, seconds(failure.at));
    }
    let told: Vec<(String, &RankStatus)> =
        snapshot.ranks.iter().filter_map(|(rank, told)| Some((rank.to_string(), told.as_ref()?))).collect();
    for (name, kind, help, value) in OF_RANKS {
        let mut values = told.iter().filter_map(|(rank, told)| Some((rank, &told.host, value(told)?))).peekable();
        if values.peek().is_some() {
            text.head(name, kind, help);
        }
        values.for_each(|(rank, host, value)| text.line(name, &[("rank", rank), ("host", host)], value));
    }
    let name = "ddprun_rank_metric";
    let mut metrics = told
        .iter()
        .flat_map(|(rank, told)| told.metrics.iter().map(move |metric| (rank, &told.host, metric)))
        .filter_map(|(rank, host, (name, value))| Some((rank, host, name, value.parse().ok()?)))
        .peekable();
    if metrics.peek().is_some() {
        text.head(name, "gauge", "The newest values that the program has put or written.");
    }
    metrics.for_each(|(rank, host, metric, value)| {
        text.line(name, &[("name", metric), ("rank", rank), ("host", host)], value);
    });
    text.0
}

#[derive(Default)]
struct Text(String);

impl Text {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        self.0 += &format!("# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    fn line(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
        let labels: Vec<String> = labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escape(value))).collect();
        let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        let value = match value {
            f64::INFINITY => "+Inf".to_string(),
            f64::NEG_INFINITY => "-Inf".to_string(),
            // NaN is written as it is here.
            value => value.to_string(),
        };
        // Writing to a String cannot fail.
        let _ = writeln!(self.0, "{name}{labels} {value}");
    }

    fn single(&mut self, name: &str, kind: &str, help: &str, labels: &[(&str, &str)], value: f64) {
        self.head(name, kind, help);
        self.line(name, labels, value);
    }
}

fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::super::tests::snapshot;

    /// Prometheus's own parser (`prometheus_client.parser` 0.26.0) reads this file, escapes and NaN included.
    #[test]
    fn the_metrics_of_a_run() {
        let expected = include_str!("prometheus.txt").replace("VERSION", env!("CARGO_PKG_VERSION"));
        let text = super::text(&snapshot());
        assert_eq!(text, expected, "{text}");
    }
}
