//! The parser and the server's replies for arbitrary, truncated and mutated bytes.
use super::output::Output;
use super::protocol::{Decoder, MAGIC, MAX_COUNT, MAX_KEY, MAX_VALUE, Malformed, Request};
use super::shared::Meter;
use super::state::State;
use proptest::collection::vec;
use proptest::prelude::*;

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![vec(any::<u8>(), 0..20), vec(any::<u8>(), 0..300)]
}

/// A small set of keys, so that requests refer to the same ones.
fn key() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![(0..4u8).prop_map(|key| vec![b'/', b'a' + key]), bytes()]
}

fn request() -> impl Strategy<Value = Request> {
    let keys = || vec(key(), 0..5);
    let number = || prop_oneof![-3..3i64, any::<i64>()];
    prop_oneof![
        any::<u32>().prop_map(Request::Validate),
        (key(), bytes()).prop_map(|(key, value)| Request::Set { key, value }),
        (key(), bytes(), bytes()).prop_map(|(key, expected, desired)| Request::CompareSet { key, expected, desired }),
        key().prop_map(Request::Get),
        (key(), number()).prop_map(|(key, amount)| Request::Add { key, amount }),
        keys().prop_map(Request::Check),
        keys().prop_map(Request::Wait),
        Just(Request::NumKeys),
        key().prop_map(Request::Delete),
        (key(), bytes()).prop_map(|(key, value)| Request::Append { key, value }),
        keys().prop_map(Request::MultiGet),
        vec((key(), bytes()), 0..5).prop_map(Request::MultiSet),
        Just(Request::CancelWait),
        any::<u32>().prop_map(Request::Ping),
        (key(), bytes()).prop_map(|(key, value)| Request::QueuePush { key, value }),
        key().prop_map(Request::QueuePop),
        key().prop_map(Request::QueueLen),
        Just(Request::ListKeys),
        (key(), number()).prop_map(|(key, world_size)| Request::Barrier { key, world_size }),
        any::<([u8; 32], [u8; 32])>().prop_map(|(nonce, proof)| Request::Prove { nonce, proof }),
        bytes().prop_map(Request::LastWill),
    ]
}

fn encode(requests: &[Request]) -> Vec<u8> {
    let mut bytes = Vec::new();
    requests.iter().for_each(|request| request.encode(&mut bytes));
    bytes
}

/// Returns all requests in `bytes`, fed in pieces of `step`, and the error that ended decoding.
fn decode(bytes: &[u8], step: usize) -> (Vec<Request>, Option<Malformed>) {
    let mut decoder = Decoder::default();
    let mut requests = Vec::new();
    for piece in bytes.chunks(step) {
        decoder.feed(piece);
        loop {
            match decoder.next() {
                Ok(Some(request)) => requests.push(request),
                Ok(None) => break,
                Err(error) => return (requests, Some(error)),
            }
        }
    }
    (requests, None)
}

proptest! {
    #[test]
    fn round_trip(requests in vec(request(), 0..6), step in 1..400usize) {
        prop_assert_eq!(decode(&encode(&requests), step), (requests, None));
    }

    #[test]
    fn truncated(requests in vec(request(), 1..6), cut in any::<prop::sample::Index>(), step in 1..400usize) {
        let mut bytes = encode(&requests);
        bytes.truncate(cut.index(bytes.len()));
        let (whole, error) = decode(&bytes, step);
        prop_assert_eq!(error, None);
        prop_assert!(whole.len() < requests.len());
        prop_assert_eq!(&whole[..], &requests[..whole.len()]);
    }

    #[test]
    fn mutated(
        requests in vec(request(), 1..6),
        changes in vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        step in 1..400usize,
    ) {
        let mut bytes = encode(&requests);
        for (place, byte) in changes {
            let place = place.index(bytes.len());
            bytes[place] = byte;
        }
        // The result must not depend on how the bytes are split.
        prop_assert_eq!(decode(&bytes, step), decode(&bytes, bytes.len()));
        let mut state = State::new(1 << 30);
        for (client, request) in decode(&bytes, step).0.into_iter().enumerate() {
            let _ = state.handle(client as u64 % 3, request, &mut Output::default());
        }
    }

    #[test]
    fn garbage(bytes in vec(any::<u8>(), 0..500), step in 1..400usize) {
        let _ = decode(&bytes, step);
    }

    /// A client is woken only if it waits, and only once.
    #[test]
    fn state(requests in vec((0..3u64, request()), 0..60)) {
        let mut state = State::new(1 << 30);
        let mut waiting = [false; 3];
        for (client, request) in requests {
            let mut reply = Output::default();
            let waits = matches!(request, Request::Wait(_) | Request::Barrier { .. });
            let cancels = request == Request::CancelWait;
            let done = state.handle(client, request, &mut reply);
            // Check wake-ups before the request's own wait: a barrier's count may be the key that its own client waited
            // for.
            for woken in state.take_woken() {
                prop_assert!(std::mem::take(&mut waiting[woken as usize]), "woken without a wait");
            }
            let client = client as usize;
            if done.is_err() {
                state.leave(client as u64);
                waiting[client] = false;
            } else if waits {
                prop_assert!(!(waiting[client] && reply.is_empty()), "two waits of one client");
                waiting[client] |= reply.is_empty();
            } else if cancels {
                waiting[client] = false;
            }
        }
    }
}

