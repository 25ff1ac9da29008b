//! What watches a run on the machine that hosts its store: it serves metrics, names slow ranks, and records the ranks' reports.
use crate::command::Config;
use crate::console::message;
use crate::error::Result;
use crate::view::metrics_server;
use crate::view::status::{Recorder, SlowRanks, Source};
use candle_ddp_base::panic::lock;
use candle_ddp_base::thread;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The shortest time between two looks, and the largest share of the time that they may take.
const INTERVAL: Duration = Duration::from_secs(1);
const SHARE: u32 = 50;

/// Watches a run until the process ends.
pub(crate) struct Watch {
    source: Arc<Source>,
    recorder: Arc<Mutex<Recorder>>,
}

impl Watch {
    /// Starts to watch; `None` if another machine hosts the store. The reports go to the file `record`.
    pub(crate) fn start(config: &Config, source: Option<Arc<Source>>, record: Option<PathBuf>) -> Result<Option<Self>> {
        let Some(source) = source else {
            if config.metrics.is_some() {
                message("--metrics-port: this ddprun serves no metrics, since the one that hosts the run's store does");
            }
            return Ok(None);
        };
        if let Some(address) = config.metrics {
            let at = metrics_server::start(address, Arc::clone(&source))?;
            message(format_args!("metrics are at http://{at}/metrics"));
        }
        let watch = Self { source, recorder: Arc::new(Mutex::new(Recorder::new(record))) };
        let (source, recorder) = (Arc::clone(&watch.source), Arc::clone(&watch.recorder));
        let look = move || {
            let mut slow = SlowRanks::default();
            loop {
                let begun = Instant::now();
                match source.snapshot() {
                    Ok(snapshot) => {
                        slow.look(&snapshot).into_iter().for_each(message);
                        lock(&recorder).record(&snapshot, false);
                    }
                    Err(error) => log::debug!("the status of the run is unknown: {error}"),
                }
                std::thread::sleep(INTERVAL.max(SHARE * begun.elapsed()));
            }
        };
        thread::spawn("ddprun-watch", look)?;
        Ok(Some(watch))
    }

    /// Records the last reports, when all workers have ended.
    pub(crate) fn finish(&self) {
        match self.source.now() {
            Ok(snapshot) => lock(&self.recorder).record(&snapshot, true),
            Err(error) => log::debug!("the last status of the run is unknown: {error}"),
        }
    }
}
