//! The suite for engines.
use crate::launch;
use candle_ddp::backend::{Communicator, Split};
use candle_ddp::conformance::{ConformanceOptions, run_rank};
use candle_ddp::rendezvous::HashStore;
use candle_ddp::{Error, Result};
use candle_ddp_mpi::{MpiCommunicator, MpiOptions};
use std::sync::Arc;
use std::time::Duration;

/// Small pieces, so that calls have several.
fn options() -> MpiOptions {
    MpiOptions { timeout: Duration::from_secs(240), piece_bytes: 100_000, ..MpiOptions::default() }
}

fn conform() -> Result<()> {
    let first = MpiCommunicator::world(options())?;
    // An engine does not need the store.
    let store = Arc::new(HashStore::new(Duration::from_secs(1)));
    let Split::Member(second) = first.duplicate(store)? else {
        return Err(Error::Unavailable { what: "a second group".into(), hint: "duplicate must make it".into() });
    };
    assert_eq!((second.rank(), second.world_size()), (first.rank(), first.world_size()));
    run_rank(ConformanceOptions::default(), [&first, &*second])
}

macro_rules! worlds {
    ($($name:ident = $ranks:literal),*) => {$(
        #[test]
        fn $name() {
            launch::ranks(concat!("conformance::", stringify!($name)), $ranks, conform);
        }
    )*};
}

worlds!(one_rank = 1, two_ranks = 2, three_ranks = 3, four_ranks = 4);
