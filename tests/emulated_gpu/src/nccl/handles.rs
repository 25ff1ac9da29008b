//! The meaning of an `ncclComm_t`. A handle is a number that is never reused, so that use of a communicator after its
//! end is detected.
use super::communicator::Communicator;
use super::{Code, Outcome, die, failure, lock};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex};

pub(super) type Handle = *mut c_void;

const FIRST: usize = 0x10_0000;
const STEP: usize = 16;

struct Handles {
    next: usize,
    alive: Option<HashMap<usize, Arc<Communicator>>>,
}

static HANDLES: Mutex<Handles> = Mutex::new(Handles { next: FIRST, alive: None });

pub(super) fn add(communicator: Arc<Communicator>) -> Handle {
    let mut handles = lock(&HANDLES);
    let number = handles.next;
    handles.next += STEP;
    handles.alive.get_or_insert_default().insert(number, communicator);
    std::ptr::without_provenance_mut(number)
}

/// `call` is the name of the function that received the handle.
pub(super) fn find(handle: Handle, call: &str) -> Outcome<Arc<Communicator>> {
    let handles = lock(&HANDLES);
    let number = handle.addr();
    if let Some(communicator) = handles.alive.as_ref().and_then(|alive| alive.get(&number)) {
        return Ok(communicator.clone());
    }
    if (FIRST..handles.next).contains(&number) {
        die(&format!("{call} on a communicator that was destroyed or aborted"));
    }
    Err(failure(Code::InvalidArgument, format!("{call}: this is not a communicator")))
}

pub(super) fn remove(handle: Handle) {
    if let Some(alive) = &mut lock(&HANDLES).alive {
        alive.remove(&handle.addr());
    }
}
