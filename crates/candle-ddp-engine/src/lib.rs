//! The CPU engine of [candle-ddp](https://docs.rs/candle-ddp): collectives on the bytes of tensors, over shared memory between
//! the ranks of a host and over TCP between hosts. It knows of tensors only that they are [`Memory`].
//!
//! An [`Engine`] is one rank of a group. A [`Call`] says what is done, [`Operands`] with which bytes.
//!
//! The `README.md` of the sources describes connections, threads, frames, failures and determinism. Items hidden from the
//! documentation are for candle-ddp's other engines, and change with them.
mod algorithm;
mod arrival;
mod call;
mod call_site;
mod call_sites;
mod construction;
mod data_path;
#[doc(hidden)]
pub mod device_group;
mod engine;
mod failure;
pub mod flight_recorder;
#[cfg(any(test, fuzzing))]
mod fuzz;
mod gone;
mod group;
mod host_monitor;
mod hosts;
mod label;
mod member;
mod memory;
mod news;
mod operands;
mod operation;
mod options;
mod query;
mod question;
mod reduce_op;
mod reduction;
mod root_cause;
mod session;
mod shape;
mod shm;
#[doc(hidden)]
pub mod standing;
mod state;
mod tcp;
mod texts;
mod transport_error;
mod wait;
mod work_queue;

use candle_ddp_base::{deadline, descriptors, host, panic, random, thread, warnings};
use candle_ddp_rendezvous as rendezvous;
use candle_ddp_rendezvous::error;

pub use call::{Call, Channel, Element};
pub use call_site::CallSite;
pub use candle_ddp_rendezvous::{Error, Failure, Result};
pub use construction::Construction;
pub use engine::Engine;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub use fuzz::mesh as fuzz_mesh;
pub use label::Label;
pub use memory::Memory;
pub use operands::{Operands, Slice, Tensors};
pub use operation::Operation;
pub use options::{CpuOptions, CpuTransport};
pub use reduce_op::ReduceOp;
pub use shape::ShapeCode;
pub use work_queue::{Work, WorkQueue};

#[doc(hidden)]
pub use self::{operation::Extent, shape::significant};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
