//! Which connections there are between hosts. Ranks are threads; their labels stand for hosts.
use super::*;
use crate::call::Header;
use crate::failure::RankState;
use crate::memory::buffer::Buffer;
use crate::panic::lock;
use crate::rendezvous::HashStore;
use crate::standing::Membership;
use crate::{CpuTransport, Element, Operands, ReduceOp, Slice};
use std::sync::Barrier;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(120);

/// Runs `body` on all ranks; `hosts` has the host of each.
fn on_hosts(hosts: &[usize], body: impl Fn(Engine, &Barrier) + Sync) {
    let (world_size, barrier) = (hosts.len(), Barrier::new(hosts.len()));
    let store = Arc::new(HashStore::new(PATIENCE));
    std::thread::scope(|scope| {
        for (rank, host) in hosts.iter().enumerate() {
            let (store, body, barrier) = (store.clone(), &body, &barrier);
            scope.spawn(move || {
                let host = Some(host.to_string());
                let (timeout, transport) = (PATIENCE, Some(CpuTransport::Auto));
                let options = CpuOptions { host, timeout, transport, ..CpuOptions::default() };
                body(Engine::new(Construction::default(), store, rank, world_size, options).unwrap(), barrier);
            });
        }
    });
}

/// Runs `body` on four ranks, two on each host.
fn on_two_hosts(body: impl Fn(Engine, &Barrier) + Sync) {
    on_hosts(&[0, 0, 1, 1], body);
}

/// The peers to which there are connections for collectives, for messages, and for control.
fn connected(engine: &Engine) -> [Vec<usize>; 3] {
    let Group { data, direct, control, .. } = &*engine.group;
    let [data, direct] = [data, direct].map(|transport| (0..4).filter(|peer| transport.has(*peer)).collect());
    [data, direct, (0..4).filter(|peer| control.link(*peer).is_some()).collect()]
}

/// Runs a call on `bytes` bytes, and returns what has become of the output.
fn run(engine: &Engine, call: Call, channel: Channel, bytes: &[u8]) -> Result<Vec<u8>> {
    let [output, input] = [(); 2].map(|()| Buffer::new(bytes));
    let operands = [&output, &input].map(|buffer| Some(Slice::new(buffer, 0..bytes.len())));
    let operands = Operands { output: operands[0], input: operands[1] };
    engine.queue(channel)?.run(call, operands).unwrap()?;
    Ok(output.bytes())
}

/// A call on `count` bytes.
fn call(operation: Operation, count: usize) -> Call {
    Call { element: Some(Element::U8), count: count as u64, ..Call::bare(operation) }
}

const MANY: usize = 400_000;

fn all_reduce(engine: &Engine) {
    let call = Call { reduction: Some(ReduceOp::Sum), ..call(Operation::AllReduce, MANY) };
    let sum = run(engine, call, Channel::Collectives, &[3; MANY]).unwrap();
    assert!(sum.iter().all(|byte| usize::from(*byte) == 3 * engine.world_size()));
}

fn send(engine: &Engine, peer: usize, bytes: &[u8]) {
    run(engine, call(Operation::Send, bytes.len()), Channel::SendTo(peer), bytes).unwrap();
}

fn receive(engine: &Engine, peer: usize, count: usize) -> Result<Vec<u8>> {
    run(engine, call(Operation::Recv, count), Channel::RecvFrom(peer), &vec![0; count])
}

#[test]
fn ranks_have_connections_to_those_with_which_they_exchange_data() {
    on_two_hosts(|engine, barrier| {
        let rank = engine.rank();
        let partner = (rank + 2) % 4;
        let leaders = if rank % 2 == 0 { vec![partner] } else { vec![] };
        assert_eq!(connected(&engine), [leaders.clone(), vec![], leaders]);
        barrier.wait();
        all_reduce(&engine);
        assert_eq!(connected(&engine), [vec![partner], vec![], vec![partner]]);
        barrier.wait();
        match rank {
            0 => send(&engine, 3, &[5; MANY]),
            3 => assert_eq!(receive(&engine, 0, MANY).unwrap(), [5; MANY]),
            _ => {}
        }
        let messages = match rank {
            0 => vec![3],
            3 => vec![0],
            _ => vec![],
        };
        let others = if rank < 2 { vec![2, 3] } else { vec![0, 1] };
        let known = if messages.is_empty() { vec![partner] } else { others.clone() };
        assert_eq!(connected(&engine), [vec![partner], messages.clone(), known]);
        barrier.wait();
        let own = [rank as u8; 4];
        let exchanged = run(&engine, call(Operation::AllToAll, 4), Channel::Collectives, &own).unwrap();
        assert_eq!(exchanged, [0, 1, 2, 3]);
        assert_eq!(connected(&engine), [others.clone(), messages, others]);
    });
}

/// A small message is sent before its receiver waits for it, whichever of the two makes the connection.
#[test]
fn a_first_message_does_not_wait_for_its_receiver() {
    for (from, to) in [(0, 3), (3, 0)] {
        on_two_hosts(|engine, barrier| {
            if engine.rank() == from {
                send(&engine, to, &[7]);
            }
            barrier.wait();
            if engine.rank() == to {
                assert_eq!(receive(&engine, from, 1).unwrap(), [7]);
            }
        });
    }
}

