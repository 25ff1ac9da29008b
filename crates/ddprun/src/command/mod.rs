//! The command line: what it says ([`cli`]), and its meaning ([`config`]).
pub(crate) mod cargo;
pub(crate) mod cli;
pub(crate) mod config;
pub(crate) mod hosts;
pub(crate) mod layout;
pub(crate) mod mode;
pub(crate) mod options;
pub(crate) mod prefix;
pub(crate) mod processes;
mod ranks;
pub(crate) mod secret;
pub(crate) mod streams;
pub(crate) mod terms;
