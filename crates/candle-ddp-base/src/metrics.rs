//! The values that a program reports about itself.
use crate::Result;
use crate::panic::lock;
use std::collections::BTreeMap;
use std::sync::Mutex;

static METRICS: Mutex<Metrics> = Mutex::new(Metrics::new());

/// The most names of metrics that a rank reports, and the most bytes of a name.
const MOST_METRICS: usize = 64;
const LONGEST_NAME: usize = 100;

/// Reports a value of this process, such as its loss, to the metrics of [`ddprun`](https://docs.rs/ddprun): `--metrics-port`
/// and `ddprun status --json`. It replaces the last one with this name, and is seen about a second later. Calls cost
/// less than a microsecond. torchelastic has a function of this name, `torch.distributed.elastic.metrics.put_metric`.
///
/// Without `ddprun`, nobody sees the values.
///
/// ```
/// # use candle_ddp_base::metrics::put_metric;
/// # fn main() -> candle_ddp_base::Result<()> {
/// put_metric("loss", 0.25)?;
/// put_metric("samples_per_second", 1200.)?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// Returns an error if the name is empty or longer than 100 bytes, has control characters, or is the 65th.
pub fn put_metric(name: &str, value: f64) -> Result<()> {
    lock(&METRICS).put(name, value)
}

/// Reports a value that the program has written to its files, unless it puts one of this name itself. A name for which there is no room,
/// or that [`put_metric`] refuses, is left out, and a warning says so once.
pub fn show_written_metric(name: &str, value: f64) {
    let is_left_out = lock(&METRICS).write(name, value);
    if is_left_out {
        log::warn!(
            "ddprun does not show the metric {name:?}, and maybe others: a process may have {MOST_METRICS}, with names of 1 to \
             {LONGEST_NAME} bytes and without control characters"
        );
    }
}

/// Reports no written values any more: this process has become a rank that writes none.
pub fn hide_written_metrics() {
    lock(&METRICS).written.clear();
}

/// The newest values of the program.
struct Metrics {
    /// The program has put these.
    put: BTreeMap<String, f64>,
    /// The program has only written these to its files: they take the room that is left.
    written: BTreeMap<String, f64>,
    /// Whether a written one was left out.
    is_incomplete: bool,
}

impl Metrics {
    const fn new() -> Self {
        Self { put: BTreeMap::new(), written: BTreeMap::new(), is_incomplete: false }
    }

    fn put(&mut self, name: &str, value: f64) -> Result<()> {
        if !is_metric_name(name) {
            let reason = format!("{name:?} must have 1 to {LONGEST_NAME} bytes, and no control characters");
            return Err(crate::Error::invalid("name", reason));
        }
        if let Some(known) = self.put.get_mut(name) {
            *known = value;
            return Ok(());
        }
        if self.put.len() == MOST_METRICS {
            let reason = format!("a process must report at most {MOST_METRICS} metrics: {name:?} would be one more");
            return Err(crate::Error::invalid("name", reason));
        }
        self.put.insert(name.to_string(), value);
        Ok(())
    }

    /// Returns whether this is the first one that is left out.
    fn write(&mut self, name: &str, value: f64) -> bool {
        if let Some(known) = self.written.get_mut(name) {
            *known = value;
        } else if is_metric_name(name) && self.written.len() < MOST_METRICS {
            self.written.insert(name.to_string(), value);
        } else {
            return !std::mem::replace(&mut self.is_incomplete, true);
        }
        false
    }

    fn all(&self) -> BTreeMap<String, f64> {
        let room = MOST_METRICS - self.put.len();
        let written = self.written.iter().filter(|(name, _)| !self.put.contains_key(*name)).take(room);
        self.put.iter().chain(written).map(|(name, value)| (name.clone(), *value)).collect()
    }
}

/// The newest values of the program.
pub fn all() -> BTreeMap<String, f64> {
    lock(&METRICS).all()
}

fn is_metric_name(name: &str) -> bool {
    (1..=LONGEST_NAME).contains(&name.len()) && !name.contains(char::is_control)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_values_take_no_room_from_those_that_are_put() {
        let mut metrics = Metrics::new();
        let value = |metrics: &Metrics, name: &str| metrics.all().get(name).copied();
        assert!(!metrics.write("loss", 1.) && !metrics.write("lr", 2.));
        metrics.put("loss", 3.).unwrap();
        assert!(!metrics.write("loss", 4.));
        assert_eq!((value(&metrics, "loss"), value(&metrics, "lr")), (Some(3.), Some(2.)));
        // More than there is room for, and what is no name; only the first is said.
        let said = (0..MOST_METRICS).filter(|index| metrics.write(&format!("m{index:02}"), 0.)).collect::<Vec<_>>();
        assert_eq!(said, [MOST_METRICS - 2]);
        for name in ["", "a\nb", &"x".repeat(LONGEST_NAME + 1)] {
            assert!(!metrics.write(name, 0.) && metrics.put(name, 0.).is_err(), "{name:?}");
        }
        assert_eq!(metrics.all().len(), MOST_METRICS);
        for index in 1..MOST_METRICS {
            metrics.put(&format!("p{index}"), 5.).unwrap();
        }
        assert!(metrics.put("one more", 5.).is_err());
        assert_eq!(
            (metrics.all().len(), value(&metrics, "p63"), value(&metrics, "lr")),
            (MOST_METRICS, Some(5.), None)
        );
    }
}
