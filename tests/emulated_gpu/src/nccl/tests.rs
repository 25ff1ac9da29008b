//! Ranks as threads, or as processes if one of them dies; called through the functions that programs use.
mod collectives;
mod failures;
mod lifetimes;
mod messages;
mod processes;
mod support;
