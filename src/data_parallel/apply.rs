//! Running work on several devices at once.
use super::device::device_name;
use super::replica::{DeviceVariables, Replica};
use crate::nn::{autocast_mode, set_autocast};
use crate::panic::panic_message;
use crate::process_group::STACK_BYTES;
use crate::tensor::function::{is_grad_enabled, set_grad_enabled};
use crate::thread::not_started;
use crate::{Error, Result};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

/// Updates the replicas' copies of the variables and then runs `f` on each replica with its input, concurrently:
/// PyTorch's `parallel_apply`. Returns the outputs in the order of the inputs. With fewer inputs than replicas, only
/// the first replicas are used; a single input runs on the calling thread.
///
/// An input's tensors must be on its replica's device. The gradients of `f`'s results belong to each replica's own
/// copies; [`DataParallel`](super::DataParallel) sums them.
///
/// # Errors
/// Returns an error if there are more inputs than replicas, or if `f` fails or panics on a replica. [`Error::Replica`]
/// names its device; if several fail, it is the first one in the list, returned after all others have finished.
pub fn parallel_apply<M: Sync, I: Send, O: Send>(
    replicas: &[Replica<M>],
    inputs: Vec<I>,
    f: impl Fn(&M, I) -> candle_core::Result<O> + Sync,
) -> Result<Vec<O>> {
    if inputs.len() > replicas.len() {
        let reason = format!("there are {} inputs for {} replicas", inputs.len(), replicas.len());
        return Err(Error::invalid("inputs", reason));
    }
    let locals: Vec<_> = replicas.iter().map(|replica| Arc::clone(replica.local_variables())).collect();
    // The first replica computes with the variables themselves and may write to buffers, so all copies must be complete
    // before it starts. It has no copies itself.
    if inputs.len() > 1 {
        on_each(&locals, vec![(); inputs.len()], |index, ()| replicas[index].refresh())?;
    }
    on_each(&locals, inputs, |index, input| Ok(f(replicas[index].module(), input)?))
}

/// Runs `work` for each of the inputs, with one thread per device, with this thread's `no_grad` and `autocast`.
///
/// # Streams
/// On a device made by `Device::new_cuda`, each thread has its own CUDA stream, and streams do not wait for each other.
/// Work that this thread has enqueued, such as inputs and the optimizer's last step, must be complete before other
/// threads read its results. Likewise, the work of the other threads must be complete before this thread continues,
/// even if one of them has failed. So this function waits on both sides.
pub(super) fn on_each<I: Send, O: Send>(
    locals: &[Arc<DeviceVariables>],
    inputs: Vec<I>,
    work: impl Fn(usize, I) -> Result<O> + Sync,
) -> Result<Vec<O>> {
    let failed = |replica: usize, reason: String| {
        let device = device_name(locals[replica].device.location());
        Error::Replica { replica, device, reason }
    };
    let (grad_enabled, casts) = (is_grad_enabled(), autocast_mode());
    let run = |index: usize, input: I| -> Result<O> {
        let work = || set_grad_enabled(grad_enabled, || set_autocast(casts, || work(index, input)));
        let result =
            catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(failed(index, panic_message(&*panic))));
        let finished = locals[index].device.synchronize();
        match result.and_then(|output| Ok(finished.map(|()| output)?)) {
            Err(error @ Error::Replica { .. }) => Err(error),
            result => result.map_err(|error| failed(index, error.to_string())),
        }
    };
    if inputs.len() <= 1 {
        return inputs.into_iter().map(|input| run(0, input)).collect();
    }
    for local_variables in locals {
        local_variables.device.synchronize()?;
    }
    let run = &run;
    let outputs: Vec<Result<O>> = thread::scope(|scope| {
        let threads: Vec<_> = inputs
            .into_iter()
            .enumerate()
            .map(|(index, input)| {
                let thread = thread::Builder::new().name(format!("replica{index}")).stack_size(STACK_BYTES);
                thread.spawn_scoped(scope, move || run(index, input))
            })
            .collect();
        threads
            .into_iter()
            .enumerate()
            .map(|(index, thread)| match thread.map(thread::ScopedJoinHandle::join) {
                Ok(Ok(output)) => output,
                Ok(Err(panic)) => Err(failed(index, panic_message(&*panic))),
                Err(error) => Err(not_started(&format!("replica{index}"), error).into()),
            })
            .collect()
    });
    outputs.into_iter().collect()
}
