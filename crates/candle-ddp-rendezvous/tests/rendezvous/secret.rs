//! Stores with a secret, and strangers at them.
use candle_ddp_rendezvous::{Error, Result};
use candle_ddp_rendezvous::{
    RendezvousOptions, Secret, Store, TcpStore, TcpStoreOptions, TcpStoreServer, TcpStoreServerOptions, rendezvous,
};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Mutex;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(120);
const VALIDATE: [u8; 5] = [0, 0xce, 0xf7, 0x85, 0x3c];
/// PING with the nonce that asks for the server's proof, and with a usual one.
const OFFER: [u8; 5] = [0x0d, 0x01, 0x00, 0xd9, 0xcd];
const PING: [u8; 5] = [0x0d, 4, 3, 2, 1];
const CHALLENGE: [u8; 4] = [0x02, 0x00, 0xd9, 0xcd];
const SECRET_NEEDED: [u8; 4] = [0x03, 0x00, 0xd9, 0xcd];
const REFUSED: [u8; 1] = [0];
/// SET of the key "job" to "x".
const SET: [u8; 22] = [1, 4, 0, 0, 0, 0, 0, 0, 0, b'/', b'j', b'o', b'b', 1, 0, 0, 0, 0, 0, 0, 0, b'x'];

fn secret() -> Secret {
    Secret::new("0123456789abcdef0123456789abcdef").unwrap()
}

fn serve(options: TcpStoreServerOptions) -> TcpStoreServer {
    TcpStoreServer::bind((Ipv4Addr::LOCALHOST, 0), options).unwrap()
}

fn server() -> TcpStoreServer {
    serve(TcpStoreServerOptions { secret: Some(secret()), ..Default::default() })
}

fn connect(port: u16, secret: Option<Secret>) -> Result<TcpStore> {
    TcpStore::connect_with("127.0.0.1", port, TcpStoreOptions { timeout: TIMEOUT, secret })
}

fn member(server: &TcpStoreServer) -> TcpStore {
    connect(server.port(), Some(secret())).unwrap()
}

/// A stranger's connection, which has sent `bytes`.
fn stranger(server: &TcpStoreServer, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(("127.0.0.1", server.port())).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.write_all(bytes).unwrap();
    stream
}

fn take<const N: usize>(stream: &mut TcpStream) -> [u8; N] {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

/// What comes until the server closes the connection.
fn rest(mut stream: TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Err(error) if error.kind() != ErrorKind::ConnectionReset => panic!("the server did not close it: {error}"),
        _ => bytes,
    }
}

/// The text of a refusal, which comes at once and not after the time-out.
#[track_caller]
fn refused<T>(result: Result<T>, started: Instant) -> String {
    let Err(error) = result else { panic!("not refused") };
    assert!(matches!(error, Error::Secret { .. }) && started.elapsed() < TIMEOUT / 2, "{error:?}");
    error.to_string()
}

#[test]
fn members_use_the_store_as_ever() {
    let server = server();
    let [one, two] = [(); 2].map(|()| member(&server));
    std::thread::scope(|scope| {
        // Each thread has its own connection.
        let waits: Vec<_> = (0..8).map(|_| scope.spawn(|| one.get("key").unwrap())).collect();
        two.set("key", b"value").unwrap();
        waits.into_iter().for_each(|wait| assert_eq!(wait.join().unwrap(), b"value"));
    });
}

#[test]
fn both_ends_refuse_each_other_at_once() {
    let (started, server) = (Instant::now(), server());
    let other = || Some(Secret::random().unwrap());
    let error = refused(connect(server.port(), None), started);
    assert!(error.contains("requires a secret, but this process has none: give all processes"), "{error}");
    let error = refused(connect(server.port(), other()), started);
    assert!(error.contains("the store has another secret than this process"), "{error}");
    // A server without a secret, such as PyTorch's.
    let plain = serve(TcpStoreServerOptions::default());
    let error = refused(connect(plain.port(), Some(secret())), started);
    assert!(error.contains("does not prove that it knows it") && error.contains("CANDLE_DDP_SECRET"), "{error}");
    assert!(connect(plain.port(), None).is_ok());
    // Nobody has changed anything.
    assert!(!member(&server).check(&["job"]).unwrap());
}

