//! The server with misbehaving clients, over raw sockets.
use candle_ddp_rendezvous::{Listening, Result, Store, TcpStore, TcpStoreServer, TcpStoreServerOptions, host_store};
use candle_ddp_testing::{assert_error, test_arguments};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

pub(crate) const TIMEOUT: Duration = Duration::from_secs(120);
const VALIDATE: [u8; 5] = [0, 0xce, 0xf7, 0x85, 0x3c];
const PING: [u8; 5] = [0x0d, 4, 3, 2, 1];
const PONG: [u8; 4] = [4, 3, 2, 1];

pub(crate) fn server() -> (TcpStoreServer, TcpStore) {
    let server = TcpStoreServer::bind((Ipv6Addr::UNSPECIFIED, 0), Default::default()).unwrap();
    let store = TcpStore::connect("127.0.0.1", server.port(), TIMEOUT).unwrap();
    (server, store)
}

fn bounded(options: TcpStoreServerOptions) -> TcpStoreServer {
    TcpStoreServer::bind((Ipv4Addr::LOCALHOST, 0), options).unwrap()
}

fn raw(server: &TcpStoreServer) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", server.port())).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.set_write_timeout(Some(TIMEOUT)).unwrap();
    stream
}

/// Returns a raw client that has sent VALIDATE.
fn greeted(server: &TcpStoreServer) -> TcpStream {
    let mut stream = raw(server);
    stream.write_all(&VALIDATE).unwrap();
    stream
}

fn field(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes(), bytes].concat()
}

fn closed(stream: &mut TcpStream) -> bool {
    // A reset also means closed: the server closed before it had read everything.
    match stream.read(&mut [0; 64]) {
        Ok(count) => count == 0,
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    }
}

fn pings(stream: &mut TcpStream) -> bool {
    let mut answer = [0; 4];
    stream.write_all(&PING).and_then(|()| stream.read_exact(&mut answer)).is_ok() && answer == PONG
}

#[test]
fn only_a_malformed_client_is_closed() -> Result<()> {
    let (server, store) = server();
    let mut good = greeted(&server);
    let long = |command: u8, length: u64| [&VALIDATE[..], &[command], &length.to_le_bytes()].concat();
    let cases: [(&str, Vec<u8>); 11] = [
        ("HTTP", b"GET / HTTP/1.1\r\n\r\n".to_vec()),
        ("instead of VALIDATE", PING.to_vec()),
        ("another magic", vec![0, 1, 2, 3, 4]),
        ("VALIDATE twice", [VALIDATE, VALIDATE].concat()),
        ("unknown command", [&VALIDATE[..], &[0x13]].concat()),
        ("a key beyond the limit", long(3, 8193)),
        ("a key larger than memory", long(3, u64::MAX)),
        ("a value beyond the limit", [&VALIDATE[..], &[1], &field(b"/k"), &(8u64 << 20 | 1).to_le_bytes()].concat()),
        ("too many keys", long(6, 131_073)),
        ("as many keys as a u64 allows", long(0x0a, u64::MAX)),
        ("a counter that is not a number", [&VALIDATE[..], &[4], &field(b"/word"), &1i64.to_le_bytes()].concat()),
    ];
    store.set("word", b"word")?;
    for (name, bytes) in cases {
        let mut stream = raw(&server);
        stream.write_all(&bytes).unwrap();
        assert!(closed(&mut stream), "{name}");
        assert!(pings(&mut good), "{name}");
    }
    assert_eq!(store.get("word")?, b"word");
    Ok(())
}

#[test]
fn requests_may_come_in_pieces() {
    let (server, store) = server();
    let mut stream = raw(&server);
    let request = [&VALIDATE[..], &[1], &field(b"/pieces"), &field(b"value"), &PING].concat();
    for byte in request {
        stream.write_all(&[byte]).unwrap();
    }
    let mut answer = [0; 4];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!((answer, store.get("pieces").unwrap()), (PONG, b"value".to_vec()));
}

