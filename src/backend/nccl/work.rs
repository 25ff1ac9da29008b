//! A call in flight, as its `Work` holds it.
use super::status::NcclFailure;
use super::stream::{Done, Streams};
use crate::Result;
use crate::backend::Completion;
use crate::error::Failure;
use candle_core::Tensor;
use candle_ddp_engine::Call;
use candle_ddp_engine::device_group::{DeviceGroup, Fence};
use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Keeps the tensors of a call in the GPU's memory until candle's stream has passed it.
pub(super) struct NcclWork {
    pub(super) group: Arc<DeviceGroup>,
    pub(super) streams: Streams,
    pub(super) done: Arc<Done>,
    pub(super) call: Call,
    /// Whether waiting blocks the host, as for a barrier.
    pub(super) blocks_host: bool,
    pub(super) _tensors: Vec<Tensor>,
}

impl NcclWork {
    /// Waits until the call is on the stream. A thread may still have to put it there: a message, or a collective
    /// whose ranks NCCL connects first. That thread must not be the last to hold the tensors: it would free them on a stream that is not
    /// ordered with what follows the wait.
    fn await_launch(&self) -> Result<()> {
        if self.done.started().is_none() {
            let _waiting = self.group.waiting(&*self.done, false);
            self.group.wait_for(|| self.done.started().map(drop))?;
        }
        Ok(())
    }

    fn hand_over(&self) -> Result<()> {
        self.streams.hand_over(&self.done).map_err(|error| self.failed(&super::cuda_error(error)))
    }

    fn failed(&self, reason: &str) -> crate::Error {
        NcclFailure::other("waiting for a collective", &format!("{}: {reason}", self.call)).into_error(self.group.rank)
    }

    fn is_over(&self) -> Result<bool> {
        self.done.is_over().map_err(|reason| self.failed(&reason))
    }
}

/// A call of another group, behind which a call is to run. It holds no tensors.
pub(super) struct Behind {
    group: Arc<DeviceGroup>,
    pub(super) done: Arc<Done>,
}

impl Behind {
    /// Waits until the call is on its stream, or its group has failed.
    pub(super) fn await_launch(&self) -> std::result::Result<(), Failure> {
        self.group.wait_for(|| self.done.mark().map(drop))
    }
}

impl Completion for NcclWork {
    fn wait(&self) -> Result<()> {
        if self.blocks_host {
            return self.synchronize();
        }
        self.await_launch()?;
        self.hand_over()
    }

    fn synchronize(&self) -> Result<()> {
        const SPINS: u32 = 100;
        const LONGEST: Duration = Duration::from_millis(1);
        let _waiting = self.group.waiting(&*self.done, true);
        self.await_launch()?;
        let mut pause = Duration::from_micros(20);
        for round in 0.. {
            let over = self.is_over()?;
            // The order matters: an abort also ends calls on the GPU, but only after the failure is known.
            self.group.check()?;
            if over {
                break;
            }
            if round < SPINS {
                std::thread::yield_now();
            } else {
                std::thread::sleep(pause);
                pause = (pause * 2).min(LONGEST);
            }
        }
        self.hand_over()
    }

    fn is_completed(&self) -> bool {
        self.done.is_over().unwrap_or(true) || self.group.failure().is_some()
    }

    fn span(&self) -> Option<(Instant, Instant)> {
        self.done.span()
    }
}

impl Drop for NcclWork {
    /// A tensor is freed in the order of candle's stream, which must be behind the call even if no thread waited.
    fn drop(&mut self) {
        if !matches!(self.done.is_over(), Ok(true))
            && let Err(error) = self.streams.hand_over(&self.done)
        {
            log::debug!("{}: {}", self.call, super::cuda_error(error));
        }
    }
}

/// A work shared with the thread that starts it.
pub(super) struct Shared(pub(super) Arc<NcclWork>);

impl Shared {
    pub(super) fn behind(&self) -> Behind {
        let NcclWork { group, done, .. } = &*self.0;
        Behind { group: Arc::clone(group), done: Arc::clone(done) }
    }
}

impl Completion for Shared {
    fn wait(&self) -> Result<()> {
        self.0.wait()
    }

    fn synchronize(&self) -> Result<()> {
        self.0.synchronize()
    }

    fn is_completed(&self) -> bool {
        self.0.is_completed()
    }

    fn span(&self) -> Option<(Instant, Instant)> {
        self.0.span()
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }
}