#[test]
fn the_refusal_reaches_rendezvous() {
    let server = server();
    let init_method = format!("tcp://127.0.0.1:{}", server.port());
    let options = |secret| {
        let (rank, world_size, init_method) = (Some(1), Some(2), init_method.clone());
        RendezvousOptions { init_method, rank, world_size, timeout: TIMEOUT, secret, ..Default::default() }
    };
    let started = Instant::now();
    refused(rendezvous(options(None)), started);
    refused(rendezvous(options(Some(Secret::random().unwrap()))), started);
}

#[test]
fn ranks_with_the_same_secret_meet() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let join = |rank, secret| {
        let options = RendezvousOptions {
            init_method: format!("tcp://127.0.0.1:{port}"),
            rank: Some(rank),
            world_size: Some(2),
            timeout: TIMEOUT,
            secret,
            ..Default::default()
        };
        rendezvous(options)
    };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..2).map(|rank| scope.spawn(move || join(rank, Some(secret())).unwrap())).collect();
        let ranks: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        ranks[0].store.set("a", b"b").unwrap();
        assert_eq!(ranks[1].store.get("a").unwrap(), b"b");
        // The server is there as long as rank 0.
        assert!(connect(port, None).is_err());
    });
}

#[test]
fn a_stranger_changes_nothing_and_learns_nothing() {
    let server = server();
    let member = member(&server);
    let get = [&[3][..], &SET[1..13]].concat();
    for requests in [&SET[..], &get, &PING, &[&PING[..], &SET].concat()] {
        let said = rest(stranger(&server, &[&VALIDATE[..], requests].concat()));
        assert!(said.is_empty() || said == SECRET_NEEDED, "{said:?}");
    }
    // In the middle of the handshake.
    let mut offering = stranger(&server, &[&VALIDATE[..], &OFFER].concat());
    assert_eq!(take(&mut offering), CHALLENGE);
    take::<32>(&mut offering);
    offering.write_all(&SET).unwrap();
    assert!(rest(offering).is_empty());
    // A proof without a secret.
    let guess = [&VALIDATE[..], &OFFER, &[0xdd], &[7; 64], &SET].concat();
    let mut guessing = stranger(&server, &guess);
    assert_eq!(take(&mut guessing), CHALLENGE);
    take::<32>(&mut guessing);
    assert_eq!(rest(guessing), REFUSED);
    assert!(!member.check(&["job"]).unwrap());
}

/// Forwards one connection to `to` and returns all that its client has sent.
fn forward(listener: &TcpListener, to: SocketAddr) -> Vec<u8> {
    let (client, server) = (listener.accept().unwrap().0, TcpStream::connect(to).unwrap());
    let sent = Mutex::new(Vec::new());
    let copy = |mut from: &TcpStream, mut to: &TcpStream, keep: bool| {
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            if keep {
                sent.lock().unwrap().extend_from_slice(&bytes[..count]);
            }
            let _ = to.write_all(&bytes[..count]);
        }
        let _ = to.shutdown(std::net::Shutdown::Both);
    };
    std::thread::scope(|scope| {
        scope.spawn(|| copy(&server, &client, false));
        copy(&client, &server, true);
    });
    sent.into_inner().unwrap()
}

#[test]
fn a_replayed_handshake_is_refused() {
    let server = server();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let recorded = std::thread::scope(|scope| {
        let recorded = scope.spawn(|| forward(&listener, server.local_addr()));
        let client = connect(port, Some(secret())).unwrap();
        assert_eq!(client.add("count", 1).unwrap(), 1);
        drop(client);
        recorded.join().unwrap()
    });
    assert!(recorded.starts_with(&[&VALIDATE[..], &OFFER, &[0xdd]].concat()) && recorded.len() > 75 + 20);
    for _ in 0..3 {
        let mut replay = stranger(&server, &recorded);
        assert_eq!(take(&mut replay), CHALLENGE);
        take::<32>(&mut replay);
        assert_eq!(rest(replay), REFUSED);
    }
    assert_eq!(member(&server).add("count", 0).unwrap(), 1);
}