#[test]
fn half_a_request_changes_nothing() {
    let (server, store) = server();
    let mut stream = greeted(&server);
    stream.write_all(&[&[1][..], &field(b"/half"), &5u64.to_le_bytes(), b"val"].concat()).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    assert!(closed(&mut stream));
    assert!(!store.check(&["half"]).unwrap());
}

#[test]
fn a_client_that_leaves_while_it_waits_is_forgotten() {
    let (server, _store) = server();
    let wait = [&[6][..], &1u64.to_le_bytes(), &field(b"/queue")].concat();
    let [mut first, mut second, mut third] = [greeted(&server), greeted(&server), greeted(&server)];
    first.write_all(&[&PING[..], &wait].concat()).unwrap();
    first.read_exact(&mut [0; 4]).unwrap();
    first.shutdown(Shutdown::Write).unwrap();
    assert!(closed(&mut first));
    second.write_all(&wait).unwrap();
    // An element is for a single waiting client, not for the one that left.
    third.write_all(&[&[0x0e][..], &field(b"/queue"), &field(b"v")].concat()).unwrap();
    let mut answer = [9];
    second.read_exact(&mut answer).unwrap();
    assert_eq!(answer, [0]);
}

#[test]
fn a_slow_reader_blocks_no_other_client() {
    let (server, store) = server();
    let large = vec![1; 8 << 20];
    store.set("large", &large).unwrap();
    // 100 times 8 MiB, none of which is read for now: the server must neither block nor keep it all in memory.
    let mut slow = greeted(&server);
    let get = [&[3][..], &field(b"/large")].concat();
    slow.write_all(&get.repeat(100)).unwrap();
    let before = resident();
    for round in 0..50 {
        assert_eq!(store.add("count", 1).unwrap(), round + 1);
    }
    assert!(resident() < before + (200 << 20), "the replies are held in memory");
    // All replies arrive in the end.
    let mut answer = vec![0; 8 + large.len()];
    for _ in 0..100 {
        slow.read_exact(&mut answer).unwrap();
        assert!(answer[..8] == (8u64 << 20).to_le_bytes() && answer[8..] == large);
    }
    assert!(pings(&mut slow));
}

/// Returns a request for the values of `keys`.
fn multi_get(keys: &[&str]) -> Vec<u8> {
    let fields: Vec<u8> = keys.iter().flat_map(|key| field(key.as_bytes())).collect();
    [&[0x0a][..], &(keys.len() as u64).to_le_bytes(), &fields].concat()
}

#[test]
fn unread_replies_cost_nothing() {
    let (server, store) = server();
    let large = vec![1; 8 << 20];
    store.set("large", &large).unwrap();
    let before = resident();
    // Requests of less than 1 KiB each, whose replies have 248 MiB.
    let mut clients: Vec<TcpStream> = (0..8).map(|_| greeted(&server)).collect();
    for client in &mut clients {
        client.write_all(&multi_get(&["/large"; 31])).unwrap();
        let mut length = [0; 8];
        client.read_exact(&mut length).unwrap();
        assert_eq!(u64::from_le_bytes(length), 8 << 20);
    }
    store.set("other", b"value").unwrap();
    assert!(resident() < before + (100 << 20), "{} MiB more", (resident() - before) >> 20);
    // Requested values arrive even if their key has changed since.
    store.set("large", b"small").unwrap();
    let mut answer = vec![0; 8 + large.len()];
    clients[0].read_exact(&mut answer[8..]).unwrap();
    assert!(answer[8..] == large);
    for _ in 1..31 {
        clients[0].read_exact(&mut answer).unwrap();
        assert!(answer[..8] == (8u64 << 20).to_le_bytes() && answer[8..] == large);
    }
    assert!(pings(&mut clients[0]));
}

