//! Why a group ended, and how the cause is found.
//!
//! Both engines collect the same facts: what every rank has called ([`ProgressReport`]), and which ranks do not answer.
//! The CPU engine does so over its control connections, the NCCL engine through the store. One pure function,
//! `diagnose`, finds the cause from these facts.
mod diagnose;
mod history;
mod report;

pub(crate) use diagnose::{ExpiredCall, RankState, desync, diagnose, left_before, left_since};
pub(crate) use history::CallHistory;
pub(crate) use report::{CallCounts, ProgressReport};
