//! Batches of messages.
use crate::common::{assert_error, floats, ranks, try_ranks};
use candle_core::{DType, Device, Tensor, Var};
use candle_ddp::rendezvous::Store;
use candle_ddp::{Error, P2pOp, ProcessGroup, ReduceOp, Result};

fn filled(value: usize, count: usize) -> Tensor {
    Tensor::full(value as f32, count, &Device::Cpu).unwrap()
}

fn send(tensor: &Tensor, peer: usize) -> P2pOp {
    P2pOp::Send { tensor: tensor.clone(), peer }
}

fn recv(tensor: &Tensor, peer: usize) -> P2pOp {
    P2pOp::Recv { tensor: tensor.clone(), peer }
}

/// Every rank sends to every other, each in an order of its own, more than the buffers between them hold.
#[test]
fn large_messages_of_all_ranks_cross_in_one_batch() {
    const COUNT: usize = 3 << 20;
    ranks(3, |pg| {
        let rank = pg.rank();
        let peers = || (1..3).map(|step| (rank + step) % 3);
        let received = filled(9, 3 * COUNT);
        let part = |peer: usize| received.narrow(0, peer * COUNT, COUNT);
        let own = filled(rank, COUNT);
        let mut batch: Vec<P2pOp> = peers().map(|peer| send(&own, peer)).collect();
        for peer in peers() {
            batch.push(recv(&part(peer)?, peer));
        }
        let turns = rank % batch.len();
        batch.rotate_left(turns);
        let work = pg.batch_isend_irecv(&batch)?;
        work.wait()?;
        let (started, ended) = work.span().unwrap();
        assert!(work.is_completed() && started < ended);
        for peer in peers() {
            assert!(floats(&part(peer)?).iter().all(|value| *value == peer as f32));
        }
        assert!(floats(&part(rank)?).iter().all(|value| *value == 9.0));
        Ok(())
    });
}

/// Only two of three ranks have messages, while a collective of all is in flight.
#[test]
fn a_batch_needs_only_its_own_ranks_and_no_collective() {
    ranks(3, |pg| {
        let (sum, received) = (filled(1, 10), filled(9, 4));
        let sums = match pg.rank() {
            2 => None,
            _ => Some(pg.all_reduce_async(&sum, ReduceOp::Sum)?),
        };
        if sums.is_some() {
            let peer = 1 - pg.rank();
            pg.batch_isend_irecv(&[recv(&received, peer), send(&filled(pg.rank(), 4), peer)])?.wait()?;
            assert_eq!(floats(&received), [peer as f32; 4]);
            pg.store().set(&format!("rank {}", pg.rank()), b"")?;
        } else {
            pg.store().wait(&["rank 0", "rank 1"], None)?;
            pg.all_reduce(&sum, ReduceOp::Sum)?;
        }
        sums.map_or(Ok(()), |work| work.wait())?;
        assert_eq!(floats(&sum), [3.0; 10]);
        Ok(())
    });
}

fn refusal(pg: &ProcessGroup, batch: &[P2pOp]) -> String {
    let error = pg.batch_isend_irecv(batch).unwrap_err();
    assert!(!matches!(error, Error::Group(_)), "{error}");
    error.to_string()
}

/// If one message is refused, none is sent: the next batch is the first that the other rank sees.
#[test]
fn of_a_batch_that_is_refused_nothing_is_sent() {
    ranks(2, |pg| {
        let (rank, peer) = (pg.rank(), 1 - pg.rank());
        let (own, received) = (filled(rank + 5, 10), filled(9, 10));
        let fine = send(&filled(7, 10), peer);
        let var = Var::zeros(10, DType::F32, &Device::Cpu)?;
        let cases = [
            (recv(&received, rank), "is this rank itself"),
            (recv(&received, 2), "rank 2 is outside of a world of 2"),
            (recv(&filled(0, 6).reshape((2, 3))?.t()?, peer), "not contiguous"),
            (recv(&var.sqr()?, peer), "gradients flow back through it"),
        ];
        for (wrong, expected) in cases {
            let text = refusal(&pg, &[fine.clone(), wrong]);
            assert!(text.contains(expected), "{text}");
        }
        let text = refusal(&pg, &[send(&own, peer), recv(&own, peer)]);
        assert!(text.contains("batch_isend_irecv") && text.contains("one of them is written"), "{text}");
        // A tensor of another call in flight.
        let busy = pg.irecv(&received, peer)?;
        let text = refusal(&pg, &[fine, send(&received, peer)]);
        assert!(text.contains("overlaps the tensor of recv(f32[10])"), "{text}");
        pg.barrier()?;
        pg.send(&own, peer)?;
        busy.wait()?;
        let more = filled(9, 10);
        pg.batch_isend_irecv(&[send(&own, peer), recv(&more, peer)])?.wait()?;
        assert_eq!((floats(&received), floats(&more)), (vec![(peer + 5) as f32; 10], vec![(peer + 5) as f32; 10]));
        Ok(())
    });
}

#[test]
fn a_world_of_one_has_no_messages() {
    ranks(1, |pg| {
        assert!(refusal(&pg, &[send(&filled(1, 3), 0)]).contains("is this rank itself"));
        pg.batch_isend_irecv(&[])?.wait()?;
        pg.abort("enough");
        assert!(matches!(pg.batch_isend_irecv(&[]), Err(Error::Group(_))));
        Ok(())
    });
}

/// What is sent in a batch is not received by a call of its own, which would hang over NCCL.
#[test]
fn a_message_of_a_batch_pairs_up_with_one_of_a_batch() {
    let error = try_ranks(2, |pg| -> Result<()> {
        match pg.rank() {
            0 => pg.batch_isend_irecv(&[send(&filled(1, 3), 1)])?.wait()?,
            _ => pg.recv(&filled(0, 3), 0)?,
        }
        pg.barrier()
    });
    assert_error(
        error,
        &["rank 1 called recv(f32[3]) where rank 0 called send(f32[3]) for batch_isend_irecv, sequence 1"],
    );
}
