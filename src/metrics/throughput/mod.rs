//! How fast a run trains: units per second, and the model FLOPs utilization.
#[cfg(test)]
mod tests;

use super::ratio;
use crate::backend::ReduceOp;
use crate::process_group::ProcessGroup;
use crate::{Error, Result};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Options for [`Throughput::new`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ThroughputOptions {
    /// The first steps that do not count, neither their units nor their time: they fill caches and compile kernels. Default: 1.
    pub warmup_steps: u64,
    /// The number of steps over which [`Throughput::rate`] is measured. Default: 20.
    pub window: usize,
    /// The floating-point operations of the model for a unit, forward and backward: for tokens of a transformer
    /// [`TransformerFlops::per_token`](super::TransformerFlops::per_token). Default: unknown.
    pub flops_per_unit: Option<f64>,
    /// The most floating-point operations per second that the devices of one rank can do, in the dtype of the products and
    /// without sparsity: `docs/measuring.md` has those of some GPUs. There is no default. The peak of a CPU depends on its clock, its vector
    /// units, and the cores that a rank has.
    pub peak_flops: Option<f64>,
}

impl Default for ThroughputOptions {
    fn default() -> Self {
        Self { warmup_steps: 1, window: 20, flops_per_unit: None, peak_flops: None }
    }
}

/// How fast a run trains, by wall clock: samples or tokens per second, and the model FLOPs utilization (MFU) of [PaLM's appendix B].
///
/// The time of a step is from the end of the one before, so that it has everything that training waits for: data, other ranks, the
/// optimizer. What is not training, such as an evaluation, belongs into [`pause`](Self::pause).
///
/// On a GPU, the host runs ahead of the device. Call [`step`](Self::step) after the program has read a value of the step, such as its loss; if
/// it does so only now and then, the rate is right over windows that are much longer.
///
/// ```
/// use candle_ddp::metrics::{Throughput, ThroughputOptions, TransformerFlops};
///
/// # fn main() -> candle_ddp::Result<()> {
/// # fn train() -> candle_ddp::Result<()> { Ok(()) }
/// # fn evaluate() -> candle_ddp::Result<f64> { Ok(0.) }
/// candle_ddp::spawn(2, |pg| {
///     // GPT-2 with 8 pieces of 1024 tokens per rank, on H100s.
///     let gpt2 = TransformerFlops { parameters: 123_653_376, layers: 12, heads: 12, head_dim: 64, context: 1024, ..Default::default() };
///     let (flops_per_unit, peak_flops) = (Some(gpt2.per_token()), Some(989.4e12));
///     let mut throughput = Throughput::new(&pg, ThroughputOptions { flops_per_unit, peak_flops, ..Default::default() })?;
///     for _ in 0..5 {
///         train()?;
///         throughput.step(8 * 1024);
///     }
///     throughput.pause(evaluate)?;
///     let rate = throughput.rate();
///     println!("{:.0} tokens/s, MFU {:.1} %", rate.units_per_second, 100. * rate.mfu.unwrap_or(f64::NAN));
///     assert_eq!((rate.steps, rate.units), (4, 4. * 2. * 8. * 1024.));
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
///
/// [PaLM's appendix B]: https://arxiv.org/abs/2204.02311
#[derive(Clone, Debug)]
pub struct Throughput {
    options: ThroughputOptions,
    world_size: usize,
    /// When the step began, and how much of the time since then does not count.
    began: Instant,
    paused: Duration,
    warmup_left: u64,
    last: VecDeque<Sum>,
    all: Sum,
}

/// A sum over some steps.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    steps: u64,
    units: f64,
    time: Duration,
}

impl Sum {
    fn add(&mut self, other: &Self) {
        self.steps += other.steps;
        self.units += other.units;
        self.time += other.time;
    }
}

/// How fast some steps were.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Rate {
    /// The number of steps.
    pub steps: u64,
    /// The units of all ranks in these steps.
    pub units: f64,
    /// How long the steps took.
    pub seconds: f64,
    /// The units of all ranks per second; NaN if no time was measured, as during the warm-up.
    pub units_per_second: f64,
    /// The floating-point operations of the model per second and rank, if those of a unit are known; NaN if no time was measured.
    pub flops_per_second: Option<f64>,
    /// The model FLOPs utilization, if the peak is known as well: `flops_per_second / peak_flops`, at best 1. A larger value shows
    /// that one of the two options is wrong.
    pub mfu: Option<f64>,
}

