//! Work on several devices at once.
use super::device::device_name;
use super::replica::{Place, Replica};
use crate::panic::panic_message;
use crate::process_group::STACK_BYTES;
use crate::{Error, Result};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

/// Brings the replicas up to date and then runs `f` on each, with its input, at the same time: PyTorch's `parallel_apply`.
/// Returns the outputs in the order of the inputs. With fewer inputs than replicas the first replicas are used; a single
/// one runs on the calling thread.
///
/// An input's tensors are on its replica's device. The gradients of what `f` returns are those of each replica's own
/// copies; [`DataParallel`](super::DataParallel) is what sums them up.
///
/// # Errors
/// More inputs than replicas; an error or a panic of `f` ([`Error::Replica`] names the device; of several, the first in
/// the list), once all others have finished.
pub fn parallel_apply<M: Sync, I: Send, O: Send>(
    replicas: &[Replica<M>],
    inputs: Vec<I>,
    f: impl Fn(&M, I) -> candle_core::Result<O> + Sync,
) -> Result<Vec<O>> {
    if inputs.len() > replicas.len() {
        let reason = format!("there are {} for {} replicas", inputs.len(), replicas.len());
        return Err(Error::invalid("inputs", reason));
    }
    let places: Vec<_> = replicas.iter().map(|replica| Arc::clone(replica.place())).collect();
    // The first replica computes with the variables themselves and may write to buffers, so that all copies must be done
    // before it starts. It has none itself.
    if inputs.len() > 1 {
        on_each(&places, vec![(); inputs.len()], |index, ()| replicas[index].refresh())?;
    }
    on_each(&places, inputs, |index, input| Ok(f(replicas[index].module(), input)?))
}

/// Runs `work` for each of the inputs, on a thread for each place.
///
/// # Streams
/// Each thread has a CUDA stream of its own on a device that was made by `Device::new_cuda`, and streams do not wait for
/// each other. What this thread has enqueued, inputs and the optimizer's last step among it, must be done
/// before other threads read it; and their results, and the memory they have used, must be done with before this thread
/// goes on, also where one has failed. So both sides are waited for.
pub(super) fn on_each<I: Send, O: Send>(
    places: &[Arc<Place>],
    inputs: Vec<I>,
    work: impl Fn(usize, I) -> Result<O> + Sync,
) -> Result<Vec<O>> {
    let failed = |replica: usize, reason: String| {
        let device = device_name(places[replica].device.location());
        Error::Replica { replica, device, reason }
    };
    let run = |index: usize, input: I| -> Result<O> {
        let result = catch_unwind(AssertUnwindSafe(|| work(index, input)))
            .unwrap_or_else(|panic| Err(failed(index, panic_message(&*panic))));
        let finished = places[index].device.synchronize();
        match result.and_then(|output| Ok(finished.map(|()| output)?)) {
            Err(error @ Error::Replica { .. }) => Err(error),
            result => result.map_err(|error| failed(index, error.to_string())),
        }
    };
    if inputs.len() <= 1 {
        return inputs.into_iter().map(|input| run(0, input)).collect();
    }
    for place in places {
        place.device.synchronize()?;
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
                Err(error) => Err(Error::io(format!("starting the thread of replica {index}"), error)),
            })
            .collect()
    });
    outputs.into_iter().collect()
}
