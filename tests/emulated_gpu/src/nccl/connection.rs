//! The threads of a communicator: one that connects it and reads from its hub, and one per operation.
use super::communicator::{Communicator, MEMORY};
use super::ffi::Wishes;
use super::handles::{self, Handle};
use super::wire::{Greeting, Message};
use super::{Code, Failure, Outcome, failure, system_error};
use std::io::ErrorKind::{BrokenPipe, ConnectionRefused, ConnectionReset};
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// Starts connecting a new communicator.
pub(super) fn start(communicator: Arc<Communicator>) {
    std::thread::spawn(move || {
        communicator.be_seen();
        match connect(&communicator) {
            Ok(control) => listen(&communicator, &control),
            Err(error) => communicator.fail(error),
        }
    });
}

fn connect(communicator: &Communicator) -> Outcome<Arc<UnixStream>> {
    let Communicator { rank, size, peer_info, hub, .. } = communicator;
    let connect = |for_data| {
        let greeting = Greeting { for_data, rank: *rank, size: *size, process: std::process::id() };
        let stream = greeting.connect(hub).map_err(|error| {
            let is_gone = matches!(error.kind(), BrokenPipe | ConnectionRefused | ConnectionReset);
            let code = if is_gone { to_blame(hub) } else { Code::SystemError };
            failure(code, format!("connecting to the process that made the id: {error}"))
        })?;
        Ok(Arc::new(stream))
    };
    if !crate::pool::took_outside(MEMORY) {
        return Err(failure(Code::UnhandledCudaError, "Cuda failure 2 'out of memory'"));
    }
    let (control, data) = (connect(false)?, connect(true)?);
    communicator.unless_ended(|state| {
        (state.control, state.data, state.memory) = (Some(control.clone()), Some(data), MEMORY);
    })?;
    let join = Message::Join { device: peer_info.device, may_share: peer_info.may_share, host: peer_info.host.clone() };
    // If the hub does not receive it, later steps of the connection report the reason.
    let _ = join.send(&control);
    Ok(control)
}

/// Reads messages until the connection ends.
fn listen(communicator: &Communicator, control: &UnixStream) {
    for line in BufReader::new(control).lines() {
        let Ok(line) = line else { break };
        match Message::parse(&line) {
            Some(Message::Ready) => {
                super::log::init(communicator);
                communicator.settle();
            }
            Some(Message::Failed(error)) => communicator.fail(error),
            Some(Message::Child(child)) => communicator.change(|state| state.child = Some(child)),
            Some(Message::Connected) => communicator.change(|state| state.connected = true),
            Some(Message::Finalized) => communicator.change(|state| state.finalized = true),
            Some(Message::Destroyed) => communicator.change(|state| state.destroyed = true),
            Some(Message::Orphaned) => communicator.change(|state| state.orphaned = true),
            other => {
                communicator.fail(failure(Code::InternalError, format!("unexpected message from the hub: {other:?}")))
            }
        }
    }
    let expected = communicator.change(|state| {
        state.alone = state.orphaned;
        state.destroyed = true;
        state.orphaned || state.finalized
    });
    if !expected {
        let text = "the process that made the id has closed the connection";
        communicator.fail(failure(to_blame(&communicator.hub), text));
    }
}

/// The error when the hub is gone: another process's, unless it was in this one.
fn to_blame(hub: &str) -> Code {
    if super::wire::is_here(hub) { Code::SystemError } else { Code::RemoteError }
}

fn tell(communicator: &Communicator, message: &Message) {
    let control = communicator.change(|state| state.control.clone());
    if let Some(control) = control {
        // If the connection is closed, the reading thread will notice.
        let _ = message.send(&control);
    }
}

/// Called by the launch of a communicator's first call: waits for the other ranks' first calls.
pub(super) fn await_connection(communicator: &Communicator) -> Outcome<()> {
    if communicator.size > 1 && !communicator.change(|state| state.connected) {
        tell(communicator, &Message::Connect);
        communicator.wait_for(|state| state.connected.then_some(()))?;
    }
    Ok(())
}

/// Called by the end of a finalized communicator: waits until the other ranks of this host end it too, by no abort.
pub(super) fn await_others_at_end(communicator: &Communicator) -> Outcome<()> {
    tell(communicator, &Message::Destroy);
    communicator.wait_for(|state| state.destroyed.then_some(()))
}

/// Executes an operation in a separate thread. Its failure becomes the communicator's.
fn operate(
    communicator: &Arc<Communicator>,
    operation: impl FnOnce(&Arc<Communicator>) -> Outcome<()> + Send + 'static,
) {
    communicator.begin();
    let communicator = communicator.clone();
    std::thread::spawn(move || {
        communicator.be_seen();
        match operation(&communicator) {
            Ok(()) => communicator.settle(),
            Err(error) => communicator.fail(error),
        }
    });
}

/// Memory for a handle, which NCCL's caller keeps until the operation has ended.
pub(super) struct Slot(pub(super) *mut Handle);

// SAFETY: NCCL's caller does not use the memory until the operation has ended.
unsafe impl Send for Slot {}

impl Slot {
    /// # Safety
    /// The memory must be valid for a write, and no other code may access it now.
    pub(super) unsafe fn fill(&self, handle: Handle) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.0.write(handle) };
    }
}

/// Starts a split. `slot` receives the new communicator, or null, before the operation ends.
pub(super) fn split(communicator: &Arc<Communicator>, color: i32, key: i32, wishes: Wishes, slot: Slot) -> Outcome<()> {
    if !communicator.is_idle() {
        let text = "ncclCommSplit: calls on the communicator are still running, which may cause a deadlock";
        return Err(failure(Code::InvalidUsage, text));
    }
    operate(communicator, move |parent| {
        parent.change(|state| state.child = None);
        tell(parent, &Message::Split { color, key });
        let handle = match parent.wait_for(|state| state.child.clone())? {
            Some((rank, size, hub)) => {
                let child = Communicator::new(hub, rank, size, parent.peer_info.clone(), wishes);
                start(child.clone());
                if wishes.blocking {
                    child.await_settled()?;
                }
                handles::add(child)
            }
            None => std::ptr::null_mut(),
        };
        // SAFETY: the operation has not ended, and the caller keeps the memory until then or until an abort.
        parent.unless_ended(|_| unsafe { slot.fill(handle) })
    });
    Ok(())
}

/// Starts finalizing: completes pending work, and then the ranks of this host wait for each other.
pub(super) fn finalize(communicator: &Arc<Communicator>) {
    communicator.change(|state| state.finalizing = true);
    operate(communicator, |communicator| {
        communicator.await_idle()?;
        tell(communicator, &Message::Finalize);
        communicator.wait_for(|state| (state.finalized || state.alone).then_some(()))
    });
}

/// Returns the name of a new hub in this process, for an id.
pub(super) fn new_hub() -> Outcome<String> {
    super::hub::open().map_err(|error| system_error("opening a socket for the other ranks", &error))
}

/// Cleans up after a failed construction.
pub(super) fn give_up(communicator: &Communicator, handle: Handle, error: Failure) -> Failure {
    communicator.end();
    handles::remove(handle);
    error
}
