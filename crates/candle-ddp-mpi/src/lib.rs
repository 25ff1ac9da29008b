#![doc = include_str!("../README.md")]

mod call;
mod comm;
mod communicator;
mod control_variable;
mod group;
mod in_place;
mod library;
mod lifetime;
mod notice;
mod options;
mod patience;
mod process_group;
mod queues;
mod reduction;
mod retired;
mod tuning;

pub use communicator::MpiCommunicator;
pub use mpi;
pub use options::MpiOptions;
pub use process_group::{init_process_group, run};
