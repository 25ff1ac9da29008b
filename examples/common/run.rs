//! The code around the loop of a program that trains for epochs: continuing from a checkpoint, adding up gradients, the progress
//! bar, the metrics, a checkpoint after each epoch, and the summary.
use super::options::{MicroBatch, TrainOptions, require_rest};
use super::progress::Progress;
use super::summary::{Summary, parameter_hash};
use candle_core::{DType, Tensor};
use candle_ddp::checkpoint::{Checkpointer, Parts, Serde};
use candle_ddp::metrics::{ThroughputOptions, Writer};
use candle_ddp::{DistributedDataParallel, ProcessGroup, ReduceOp, Result};
use std::ops::RangeInclusive;

pub(crate) struct Run<'a> {
    pg: &'a ProcessGroup,
    options: &'a TrainOptions,
    /// The name of the score, from 0 to 1, such as "test accuracy".
    measure: &'static str,
    epochs_done: u64,
    state: Serde<State>,
    checkpointer: Option<Checkpointer>,
    writer: Writer,
    summary: Summary,
    /// Of the epoch: its progress and how many batches it has.
    progress: Option<Progress>,
    batches: usize,
    /// Of the batches whose gradients are being added up.
    loss_sum: f64,
    counted: f64,
    samples: usize,
}

/// The parts of a checkpoint that are not parts of the program.
#[derive(Default, serde::Deserialize, serde::Serialize)]
struct State {
    steps: u64,
    /// How good the model was after the last epoch, and at best.
    score: f64,
    best_score: f64,
}

impl<'a> Run<'a> {
    /// Starts the clock. With `--resume`, loads `parts` from the latest checkpoint, if there is one.
    pub(crate) fn new(
        pg: &'a ProcessGroup,
        options: &'a TrainOptions,
        measure: &'static str,
        parts: impl Parts,
    ) -> Result<Self> {
        let mut checkpointer = options.checkpointer(pg, 1)?;
        let (mut epochs_done, mut state) = (0, Serde(State::default()));
        if let Some(checkpointer) = checkpointer.as_mut().filter(|_| options.resume) {
            epochs_done = checkpointer.load_latest((parts, ("run", &mut state)))?.unwrap_or(0);
        }
        // Of an epoch that was not saved, the steps come again.
        let writer = options.writer(pg, state.0.steps)?;
        let summary = Summary::new(pg, "images", ThroughputOptions::default())?;
        Ok(Self {
            pg,
            options,
            measure,
            epochs_done,
            state,
            checkpointer,
            writer,
            summary,
            progress: None,
            batches: 0,
            loss_sum: 0.,
            counted: 0.,
            samples: 0,
        })
    }

    /// Returns the numbers, from 1, of those of the `total` epochs that are not done. There must be one.
    pub(crate) fn epochs(&self, total: u64) -> Result<RangeInclusive<u64>> {
        require_rest("--epochs", self.epochs_done, total)?;
        Ok(self.epochs_done + 1..=total)
    }

    /// Begins an epoch, in which this rank has so many batches.
    pub(crate) fn begin_epoch(&mut self, epoch: u64, batches: usize) {
        self.batches = batches;
        self.progress = Some(Progress::new(self.pg, format!("epoch {epoch}"), batches));
    }

    /// Runs `evaluate`, whose time is none of the training.
    pub(crate) fn pause<T>(&mut self, evaluate: impl FnOnce() -> T) -> T {
        self.summary.throughput.pause(evaluate)
    }

    /// Returns which part of a step the batch `index` of the epoch is.
    pub(crate) fn micro_batch(&self, index: usize) -> MicroBatch {
        self.options.micro_batch(index, self.batches)
    }

    /// Counts a batch of so many samples, and its part of the step's loss. After the last one of a step, all ranks write
    /// down their mean loss.
    pub(crate) fn count(
        &mut self,
        micro_batch: &MicroBatch,
        loss: &Tensor,
        samples: usize,
        learning_rate: f64,
    ) -> Result<()> {
        self.count_sum(micro_batch, loss, 1. / micro_batch.count as f64, samples, learning_rate)
    }

    /// [`count`](Self::count) for a loss that is a sum over `counted` pixels.
    pub(crate) fn count_sum(
        &mut self,
        micro_batch: &MicroBatch,
        loss_sum: &Tensor,
        counted: f64,
        samples: usize,
        learning_rate: f64,
    ) -> Result<()> {
        self.loss_sum += loss_sum.to_dtype(DType::F64)?.to_scalar::<f64>()?;
        self.counted += counted;
        self.samples += samples;
        if !micro_batch.is_last {
            return Ok(());
        }
        let sums = [std::mem::take(&mut self.loss_sum), std::mem::take(&mut self.counted)];
        let samples = std::mem::take(&mut self.samples);
        let [loss_sum, counted] = self.pg.all_reduce_scalars(sums, ReduceOp::Sum)?;
        let loss = loss_sum / counted;
        self.state.0.steps += 1;
        self.summary.step(samples);
        if let Some(progress) = &mut self.progress {
            progress.step(loss, &self.summary);
        }
        self.writer.write(&[
            ("step", self.state.0.steps.into()),
            ("loss", loss.into()),
            ("learning_rate", learning_rate.into()),
            ("seconds", self.summary.seconds().into()),
            ("images_per_second", self.summary.throughput.rate().units_per_second.into()),
        ])
    }

    /// Writes down how good the model is after the epoch, with `more` that was measured, and saves `parts`, to which that
    /// belongs.
    pub(crate) fn end_epoch<M>(
        &mut self,
        ddp: &DistributedDataParallel<M>,
        epoch: u64,
        score: f64,
        more: &[(&str, f64)],
        parts: impl Parts,
    ) -> Result<()> {
        if let Some(progress) = self.progress.take() {
            progress.finish();
        }
        let scores = [&[(self.measure, score)], more].concat();
        if self.pg.rank() == 0 {
            let words: Vec<_> = scores.iter().map(|(name, score)| format!("{name} {:.2} %", 100. * score)).collect();
            println!("epoch {epoch:>3}: {}", words.join(", "));
        }
        let names: Vec<_> = scores.iter().map(|(name, _)| name.to_lowercase().replace(' ', "_")).collect();
        self.summary.throughput.pause(|| {
            let parameter_hash = parameter_hash(ddp)?.to_string();
            let mut fields = vec![("step", self.state.0.steps.into()), ("epoch", epoch.into())];
            fields.extend(names.iter().zip(&scores).map(|(name, &(_, score))| (name.as_str(), score.into())));
            fields.push(("parameter_hash", parameter_hash.as_str().into()));
            self.writer.write(&fields)?;

            let state = &mut self.state.0;
            let is_best = score > state.best_score;
            (state.score, state.best_score) = (score, score.max(state.best_score));
            if let Some(checkpointer) = &mut self.checkpointer {
                let parts = (parts, ("run", &mut self.state));
                if is_best {
                    checkpointer.save_best(epoch, parts)?
                } else {
                    checkpointer.save(epoch, parts)?
                };
            }
            Ok(())
        })
    }

    /// Waits until the last checkpoint is written, prints the summary, and returns how good the model is.
    pub(crate) fn finish<M>(mut self, ddp: &DistributedDataParallel<M>) -> Result<f64> {
        if let Some(checkpointer) = &mut self.checkpointer {
            checkpointer.finish()?;
        }
        let State { score, best_score, .. } = self.state.0;
        let result = format!("{:.2} %, {:.2} % at best", 100. * score, 100. * best_score);
        self.summary.print(ddp, &[(self.measure, result)])?;
        Ok(score)
    }
}