#[test]
fn all_clients_together_are_limited() {
    let mib = |count: usize| count << 20;
    let server = bounded(TcpStoreServerOptions { max_stored: mib(10), max_pending: mib(12), ..Default::default() });
    let store = TcpStore::connect("127.0.0.1", server.port(), TIMEOUT).unwrap();
    let mut good = greeted(&server);
    // Requests that never end: the client with the largest share is closed.
    let part = |length: usize| {
        let mut client = greeted(&server);
        let set = [&[1][..], &field(b"/part"), &(mib(8) as u64).to_le_bytes(), &vec![1; length]].concat();
        // The server may close the client while it is still writing.
        let _ = client.write_all(&set);
        client
    };
    let mut parts = [part(mib(2)), part(mib(7)), part(mib(2))];
    assert!(closed(&mut parts[1]));
    drop(parts);
    // Overwritten values count as long as they are still to be sent.
    let value = vec![1; mib(4)];
    let slow = [(); 2].map(|()| {
        store.set("large", &value).unwrap();
        let mut slow = greeted(&server);
        slow.write_all(&multi_get(&["/large"; 20])).unwrap();
        slow.read_exact(&mut [0; 8]).unwrap();
        slow
    });
    assert_error(store.set("large", &value), &["the store is full"]);
    drop(slow);
    let start = Instant::now();
    while store.set("large", &value).is_err() {
        assert!(start.elapsed() < TIMEOUT, "unread replies of a client that left still count");
    }
    // Keys that clients wait for count as well.
    let mut waits = greeted(&server);
    let keys: Vec<u8> = (0..1000u32).flat_map(|key| field(&[&key.to_le_bytes()[..], &[0; 8000]].concat())).collect();
    waits.write_all(&[&[6][..], &1000u64.to_le_bytes(), &keys].concat()).unwrap();
    assert!(closed(&mut waits));
    assert!(pings(&mut good));
}

#[test]
fn clients_that_never_send_validate_block_no_others() {
    let server = bounded(TcpStoreServerOptions { max_clients: 20, max_ungreeted: 5, ..Default::default() });
    let mut ranks: Vec<TcpStream> = (0..3).map(|_| greeted(&server)).collect();
    // Far more silent clients than there is room for, with ranks that connect in between.
    let mut silent = Vec::new();
    for _ in 0..10 {
        silent.extend((0..30).map(|_| raw(&server)));
        ranks.push(greeted(&server));
    }
    assert!(ranks.iter_mut().all(pings));
    assert!(silent.iter_mut().take(295).all(closed));
    // Clients that have not been closed may still send VALIDATE.
    let last = silent.last_mut().unwrap();
    last.write_all(&VALIDATE).unwrap();
    assert!(pings(last));
}

#[test]
fn ranks_that_connect_all_at_once_are_all_accepted() {
    let server = bounded(TcpStoreServerOptions { max_ungreeted: 2, ..Default::default() });
    let count = 100;
    std::thread::scope(|scope| {
        for _ in 0..count {
            scope.spawn(|| {
                let store = TcpStore::connect("127.0.0.1", server.port(), TIMEOUT).unwrap();
                if store.add("arrived", 1).unwrap() == count {
                    store.set("all", b"").unwrap();
                }
                store.wait(&["all"], None).unwrap();
            });
        }
    });
}

#[test]
fn a_launchers_store_has_room_for_all_ranks_at_once() {
    for (ranks, has_room) in [(2, false), (250, true)] {
        let listening = Listening::at("127.0.0.1", 0, true, TIMEOUT).unwrap();
        let server = host_store(&listening, None, None, false, ranks, &[]).unwrap();
        let first = raw(&server);
        let _others: Vec<TcpStream> = (0..600).map(|_| raw(&server)).collect();
        // By then, the server has admitted all that came before.
        assert!(pings(&mut greeted(&server)));
        first.set_nonblocking(true).unwrap();
        let is_open = matches!((&first).read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock);
        assert_eq!(is_open, has_room, "{ranks} ranks");
    }
}

#[test]
fn only_the_handshake_has_a_deadline() {
    let greeting_timeout = Duration::from_secs(1);
    let server = bounded(TcpStoreServerOptions { greeting_timeout, ..Default::default() });
    let start = Instant::now();
    let (mut silent, mut partial, mut idle) = (raw(&server), raw(&server), greeted(&server));
    partial.write_all(&VALIDATE[..4]).unwrap();
    assert!(closed(&mut silent) && closed(&mut partial));
    assert!(start.elapsed() >= greeting_timeout);
    std::thread::sleep(greeting_timeout);
    assert!(pings(&mut idle));
}

