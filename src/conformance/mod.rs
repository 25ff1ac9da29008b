//! A test suite for implementations of [`Communicator`], including engines outside this crate.
//!
//! Enable the feature `conformance` in `[dev-dependencies]`:
//!
//! ```
//! use candle_ddp::backend::cpu::{CpuCommunicator, CpuOptions};
//! use candle_ddp::conformance::{self, ConformanceOptions};
//!
//! # fn main() -> candle_ddp::Result<()> {
//! # let quick = |options| ConformanceOptions { world_sizes: vec![2], counts: vec![3], ..options };
//! let options = ConformanceOptions::default();
//! # let options = quick(options);
//! conformance::run(options, |store, rank, world_size| {
//!     Ok(Box::new(CpuCommunicator::new(store, rank, world_size, CpuOptions::default())?))
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! Every collective runs in worlds of several sizes, with every dtype and reduction, with small and large element
//! counts, and is compared with closed forms. Calls in flight and slices of one tensor follow ([`Case`] has the list).
//! The suite tests neither speed nor an engine's behaviour when a rank dies or makes a different call.
mod batches;
mod in_flight;
mod matrix;
mod options;
mod rank;
mod slices;

pub use matrix::Case;
pub use options::ConformanceOptions;

use crate::backend::Communicator;
use crate::process_group::spawn::on_ranks;
use crate::rendezvous::{HashStore, Store};
use crate::{Error, Result};
use rank::{Fault, Outcome, Rank};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

/// Tests an engine whose ranks can be threads of one process. `make` creates the communicator of one rank from a store,
/// the rank and the world size, on that rank's own thread; every group has its own store. For each world size, two
/// groups are created and run all cases in order.
///
/// # Errors
/// Returns the first fault, as [`Error::RankFailed`], with the case, the call, and what was expected. If the engine
/// never returns from a call, neither does this function.
pub fn run<M>(options: ConformanceOptions, make: M) -> Result<()>
where
    M: Fn(Arc<dyn Store>, usize, usize) -> Result<Box<dyn Communicator>> + Sync,
{
    check(&options)?;
    for &world_size in &options.world_sizes {
        let stores: [Arc<dyn Store>; 2] = std::array::from_fn(|_| Arc::new(HashStore::new(options.timeout)) as _);
        let come = AtomicUsize::new(0);
        let test = |rank: usize| -> Result<()> {
            let connect = |store: &Arc<dyn Store>| {
                let communicator = make(store.clone(), rank, world_size);
                communicator.map_err(|error| failed(rank, world_size, &"making a group", error.into()))
            };
            let (first, second) = (connect(&stores[0])?, connect(&stores[1])?);
            run_cases(&options, [&*first, &*second], Some(&come))
        };
        on_ranks(world_size, test, |_, _| ())?;
    }
    Ok(())
}

/// Tests an engine whose ranks are processes. Every rank must call this with the same options and its communicators of
/// two groups of all ranks.
///
/// # Errors
/// Returns the errors of [`run`] on the rank that finds the fault, which then [aborts](Communicator::abort) both
/// groups.
pub fn run_rank(options: ConformanceOptions, groups: [&dyn Communicator; 2]) -> Result<()> {
    let options = ConformanceOptions { world_sizes: vec![groups[0].world_size()], ..options };
    check(&options)?;
    run_cases(&options, groups, None)
}

fn check(options: &ConformanceOptions) -> Result<()> {
    match options.world_sizes.iter().find(|size| !(1..=14).contains(*size)) {
        Some(size) => Err(Error::invalid("world_sizes", format!("worlds have 1 to 14 ranks here, not {size}"))),
        None => Ok(()),
    }
}

fn run_cases(options: &ConformanceOptions, groups: [&dyn Communicator; 2], come: Option<&AtomicUsize>) -> Result<()> {
    let ConformanceOptions { dtypes, counts, reductions, average_is_rounded_once, device, .. } = options;
    let rank =
        Rank { dtypes, counts, reductions, average_is_rounded_once: *average_is_rounded_once, device, groups, come };
    for case in &options.cases {
        if let Err(fault) = test(*case, &rank) {
            let error = failed(rank.number(), rank.world_size(), case, fault);
            // The other ranks are in the same case or about to start it.
            groups.iter().for_each(|group| group.abort(&error.to_string()));
            return Err(error);
        }
    }
    Ok(())
}

macro_rules! define_test {
    ($($(#[$doc:meta])* $case:ident = $module:ident::$name:ident),+ $(,)?) => {
        fn test(case: Case, rank: &Rank) -> Outcome {
            match case {
                $(Case::$case => $module::$name(rank),)+
            }
        }
    };
}

matrix::with_cases!(define_test);

fn failed(rank: usize, world_size: usize, case: &dyn fmt::Display, fault: Fault) -> Error {
    match fault.error {
        // Another rank reports the cause.
        Some(error) if error.is_echo(rank) => *error,
        _ => Error::RankFailed { rank, reason: format!("{case}, {world_size} ranks, {}", fault.reason) },
    }
}
