//! The barrier that names the ranks that did not come.
use crate::common::{ranks, try_ranks};
use candle_ddp::Error;
use candle_ddp::rendezvous::Store;
use std::time::Duration;

/// Short enough to wait for, and long enough for a rank that comes.
const SHORT: Option<Duration> = Some(Duration::from_secs(3));

#[test]
fn all_ranks_pass_together_again_and_again() {
    ranks(3, |pg| {
        for round in 0..5 {
            std::thread::sleep(Duration::from_millis(10 * ((round + pg.rank() as u64) % 3)));
            pg.monitored_barrier(None)?;
        }
        pg.barrier()?;
        // Only the keys of the last barrier are left.
        let keys = pg.store().num_keys()?;
        pg.barrier()?;
        for _ in 0..3 {
            pg.monitored_barrier(None)?;
        }
        pg.barrier()?;
        assert_eq!(pg.store().num_keys()?, keys);
        pg.barrier()
    });
}

#[test]
fn the_missing_ranks_are_named_and_the_group_goes_on() {
    ranks(4, |pg| {
        // All ranks are there.
        pg.barrier()?;
        if pg.rank() % 2 == 0 {
            let error = pg.monitored_barrier(SHORT).unwrap_err();
            let Error::MonitoredBarrier { rank, missing, .. } = &error else { panic!("{error}") };
            assert_eq!((*rank, &missing[..]), (pg.rank(), &[1, 3][..]));
            assert!(error.to_string().contains("did not come to monitored_barrier within 3s"), "{error}");
        }
        pg.barrier()?;
        if pg.rank() % 2 == 1 {
            // This rank is too late for the others, and the others for it.
            let error = pg.monitored_barrier(SHORT).unwrap_err();
            assert!(matches!(&error, Error::MonitoredBarrier { missing, .. } if *missing == [1, 3]), "{error}");
        }
        pg.monitored_barrier(None)
    });
}

#[test]
fn a_failure_of_the_group_ends_the_wait() {
    let error = try_ranks(2, |pg| match pg.rank() {
        0 => pg.monitored_barrier(Some(Duration::from_secs(600))),
        _ => Err(Error::RankFailed { rank: 1, reason: "no data".to_string() }),
    });
    assert!(error.unwrap_err().to_string().contains("no data"));
}