/// A helper process rather than a test: serves a store with few file descriptors, and opens files on request.
#[test]
#[ignore = "started by another test"]
fn server_process() {
    let server = TcpStoreServer::bind((Ipv4Addr::LOCALHOST, 0), Default::default()).unwrap();
    println!("\nport {}", server.port());
    for line in std::io::stdin().lines().map(|line| line.unwrap()) {
        let files: Vec<_> = (0..20).map(|_| std::fs::File::open("/dev/null")).collect();
        println!("\n{line} {}", files.iter().all(|file| file.is_ok()));
    }
}

#[test]
fn a_flood_leaves_descriptors_and_room_for_ranks() {
    let mut command = Command::new("sh");
    command.args(["-c", r#"ulimit -n 128; exec "$0" "$@""#]).arg(std::env::current_exe().unwrap());
    command.args(test_arguments(module_path!(), "server_process"));
    let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines().map(|line| line.unwrap());
    let port = lines.find_map(|line| line.strip_prefix("port ").map(|port| port.parse().unwrap())).unwrap();
    let connect = || TcpStream::connect(("127.0.0.1", port)).unwrap();
    let rank = || TcpStore::connect("127.0.0.1", port, TIMEOUT).unwrap();
    let before = rank();
    let silent: Vec<TcpStream> = (0..200).map(|_| connect()).collect();
    let web: Vec<TcpStream> = (0..50).map(|_| connect()).collect();
    for mut web in &web {
        // The server may have closed it already.
        let _ = web.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
    }
    let during = rank();
    let idle: Vec<TcpStream> = (0..100)
        .map(|_| {
            let mut client = connect();
            // The server may have closed it: beyond the maximum number of clients, connections are refused.
            let _ = client.write_all(&VALIDATE);
            client
        })
        .collect();
    during.set("key", b"value").unwrap();
    assert_eq!(before.get("key").unwrap(), b"value");
    // The process still has descriptors for its own files.
    process.stdin.as_mut().unwrap().write_all(b"open\n").unwrap();
    assert_eq!(lines.find(|line| line.starts_with("open")).unwrap(), "open true");
    drop((silent, web, idle));
    rank().set("key", b"after").unwrap();
    drop(process.stdin.take());
    assert!(process.wait().unwrap().success());
}

fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    status.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0) * 4096u64
}

#[test]
fn many_clients() {
    let (server, store) = server();
    let mut clients: Vec<TcpStream> = (0..200).map(|_| greeted(&server)).collect();
    let wait = [&[6][..], &1u64.to_le_bytes(), &field(b"/go")].concat();
    clients.iter_mut().for_each(|client| client.write_all(&wait).unwrap());
    assert!(clients.iter_mut().rev().take(1).all(|client| {
        client.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let early = client.read(&mut [0]).is_err();
        client.set_read_timeout(Some(TIMEOUT)).unwrap();
        early
    }));
    store.set("go", b"").unwrap();
    for client in &mut clients {
        let mut answer = [9];
        client.read_exact(&mut answer).unwrap();
        assert_eq!(answer, [0]);
    }
}

#[test]
fn clients_beyond_the_limit_are_refused() {
    let server = bounded(TcpStoreServerOptions { max_clients: 3, ..Default::default() });
    let mut clients: Vec<TcpStream> = (0..3).map(|_| greeted(&server)).collect();
    assert!(clients.iter_mut().all(pings));
    assert!(closed(&mut raw(&server)));
    assert!(clients.iter_mut().all(pings));
    // A freed place goes to the next client; ours retries in the meantime.
    let store = std::thread::scope(|scope| {
        let store = scope.spawn(|| TcpStore::connect("127.0.0.1", server.port(), TIMEOUT));
        std::thread::sleep(Duration::from_millis(100));
        clients.pop();
        store.join().unwrap().unwrap()
    });
    store.set("k", b"").unwrap();
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let (server, _store) = server();
    let mut stream = greeted(&server);
    let add = [&[4][..], &field(b"/n"), &1i64.to_le_bytes()].concat();
    stream.write_all(&add.repeat(1000)).unwrap();
    for count in 1..=1000i64 {
        let mut answer = [0; 8];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(i64::from_le_bytes(answer), count);
    }
}

