//! The command line: what it says ([`Cli`]), and its meaning ([`Config`]).
mod cargo;
mod cli;
mod config;
pub(crate) mod hosts;
mod layout;
mod mode;
mod options;
pub(crate) mod prefix;
mod processes;
mod ranks;
pub(crate) mod secret;
mod streams;
mod terms;

pub(crate) use cli::Cli;
pub(crate) use config::{Config, Program, Rendezvous};
pub(crate) use layout::{Layout, Topology};
pub(crate) use mode::{Check, HostStore, Manner, Mode, WORKER};
pub(crate) use options::{Options, Tolerance};
pub(crate) use processes::{Host, Processes};
pub(crate) use secret::RunSecret;
pub(crate) use streams::Streams;
pub(crate) use terms::{Pace, Terms, older, version};
