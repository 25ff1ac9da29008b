//! Ranks of the CPU engine that have a secret, and strangers at their connections.
use crate::rank::{Collective, Rank, Tensor};
use candle_ddp_engine::{CpuOptions, CpuTransport, Error, ReduceOp, Result};
use candle_ddp_rendezvous::{HashStore, Secret, Store};
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(120);
/// The sizes of a handshake, of a greeting (a handshake and a random number), of a reply, and of a proof.
const HANDSHAKE: usize = 56;
const GREETING: usize = HANDSHAKE + 32;
const REPLY: usize = GREETING + PROOF;
const PROOF: usize = 32;

fn secret() -> Option<Secret> {
    Some(Secret::new("0123456789abcdef0123456789abcdef").unwrap())
}

fn store() -> Arc<dyn Store> {
    Arc::new(HashStore::new(TIMEOUT))
}

/// Joins, and reduces once.
fn join(store: &Arc<dyn Store>, rank: usize, size: usize, secret: Option<Secret>, timeout: Duration) -> Result<f32> {
    let options = CpuOptions { timeout, secret, transport: Some(CpuTransport::Tcp), ..CpuOptions::default() };
    let group = Rank::new(Arc::clone(store), rank, size, options)?;
    let tensor = Tensor::full(1. + rank as f32, 100);
    group.run(Collective::AllReduce { tensor: tensor.clone(), op: ReduceOp::Sum })?;
    Ok(tensor.values()[99])
}

fn start<'scope>(
    scope: &'scope Scope<'scope, '_>,
    store: &Arc<dyn Store>,
    rank: usize,
    size: usize,
) -> ScopedJoinHandle<'scope, Result<f32>> {
    let store = Arc::clone(store);
    scope.spawn(move || join(&store, rank, size, secret(), TIMEOUT))
}

/// Where rank 0 listens, and the handshake that it has published.
fn published(store: &Arc<dyn Store>) -> (SocketAddr, Vec<u8>, String) {
    let text = String::from_utf8(store.get("addr/0").unwrap()).unwrap();
    let (address, digits) = text.split_once(' ').unwrap();
    let byte = |index| u8::from_str_radix(&digits[2 * index..2 * index + 2], 16).unwrap();
    let handshake = (0..HANDSHAKE).map(byte).collect();
    (address.parse().unwrap(), handshake, digits.to_string())
}

/// Publishes what the last rank to come publishes.
fn complete(store: &Arc<dyn Store>, size: usize) {
    let address = |rank| {
        let card = store.get(&format!("addr/{rank}")).unwrap();
        format!("{}\n", std::str::from_utf8(&card).unwrap().split_once(' ').unwrap().0)
    };
    store.set("addresses", (0..size).map(address).collect::<String>().as_bytes()).unwrap();
    store.set("complete", b"").unwrap();
}

/// Publishes the card of a rank that calls later, so that the others listen: rank 0's card, with this number and a proof. The
/// address is that of nobody.
fn announce(store: &Arc<dyn Store>, rank: u8, size: i64, secret: Option<&Secret>) {
    let (_, _, digits) = published(store);
    let byte = |index| u8::from_str_radix(&digits[2 * index..2 * index + 2], 16).unwrap();
    let mut card: Vec<u8> = (0..digits.len() / 2).map(byte).collect();
    card[16] = rank;
    let (signed, proof) = card.split_at_mut(digits.len() / 2 - PROOF);
    if let Some(secret) = secret {
        let (handshake, info) = signed.split_at(HANDSHAKE);
        proof.copy_from_slice(&secret.prove("candle-ddp engine card", &[handshake, info]));
    }
    let digits: String = card.iter().map(|byte| format!("{byte:02x}")).collect();
    store.set(&format!("addr/{rank}"), format!("127.0.0.1:1 {digits}").as_bytes()).unwrap();
    if store.add("count", 1).unwrap() == size {
        complete(store, size as usize);
    }
}

/// Starts a rank that was announced.
fn start_announced<'scope>(
    scope: &'scope Scope<'scope, '_>,
    store: &Arc<dyn Store>,
    rank: usize,
    size: usize,
) -> ScopedJoinHandle<'scope, Result<f32>> {
    store.delete(&format!("addr/{rank}")).unwrap();
    start(scope, store, rank, size)
}

/// Kinds of connections.
const DATA: u8 = 0;
const CONTROL: u8 = 2;