#[test]
fn list_keys_and_queues() {
    let (server, store) = server();
    store.set("a", b"").unwrap();
    let mut stream = greeted(&server);
    let mut ask = |request: &[u8], length: usize| {
        let mut answer = vec![0; length];
        stream.write_all(request).and_then(|()| stream.read_exact(&mut answer)).unwrap();
        answer
    };
    let list = ask(&[0x11], 8 + (8 + 2) + (8 + 5));
    assert_eq!(list[..8], 2i64.to_le_bytes());
    assert!(list.ends_with(&field(b"/a")) || list.ends_with(&field(b"init/")));
    let key = field(b"/q");
    let push = [&[0x0e][..], &key, &field(b"v"), &[0x10], &key].concat();
    assert_eq!(ask(&push, 8), 1i64.to_le_bytes());
    assert!(store.check(&["q"]).unwrap());
    assert_eq!(ask(&[&[0x0f][..], &key].concat(), 17), [&1i64.to_le_bytes()[..], &field(b"v")].concat());
    assert_eq!(ask(&[&[0x0f][..], &key].concat(), 8), 0i64.to_le_bytes());
    assert!(!store.check(&["q"]).unwrap());
}

#[test]
fn dropping_the_server_is_reported_by_its_clients_at_once() {
    let (server, store) = server();
    let port = server.port();
    std::thread::scope(|scope| {
        let wait = scope.spawn(|| store.wait(&["never"], None));
        std::thread::sleep(Duration::from_millis(50));
        let start = Instant::now();
        drop(server);
        let error = wait.join().unwrap().unwrap_err();
        assert!(error.to_string().contains("the server is gone") && start.elapsed() < TIMEOUT / 2, "{error}");
        assert!(error.to_string().contains("wait(\"never\")") && error.to_string().contains("rank 0"), "{error}");
    });
    let start = Instant::now();
    assert!(store.set("a", b"").unwrap_err().to_string().contains("the server is gone"));
    assert!(start.elapsed() < TIMEOUT / 2);
    // The port is free again.
    drop(TcpStoreServer::bind((Ipv6Addr::UNSPECIFIED, port), Default::default()).unwrap());
}

#[test]
fn requests_sent_before_the_end_are_executed() {
    for _ in 0..20 {
        let (server, _store) = server();
        let mut waits = greeted(&server);
        waits.write_all(&[&[6][..], &1u64.to_le_bytes(), &field(b"/last"), &PING].concat()).unwrap();
        waits.read_exact(&mut [0; 4]).unwrap();
        greeted(&server).write_all(&[&[1][..], &field(b"/last"), &field(b"")].concat()).unwrap();
        drop(server);
        let mut answer = [9];
        waits.read_exact(&mut answer).unwrap();
        assert_eq!(answer, [0]);
    }
}

#[test]
fn a_port_in_use_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    for error in [
        TcpStoreServer::bind((Ipv6Addr::UNSPECIFIED, port), Default::default()),
        TcpStoreServer::bind(taken.local_addr().unwrap(), Default::default()),
    ] {
        let error = error.unwrap_err().to_string();
        for part in [&port.to_string(), "another program uses it", "MASTER_PORT"] {
            assert!(error.contains(part), "{error}");
        }
    }
}

#[test]
fn all_interfaces_are_served() {
    let server = TcpStoreServer::bind((Ipv6Addr::UNSPECIFIED, 0), Default::default()).unwrap();
    let mut hosts = vec!["127.0.0.1", "localhost"];
    if server.local_addr().is_ipv6() {
        hosts.extend(["::1", "[::1]"]);
    }
    for host in hosts {
        let store = TcpStore::connect(host, server.port(), TIMEOUT).unwrap();
        store.set("host", host.as_bytes()).unwrap();
        assert!(store.local_addr().is_loopback());
    }
}
