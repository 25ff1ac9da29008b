//! Memory that the ranks of one host share, and the streams of slots that they pass through it.
//!
//! The one part of the engine with `unsafe` in it. What it offers is safe to use, whatever a peer does to the memory:
//! see `README.md` beside this file for who writes what when.
#![allow(unsafe_code)]
mod bell;
mod card;
mod kernels;
mod layout;
mod meeting;
mod room;
mod segment;
mod slot;
mod stream;

pub(super) use kernels::{Source, reduce};
pub(super) use layout::{Layout, Sleeper};
pub(super) use meeting::{Guest, Meeting};
pub(super) use room::{Post, Room, pieces};

// What it shares with the rest of the engine.
use super::{call, hosts, kernels as block_kernels, lock, storage, transport};
