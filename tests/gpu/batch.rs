//! Batches of messages over NCCL.
use crate::launch::{Ranks, SHORT, Worker, gpus};
use crate::left_out;
use candle_core::{DType, Tensor};
use candle_ddp::{P2pOp, ProcessGroup, ReduceOp, Result};
use std::time::Duration;

/// Runs the job of a rank, if it is one of these.
pub(crate) fn run(worker: &Worker, group: impl Fn(u64) -> ProcessGroup) -> bool {
    match worker.job.as_str() {
        "batches and collectives" => in_order(&group(60)).unwrap(),
        "waits of a batch" => waits(&group(60)).unwrap(),
        "killed in a batch" => worker.report(&batches(worker, &group(300))),
        "leave before a batch" => leave(worker, &group(200)),
        "late for a batch" => late(worker, &group(SHORT)),
        _ => return false,
    }
    true
}

fn filled(pg: &ProcessGroup, value: usize, count: usize) -> Tensor {
    Tensor::full(value as f32, count, pg.device()).unwrap()
}

/// What this rank sends to `peers`, and what it receives from them.
fn exchange(pg: &ProcessGroup, peers: &[usize], own: &Tensor) -> (Vec<P2pOp>, Vec<Tensor>) {
    let received: Vec<Tensor> = peers.iter().map(|_| filled(pg, 9, own.elem_count())).collect();
    let sends = peers.iter().map(|peer| P2pOp::Send { tensor: own.clone(), peer: *peer });
    let recvs = peers.iter().zip(&received).map(|(peer, tensor)| P2pOp::Recv { tensor: tensor.clone(), peer: *peer });
    (sends.chain(recvs).collect(), received)
}

fn others(pg: &ProcessGroup) -> Vec<usize> {
    (0..pg.world_size()).filter(|peer| *peer != pg.rank()).collect()
}

fn assert_all(tensor: &Tensor, value: usize) -> Result<()> {
    let values = tensor.to_vec1::<f32>()?;
    assert!(values.iter().all(|found| *found == value as f32), "{:?} instead of {value}", &values[..4]);
    Ok(())
}

/// Two of three ranks have a batch between two collectives of all. The tensors come from them, and go into them.
fn in_order(pg: &ProcessGroup) -> Result<()> {
    const COUNT: usize = 1 << 20;
    for round in 0..5 {
        let own = filled(pg, round + pg.rank(), COUNT);
        let first = pg.all_reduce_async(&own, ReduceOp::Sum)?;
        let sum = 3 * round + 3;
        let received = if pg.rank() < 2 {
            let (batch, received) = exchange(pg, &[1 - pg.rank()], &own);
            // It runs behind the collective, for which nobody has waited.
            let work = pg.batch_isend_irecv(&batch)?;
            drop((first, work));
            received[0].clone()
        } else {
            own
        };
        pg.all_reduce_async(&received, ReduceOp::Max)?.wait()?;
        assert_all(&received, sum)?;
    }
    Ok(())
}

#[test]
fn a_batch_runs_in_the_order_of_the_collectives() {
    crate::finish("a_batch_runs_in_the_order_of_the_collectives", 3, "batches and collectives");
}

/// However many messages it has, a batch makes NCCL's stream wait once, for candle's, and candle's stream once, for NCCL's.
fn waits(pg: &ProcessGroup) -> Result<()> {
    let own = filled(pg, pg.rank(), 1000);
    let peers = [1 - pg.rank(); 10];
    let (batch, _) = exchange(pg, &peers, &own);
    pg.batch_isend_irecv(&batch)?.synchronize()?;
    let (batch, received) = exchange(pg, &peers, &own);
    let before = left_out::waits();
    let work = pg.batch_isend_irecv(&batch)?;
    work.wait()?;
    assert_eq!(left_out::waits() - before, 2);
    received.iter().try_for_each(|tensor| assert_all(tensor, 1 - pg.rank()))
}

#[test]
fn a_batch_waits_for_two_events() {
    crate::finish("a_batch_waits_for_two_events", 2, "waits of a batch");
}

/// Repeats batches among all ranks until one fails, and returns its error.
fn batches(worker: &Worker, pg: &ProcessGroup) -> String {
    let own = Tensor::ones(1 << 20, DType::F32, pg.device()).unwrap();
    worker.until_failure(|| pg.batch_isend_irecv(&exchange(pg, &others(pg), &own).0))
}

#[test]
fn a_death_in_a_batch_ends_all_others() {
    let Some(_) = gpus("a_death_in_a_batch_ends_all_others") else { return };
    let mut ranks = Ranks::start(3, "killed in a batch");
    ranks.await_signs();
    ranks.kill(1);
    for report in ranks.reports(&[0, 2]) {
        assert!(report.contains("rank 1"), "{report}");
    }
}

/// Rank 1 leaves after one batch, and the others wait for more.
fn leave(worker: &Worker, pg: &ProcessGroup) {
    let own = filled(pg, 1, 3);
    let start = || pg.batch_isend_irecv(&exchange(pg, &others(pg), &own).0);
    start().unwrap().synchronize().unwrap();
    if pg.rank() != 1 {
        worker.report(&start().and_then(|work| work.synchronize()).unwrap_err().to_string());
    }
}

#[test]
fn a_batch_with_a_rank_that_has_left_ends_within_seconds() {
    let Some(_) = gpus("a_batch_with_a_rank_that_has_left_ends_within_seconds") else { return };
    let mut ranks = Ranks::start(3, "leave before a batch");
    for report in ranks.reports(&[0, 2]) {
        assert!(report.contains("rank 1 left the group after sequence 1"), "{report}");
        assert!(report.contains("for batch_isend_irecv, sequence 2"), "{report}");
    }
}

/// Rank 2 does not make its part of rank 0's batch.
fn late(worker: &Worker, pg: &ProcessGroup) {
    let own = filled(pg, 1, 3);
    let (batch, _) = match pg.rank() {
        0 => exchange(pg, &[1, 2], &own),
        1 => exchange(pg, &[0], &own),
        _ => {
            worker.await_report(0);
            return worker.report(&pg.barrier().unwrap_err().to_string());
        }
    };
    let ended = pg.batch_isend_irecv(&batch).and_then(|work| work.synchronize());
    let error = ended.err().unwrap_or_else(|| {
        std::thread::sleep(Duration::from_secs(SHORT + 1));
        pg.barrier().unwrap_err()
    });
    worker.report(&error.to_string());
}

#[test]
fn a_batch_that_does_not_end_names_its_ranks() {
    let Some(_) = gpus("a_batch_that_does_not_end_names_its_ranks") else { return };
    let reports = Ranks::start(3, "late for a batch").finish();
    for report in &reports {
        assert!(report.contains("for batch_isend_irecv, sequence 1, timed out after 20s"), "{reports:#?}");
        // That of the rank whose time was over first.
        let ranks = if report.starts_with("rank 0") { "ranks [1, 2]" } else { "ranks [0]" };
        let expected = format!("of {ranks}, at least one did not make the matching call, or waits for another rank");
        assert!(report.contains(&expected), "{reports:#?}");
    }
}