#[test]
fn a_reflected_handshake_is_refused() {
    let reflect = |answer: fn(&mut TcpStream)| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut client = listener.accept().unwrap().0;
                assert_eq!(take::<10>(&mut client), *[&VALIDATE[..], &OFFER].concat());
                answer(&mut client);
            });
            let started = Instant::now();
            refused(connect(port, Some(secret())), started)
        })
    };
    // All that the client says comes back.
    let error = reflect(|client| client.write_all(&OFFER[1..]).unwrap());
    assert!(error.contains("does not prove"), "{error}");
    // The client's random number and proof come back as the server's.
    let error = reflect(|client| {
        client.write_all(&[&CHALLENGE[..], &[9; 32]].concat()).unwrap();
        let proof: [u8; 65] = take(client);
        client.write_all(&[&[1], &proof[33..]].concat()).unwrap();
    });
    assert!(error.contains("another secret"), "{error}");
}

#[test]
fn guests_have_keys_of_their_own_until_a_member_comes() {
    let server = serve(TcpStoreServerOptions { secret: Some(secret()), guests: true, ..Default::default() });
    // As long as there are only guests, the store serves PyTorch's programs.
    let [one, two] = [(); 2].map(|()| TcpStore::connect("127.0.0.1", server.port(), TIMEOUT).unwrap());
    one.set("job", b"theirs").unwrap();
    assert_eq!(two.get("job").unwrap(), b"theirs");
    std::thread::scope(|scope| {
        let started = Instant::now();
        let waits = scope.spawn(|| two.get("job of members"));
        let member = member(&server);
        assert!(!member.check(&["job"]).unwrap());
        member.set("job of members", b"ours").unwrap();
        let error = refused(waits.join().unwrap(), started);
        assert!(error.contains("requires a secret"), "{error}");
        refused(one.get("job"), started);
        refused(connect(server.port(), None), started);
        assert_eq!(member.get("job of members").unwrap(), b"ours");
    });
}

/// Anybody may be a guest, for as long as the job's programs are not those of candle-ddp.
#[test]
fn guests_cannot_store_much() {
    let server = serve(TcpStoreServerOptions { secret: Some(secret()), guests: true, ..Default::default() });
    let guest = TcpStore::connect("127.0.0.1", server.port(), TIMEOUT).unwrap();
    let value = vec![1; 8 << 20];
    // SET has no answer: the next call sees that the connection is closed.
    let stored = (0..20).take_while(|n| {
        let key = format!("key{n}");
        guest.set(&key, &value).and_then(|()| guest.check(&[&key])).is_ok()
    });
    assert_eq!(stored.count(), 7);
    let member = member(&server);
    (0..20).for_each(|n| member.set(&format!("key{n}"), &value).unwrap());
    assert!(member.check(&["key19"]).unwrap());
}

#[test]
fn guests_leave_room_for_members() {
    let options = TcpStoreServerOptions {
        secret: Some(secret()),
        guests: true,
        max_clients: 20,
        max_ungreeted: 5,
        ..Default::default()
    };
    let server = serve(options);
    let guests: Vec<TcpStream> = (0..40).map(|_| stranger(&server, &[&VALIDATE[..], &PING].concat())).collect();
    let silent: Vec<TcpStream> = (0..40).map(|_| stranger(&server, &[])).collect();
    let member = member(&server);
    member.set("key", b"value").unwrap();
    guests.into_iter().for_each(|guest| assert!([&[][..], &PING[1..]].contains(&&*rest(guest))));
    assert_eq!(member.get("key").unwrap(), b"value");
    drop(silent);
}

#[test]
fn a_stranger_costs_little() {
    let greeting_timeout = Duration::from_secs(1);
    let server = serve(TcpStoreServerOptions { secret: Some(secret()), greeting_timeout, ..Default::default() });
    let member = member(&server);
    // A client that stops talking is closed, however far it has come.
    let started = Instant::now();
    for said in [&[][..], &VALIDATE, &[&VALIDATE[..], &OFFER].concat(), &[&VALIDATE[..], &OFFER, &[0xdd, 1]].concat()] {
        rest(stranger(&server, said));
    }
    assert!(started.elapsed() >= greeting_timeout);
    // A client that sends a large value before it has proved anything is closed before the value has arrived.
    let mut value = stranger(&server, &[&VALIDATE[..], &SET[..13], &(8u64 << 20).to_le_bytes()].concat());
    let sent = (0..128).take_while(|_| value.write_all(&[0; 1 << 16]).is_ok()).count();
    assert!(sent < 128, "8 MiB were taken");
    member.set("key", b"value").unwrap();
}

