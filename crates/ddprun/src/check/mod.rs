//! `ddprun check`: measures all nodes before a run.
//!
//! A check is a run whose workers are this program, in a hidden mode. So it meets as a run does, at the same store, with the
//! same secret; its ranks are connected by the engine of candle-ddp, and what stops a run stops the check as well. Each rank
//! measures, all learn what the others have measured, and rank 0 shows it.
mod compute;
mod facts;
mod gpus;
mod group;
mod launch;
mod measured;
mod network;
mod outliers;
mod table;
#[cfg(test)]
mod tests;
mod worker;

pub(crate) use launch::{Fitness, cli, code, joint, of_this_machine};
pub(crate) use worker::work;