/// A writer that accepts a few bytes at a time.
struct Slow(usize, Vec<u8>);

impl std::io::Write for Slow {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let count = bytes.len().min(self.0);
        self.1.extend_from_slice(&bytes[..count]);
        Ok(count)
    }

    fn write_vectored(&mut self, slices: &[std::io::IoSlice]) -> std::io::Result<usize> {
        let all: Vec<u8> = slices.iter().flat_map(|slice| slice.iter()).copied().collect();
        self.write(&all)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

proptest! {
    /// Replies are sent in order, however little the socket accepts.
    #[test]
    fn output(values in vec((any::<bool>(), 0..200usize), 0..100), step in 1..5000usize) {
        let meter = Meter::default();
        let (mut output, mut expected, mut slow) = (Output::default(), Vec::new(), Slow(step, Vec::new()));
        for (number, (shared, length)) in values.into_iter().enumerate() {
            let value = vec![number as u8; length];
            match shared {
                true => output.put_shared(&meter.share(value.clone())),
                false => output.put_bytes(&value),
            }
            expected.extend_from_slice(&(length as u64).to_le_bytes());
            expected.extend_from_slice(&value);
            if number % 7 == 0 {
                output.write_to(&mut slow).unwrap();
            }
        }
        prop_assert_eq!([&slow.1[..], &output.to_vec()].concat(), &expected[..]);
        while !output.is_empty() {
            output.write_to(&mut slow).unwrap();
        }
        prop_assert_eq!(&slow.1[..], &expected[..]);
        prop_assert_eq!((output.held(), meter.bytes()), (0, 0));
    }
}

#[test]
fn known_bytes() {
    let set = Request::Set { key: b"/a".to_vec(), value: b"xyz".to_vec() };
    assert_eq!(encode(&[Request::Validate(MAGIC)]), [0, 0xce, 0xf7, 0x85, 0x3c]);
    assert_eq!(encode(&[Request::Ping(0x0102_0304)]), [0x0d, 4, 3, 2, 1]);
    assert_eq!(encode(&[set]), b"\x01\x02\0\0\0\0\0\0\0/a\x03\0\0\0\0\0\0\0xyz");
    // The commands in the order of the protocol's list.
    let key = Vec::new;
    let all = [
        Request::Validate(0),
        Request::Set { key: key(), value: key() },
        Request::CompareSet { key: key(), expected: key(), desired: key() },
        Request::Get(key()),
        Request::Add { key: key(), amount: 0 },
        Request::Check(vec![]),
        Request::Wait(vec![]),
        Request::NumKeys,
        Request::Delete(key()),
        Request::Append { key: key(), value: key() },
        Request::MultiGet(vec![]),
        Request::MultiSet(vec![]),
        Request::CancelWait,
        Request::Ping(0),
        Request::QueuePush { key: key(), value: key() },
        Request::QueuePop(key()),
        Request::QueueLen(key()),
        Request::ListKeys,
        Request::Barrier { key: key(), world_size: 0 },
    ];
    for (byte, request) in all.into_iter().enumerate() {
        assert_eq!(usize::from(encode(&[request])[0]), byte);
    }
    let will = Request::LastWill(b"w".to_vec());
    assert_eq!(encode(&[will]), b"\xde\x01\0\0\0\0\0\0\0w");
}

#[test]
fn bounds() {
    let refused = |bytes: &[u8]| decode(bytes, 7).1.map(|error| error.0).unwrap_or_default();
    let set = |key: usize, value: usize| encode(&[Request::Set { key: vec![b'k'; key], value: vec![b'v'; value] }]);
    assert_eq!(decode(&set(MAX_KEY, 1), 4096).0.len(), 1);
    assert!(refused(&set(MAX_KEY + 1, 1)).contains("8193 bytes in a key"));
    assert_eq!(decode(&set(1, MAX_VALUE), 1 << 16).0.len(), 1);
    // Refused because of its length, before any of its bytes arrived.
    assert!(refused(&set(1, MAX_VALUE + 1)[..18]).contains("bytes in a value"));
    assert!(refused(&[&[3][..], &u64::MAX.to_le_bytes()].concat()).contains("18446744073709551615 bytes in a key"));
    assert!(refused(&[&[6][..], &(MAX_COUNT as u64 + 1).to_le_bytes()].concat()).contains("131073 keys"));
    assert!(refused(&[0x13]).contains("unknown command 0x13"));
}

#[test]
fn a_length_allocates_nothing() {
    let mut decoder = Decoder::default();
    decoder.feed(&[&[11][..], &(MAX_COUNT as u64).to_le_bytes(), &8000u64.to_le_bytes(), b"begin"].concat());
    assert_eq!(decoder.next(), Ok(None));
    assert!(decoder.allocated() < 1 << 12, "{}", decoder.allocated());
}

/// Returns the reply that `client` gets for `request`, and the clients that are woken.
fn ask(state: &mut State, client: u64, request: Request) -> (Vec<u8>, Vec<u64>) {
    let mut reply = Output::default();
    state.handle(client, request, &mut reply).unwrap();
    (reply.to_vec(), state.take_woken())
}

#[test]
fn an_element_wakes_one_waiting_client() {
    let mut state = State::new(1 << 30);
    let wait = || Request::Wait(vec![b"q".to_vec()]);
    let push = || Request::QueuePush { key: b"q".to_vec(), value: b"v".to_vec() };
    assert_eq!(ask(&mut state, 1, wait()), (vec![], vec![]));
    assert_eq!(ask(&mut state, 2, wait()), (vec![], vec![]));
    assert_eq!(ask(&mut state, 3, push()), (vec![], vec![1]));
    assert_eq!(ask(&mut state, 1, Request::QueuePop(b"q".to_vec())).0, b"\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0v");
    assert_eq!(ask(&mut state, 3, push()), (vec![], vec![2]));
}

/// A last will to append to the queue `q`.
fn will(value: &[u8]) -> Request {
    Request::LastWill(encode(&[Request::QueuePush { key: b"q".to_vec(), value: value.to_vec() }]))
}

#[test]
fn a_last_will_is_carried_out_when_its_client_leaves() {
    let mut state = State::new(100);
    ask(&mut state, 1, will(b"first"));
    assert_eq!(ask(&mut state, 1, will(b"last")), (vec![], vec![]));
    assert_eq!(ask(&mut state, 1, Request::CancelWait), (vec![1], vec![]), "the client is still there");
    assert_eq!(ask(&mut state, 2, Request::QueueLen(b"q".to_vec())).0, 0i64.to_le_bytes());
    state.leave(1);
    state.leave(1);
    assert_eq!(ask(&mut state, 2, Request::QueueLen(b"q".to_vec())).0, 1i64.to_le_bytes());
    assert!(ask(&mut state, 2, Request::QueuePop(b"q".to_vec())).0.ends_with(b"\x04\0\0\0\0\0\0\0last"));
    // It takes up memory before it is carried out.
    ask(&mut state, 3, will(&[0; 70]));
    let set = Request::Set { key: b"k".to_vec(), value: vec![0; 20] };
    let error = state.handle(2, set, &mut Output::default()).unwrap_err();
    assert!(error.0.contains("full: it holds 100 bytes"), "{error}");
}

#[test]
fn the_first_last_will_at_a_key_counts() {
    let mut state = State::new(1000);
    for client in [1, 2] {
        let (key, expected, desired) = (b"k".to_vec(), Vec::new(), client.to_string().into_bytes());
        ask(&mut state, client, Request::LastWill(encode(&[Request::CompareSet { key, expected, desired }])));
    }
    assert_eq!(ask(&mut state, 3, Request::Wait(vec![b"k".to_vec()])), (vec![], vec![]));
    state.leave(2);
    assert_eq!(state.take_woken(), [3]);
    state.leave(1);
    assert_eq!(ask(&mut state, 3, Request::Get(b"k".to_vec())).0, b"\x01\0\0\0\0\0\0\x002");
}

#[test]
fn a_last_will_can_be_withdrawn() {
    let mut state = State::new(100);
    ask(&mut state, 1, will(&[0; 70]));
    ask(&mut state, 1, Request::LastWill(vec![]));
    state.leave(1);
    assert_eq!(ask(&mut state, 2, Request::QueueLen(b"q".to_vec())).0, 0i64.to_le_bytes());
    // Its memory is free again.
    ask(&mut state, 2, will(&[0; 70]));
}

#[test]
fn a_last_will_is_one_small_request() {
    let get = encode(&[Request::Get(b"k".to_vec())]);
    let push = |count: usize| encode(&vec![Request::QueuePush { key: b"q".to_vec(), value: vec![] }; count]);
    for wrong in [get, push(2), push(1)[..5].to_vec(), b"?".to_vec()] {
        let mut state = State::new(1000);
        assert!(state.handle(1, Request::LastWill(wrong.clone()), &mut Output::default()).is_err(), "{wrong:?}");
    }
}

#[test]
fn a_last_will_wakes_who_waits_for_it() {
    let mut state = State::new(1 << 30);
    let wait = || Request::Wait(vec![b"q".to_vec()]);
    // Nobody wakes a client that has left itself.
    ask(&mut state, 1, will(b""));
    ask(&mut state, 1, wait());
    ask(&mut state, 2, wait());
    state.leave(1);
    assert_eq!(state.take_woken(), [2]);
}

#[test]
fn a_barrier_wakes_all_and_stays_open() {
    let mut state = State::new(1 << 30);
    let barrier = || Request::Barrier { key: b"b".to_vec(), world_size: 3 };
    assert_eq!(ask(&mut state, 1, barrier()), (vec![], vec![]));
    assert_eq!(ask(&mut state, 2, barrier()), (vec![], vec![]));
    assert_eq!(ask(&mut state, 3, barrier()), (vec![0], vec![1, 2]));
    assert_eq!(ask(&mut state, 1, barrier()), (vec![0], vec![]));
    assert_eq!(ask(&mut state, 1, Request::Get(b"b".to_vec())).0, b"\x01\0\0\0\0\0\0\x004");
}

#[test]
fn a_client_that_left_is_not_woken() {
    let mut state = State::new(1 << 30);
    let wait = Request::Wait(vec![b"k".to_vec(), b"l".to_vec(), b"k".to_vec()]);
    ask(&mut state, 1, wait.clone());
    ask(&mut state, 2, wait.clone());
    ask(&mut state, 3, wait.clone());
    state.forget(1);
    assert_eq!(ask(&mut state, 2, Request::CancelWait), (vec![1], vec![]));
    assert_eq!(ask(&mut state, 4, Request::Set { key: b"k".to_vec(), value: vec![] }), (vec![], vec![]));
    assert_eq!(ask(&mut state, 4, Request::Add { key: b"l".to_vec(), amount: 1 }).1, [3]);
    assert_eq!(ask(&mut state, 4, wait), (vec![0], vec![]));
}

#[test]
fn a_reply_has_a_limit() {
    let mut state = State::new(1 << 30);
    ask(&mut state, 1, Request::Set { key: b"k".to_vec(), value: vec![0; MAX_VALUE] });
    let mut reply = Output::default();
    let error = state.handle(1, Request::MultiGet(vec![b"k".to_vec(); 64]), &mut reply).unwrap_err();
    assert!(error.0.contains("the reply would have") && reply.is_empty(), "{error}");
    let append = Request::Append { key: b"k".to_vec(), value: vec![0] };
    assert!(state.handle(1, append, &mut reply).unwrap_err().0.contains("8388609 bytes"));
    for key in 0..1024u32 {
        let set = Request::Set { key: key.to_le_bytes().to_vec(), value: vec![0; MAX_VALUE] };
        if let Err(error) = state.handle(1, set, &mut reply) {
            assert!(error.0.contains("full: it holds 1073741824 bytes"), "{error}");
            assert_eq!(key, 126, "128 × 8 MiB, less one and the keys");
            break;
        }
        assert!(key < 128);
    }
    // Deleting frees memory.
    assert_eq!(ask(&mut state, 1, Request::Delete(b"k".to_vec())).0, 1i64.to_le_bytes());
    ask(&mut state, 1, Request::Set { key: b"l".to_vec(), value: vec![0; MAX_VALUE] });
}
