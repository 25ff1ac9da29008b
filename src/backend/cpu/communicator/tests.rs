//! Which connections there are between hosts. Ranks are threads; their labels stand for hosts.
use super::*;
use crate::ReduceOp;
use crate::backend::cpu::CpuTransport;
use crate::backend::failure::RankState;
use crate::rendezvous::HashStore;
use candle_core::{Device, Tensor};
use std::sync::Barrier;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(120);

/// Runs `body` on four ranks, two on each host.
fn on_two_hosts(body: impl Fn(CpuCommunicator, &Barrier) + Sync) {
    let (store, barrier) = (Arc::new(HashStore::new(PATIENCE)), Barrier::new(4));
    std::thread::scope(|scope| {
        for rank in 0..4 {
            let (store, body, barrier) = (store.clone(), &body, &barrier);
            scope.spawn(move || {
                let host = Some((rank / 2).to_string());
                let (timeout, transport) = (PATIENCE, CpuTransport::Auto);
                let options = CpuOptions { host, timeout, transport, ..CpuOptions::default() };
                body(CpuCommunicator::new(store, rank, 4, options).unwrap(), barrier);
            });
        }
    });
}

/// The peers to which there are connections for collectives, for messages, and for control.
fn connected(communicator: &CpuCommunicator) -> [Vec<usize>; 3] {
    let Group { data, direct, control, .. } = &*communicator.group;
    let [data, direct] = [data, direct].map(|transport| (0..4).filter(|peer| transport.has(*peer)).collect());
    [data, direct, (0..4).filter(|peer| control.link(*peer).is_some()).collect()]
}

fn tensor() -> Tensor {
    Tensor::zeros(100_000, candle_core::DType::F32, &Device::Cpu).unwrap()
}

#[test]
fn ranks_have_connections_to_those_with_which_they_exchange_data() {
    on_two_hosts(|communicator, barrier| {
        let rank = communicator.rank();
        let partner = (rank + 2) % 4;
        communicator.run(Collective::AllReduce { tensor: tensor(), op: ReduceOp::Sum }).unwrap();
        assert_eq!(connected(&communicator), [vec![partner], vec![], vec![partner]]);
        barrier.wait();
        match rank {
            0 => communicator.run(Collective::Send { tensor: tensor(), peer: 3 }).unwrap(),
            3 => communicator.run(Collective::Recv { tensor: tensor(), peer: 0 }).unwrap(),
            _ => {}
        }
        let messages = match rank {
            0 => vec![3],
            3 => vec![0],
            _ => vec![],
        };
        let others = if rank < 2 { vec![2, 3] } else { vec![0, 1] };
        let known = if messages.is_empty() { vec![partner] } else { others.clone() };
        assert_eq!(connected(&communicator), [vec![partner], messages.clone(), known]);
        barrier.wait();
        let input = Tensor::zeros(4, candle_core::DType::F32, &Device::Cpu).unwrap();
        let output = input.zeros_like().unwrap();
        communicator.run(Collective::AllToAll { output, input }).unwrap();
        assert_eq!(connected(&communicator), [others.clone(), messages, others]);
    });
}

/// A small message is sent before its receiver waits for it, whichever of the two makes the connection.
#[test]
fn a_first_message_does_not_wait_for_its_receiver() {
    for (from, to) in [(0, 3), (3, 0)] {
        on_two_hosts(|communicator, barrier| {
            let tensor = Tensor::new(&[7f32], &Device::Cpu).unwrap();
            if communicator.rank() == from {
                communicator.run(Collective::Send { tensor: tensor.clone(), peer: to }).unwrap();
            }
            barrier.wait();
            if communicator.rank() == to {
                let tensor = tensor.zeros_like().unwrap();
                communicator.run(Collective::Recv { tensor: tensor.clone(), peer: from }).unwrap();
                assert_eq!(tensor.to_vec1::<f32>().unwrap(), [7.]);
            }
        });
    }
}

/// Rank 1's only contact on the other host is rank 3, which passes on the question and the answer.
#[test]
fn all_ranks_answer_one_that_has_no_connection_to_them() {
    on_two_hosts(|communicator, barrier| {
        let states = if communicator.rank() == 1 { communicator.group.query() } else { vec![] };
        barrier.wait();
        assert!(states.iter().all(|state| matches!(state, RankState::Running(_))), "{states:?}");
    });
}

/// Rank 2 learns from rank 0 that rank 1 has left.
#[test]
fn ranks_learn_who_has_left_without_a_connection_to_them() {
    on_two_hosts(|communicator, barrier| match communicator.rank() {
        1 => {
            drop(communicator);
            barrier.wait();
        }
        2 => {
            barrier.wait();
            let error = communicator.run(Collective::Recv { tensor: tensor(), peer: 1 }).unwrap_err();
            assert!(matches!(error, Error::Group(Failure::PeerLeft { peer: 1, .. })), "{error:?}");
        }
        _ => {
            barrier.wait();
        }
    });
}
