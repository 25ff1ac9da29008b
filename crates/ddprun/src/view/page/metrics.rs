//! The curves of a file of JSON lines.
use super::chart::Series;
use super::{chart, find, html};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;

/// The longest line that counts.
const LONGEST: u64 = 1 << 20;
/// The most curves of a file.
const CURVES: usize = 64;

/// The contents of the lines of a file.
#[derive(Default)]
struct Metrics {
    /// By position, "step" or "epoch", and name.
    curves: BTreeMap<(&'static str, String), Series>,
    /// How many lines are torn, or are not JSON objects, and how many have no position.
    torn: usize,
    others: usize,
    /// Whether there are more curves.
    is_cut: bool,
}

/// The section about a file of JSON lines; "" if it has no numbers.
pub(super) fn html(folder: &Path, file: &Path, notes: &mut Vec<String>) -> String {
    let name = file.strip_prefix(folder).unwrap_or(file).display().to_string();
    let mut metrics = Metrics::default();
    if let Err(error) = find::lines(file, LONGEST, |line| metrics.add(line)) {
        notes.push(format!("{name} cannot be read: {error}"));
    }
    let Metrics { curves, torn, others, is_cut } = metrics;
    let found = [
        (torn > 0, format!("{torn} lines are torn, or are not JSON objects")),
        (others > 0, format!("{others} lines have no \"step\" and no \"epoch\"")),
        (is_cut, format!("only the first {CURVES} of its curves are shown")),
    ];
    notes.extend(found.into_iter().filter(|(is_so, _)| *is_so).map(|(_, text)| format!("{name}: {text}")));
    if curves.is_empty() {
        return String::new();
    }
    let mut charts: BTreeMap<((usize, &str), &str), Vec<chart::Curve<'_>>> = BTreeMap::new();
    for ((position, name), series) in &curves {
        charts.entry((chart_of(name), *position)).or_default().push((name.clone(), series.points()));
    }
    let mut figures = String::new();
    for (((_, title), position), curves) in &charts {
        for curves in curves.chunks(chart::MOST) {
            figures += &chart::figure(title, position, curves);
        }
    }
    let last = |((position, name), series): (&(&str, String), &Series)| {
        let (at, value) = series.points().last()?;
        Some([name.clone(), html::number(*value), format!("{position} {}", html::number(*at))])
    };
    let rows: Vec<[String; 3]> = curves.iter().filter_map(last).collect();
    let table = html::table(["metric", "last value", "at"], &rows);
    html::section(&format!("Metrics: {name}"), &format!("<div class=charts>{figures}</div>{table}"))
}

impl Metrics {
    fn add(&mut self, line: &[u8]) {
        let Ok(fields) = serde_json::from_slice::<Map<String, Value>>(line) else {
            self.torn += usize::from(!line.trim_ascii().is_empty());
            return;
        };
        let position = ["step", "epoch"].into_iter().find_map(|name| Some((name, fields.get(name)?.as_f64()?)));
        let Some((position, at)) = position else {
            self.others += 1;
            return;
        };
        for (name, value) in fields {
            // The position, and numbers that have no curve.
            let value = match value {
                _ if ["step", "epoch", "seconds", "world_size"].contains(&name.as_str()) => continue,
                // What JSON has for NaN.
                Value::Null => f64::NAN,
                Value::Number(value) => value.as_f64().unwrap_or(f64::NAN),
                _ => continue,
            };
            let key = (position, name);
            if !self.curves.contains_key(&key) && self.curves.len() == CURVES {
                self.is_cut = true;
                continue;
            }
            self.curves.entry(key).or_default().push(at, value);
        }
    }
}

/// The chart of a curve: its place among the charts, and its title.
fn chart_of(name: &str) -> (usize, &str) {
    let lower = name.to_lowercase();
    let has = |parts: &[&str]| parts.iter().any(|part| lower.contains(part));
    match () {
        () if has(&["per_second"]) => (2, "Samples per second"),
        () if has(&["loss"]) => (0, "Loss"),
        () if has(&["accuracy", "f1", "iou", "auroc"]) => (1, "Accuracy"),
        () => (3, name),
    }
}