/// The greeting of a caller that claims to be `rank` and wants a connection of this kind.
fn greeting(handshake: &[u8], rank: u8, kind: u8) -> Vec<u8> {
    let mut greeting = [handshake, &[5; 32]].concat();
    (greeting[16], greeting[20]) = (rank, kind);
    greeting
}

fn call(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream
}

/// The bytes that arrive until the other end closes the connection.
fn rest(mut stream: TcpStream) -> usize {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Err(error) if error.kind() != ErrorKind::ConnectionReset => panic!("it was not closed: {error}"),
        _ => bytes.len(),
    }
}

#[test]
fn ranks_with_the_same_secret_connect() {
    let store = store();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..4).map(|rank| start(scope, &store, rank, 4)).collect();
        ranks.into_iter().for_each(|rank| assert_eq!(rank.join().unwrap().unwrap(), 10.));
    });
}

#[test]
fn a_rank_with_another_secret_or_none_is_refused_on_both_sides() {
    let another = "it has another secret than this rank: give all ranks the same";
    let (has, none) = ("it has a secret, but this rank has none", "it has none, but this rank has a secret");
    for (secrets, expected) in [
        ([secret(), Some(Secret::random().unwrap())], [another, another]),
        ([secret(), None], [none, has]),
        ([None, secret()], [has, none]),
    ] {
        let store = store();
        let errors = std::thread::scope(|scope| {
            let rank = |rank: usize| {
                let (store, secret) = (&store, secrets[rank].clone());
                scope.spawn(move || join(store, rank, 2, secret, TIMEOUT).unwrap_err())
            };
            [rank(0), rank(1)].map(|rank| rank.join().unwrap())
        });
        for (error, expected) in errors.iter().zip(expected) {
            assert_eq!(matches!(error, Error::Secret { .. }), expected == another);
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}

#[test]
fn a_stranger_is_named_if_its_rank_is_missing() {
    let store = store();
    std::thread::scope(|scope| {
        let rank_0 = scope.spawn(|| join(&store, 0, 2, secret(), Duration::from_secs(5)));
        announce(&store, 1, 2, secret().as_ref());
        let (address, handshake, _) = published(&store);
        let mut stranger = call(address);
        stranger.write_all(&[greeting(&handshake, 1, CONTROL), vec![0; PROOF]].concat()).unwrap();
        assert_eq!(rest(stranger), REPLY);
        let error = rank_0.join().unwrap().unwrap_err().to_string();
        let expected = "claims to be rank 1, but did not prove that it has the secret of this rank: give all ranks";
        assert!(error.contains(expected), "{error}");
    });
}

/// A stranger who knows the store's contents and all traffic, but not the secret.
#[test]
fn who_only_knows_the_group_gets_nowhere() {
    let store = store();
    std::thread::scope(|scope| {
        let rank_0 = start(scope, &store, 0, 2);
        announce(&store, 1, 2, secret().as_ref());
        let (address, handshake, _) = published(&store);
        let greeting = |rank, kind| greeting(&handshake, rank, kind);
        // Rank 0 proves that it knows the secret, and the stranger repeats that proof.
        let mut reflecting = call(address);
        reflecting.write_all(&greeting(1, CONTROL)).unwrap();
        let mut reply = [0; REPLY];
        reflecting.read_exact(&mut reply).unwrap();
        assert_eq!(reply[..16], handshake[..16]);
        reflecting.write_all(&reply[GREETING..]).unwrap();
        assert_eq!(rest(reflecting), 0);
        // A proof is valid only for its connection and rank. Rank 0 proves whatever it is asked for, but nothing for a
        // connection that comes after one for control.
        for (rank, replied) in [(1, REPLY), (0, REPLY), (7, 0)] {
            let mut other = call(address);
            other.write_all(&[greeting(rank, CONTROL), reply[GREETING..].to_vec()].concat()).unwrap();
            assert_eq!(rest(other), replied);
        }
        let mut early = call(address);
        early.write_all(&[greeting(1, DATA), reply[GREETING..].to_vec()].concat()).unwrap();
        assert_eq!(rest(early), 0);
        // Another world, which would be an error of the group if a peer said it.
        let mut world = greeting(1, CONTROL);
        world[24] = 9;
        let mut foreign = call(address);
        foreign.write_all(&[world, vec![0; PROOF]].concat()).unwrap();
        assert_eq!(rest(foreign), REPLY);
        // A stranger that claims to have no secret learns nothing at all.
        let mut without = greeting(1, CONTROL);
        without[32] = 0;
        let mut plain = call(address);
        plain.write_all(&without).unwrap();
        assert_eq!(rest(plain), 0);
        // Far more of them than there are ranks, which never prove anything. The first ones give way to the others.
        let mut unproved: Vec<TcpStream> = (0..200).map(|_| occupy(address, &greeting(1, CONTROL)).unwrap()).collect();
        assert!(unproved.drain(..5).all(|stream| rest(stream) == 0));
        let started = Instant::now();
        drop(unproved);
        let rank_1 = start_announced(scope, &store, 1, 2);
        assert_eq!((rank_0.join().unwrap().unwrap(), rank_1.join().unwrap().unwrap()), (3., 3.));
        assert!(started.elapsed() < TIMEOUT);
    });
}

/// Ranks make connections at any time, so their ports stay open.
#[test]
fn strangers_gain_nothing_after_the_construction_either() {
    let (store, barrier) = (store(), Barrier::new(3));
    let rank = |rank: usize| {
        let options = CpuOptions {
            timeout: TIMEOUT,
            secret: secret(),
            transport: Some(CpuTransport::Tcp),
            ..CpuOptions::default()
        };
        let group = Rank::new(Arc::clone(&store), rank, 2, options).unwrap();
        barrier.wait();
        barrier.wait();
        let (first, second) = (Tensor::full(rank as f32 + 1., 1), Tensor::zeros(1));
        let send = group.start(Collective::Send { tensor: first, peer: 1 - rank }).unwrap();
        group.run(Collective::Recv { tensor: second.clone(), peer: 1 - rank }).unwrap();
        send.wait().unwrap();
        assert_eq!(second.values(), [2. - rank as f32]);
    };
    std::thread::scope(|scope| {
        scope.spawn(|| rank(0));
        let (address, handshake, _) = published(&store);
        scope.spawn(|| rank(1));
        barrier.wait();
        let silent = call(address);
        let mut talker = call(address);
        talker.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: something else\r\n\r\n").unwrap();
        let mut unproved = Vec::new();
        for kind in 0..3 {
            let mut stranger = call(address);
            stranger.write_all(&[greeting(&handshake, 1, kind), vec![0; PROOF]].concat()).unwrap();
            assert_eq!(rest(stranger), REPLY, "kind {kind}");
            unproved.push(occupy(address, &greeting(&handshake, 1, kind)).unwrap());
        }
        barrier.wait();
        drop((silent, talker));
    });
}

/// A stranger who sends `greeting`, proves nothing, and keeps its connection, if it is accepted.
fn occupy(address: SocketAddr, greeting: &[u8]) -> Option<TcpStream> {
    let mut stranger = call(address);
    stranger.write_all(greeting).unwrap();
    stranger.read_exact(&mut [0; REPLY]).is_ok().then_some(stranger)
}

#[test]
fn strangers_that_prove_nothing_do_not_hold_up_a_peer() {
    let (store, is_over) = (store(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let rank_0 = start(scope, &store, 0, 2);
        announce(&store, 1, 2, secret().as_ref());
        let (address, handshake, _) = published(&store);
        let greeting = greeting(&handshake, 1, CONTROL);
        let flood = || {
            let mut strangers = VecDeque::new();
            while !is_over.load(Ordering::Relaxed) {
                // Rank 0 may end at any time.
                let Ok(mut stranger) = TcpStream::connect(address) else { break };
                if stranger.write_all(&greeting).is_ok() && stranger.read_exact(&mut [0; REPLY]).is_ok() {
                    strangers.push_back(stranger);
                }
                if strangers.len() > 200 {
                    strangers.pop_front();
                }
            }
        };
        std::thread::scope(|floods| {
            let _floods = [(); 2].map(|()| floods.spawn(flood));
            let _strangers: Vec<_> = (0..200).map(|_| occupy(address, &greeting).unwrap()).collect();
            let rank_1 = start_announced(scope, &store, 1, 2);
            let sums = [rank_0, rank_1].map(|rank| rank.join().unwrap());
            is_over.store(true, Ordering::Relaxed);
            assert_eq!(sums.map(Result::unwrap), [3., 3.]);
        });
    });
}

/// Without a secret, the number of the group is all that a caller must know.
#[test]
fn a_caller_of_another_version_does_not_learn_the_number_of_the_group() {
    for secret in [secret(), None] {
        let store = store();
        std::thread::scope(|scope| {
            let join = |rank: usize| join(&store, rank, 2, secret.clone(), TIMEOUT);
            let rank_0 = scope.spawn(move || join(0));
            announce(&store, 1, 2, secret.as_ref());
            let (address, handshake, _) = published(&store);
            for version in [0, 1, handshake[4] + 1] {
                let mut caller = call(address);
                caller.write_all(&[&b"cDDP"[..], &[version], &[0; GREETING - 5]].concat()).unwrap();
                assert_eq!(rest(caller), 0, "version {version}");
            }
            store.delete("addr/1").unwrap();
            let rank_1 = scope.spawn(move || join(1));
            assert_eq!([rank_0, rank_1].map(|rank| rank.join().unwrap().unwrap()), [3., 3.]);
        });
    }
}

/// Forwards all connections to `to`, however many ranks call and however often, until the test program ends. Keeps the bytes that
/// each client sent before the first reply and right after it.
fn record(listener: TcpListener, to: SocketAddr) -> Arc<Mutex<Vec<Vec<u8>>>> {
    let kept = Arc::<Mutex<Vec<Vec<u8>>>>::default();
    let recorded = kept.clone();
    std::thread::spawn(move || {
        while let Ok((client, _)) = listener.accept() {
            let (server, recorded) = (TcpStream::connect(to).unwrap(), recorded.clone());
            std::thread::spawn(move || {
                let copy = |mut from: &TcpStream, mut to: &TcpStream, keep: bool| {
                    let (mut bytes, mut sent) = ([0; 4096], Vec::new());
                    while let Ok(count @ 1..) = from.read(&mut bytes) {
                        if keep && sent.len() < GREETING + PROOF {
                            sent.extend_from_slice(&bytes[..count]);
                            if sent.len() >= GREETING + PROOF {
                                recorded.lock().unwrap().push(sent[..GREETING + PROOF].to_vec());
                            }
                        }
                        if to.write_all(&bytes[..count]).is_err() {
                            break;
                        }
                    }
                    let _ = to.shutdown(std::net::Shutdown::Both);
                };
                std::thread::scope(|scope| {
                    scope.spawn(|| copy(&server, &client, false));
                    copy(&client, &server, true);
                });
            });
        }
    });
    kept
}

#[test]
fn a_replayed_handshake_is_refused() {
    let store = store();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    std::thread::scope(|scope| {
        // Rank 2 comes last, so that rank 0 listens until then.
        let rank_0 = start(scope, &store, 0, 3);
        announce(&store, 2, 3, secret().as_ref());
        let (address, _, digits) = published(&store);
        let proxy = listener.local_addr().unwrap();
        store.set("addr/0", format!("{proxy} {digits}").as_bytes()).unwrap();
        let kept = record(listener, address);
        let rank_1 = start(scope, &store, 1, 3);
        let started = Instant::now();
        while kept.lock().unwrap().is_empty() {
            assert!(started.elapsed() < TIMEOUT);
            std::thread::sleep(Duration::from_millis(5));
        }
        for recorded in kept.lock().unwrap().iter() {
            let mut replay = call(address);
            replay.write_all(recorded).unwrap();
            assert_eq!(rest(replay), REPLY, "refused after rank 0's own proof");
        }
        let rank_2 = start_announced(scope, &store, 2, 3);
        for rank in [rank_0, rank_1, rank_2] {
            assert_eq!(rank.join().unwrap().unwrap(), 6.);
        }
    });
}

/// A rank closes connections whose greeting is late, when many strangers call.
#[test]
fn a_peer_that_was_closed_before_it_was_heard_calls_again_without_a_secret_too() {
    let store = store();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    std::thread::scope(|scope| {
        let rank_0 = scope.spawn(|| join(&store, 0, 2, None, TIMEOUT));
        let (address, _, digits) = published(&store);
        let proxy = listener.local_addr().unwrap();
        store.set("addr/0", format!("{proxy} {digits}").as_bytes()).unwrap();
        std::thread::spawn(move || {
            (0..3).for_each(|_| drop(listener.accept().unwrap()));
            record(listener, address);
        });
        let rank_1 = scope.spawn(|| join(&store, 1, 2, None, TIMEOUT));
        assert_eq!((rank_0.join().unwrap().unwrap(), rank_1.join().unwrap().unwrap()), (3., 3.));
    });
}

#[test]
fn no_options_show_the_secret() {
    let shown = format!("{:?}", CpuOptions { secret: secret(), ..Default::default() });
    assert!(!shown.contains("0123456789abcdef") && shown.contains("Secret(hidden)"), "{shown}");
}
