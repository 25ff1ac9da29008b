//! Ranks as threads, and where one dies, as processes; through the functions that programs call.
mod collectives;
mod failures;
mod lifetimes;
mod messages;
mod processes;
mod support;