/// Sends a member's first requests, and takes the server's random number.
fn offer(server: &TcpStoreServer) -> (TcpStream, [u8; 32]) {
    let mut client = stranger(server, &[&VALIDATE[..], &OFFER].concat());
    assert_eq!(take(&mut client), CHALLENGE);
    let nonce = take(&mut client);
    (client, nonce)
}

/// Sends a member's proof, which the server accepts.
fn prove(member: &mut TcpStream, theirs: &[u8; 32]) {
    let own = [5; 32];
    let proof = secret().prove("candle-ddp store client", &[&own, theirs]);
    member.write_all(&[&[0xdd][..], &own, &proof].concat()).unwrap();
    assert_eq!(take(member), [1]);
    take::<32>(member);
}

/// However long its packets take.
#[test]
fn silent_strangers_do_not_push_out_a_member_before_its_proof_arrives() {
    let server = serve(TcpStoreServerOptions { secret: Some(secret()), max_ungreeted: 10, ..Default::default() });
    let (mut member, theirs) = offer(&server);
    let mut silent: Vec<TcpStream> = (0..100).map(|_| stranger(&server, &[])).collect();
    silent.extend((0..100).map(|_| stranger(&server, &VALIDATE)));
    // By the time that the server challenges this one, it has admitted all others.
    let (first, _) = offer(&server);
    prove(&mut member, &theirs);
    // Clients that offer a proof and never send it give way to each other.
    let offering: Vec<_> = (0..20).map(|_| offer(&server)).collect();
    assert!(rest(first).is_empty());
    member.write_all(&PING).unwrap();
    assert_eq!(take::<4>(&mut member), PING[1..]);
    // A member that is new, and whose first bytes take their time, keeps a place among those.
    let mut late = stranger(&server, &[]);
    let more: Vec<_> = (0..2).map(|_| offer(&server)).collect();
    late.write_all(&[&VALIDATE[..], &OFFER].concat()).unwrap();
    assert_eq!(take(&mut late), CHALLENGE);
    let theirs = take(&mut late);
    prove(&mut late, &theirs);
    drop((silent, offering, more));
}

#[test]
fn the_memory_of_strangers_drives_out_no_member() {
    let options = TcpStoreServerOptions {
        secret: Some(secret()),
        max_ungreeted: 100,
        max_pending: 2 << 20,
        ..Default::default()
    };
    let server = serve(options);
    let (mut member, theirs) = offer(&server);
    prove(&mut member, &theirs);
    // A value arrives slowly.
    const LENGTH: usize = 1 << 19;
    member.write_all(&[&SET[..13], &(LENGTH as u64).to_le_bytes(), &[0; LENGTH / 2]].concat()).unwrap();
    let part = [&VALIDATE[..], &SET[..13], &(1u64 << 20).to_le_bytes(), &[0; 60_000]].concat();
    let strangers: Vec<TcpStream> = (0..60)
        .map(|_| {
            let mut stranger = stranger(&server, &VALIDATE);
            // The server may close it at any time.
            let _ = stranger.write_all(&part[VALIDATE.len()..]);
            stranger
        })
        .collect();
    strangers.into_iter().for_each(|stranger| assert!(rest(stranger).is_empty()));
    member.write_all(&[&[0; LENGTH / 2][..], &PING].concat()).unwrap();
    assert_eq!(take::<4>(&mut member), PING[1..]);
}

#[test]
fn nothing_shows_it() {
    let text = "0123456789abcdef0123456789abcdef";
    let (secret, server) = (Some(secret()), server());
    let shown = [
        format!("{:?}", TcpStoreOptions { secret: secret.clone(), ..Default::default() }),
        format!("{:#?}", TcpStoreServerOptions { secret: secret.clone(), ..Default::default() }),
        format!("{:?}", RendezvousOptions { secret: secret.clone(), ..Default::default() }),
        format!("{server:?} {secret:?}"),
    ];
    for shown in &shown[..3] {
        assert!(shown.contains("Secret(hidden)"), "{shown}");
    }
    let hex: Vec<String> = text.bytes().map(|byte| byte.to_string()).collect();
    for shown in shown {
        assert!(!shown.contains(&text[..8]) && !shown.contains(&hex[..8].join(", ")), "{shown}");
    }
}
