#![doc = include_str!("../README.md")]

#[doc(hidden)]
pub mod cbor;
#[doc(hidden)]
pub mod error;
#[doc(hidden)]
pub mod hash;
#[doc(hidden)]
pub mod placement;
pub mod seed;
#[doc(hidden)]
pub mod state;
#[doc(hidden)]
pub mod variables;
pub mod weights;

use candle_ddp_base::{panic, warnings};
use candle_ddp_rendezvous as rendezvous;
use candle_ddp_tensor as tensor;

pub use error::{Context, Error, Failure, Result};
pub use state::{Parts, PerRank, RankZero, Serde, StateDict};
pub use variables::{NamePredicate, Parameters};

#[cfg(fuzzing)]
#[doc(hidden)]
pub use candle_ddp_pickle::fuzz_pickle;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
