//! The summary that a run prints at its end.
use super::hash::Hash;
use super::memory::peak_rss_bytes;
use candle_ddp::metrics::{Rate, Throughput, ThroughputOptions};
use candle_ddp::{DistributedDataParallel, Error, ProcessGroup, ReduceOp, Result, Sharding};
use std::time::Instant;

pub(crate) struct Summary {
    started: Instant,
    /// The unit of the count, such as "images".
    unit: &'static str,
    samples: usize,
    pub(crate) throughput: Throughput,
}

impl Summary {
    /// Starts the clock.
    pub(crate) fn new(pg: &ProcessGroup, unit: &'static str, options: ThroughputOptions) -> Result<Self> {
        Ok(Self { started: Instant::now(), unit, samples: 0, throughput: Throughput::new(pg, options)? })
    }

    /// Ends a step in which this rank, and each other, has trained on so many samples.
    pub(crate) fn step(&mut self, samples: usize) {
        self.samples += samples;
        self.throughput.step(samples);
    }

    /// The seconds since the start.
    pub(crate) fn seconds(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    /// The speed of the last steps, in words.
    pub(crate) fn speed(&self) -> String {
        self.words(&self.throughput.rate())
    }

    fn words(&self, rate: &Rate) -> String {
        let mfu = rate.mfu.map_or(String::new(), |mfu| format!(", MFU {:.1} %", 100. * mfu));
        match rate.steps {
            0 => "speed not measured yet".to_string(),
            _ => format!("{:.0} {}/s{mfu}", rate.units_per_second, self.unit),
        }
    }

    /// Prints, on rank 0, how much was trained, and `results` with their names. Every rank calls it.
    pub(crate) fn print<M>(&self, ddp: &DistributedDataParallel<M>, results: &[(&str, String)]) -> Result<()> {
        let (pg, seconds) = (ddp.process_group(), self.seconds());
        let [samples] = pg.all_reduce_scalars([self.samples as f64], ReduceOp::Sum)?;
        let (parameters, rate) = (parameters(ddp)?, self.throughput.compute(pg)?);
        let hash = parameter_hash(ddp)?;
        if pg.rank() > 0 {
            return Ok(());
        }
        let mut lines = vec![
            ("trained on", format!("{samples:.0} {} in {seconds:.1} s", self.unit)),
            ("parameters", format!("{parameters}, with the hash {hash} on all ranks")),
        ];
        // The first step does not count.
        if rate.steps > 0 {
            lines.insert(1, ("rate", format!("{} on {} ranks", self.words(&rate), pg.world_size())));
        }
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

/// Returns how many parameters the model has, of which a sharded one has a part on each rank. Every rank calls it.
pub(crate) fn parameters<M>(ddp: &DistributedDataParallel<M>) -> Result<usize> {
    let here: usize = ddp.parameters().iter().map(|parameter| parameter.elem_count()).sum();
    if !matches!(ddp.sharding(), Sharding::Blocks { .. }) {
        return Ok(here);
    }
    let [everywhere] = ddp.process_group().all_reduce_scalars([here as f64], ReduceOp::Sum)?;
    Ok(everywhere as usize)
}

/// Returns the hash of all parameters, which must be the same on every rank; of a sharded model, the hash of the ranks' hashes.
pub(crate) fn parameter_hash<M>(ddp: &DistributedDataParallel<M>) -> Result<Hash> {
    let hash = Hash::of_variables(ddp.named_parameters().into_iter().map(|(name, var)| (name, var.into_inner())))?;
    if matches!(ddp.sharding(), Sharding::Blocks { .. }) {
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
