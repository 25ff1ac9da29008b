//! Where a rank stands in all groups of its job, and how ranks find out that none of them can continue.
//!
//! Each group notices by itself that its ranks make different calls. But if one rank waits in one group and another rank in
//! another group, each for the other, then both groups look as if a rank were late. So a rank whose threads have waited for
//! two seconds asks where all ranks stand in all groups.
//!
//! **Never a false alarm.** A thread counts as stuck only if it waits in a call that cannot end before a certain rank has made its
//! part of it, if that rank has not, and if every thread of that rank that may do so is stuck too: all threads of the program that have
//! ever made a call or a group. If none has made a call in that group, a new thread may be about to: the process must not have more
//! other threads than when it made the group. A thread that computes, sleeps,
//! reads files or waits for anything but a call is not stuck, nor is a rank that does not answer. Answers are not given at one instant,
//! so the ranks are asked twice, and only what is the same in both answers counts: then it was so at the moment between
//! the two. Calls are numbered, and a thread waits for each only once, so a wait that is seen twice lasted from the first answer to the
//! second. What is stuck at one moment stays so.
mod deadlock;
mod job;
mod report;
mod threads;

pub use job::Membership;
pub(crate) use job::{Member, Waiting};
pub(crate) use report::{GroupReport, Lane, Wait};
pub(crate) use threads::{Thread, current, strangers};