/// Rank 1 calls its proxy on the other host, rank 3, which passes on the question and the answer.
#[test]
fn all_ranks_answer_one_that_has_no_connection_to_them() {
    on_two_hosts(|engine, barrier| {
        let states = if engine.rank() == 1 { engine.group.query() } else { vec![] };
        barrier.wait();
        assert!(states.iter().all(|state| matches!(state, RankState::Running(_))), "{states:?}");
    });
}

/// The ranks of `left` leave one after the other. Returns the error of rank `learner`, which waits for a message of the last one.
fn left_alone(hosts: &[usize], left: &[usize], learner: usize) -> Error {
    let found = std::sync::Mutex::new(None);
    on_hosts(hosts, |engine, barrier| {
        let mut engine = Some(engine);
        for rank in left {
            engine = engine.filter(|engine| engine.rank() != *rank);
            barrier.wait();
        }
        if let Some(engine) = engine.as_ref().filter(|engine| engine.rank() == learner) {
            let error = receive(engine, left[left.len() - 1], MANY).unwrap_err();
            *found.lock().unwrap() = Some(error);
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

/// A call that runs when the group fails may still succeed. Then a rank that leaves has to say why the group failed.
#[test]
fn a_failure_counts_as_said_once_a_call_has_failed_with_it() {
    for well in [true, false] {
        let (membership, store) = (Membership::of_all(0, 1), Arc::new(HashStore::new(PATIENCE)));
        let construction = Construction { membership: Some(&membership), ..Construction::default() };
        let engine = Engine::new(construction, store, 0, 1, CpuOptions::default()).unwrap();
        let (group, channel) = (&engine.group, Channel::Collectives);
        let is_said = || (!lock(&group.state).untold, membership.has_told());
        group.start(channel, Header { sequence: 1, call: call(Operation::Barrier, 0) }, None).unwrap();
        group.begin(channel, 1, Instant::now()).unwrap();
        group.fail(Failure::PeerFailed { peer: 1, reason: "a test".into() });
        assert_eq!(is_said(), (false, false));
        group.finish(channel, 1, well, None, None);
        assert_eq!(is_said(), (!well, !well));
    }
}

#[test]
fn a_call_that_a_rank_has_left_before_says_so() {
    on_hosts(&[0, 0], |engine, barrier| {
        let engine = Some(engine).filter(|engine| engine.rank() == 0);
        barrier.wait();
        if let Some(engine) = engine {
            // Rank 0 knows it before the call begins.
            engine.group.on_left(1);
            let error = run(&engine, call(Operation::Barrier, 0), Channel::Collectives, &[]).unwrap_err();
            assert!(matches!(error, Error::Group(Failure::PeerLeft { peer: 1, .. })), "{error:?}");
            assert!(!lock(&engine.group.state).untold);
        }
    });
}

/// Nothing is taken for granted of those who call the engine directly.
#[test]
fn operands_that_do_not_fit_their_call_end_the_group_and_strangers_are_refused() {
    on_hosts(&[0, 0], |engine, barrier| {
        for peer in [engine.rank(), 2] {
            assert!(engine.queue(Channel::SendTo(peer)).is_err() && engine.queue(Channel::RecvFrom(peer)).is_err());
        }
        barrier.wait();
        // One byte less than the call says.
        let call = Call { reduction: Some(ReduceOp::Sum), ..call(Operation::AllReduce, 5) };
        let error = run(&engine, call, Channel::Collectives, &[1; 4]).unwrap_err();
        assert!(error.to_string().contains("must have [Some(5), None] bytes, not [Some(4), Some(4)]"), "{error}");
    });
    let memory = Buffer::new([0; 8]);
    let bytes = |length| Some(Slice::new(&memory, 0..length));
    let check = |operation, root, output: Option<usize>, input: Option<usize>| {
        let call = Call { root, ..call(operation, 4) };
        Operands { output: output.and_then(bytes), input: input.and_then(bytes) }.check(&call, 0, 2).is_ok()
    };
    let cases = [
        (Operation::AllGather, None, [Some(8), Some(4)]),
        (Operation::ReduceScatter, None, [Some(4), Some(8)]),
        (Operation::AllToAll, None, [Some(4), Some(4)]),
        (Operation::Gather, Some(0), [Some(8), Some(4)]),
        (Operation::Scatter, Some(0), [Some(4), Some(8)]),
    ];
    for (operation, root, [output, input]) in cases {
        assert!(check(operation, root, output, input));
        for [output, input] in [[None, input], [output, None], [Some(3), input], [output, Some(3)]] {
            assert!(!check(operation, root, output, input), "{operation:?}");
        }
    }
    let three = Operands { output: bytes(3), input: bytes(3) };
    let parts = call(Operation::AllToAll, 3);
    assert!(three.check(&parts, 0, 2).is_err() && three.check(&parts, 0, 3).is_ok());
    let average = Call { reduction: Some(ReduceOp::Avg), ..call(Operation::AllReduce, 3) };
    assert!(three.check(&average, 0, 2).is_err());
    assert!(check(Operation::AllToAll, None, Some(2), Some(4)) && check(Operation::Gather, Some(1), None, Some(4)));
    assert!(
        !check(Operation::Broadcast, Some(2), Some(4), None) && check(Operation::Broadcast, Some(1), Some(4), None)
    );
}
