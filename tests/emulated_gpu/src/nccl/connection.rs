//! The threads of a communicator: the one that connects it and listens to its hub, and those of single operations.
use super::communicator::Communicator;
use super::handles::{self, Handle};
use super::wire::{Greeting, Message};
use super::{Code, Failure, Outcome, failure, system_error};
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// Starts to connect a new communicator.
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
    let Communicator { rank, size, place, hub, .. } = communicator;
    let connect = |for_data| {
        let greeting = Greeting { for_data, rank: *rank, size: *size };
        let stream = greeting.connect(hub).map_err(|error| {
            failure(Code::RemoteError, format!("connecting to the process that made the id: {error}"))
        })?;
        Ok(Arc::new(stream))
    };
    let (control, data) = (connect(false)?, connect(true)?);
    communicator.unless_ended(|state| (state.control, state.data) = (Some(control.clone()), Some(data)))?;
    let join = Message::Join {
        process: std::process::id(),
        device: place.device,
        may_share: place.may_share,
        host: place.host.clone(),
    };
    // When the hub does not hear it, the rest of the connection says why.
    let _ = join.send(&control);
    Ok(control)
}

/// Until the connection ends.
fn listen(communicator: &Communicator, control: &UnixStream) {
    for line in BufReader::new(control).lines() {
        let Ok(line) = line else { break };
        match Message::parse(&line) {
            Some(Message::Ready) => communicator.settle(),
            Some(Message::Failed(error)) => communicator.fail(error),
            Some(Message::Child(child)) => communicator.change(|state| state.child = Some(child)),
            Some(Message::Finalized) => communicator.change(|state| state.finalized = true),
            Some(Message::Orphaned) => communicator.change(|state| state.orphaned = true),
            other => communicator.fail(failure(Code::InternalError, format!("the hub said {other:?}"))),
        }
    }
    let expected = communicator.change(|state| {
        state.alone = state.orphaned;
        state.orphaned || state.finalized
    });
    if !expected {
        communicator.fail(failure(Code::RemoteError, "the process that made the id has closed the connection"));
    }
}

fn tell(communicator: &Communicator, message: &Message) {
    let control = communicator.change(|state| state.control.clone());
    if let Some(control) = control {
        // When it is closed, the thread that listens will find out.
        let _ = message.send(&control);
    }
}

/// Carries out an operation in a thread of its own; its failure is the communicator's.
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

/// A place for a handle that NCCL's caller keeps until the operation is over.
pub(super) struct Slot(pub(super) *mut Handle);

// SAFETY: whoever passes a place to NCCL leaves it alone until the operation is over.
unsafe impl Send for Slot {}

impl Slot {
    /// # Safety
    /// The place must be valid for a write, and nobody else may look at it now.
    pub(super) unsafe fn fill(&self, handle: Handle) {
        // SAFETY: the caller's promise.
        unsafe { self.0.write(handle) };
    }
}

/// Starts a split; `slot` gets the new communicator, or null, before the operation is over.
pub(super) fn split(communicator: &Arc<Communicator>, color: i32, key: i32, blocking: bool, slot: Slot) -> Outcome<()> {
    if !communicator.is_idle() {
        let text = "ncclCommSplit: calls on the communicator are not over, which may end in a deadlock";
        return Err(failure(Code::InvalidUsage, text));
    }
    operate(communicator, move |parent| {
        parent.change(|state| state.child = None);
        tell(parent, &Message::Split { color, key });
        let handle = match parent.wait_for(|state| state.child.clone())? {
            Some((rank, size, hub)) => {
                let child = Communicator::new(hub, rank, size, parent.place.clone(), blocking);
                start(child.clone());
                if blocking {
                    child.await_settled()?;
                }
                handles::add(child)
            }
            None => std::ptr::null_mut(),
        };
        // SAFETY: the operation is not over, and the caller keeps the place until then or an abort.
        parent.unless_ended(|_| unsafe { slot.fill(handle) })
    });
    Ok(())
}

/// Starts to finalize: what is under way is carried out, then the ranks of this host wait for each other.
pub(super) fn finalize(communicator: &Arc<Communicator>) {
    communicator.change(|state| state.finalizing = true);
    operate(communicator, |communicator| {
        communicator.await_idle()?;
        tell(communicator, &Message::Finalize);
        communicator.wait_for(|state| (state.finalized || state.alone).then_some(()))
    });
}

/// The name of a new hub in this process, for an id.
pub(super) fn new_hub() -> Outcome<String> {
    super::hub::open().map_err(|error| system_error("opening a socket for the other ranks", &error))
}

/// What a failed construction leaves to do.
pub(super) fn give_up(communicator: &Communicator, handle: Handle, error: Failure) -> Failure {
    communicator.end();
    handles::remove(handle);
    error
}
