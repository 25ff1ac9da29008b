//! Failures while a group is created.
use super::*;
use crate::set_by::SetBy;
use std::io::{Read, Write};
use std::net::TcpStream;

/// The size of a handshake.
const HANDSHAKE: usize = 56;

fn new(store: &Arc<dyn Store>, rank: usize, world_size: usize) -> Result<Rank> {
    Rank::new(store.clone(), rank, world_size, options())
}

/// Returns the errors of the ranks that join.
fn errors(ranks: &[(usize, usize, CpuOptions)]) -> Vec<String> {
    let store = store();
    std::thread::scope(|scope| {
        let rank = |(rank, world_size, options): &(usize, usize, CpuOptions)| {
            let (store, rank, world_size, options) = (store.clone(), *rank, *world_size, options.clone());
            scope.spawn(move || Rank::new(store, rank, world_size, options).err().unwrap().to_string())
        };
        let ranks: Vec<_> = ranks.iter().map(rank).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn a_rank_that_never_comes_is_named() {
    side_by_side(0..3, |missing| {
        let hasty = CpuOptions { timeout: TIMEOUT, ..options() };
        let ranks: Vec<_> = (0..3).filter(|rank| *rank != missing).map(|rank| (rank, 3, hasty.clone())).collect();
        for error in errors(&ranks) {
            let expected = format!("has no connection to rank(s) [{missing}] (time-out 4s): they have not");
            assert!(error.contains(&expected), "rank {missing} is missing: {error}");
            assert!(error.contains("new_group with the same ranks"), "{error}");
        }
    });
}

#[test]
fn a_network_that_fails_at_the_end_of_the_meeting_is_not_an_absent_rank() {
    // A store that one rank loses when it has met all others: it cannot tell them so.
    let set = |store: &Arc<dyn Store>, key: &str, value: &[u8]| {
        if key != "complete" {
            return store.set(key, value);
        }
        Err(Error::StoreTimeout {
            operation: format!("set {key}"),
            store: "node0:1".to_string(),
            timeout: TIMEOUT,
            reason: "the server does not answer".to_string(),
        })
    };
    let store: Arc<dyn Store> = Arc::new(SetBy { store: store(), set });
    let hasty = CpuOptions { timeout: TIMEOUT, ..options() };
    let join = |rank| Rank::new(store.clone(), rank, 3, hasty.clone()).err().unwrap().to_string();
    let errors: Vec<String> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..3).map(|rank| scope.spawn(move || join(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let lost: Vec<_> = errors.iter().filter(|error| error.contains("the server does not answer")).collect();
    let prefix = " meets the others of its group: set complete timed out after 4s on the store node0:1";
    assert!(lost.len() == 1 && lost[0].starts_with("rank ") && lost[0].contains(prefix), "{errors:?}");
    let others =
        "has no connection to the others of its group (time-out 4s): all ranks have come, but one of them has not told";
    assert_eq!(errors.iter().filter(|error| error.contains(others)).count(), 2, "{errors:?}");
}

#[test]
fn ranks_with_other_options_are_refused_on_both_sides() {
    let other = CpuOptions { segment_bytes: Some(1), ..options() };
    for (rank_1, expected) in [((1, 3, options()), "its world_size is"), ((1, 2, other), "its CANDLE_DDP_CPU_SEGMENT_BYTES is")] {
        for error in errors(&[(0, 2, options()), rank_1]) {
            assert!(error.contains(expected), "{error}");
        }
    }
}

#[test]
fn a_rank_outside_of_the_world_is_refused() {
    assert!(matches!(new(&store(), 2, 2).err().unwrap(), Error::RankOutOfRange { rank: 2, world_size: 2 }));
}

#[test]
fn two_processes_with_one_rank_are_refused() {
    let store = store();
    std::thread::scope(|scope| {
        let rank = |rank| {
            // One of the two waits for rank 2, which does not come.
            let timeout = if rank == 0 { PATIENCE } else { TIMEOUT };
            let (store, options) = (store.clone(), CpuOptions { timeout, ..options() });
            scope.spawn(move || Rank::new(store, rank, 3, options).err().unwrap().to_string())
        };
        let (rank_0, _first, _second) = (rank(0), rank(1), rank(1));
        let error = rank_0.join().unwrap();
        assert!(error.contains("[1]") && error.contains("two processes say that they are this rank"), "{error}");
    });
}

/// Other programs may connect to the port before the peer does, and send anything.
#[test]
fn foreign_connections_do_no_harm() {
    let store = store();
    let join = |rank| {
        let options = CpuOptions { transport: Some(CpuTransport::Tcp), ..options() };
        Rank::new(store.clone(), rank, 2, options).unwrap().run(all_reduce(5))
    };
    std::thread::scope(|scope| {
        let rank_0 = scope.spawn(|| join(0));
        let card = String::from_utf8(store.get("addr/0").unwrap()).unwrap();
        let (address, digits) = card.split_once(' ').unwrap();
        let byte = |index| u8::from_str_radix(&digits[2 * index..2 * index + 2], 16).unwrap();
        // The card has the handshake first; a random number follows it on the wire.
        let handshake: Vec<u8> = (0..HANDSHAKE).map(byte).chain([0; 32]).collect();
        // Rank 1 has published its card, and calls later.
        let digits = format!("{}01{}", &digits[..32], &digits[34..]);
        store.set("addr/1", format!("127.0.0.1:1 {digits}").as_bytes()).unwrap();
        store.set("addresses", format!("{address}\n127.0.0.1:1\n").as_bytes()).unwrap();
        store.set("complete", b"").unwrap();
        let connect = || TcpStream::connect(address).unwrap();
        let silent = connect();
        let mut talker = connect();
        talker.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: something else\r\n\r\n").unwrap();
        let mut newer_handshake = handshake.clone();
        newer_handshake[4] += 1;
        let mut newer = connect();
        newer.write_all(&newer_handshake).unwrap();
        let mut reply = Vec::new();
        // It learns nothing.
        assert_eq!(newer.read_to_end(&mut reply).unwrap(), 0);
        drop(connect());
        // Rank 1 of another group: only the nonce differs.
        let mut other = handshake;
        other[8] ^= 1;
        other[16] = 1;
        let mut namesake = connect();
        namesake.write_all(&other).unwrap();
        assert_eq!(namesake.read_to_end(&mut reply).unwrap(), 0);
        store.delete("addr/1").unwrap();
        let rank_1 = scope.spawn(|| join(1));
        rank_0.join().unwrap().unwrap();
        rank_1.join().unwrap().unwrap();
        drop(silent);
    });
}

#[test]
fn ipv6_and_no_keys_afterwards() {
    let store = store();
    let options = CpuOptions { address: Some("::1".parse().unwrap()), ..options() };
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (store, options) = (store.clone(), options.clone());
            scope.spawn(move || Rank::new(store, rank, 2, options).unwrap().run(all_reduce(5)).unwrap());
        }
    });
    assert_eq!(store.num_keys().unwrap(), 0);
}
