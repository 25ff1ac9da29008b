//! Memory that the ranks of one host share, and the streams of slots that they pass through it.
//!
//! This is the only part of the engine with `unsafe` code. Its interface is safe to use, whatever a peer does to the
//! memory: the `README.md` in this folder says who writes what and when.
#![allow(unsafe_code)]
mod board;
mod collectives;
mod discovery;
mod eventcount;
mod group;
mod kernels;
mod layout;
mod peer_info;
mod segment;
pub(crate) mod session;
mod slot;
mod spin;
mod stream;
mod sync;

pub(super) use board::{Board, Life};
pub(super) use collectives::Streams;
pub(super) use discovery::{Discovered, Discovery, Topic};
pub(super) use group::{ShmGroup, pieces};
pub(super) use kernels::{Source, reduce};
pub(super) use layout::{Layout, Sleeper};
pub(super) use peer_info::PeerInfo;
