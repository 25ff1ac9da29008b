//! The results, as a table for people and as JSON for programs.
use crate::problem::{Kind, Problem};
use candle_ddp::{Context, Error, Result};
use serde_json::{Value, json};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// The measurement of one size.
pub(crate) struct Measurement<'a> {
    problem: &'a Problem,
    seconds: f64,
    errors: u64,
}

impl<'a> Measurement<'a> {
    pub(crate) fn new(problem: &'a Problem, seconds: f64, errors: u64) -> Self {
        Self { problem, seconds, errors }
    }

    /// Returns GB/s, where G is 10⁹.
    fn algbw(&self) -> f64 {
        self.problem.bytes() as f64 / self.seconds / 1e9
    }

    fn busbw(&self) -> f64 {
        self.algbw() * self.problem.bus_factor()
    }

    fn row(&self) -> String {
        let op = self.problem.op().map_or("-".to_string(), |op| op.to_string());
        let root = self.problem.root().map_or("-".to_string(), |root| root.to_string());
        format!(
            "{:>12} {:>12} {:>6} {op:>6} {root:>5} {:>12.2} {:>14.4} {:>14.4} {:>8}",
            self.problem.bytes(),
            self.problem.count(),
            self.problem.dtype.as_str(),
            self.seconds * 1e6,
            self.algbw(),
            self.busbw(),
            self.errors,
        )
    }

    fn json(&self) -> Value {
        json!({
            "bytes": self.problem.bytes(),
            "count": self.problem.count(),
            "dtype": self.problem.dtype.as_str(),
            "collective": self.problem.kind.name(),
            "op": self.problem.op().map(|op| op.to_string()),
            "world_size": self.problem.world_size,
            "time_us": self.seconds * 1e6,
            "algbw_gbps": self.algbw(),
            "busbw_gbps": self.busbw(),
            "errors": self.errors,
        })
    }
}

/// Rank 0's report, which is printed and written as results arrive.
pub(crate) struct Report {
    json: Option<(PathBuf, File)>,
    points: Vec<(f64, f64)>,
}

impl Report {
    pub(crate) fn begin(kind: Kind, world_size: usize, engine: &str, json: Option<&Path>) -> Result<Self> {
        let create = |path: &Path| {
            let file = File::create(path).with_context(|| writing(path))?;
            Ok::<_, Error>((path.to_path_buf(), file))
        };
        let json = json.map(create).transpose()?;
        println!("# {}, {world_size} ranks, {engine}", kind.name());
        println!(
            "#{:>11} {:>12} {:>6} {:>6} {:>5} {:>12} {:>14} {:>14} {:>8}",
            "size (B)", "count", "type", "op", "root", "time (us)", "algbw (GB/s)", "busbw (GB/s)", "#wrong"
        );
        Ok(Self { json, points: Vec::new() })
    }

    pub(crate) fn add(&mut self, measurement: Measurement) -> Result<()> {
        println!("{}", measurement.row());
        if let Some((path, file)) = &mut self.json {
            writeln!(file, "{}", measurement.json()).with_context(|| writing(path))?;
        }
        self.points.push((measurement.problem.bytes() as f64, measurement.busbw()));
        Ok(())
    }

    pub(crate) fn end(&self, errors: u64) {
        let mean = self.points.iter().map(|(_, busbw)| busbw).sum::<f64>() / self.points.len() as f64;
        println!("# wrong values: {errors}; mean bus bandwidth: {mean:.3} GB/s");
    }

    /// Returns size and bus bandwidth of all measurements.
    pub(crate) fn into_points(self) -> Vec<(f64, f64)> {
        self.points
    }
}

/// Reads size and bus bandwidth from the JSON lines of a file.
pub(crate) fn read_points(path: &Path) -> Result<Vec<(f64, f64)>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let point = |(number, line): (usize, &str)| {
        let value: Value = serde_json::from_str(line).unwrap_or_default();
        value["bytes"].as_f64().zip(value["busbw_gbps"].as_f64()).ok_or_else(|| Error::InvalidArgument {
            argument: "--draw",
            reason: format!("{}, line {}: not a JSON object with bytes and busbw_gbps", path.display(), number + 1),
        })
    };
    text.lines().enumerate().map(point).collect()
}

fn writing(path: &Path) -> String {
    format!("cannot write the results to {}", path.display())
}
