//! Two doors of a job with a secret, on one machine, moved by the test.
use super::*;
use crate::rendezvous::Secret;
use crate::tcp::handshake::HandshakeConfig;

const PATIENCE: Duration = Duration::from_secs(120);

/// The doors of ranks 0 and 1, which know each other's addresses.
fn pair() -> [Door; 2] {
    let secret = Some(Secret::random().unwrap());
    let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let addresses: Vec<_> = listeners.iter().map(|listener| listener.local_addr().ok()).collect();
    let mut rank = 0;
    listeners.map(|listener| {
        listener.set_nonblocking(true).unwrap();
        let config = HandshakeConfig { world_size: 2, secret: true, segment: 1, small: 1 };
        let (lost_after, timeout) = (PATIENCE, PATIENCE);
        let keys = Keys::new(secret.clone());
        let identity = Identity { own: Own { rank, config, lost_after, timeout }, nonce: 7, keys };
        let mut others = addresses.clone();
        others[rank] = None;
        rank += 1;
        Door::new(identity, listener, others)
    })
}

/// Moves both doors until each has made the connections `kinds`, in any order. Returns the sockets by door.
fn meet(doors: &mut [Door; 2], kinds: &[Kind]) -> [Vec<TcpStream>; 2] {
    let (started, mut made) = (Instant::now(), [vec![], vec![]]);
    let mut sockets = [vec![], vec![]];
    while made.iter().any(|made: &Vec<usize>| made.len() < kinds.len()) {
        assert!(started.elapsed() < PATIENCE, "{made:?}");
        for (number, event) in steps(doors) {
            match event {
                Event::Connected { kind, socket, .. } => {
                    made[number].push(kind as usize);
                    sockets[number].push(socket);
                }
                Event::Answered { .. } => {}
                Event::Failed { error, .. } | Event::Misfit { error } => panic!("{error}"),
                Event::Gone { peer } => panic!("rank {peer} is gone"),
            }
        }
    }
    let mut expected: Vec<usize> = kinds.iter().map(|kind| *kind as usize).collect();
    expected.sort_unstable();
    made.iter_mut().for_each(|made| made.sort_unstable());
    assert_eq!(made, [expected.clone(), expected]);
    sockets
}

/// One step of both doors, and a short pause.
fn steps(doors: &mut [Door; 2]) -> Vec<(usize, Event)> {
    std::thread::sleep(Duration::from_millis(1));
    doors.iter_mut().for_each(|door| door.step().unwrap());
    let numbered = doors.iter_mut().enumerate();
    numbered.flat_map(|(number, door)| door.events().into_iter().map(move |event| (number, event))).collect()
}

#[test]
fn the_secret_is_proved_once_for_each_pair() {
    let mut doors = pair();
    doors[1].call(0, Kind::Control);
    let _control = meet(&mut doors, &[Kind::Control]);
    // From here on, neither needs the secret.
    doors.iter_mut().for_each(|door| door.identity.keys.secret = Some(Secret::random().unwrap()));
    doors[1].call(0, Kind::Data);
    doors[1].call(0, Kind::Direct);
    meet(&mut doors, &[Kind::Data, Kind::Direct]);
}

#[test]
fn calls_for_data_wait_for_the_key_of_the_pair() {
    for by in By::ALL {
        let mut doors = pair();
        doors[1].call(0, Kind::Data);
        doors[1].call(0, Kind::Direct);
        // Once only.
        doors[1].call(0, Kind::Data);
        assert_eq!((doors[1].keyless.len(), doors[1].conversations.len()), (2, 0));
        let (caller, callee) = if by == By::Higher { (1, 0) } else { (0, 1) };
        doors[caller].call(callee, Kind::Control);
        meet(&mut doors, &[Kind::Control, Kind::Data, Kind::Direct]);
        assert_eq!(doors[0].identity.keys.pairs.keys().collect::<Vec<_>>(), [&(1, by)]);
        assert!(doors[0].identity.keys.pairs[&(1, by)] == doors[1].identity.keys.pairs[&(0, by)]);
    }
}

#[test]
fn two_ranks_that_call_each_other_for_control_have_two_keys() {
    let mut doors = pair();
    doors[0].call(1, Kind::Control);
    doors[1].call(0, Kind::Control);
    doors[1].call(0, Kind::Data);
    meet(&mut doors, &[Kind::Control, Kind::Control, Kind::Data]);
    for by in By::ALL {
        assert!(doors[0].identity.keys.pairs[&(1, by)] == doors[1].identity.keys.pairs[&(0, by)]);
    }
    assert!(doors[0].identity.keys.pairs[&(1, By::Higher)] != doors[0].identity.keys.pairs[&(1, By::Lower)]);
}

/// The packets of two connections arrive in any order.
#[test]
fn a_call_for_data_that_overtakes_the_proof_for_control_is_repeated() {
    let mut doors = pair();
    let key = Secret::random().unwrap();
    doors[1].identity.keys.pairs.insert((0, By::Higher), key.clone());
    doors[1].call(0, Kind::Data);
    let started = Instant::now();
    while doors[1].later.is_empty() {
        assert!(steps(&mut doors).iter().all(|(_, event)| matches!(event, Event::Answered { peer: 0 })));
        assert!(started.elapsed() < PATIENCE);
    }
    doors[0].identity.keys.pairs.insert((1, By::Higher), key);
    meet(&mut doors, &[Kind::Data]);
}

/// A second process that knows the secret and says that it is the same rank has not made the control connection.
#[test]
fn data_comes_from_the_process_that_has_made_the_control_connection() {
    let mut doors = pair();
    doors[1].call(0, Kind::Control);
    let _control = meet(&mut doors, &[Kind::Control]);
    // The group turns its control connection away.
    doors[1].identity.keys.pairs.clear();
    doors[1].call(0, Kind::Control);
    let _second = meet(&mut doors, &[Kind::Control]);
    doors[1].call(0, Kind::Data);
    let started = Instant::now();
    let error = loop {
        assert!(started.elapsed() < PATIENCE);
        let failed = steps(&mut doors).into_iter().find_map(|(number, event)| match event {
            Event::Failed { peer: 0, error } if number == 1 => Some(error),
            _ => None,
        });
        if let Some(error) = failed {
            break error.to_string();
        }
    };
    assert!(error.contains("another process than the one that this rank has met answers at 127.0.0.1"), "{error}");
    while doors[0].acceptor.strangers().is_empty() {
        assert!(started.elapsed() < PATIENCE);
        assert!(steps(&mut doors).is_empty());
    }
}

/// They know the number of the group, and nothing that proves who they are.
#[test]
fn strangers_that_prove_nothing_do_not_turn_a_peer_away() {
    let mut doors = pair();
    let handshake = doors[1].identity.own.handshake(doors[0].identity.nonce, Kind::Control, By::Higher);
    let mut strangers = Vec::new();
    // More than there are places, in portions that fit into the queue of the system.
    for _ in 0..20 {
        for _ in 0..20 {
            let mut stranger = TcpStream::connect(doors[1].addresses[0].unwrap()).unwrap();
            stranger.write_all(&greeting(&handshake).unwrap()).unwrap();
            strangers.push(stranger);
        }
        assert!(steps(&mut doors).is_empty());
    }
    doors[1].call(0, Kind::Control);
    let started = Instant::now();
    while !steps(&mut doors).iter().any(|(number, event)| *number == 0 && matches!(event, Event::Connected { .. })) {
        assert!(doors[1].later.is_empty(), "it has to call again");
        assert!(started.elapsed() < PATIENCE);
    }
}
