//! Feeds the store's server arbitrary bytes from its clients; run by `crate::fuzzing`.
use super::output::Output;
use super::protocol::{Decoder, Malformed, Request};
use super::state::State;
use std::collections::BTreeMap;

/// The number of clients that are connected at a time.
const CLIENTS: u8 = 4;

/// One connection.
#[derive(Default)]
struct Client {
    id: u64,
    decoder: Decoder,
    /// All bytes that it sent, and what the server made of them.
    sent: Vec<u8>,
    decoded: Vec<Request>,
}

/// `data` is a list of packets: the number of a client, the number of its bytes, and these bytes. A client that was
/// closed because of an error comes back as a new one.
pub fn store_protocol(data: &[u8]) {
    let (mut state, mut next) = (State::new(1 << 20), 0);
    let mut clients: BTreeMap<u8, Client> = BTreeMap::new();
    let mut rest = data;
    while let [number, length, bytes @ ..] = rest {
        let (packet, behind) = bytes.split_at(usize::from(*length).min(bytes.len()));
        rest = behind;
        let number = number % CLIENTS;
        let client = clients.entry(number).or_insert_with(|| {
            next += 1;
            Client { id: next, ..Default::default() }
        });
        if let Err(Malformed(reason)) = serve(client, packet, &mut state) {
            assert!(!reason.is_empty());
            state.leave(client.id);
            clients.remove(&number);
        }
        for id in state.take_woken() {
            assert!(clients.values().any(|client| client.id == id), "client {id} has left and is woken");
        }
    }
}

fn serve(client: &mut Client, packet: &[u8], state: &mut State) -> Result<(), Malformed> {
    client.sent.extend_from_slice(packet);
    client.decoder.feed(packet);
    while let Some(request) = client.decoder.next()? {
        let mut encoded = Vec::new();
        request.encode(&mut encoded);
        assert_eq!(decode(&encoded), Ok(vec![request.clone()]), "what was decoded is encoded as something else");
        client.decoded.push(request.clone());
        let mut reply = Output::default();
        state.handle(client.id, request, &mut reply)?;
        let mut bytes = Vec::new();
        while !reply.is_empty() {
            // Writing to memory does not fail.
            let _ = reply.write_to(&mut bytes);
        }
    }
    // A field of 32 bytes holds one that may be empty and came as 8 bytes.
    let largest = 64 * client.sent.len() + (1 << 12);
    assert!(client.decoder.allocated() <= largest, "{} bytes are kept", client.decoder.allocated());
    assert_eq!(decode(&client.sent).as_ref(), Ok(&client.decoded), "it depends on how bytes are split");
    Ok(())
}

/// The requests in `bytes`, which arrive at once.
fn decode(bytes: &[u8]) -> Result<Vec<Request>, Malformed> {
    let (mut decoder, mut requests) = (Decoder::default(), Vec::new());
    decoder.feed(bytes);
    while let Some(request) = decoder.next()? {
        requests.push(request);
    }
    Ok(requests)
}
