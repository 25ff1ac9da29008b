//! The summary that a run prints at its end.
use super::hash::Hash;
use super::memory::peak_rss_bytes;
use candle_ddp::{DistributedDataParallel, Error, ProcessGroup, ReduceOp, Result};
use std::time::Instant;

pub(crate) struct Summary {
    started: Instant,
    /// The unit of the count, such as "images".
    unit: &'static str,
    samples: usize,
    /// When the speed was last asked for.
    asked: Instant,
}

impl Summary {
    /// Starts the clock.
    pub(crate) fn new(unit: &'static str) -> Self {
        let now = Instant::now();
        Self { started: now, unit, samples: 0, asked: now }
    }

    /// Counts the samples on which this rank has trained.
    pub(crate) fn count(&mut self, samples: usize) {
        self.samples += samples;
    }

    /// The seconds since the start.
    pub(crate) fn seconds(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    /// The speed since the last call, if each rank has trained on so many samples since then.
    pub(crate) fn samples_per_second(&mut self, pg: &ProcessGroup, samples: usize) -> f64 {
        let since = std::mem::replace(&mut self.asked, Instant::now());
        (samples * pg.world_size()) as f64 / (self.asked - since).as_secs_f64()
    }

    /// Prints, on rank 0, how much was trained, and `results` with their names. Every rank calls it.
    pub(crate) fn print<M>(&self, ddp: &DistributedDataParallel<M>, results: &[(&str, String)]) -> Result<()> {
        let (pg, seconds) = (ddp.process_group(), self.seconds());
        let here: usize = ddp.parameters().iter().map(|parameter| parameter.elem_count()).sum();
        let [samples, everywhere] = pg.all_reduce_scalars([self.samples as f64, here as f64], ReduceOp::Sum)?;
        // A sharded model has each parameter once.
        let parameters = if ddp.sharding().is_some() { everywhere } else { here as f64 };
        let hash = parameter_hash(ddp)?;
        if pg.rank() > 0 {
            return Ok(());
        }
        let mut lines = vec![
            ("trained on", format!("{samples:.0} {} in {seconds:.1} s", self.unit)),
            ("rate", format!("{:.0} {}/s on {} ranks", samples / seconds, self.unit, pg.world_size())),
            ("parameters", format!("{parameters}, with the hash {hash} on all ranks")),
        ];
        if let Some(bytes) = peak_rss_bytes() {
            lines.push(("memory of rank 0", format!("{:.0} MiB at most", bytes as f64 / f64::from(1 << 20))));
        }
        for (name, value) in lines.iter().chain(results) {
            println!("{name:<20}{value}");
        }
        Ok(())
    }
}

/// Fails if `value`, which `what` names, is below what the option `argument` requires.
pub(crate) fn require(argument: &'static str, required: Option<f64>, what: &str, value: f64) -> Result<()> {
    match required.filter(|required| value.is_nan() || value < *required) {
        None => Ok(()),
        Some(required) => {
            let reason = format!("{what} {value:.4} does not reach {required}");
            Err(Error::InvalidArgument { argument, reason })
        }
    }
}

/// Returns the hash of all parameters, which must be the same on every rank; of a sharded model, the hash of the ranks' hashes.
pub(crate) fn parameter_hash<M>(ddp: &DistributedDataParallel<M>) -> Result<Hash> {
    let hash = Hash::of_variables(ddp.named_parameters().into_iter().map(|(name, var)| (name, var.into_inner())))?;
    if ddp.sharding().is_some() {
        let hashes = ddp.process_group().all_gather_object(&hash.0)?;
        return Ok(Hash(hashes.iter().fold(0, |all, hash| all.rotate_left(1) ^ hash)));
    }
    same_everywhere(ddp.process_group(), hash)?;
    Ok(hash)
}

fn same_everywhere(pg: &ProcessGroup, hash: Hash) -> Result<()> {
    let hashes = pg.all_gather_object(&hash.0)?;
    match hashes.iter().position(|&other| other != hashes[0]) {
        None => Ok(()),
        Some(rank) => {
            let difference = format!("parameter hash {} instead of {}", Hash(hashes[rank]), Hash(hashes[0]));
            Err(Error::Mismatch { what: "model", rank, difference })
        }
    }
}
