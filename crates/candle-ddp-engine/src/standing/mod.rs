//! Where a rank stands in all groups of its job, and how ranks find out that none of them can continue.
//!
//! Each group notices by itself that its ranks make different calls. But if one rank waits in one group and another rank in
//! another group, each for the other, then both groups look as if a rank were late. So a rank whose threads have waited for
//! two seconds asks where all ranks stand in all groups.
//!
//! **Never a false alarm.** A thread counts as stuck only if it waits in a call that cannot end before a certain rank has made its
//! part of it, if that rank has not, and if every thread of that rank that may do so is stuck too: all threads of the program that have
//! ever made a call or a group. If none has made a call in that group, a new thread may be about to: the process must not have
//! other threads that it did not have when it made the group. A thread that computes, sleeps,
//! reads files or waits for anything but a call is not stuck, nor is a rank that does not answer. Answers are not given at one instant,
//! so the ranks are asked twice, and only what is the same in both answers counts: then it was so at the moment between
//! the two. Calls and constructions are numbered, and a thread waits for each only once, so a wait that is seen twice lasted from the
//! first answer to the second. What is stuck at one moment stays so.
//!
//! The exception is a thread that has never made a call, in a group that another living thread has called, or that is younger than the
//! thread: it is taken for one that makes none. Nothing tells it from the threads of pools and loaders, which most processes have and which
//! start at any time.
//!
//! A message through shared memory that has more pieces than the memory has slots cannot end before its receiver comes. Over TCP, a send
//! counts as one that can end: the systems on both sides, tunnels and proxies hold data on its way, and no rank knows how much. A
//! rank that makes a group and has no connections yet waits for each of its ranks that has not begun to make that group: no rank gets past the
//! construction without the others, so whichever does not have the group has never been there. A rank that waits for a value in the store is
//! busy: whoever can reach the store may set it, even a program that is no rank.
//!
//! **On a GPU**, a thread rarely waits in a call: it launches calls, and later reads a tensor in candle, which nobody here sees. But the order
//! in which the GPU runs what is launched is known. All threads of a program use one stream; [`Work::wait`](crate::Work) lets that stream wait
//! for a call; and a call begins once everything is over that was on the stream when it was launched. So whatever is launched after the wait,
//! in any group, runs after the call, also if the host is far ahead. Such a call is stuck if a rank that it needs has launched its part
//! behind a stuck call, or has not launched it and can only do so behind one, since its stream or all of its threads wait for one.
//! These are facts about orders, so it does not matter that a rank hears late that its GPU has finished a call.
//!
//! The time-out alone ends what cannot be known: ranks of which one waits outside of this crate for a call that its stream does not wait for;
//! on a device of `Device::new_cuda`, where each thread has a stream, ranks of which no thread waits in this crate; ranks that all are in the
//! first call of a group, which holds up the host instead of the stream, since threads of the driver and NCCL cannot be told from new ones of
//! the program; ranks that wait in a batch of messages, whose kernel ends as a whole; and kernels for which the GPU has no room.
mod deadlock;
mod job;
mod report;
mod threads;

pub(crate) use job::Member;
pub use job::{Membership, Waiting};
pub(crate) use report::{GroupReport, Lane, StreamWait, Wait};
pub(crate) use threads::{Thread, current, may_call, strangers};
