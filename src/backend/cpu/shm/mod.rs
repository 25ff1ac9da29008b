//! Memory that the ranks of one host share, and the streams of slots that they pass through it.
//!
//! The one part of the engine with `unsafe` in it. What it offers is safe to use, whatever a peer does to the memory:
//! see `README.md` beside this file for who writes what when.
#![allow(unsafe_code)]
mod discovery;
mod eventcount;
mod group;
mod kernels;
mod layout;
mod peer_info;
mod segment;
mod slot;
mod stream;

pub(super) use discovery::{Discovered, Discovery};
pub(super) use group::{ShmGroup, Streams, pieces};
pub(super) use kernels::{Source, reduce};
pub(super) use layout::{Layout, Sleeper};
