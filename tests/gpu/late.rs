//! Ranks that are late, stopped or short of memory.
use crate::common::assert_error;
use crate::launch::{Ranks, Worker, gpus, is_emulated};
use candle_core::{DType, Tensor};
use candle_ddp::{ProcessGroup, ReduceOp};
use std::time::{Duration, Instant};

/// Runs the job of a rank, if it is one of these.
pub(crate) fn run(worker: &Worker, group: impl Fn(u64) -> ProcessGroup) -> bool {
    match worker.job.as_str() {
        "late" => late(&group(100)),
        "stopped for a while" => stopped_for_a_while(worker, &group(100)),
        "short of memory" => short_of_memory(&group(60)),
        _ => return false,
    }
    true
}

fn all_reduce(pg: &ProcessGroup, value: f32) -> Vec<f32> {
    let tensor = Tensor::full(value, 1000, pg.device()).unwrap();
    pg.all_reduce(&tensor, ReduceOp::Sum).unwrap();
    tensor.to_vec1().unwrap()
}

/// Rank 1 is late, for the first call and for a later one.
fn late(pg: &ProcessGroup) {
    let delay = Duration::from_secs(if is_emulated() { 2 } else { 30 });
    for _ in 0..2 {
        if pg.rank() == 1 {
            std::thread::sleep(delay);
        }
        assert_eq!(all_reduce(pg, 1.0), [2.0; 1000]);
    }
}

#[test]
fn a_late_rank_is_waited_for() {
    if gpus("a_late_rank_is_waited_for").is_some() {
        // The test of the links would connect the ranks before.
        Ranks::start_in(2, "late", |_| Some(("CANDLE_DDP_LINK_TEST", "0"))).finish();
    }
}

/// Makes calls for some seconds; rank 0 decides when it is enough.
fn stopped_for_a_while(worker: &Worker, pg: &ProcessGroup) {
    let start = Instant::now();
    while all_reduce(pg, f32::from(pg.rank() == 0 && start.elapsed() > Duration::from_secs(8)))[0] == 0.0 {
        worker.sign();
    }
}

#[test]
fn a_rank_that_is_stopped_for_a_while_goes_unnoticed() {
    if gpus("a_rank_that_is_stopped_for_a_while_goes_unnoticed").is_some() {
        let mut ranks = Ranks::start(2, "stopped for a while");
        ranks.await_signs();
        ranks.signal(1, "STOP");
        std::thread::sleep(Duration::from_secs(4));
        ranks.signal(1, "CONT");
        ranks.finish();
    }
}

#[test]
fn a_rank_that_stays_stopped_ends_the_group() {
    let Some(_) = gpus("a_rank_that_stays_stopped_ends_the_group") else { return };
    let mut ranks = Ranks::start(3, "killed");
    ranks.await_signs();
    ranks.signal(1, "STOP");
    let start = Instant::now();
    for report in ranks.reports(&[0, 2]) {
        assert!(report.contains("rank 1"), "{report}");
    }
    assert!(start.elapsed() < Duration::from_secs(90), "it took {:?}", start.elapsed());
    // It learns of its own end.
    ranks.signal(1, "CONT");
    let report = ranks.reports(&[1]).swap_remove(0);
    assert!(report.contains("rank 1"), "{report}");
}

/// Rank 0 asks for more memory than there is, in between.
fn short_of_memory(pg: &ProcessGroup) {
    assert_eq!(all_reduce(pg, 1.0), [2.0; 1000]);
    if pg.rank() == 0 {
        assert_error(Tensor::zeros(1 << 42, DType::F32, pg.device()), &["OUT_OF_MEMORY"]);
    }
    assert_eq!(all_reduce(pg, 3.0), [6.0; 1000]);
}

#[test]
fn a_group_survives_a_lack_of_memory() {
    crate::finish("a_group_survives_a_lack_of_memory", 2, "short of memory");
}