impl Throughput {
    /// Starts the clock. No message is sent. Ranks of an elastic run make it anew with each group, since it knows the number of ranks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `window` is 0, `flops_per_unit` or `peak_flops` is not finite and above 0, or there is a peak but
    /// no `flops_per_unit`.
    pub fn new(pg: &ProcessGroup, options: ThroughputOptions) -> Result<Self> {
        if options.window == 0 {
            return Err(Error::invalid("window", "it must be at least 1 step"));
        }
        for (name, flops) in [("flops_per_unit", options.flops_per_unit), ("peak_flops", options.peak_flops)] {
            if let Some(flops) = flops.filter(|flops| !(flops.is_finite() && *flops > 0.)) {
                return Err(Error::invalid(name, format!("it must be finite and above 0, not {flops}")));
            }
        }
        if options.peak_flops.is_some() && options.flops_per_unit.is_none() {
            return Err(Error::invalid("peak_flops", "the MFU needs flops_per_unit as well"));
        }
        Ok(Self {
            options,
            world_size: pg.world_size(),
            began: Instant::now(),
            paused: Duration::ZERO,
            warmup_left: options.warmup_steps,
            last: VecDeque::new(),
            all: Sum::default(),
        })
    }

    /// Ends a step in which each rank has done as many units as this one, such as samples or tokens. If ranks differ, take the
    /// number for all ranks from [`compute`](Self::compute) alone.
    pub fn step(&mut self, units: usize) {
        self.end_step(units as f64 * self.world_size as f64, Instant::now());
    }

    /// Runs `f`, whose time does not count, such as an evaluation or saving a checkpoint. It may be in the middle of a step.
    pub fn pause<T>(&mut self, f: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let result = f();
        self.paused += began.elapsed();
        result
    }

    fn end_step(&mut self, units: f64, now: Instant) {
        let time = now.saturating_duration_since(self.began).saturating_sub(self.paused);
        (self.began, self.paused) = (now, Duration::ZERO);
        if self.warmup_left > 0 {
            self.warmup_left -= 1;
            return;
        }
        let step = Sum { steps: 1, units, time };
        self.all.add(&step);
        if self.last.len() == self.options.window {
            self.last.pop_front();
        }
        self.last.push_back(step);
    }

    /// The speed over the last [`window`](ThroughputOptions::window) steps, as this rank sees it. No message is sent.
    pub fn rate(&self) -> Rate {
        let mut sum = Sum::default();
        self.last.iter().for_each(|step| sum.add(step));
        self.rate_of(sum.steps, sum.units, sum.time.as_secs_f64())
    }

    /// The speed over all steps since the warm-up, the same on every rank: the units that all ranks have done, whether they are equally many
    /// or not, by the time of the slowest rank, as the states of torcheval's `Throughput` are merged. A collective: every rank calls it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the group has another number of ranks than the one for [`new`](Self::new); errors of the group.
    #[track_caller]
    pub fn compute(&self, pg: &ProcessGroup) -> Result<Rate> {
        if pg.world_size() != self.world_size {
            let reason = format!("it must have {} ranks, as that of new, not {}", self.world_size, pg.world_size());
            return Err(Error::invalid("pg", reason));
        }
        // Each rank has taken all for as fast as itself.
        let [units] = pg.all_reduce_scalars([self.all.units], ReduceOp::Avg)?;
        let slowest = [self.all.steps as f64, self.all.time.as_secs_f64()];
        let [steps, seconds] = pg.all_reduce_scalars(slowest, ReduceOp::Max)?;
        Ok(self.rate_of(steps as u64, units, seconds))
    }

    fn rate_of(&self, steps: u64, units: f64, seconds: f64) -> Rate {
        let units_per_second = ratio(units, seconds);
        let of_rank = units_per_second / self.world_size as f64;
        let flops_per_second = self.options.flops_per_unit.map(|flops| of_rank * flops);
        let mfu = flops_per_second.zip(self.options.peak_flops).map(|(flops, peak)| flops / peak);
        Rate { steps, units, seconds, units_per_second, flops_per_second, mfu }
    }
}
