//! Groups of calls: calls between `ncclGroupStart` and `ncclGroupEnd` start together. A call outside a group is its own
//! group.
use super::communicator::{Communicator, Visit};
use super::connection;
use super::job::{self, Queued};
use super::{Code, Failure, Outcome, failure};
use crate::stream::Stream;
use std::cell::RefCell;
use std::sync::Arc;

/// A call with its stream.
type OnStream = (Arc<Stream>, Queued);

#[derive(Default)]
struct Group {
    depth: usize,
    /// The communicators in use. They belong to the thread until the end of the group.
    visits: Vec<Visit>,
    calls: Vec<(Arc<Communicator>, Arc<Stream>, Queued)>,
    failed: Option<Failure>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

pub(super) fn start() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
}

/// Executes `operation` on a communicator as part of the thread's group. It returns a call to launch with the group, or
/// `None` if it has already begun.
pub(super) fn join(
    visit: Visit,
    operation: impl FnOnce(&Arc<Communicator>) -> Outcome<Option<OnStream>>,
) -> Outcome<Code> {
    start();
    let outcome = operation(&visit.0);
    let result = GROUP.with_borrow_mut(|group| {
        let result = match outcome {
            Ok(call) => {
                group.calls.extend(call.map(|(stream, queued)| (visit.0.clone(), stream, queued)));
                Ok(())
            }
            Err(error) => {
                group.failed.get_or_insert_with(|| error.clone());
                Err(error)
            }
        };
        group.visits.push(visit);
        result
    });
    let ended = end();
    result.and(ended)
}

/// Starts the calls of the group if this is its end.
pub(super) fn end() -> Outcome<Code> {
    let ended = GROUP.with_borrow_mut(|group| match group.depth {
        0 => Err(failure(Code::InvalidUsage, "ncclGroupEnd: no group was started")),
        1 => Ok(Some(std::mem::take(group))),
        _ => {
            group.depth -= 1;
            Ok(None)
        }
    });
    match ended? {
        None => Ok(Code::Success),
        Some(Group { failed: Some(error), .. }) => Err(error),
        Some(group) => launch(group),
    }
}

fn launch(group: Group) -> Outcome<Code> {
    let Group { visits, mut calls, .. } = group;
    let mut parts: Vec<(Arc<Communicator>, Vec<OnStream>)> = Vec::new();
    for Visit(communicator) in &visits {
        if !parts.iter().any(|(known, _)| Arc::ptr_eq(known, communicator)) {
            let own = calls.extract_if(.., |(known, ..)| Arc::ptr_eq(known, communicator));
            parts.push((communicator.clone(), own.map(|(_, stream, queued)| (stream, queued)).collect()));
        }
    }
    let Some(blocking) = parts.first().map(|(communicator, _)| communicator.wishes.blocking) else {
        return Ok(Code::Success);
    };
    if parts.iter().any(|(communicator, _)| communicator.wishes.blocking != blocking) {
        let text = "a group has blocking and nonblocking communicators";
        return Err(failure(Code::InvalidArgument, text));
    }
    parts.iter().try_for_each(|(communicator, calls)| job::check(communicator, calls))?;
    let in_progress =
        |(communicator, calls): &(Arc<Communicator>, Vec<_>)| !calls.is_empty() || !communicator.is_settled();
    if blocking {
        for (communicator, calls) in parts {
            if job::connects(&communicator, &calls) {
                connection::await_connection(&communicator)?;
            }
            communicator.prepare(calls.iter().map(|(_, queued)| &queued.call))?;
            job::launch(&communicator, calls);
            communicator.await_settled()?;
        }
        return Ok(Code::Success);
    }
    if !parts.iter().any(in_progress) {
        return Ok(Code::Success);
    }
    parts.retain(|(_, calls)| !calls.is_empty());
    parts.iter().for_each(|(communicator, _)| communicator.begin_launch());
    std::thread::spawn(move || {
        for (communicator, calls) in parts {
            communicator.be_seen();
            let is_stuck = job::is_stuck(calls.iter().map(|(_, queued)| queued));
            let connects = job::connects(&communicator, &calls);
            if is_stuck || connects && connection::await_connection(&communicator).is_err() {
                return communicator.hang();
            }
            if let Err(error) = communicator.prepare(calls.iter().map(|(_, queued)| &queued.call)) {
                return communicator.fail(error);
            }
            job::launch(&communicator, calls);
            communicator.settle();
        }
    });
    Ok(Code::InProgress)
}
