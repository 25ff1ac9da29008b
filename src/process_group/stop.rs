//! Requests to stop the training, on which all ranks agree.
use super::ProcessGroup;
use crate::backend::Purpose;
use crate::panic::lock;
use crate::{Error, ReduceOp, Result};
use candle_core::{DType, Device, Tensor};
use signal_hook::consts::{SIGTERM, SIGUSR1};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

static STOP: Purpose = Purpose::of("agree_on_stop");

/// The signals that ask for a stop instead of what they do otherwise, which is to end the process: see
/// [`ProcessGroup::stop_requested`]. The default is none.
///
/// The handlers belong to the process and stay until it ends. A process that handles SIGTERM and then never looks at
/// `stop_requested` is ended only by SIGKILL, which launchers and schedulers send after a while.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StopSignals {
    /// SIGTERM, which schedulers send before they take a machine away, and `ddprun` when it is to end. Default: false.
    pub sigterm: bool,
    /// SIGUSR1, which Slurm sends ahead of a job's end, as with `--signal=USR1@120`. A flight recorder that writes its file on
    /// this signal does so as well. Default: false.
    pub sigusr1: bool,
}

/// Whether this process has received one of the signals.
static SIGNALLED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

impl StopSignals {
    /// Installs the handlers that are missing.
    pub(super) fn handle(self) -> Result<()> {
        static HANDLED: Mutex<Vec<i32>> = Mutex::new(Vec::new());
        let mut handled = lock(&HANDLED);
        for (signal, is_wanted) in [(SIGTERM, self.sigterm), (SIGUSR1, self.sigusr1)] {
            if is_wanted && !handled.contains(&signal) {
                let failed = |error| Error::io("installing a signal handler (InitOptions.stop_signals)", error);
                signal_hook::flag::register(signal, Arc::clone(&SIGNALLED)).map_err(failed)?;
                handled.push(signal);
            }
        }
        Ok(())
    }
}

/// A group's state of requests to stop.
#[derive(Default)]
pub(crate) struct Stop {
    /// Whether this rank's program has asked for it.
    is_asked: AtomicBool,
    agreed: Mutex<Agreed>,
}

/// The agreement of the ranks.
#[derive(Default)]
enum Agreed {
    #[default]
    Continue,
    /// The answer of the last reduction, on its device: the ranks stop if it is above zero.
    Carried(Tensor),
    Stop,
}

impl ProcessGroup {
    /// Whether the ranks are to stop, because a [signal](super::InitOptions::stop_signals) has reached one of them, or
    /// one has called [`request_stop`](Self::request_stop). The answer is the same on all ranks after the same backward
    /// pass: the requests travel with the gradients, so this sends nothing. Once it is true, it stays true.
    ///
    /// ```no_run
    /// # use candle_ddp::checkpoint::{Checkpointer, Parts};
    /// # use candle_ddp::optim::Optimizer;
    /// # fn train(pg: &candle_ddp::ProcessGroup, checkpointer: &mut Checkpointer, mut training: impl Parts, mut one_step: impl FnMut() -> candle_ddp::Result<()>) -> candle_ddp::Result<()> {
    /// for step in 1..=10_000 {
    ///     one_step()?; // forward, backward, optimizer
    ///     checkpointer.save_if_due(step, &mut training)?; // also if the ranks are to stop
    ///     if pg.stop_requested()? {
    ///         break;
    ///     }
    /// }
    /// checkpointer.finish()
    /// # }
    /// ```
    ///
    /// It is about the last synchronised [`backward`](crate::DistributedDataParallel::backward) of a model of this group;
    /// before the first it is false, and so it is with a local communication hook. Where no backward pass comes, as in
    /// evaluation, use [`agree_on_stop`](Self::agree_on_stop). On a GPU it waits for the gradients: call it where the
    /// loop waits anyway, to read a loss, or every tenth step.
    ///
    /// # Errors
    /// Returns an error of the device.
    pub fn stop_requested(&self) -> Result<bool> {
        let mut agreed = lock(&self.0.stop.agreed);
        if let Agreed::Carried(sum) = &*agreed {
            let sum = sum.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
            *agreed = if sum.iter().any(|sum| *sum > 0.) { Agreed::Stop } else { Agreed::Continue };
        }
        Ok(matches!(*agreed, Agreed::Stop))
    }

    /// Like [`stop_requested`](Self::stop_requested), but asks all ranks now, in a collective of one byte: for
    /// evaluation and other phases without backward passes. Every rank must call it.
    ///
    /// # Errors
    /// Returns the errors of [`all_reduce`](Self::all_reduce).
    pub fn agree_on_stop(&self) -> Result<bool> {
        let asked = Tensor::new(&[u8::from(self.is_stop_asked())], self.device())?;
        STOP.during(|| self.all_reduce_async(&asked, ReduceOp::Max)?.synchronize())?;
        self.carry_stop(asked);
        self.stop_requested()
    }

    /// Asks all ranks of this group to stop: [`stop_requested`](Self::stop_requested) is true on all of them after the
    /// next backward pass. One rank is enough, such as one that watches the clock.
    pub fn request_stop(&self) {
        self.0.stop.is_asked.store(true, Ordering::Relaxed);
    }

    /// Whether this rank has been asked to stop.
    pub(crate) fn is_stop_asked(&self) -> bool {
        SIGNALLED.load(Ordering::Relaxed) || self.0.stop.is_asked.load(Ordering::Relaxed)
    }

    /// Takes the answer of a reduction: a tensor on any device that is above zero if a rank was asked to stop.
    pub(crate) fn carry_stop(&self, sum: Tensor) {
        let mut agreed = lock(&self.0.stop.agreed);
        if !matches!(*agreed, Agreed::Stop) {
            *agreed = Agreed::Carried(sum);
        }
    }
}
