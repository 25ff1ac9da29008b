//! Problems that only a warning reports. The log belongs to the process, so one test runs at a time.
#![allow(clippy::unwrap_used)] // a failed test may panic
mod aloud;
mod by_hand;
#[path = "../common/mod.rs"]
mod common;
mod damaged;
mod diverged;
mod engine;
mod epochs;
mod evaluation_graph;
mod late_samples;
mod logger;
mod lost_gradients;
mod no_batch;
mod nothing_counted;
mod places;
mod replicas;
mod schedules;
mod secrets;
mod shm_fallback;
