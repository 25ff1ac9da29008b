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

/// Runs `body` on all ranks; `hosts` has the host of each.
fn on_hosts(hosts: &[usize], body: impl Fn(CpuCommunicator, &Barrier) + Sync) {
    let (world_size, barrier) = (hosts.len(), Barrier::new(hosts.len()));
    let store = Arc::new(HashStore::new(PATIENCE));
    std::thread::scope(|scope| {
        for (rank, host) in hosts.iter().enumerate() {
            let (store, body, barrier) = (store.clone(), &body, &barrier);
            scope.spawn(move || {
                let host = Some(host.to_string());
                let (timeout, transport) = (PATIENCE, CpuTransport::Auto);
                let options = CpuOptions { host, timeout, transport, ..CpuOptions::default() };
                body(CpuCommunicator::new(store, rank, world_size, options).unwrap(), barrier);
            });
        }
    });
}

/// Runs `body` on four ranks, two on each host.
fn on_two_hosts(body: impl Fn(CpuCommunicator, &Barrier) + Sync) {
    on_hosts(&[0, 0, 1, 1], body);
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
        let leaders = if rank % 2 == 0 { vec![partner] } else { vec![] };
        assert_eq!(connected(&communicator), [leaders.clone(), vec![], leaders]);
        barrier.wait();
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

/// Rank 1 calls its proxy on the other host, rank 3, which passes on the question and the answer.
#[test]
fn all_ranks_answer_one_that_has_no_connection_to_them() {
    on_two_hosts(|communicator, barrier| {
        let states = if communicator.rank() == 1 { communicator.group.query() } else { vec![] };
        barrier.wait();
        assert!(states.iter().all(|state| matches!(state, RankState::Running(_))), "{states:?}");
    });
}

/// The ranks of `left` leave one after the other. Returns the error of rank `learner`, which waits for a message of the last one.
fn left_alone(hosts: &[usize], left: &[usize], learner: usize) -> Error {
    let found = std::sync::Mutex::new(None);
    on_hosts(hosts, |communicator, barrier| {
        let mut communicator = Some(communicator);
        for rank in left {
            communicator = communicator.filter(|communicator| communicator.rank() != *rank);
            barrier.wait();
        }
        if let Some(communicator) = communicator.as_ref().filter(|communicator| communicator.rank() == learner) {
            let receive = Collective::Recv { tensor: tensor(), peer: left[left.len() - 1] };
            *found.lock().unwrap() = Some(communicator.run(receive).unwrap_err());
        }
        barrier.wait();
    });
    found.into_inner().unwrap().unwrap()
}

/// Leaders tell each other about the ranks of their hosts, and note what they hear for those.
#[test]
fn ranks_learn_who_has_left_without_a_connection_to_them() {
    for (left, learner) in [(1, 2), (1, 3), (0, 3), (3, 1), (2, 1)] {
        let error = left_alone(&[0, 0, 1, 1], &[left], learner);
        assert!(matches!(error, Error::Group(Failure::PeerLeft { peer, .. }) if peer == left), "{error:?}");
    }
}

#[test]
fn ranks_learn_who_has_left_after_the_leader_of_its_host() {
    let hosts = [0, 0, 1, 1, 1];
    // Rank 4 says so, which rank 1 then calls.
    let error = left_alone(&hosts, &[2, 3], 1);
    assert!(matches!(error, Error::Group(Failure::PeerLeft { peer: 3, .. })), "{error:?}");
    // Nobody is left to say so.
    let error = left_alone(&hosts, &[2, 3, 4], 1);
    assert!(matches!(error, Error::Group(Failure::PeerGone { peer: 4, .. })), "{error:?}");
}
