//! `ddprun check`: measures all nodes before a run.
//!
//! A check is a run whose workers are this program, in a hidden mode. So it meets as a run does, at the same store, with the
//! same secret; its ranks are connected by the engine of candle-ddp, and what stops a run stops the check as well. Each rank
//! measures, all learn what the others have measured, and rank 0 shows it.
mod args;
mod compute;
mod effort;
mod facts;
mod fitness;
mod gpus;
mod group;
mod judge;
mod launch;
mod measured;
mod network;
mod table;
#[cfg(test)]
mod tests;
mod worker;

pub(super) use args::{Check, Manner, WORKER};
pub(super) use fitness::{Fitness, of_this_machine};
pub(super) use launch::{cli, code, joint};
pub(super) use worker::work;
