//! The client of a server that is late, silent or of another kind, and its limits.
use crate::server::{TIMEOUT, server};
use candle_ddp_rendezvous::{Error, Store, TcpStore, TcpStoreServer};
use candle_ddp_testing::assert_error;
use std::io::Write;
use std::net::{Ipv6Addr, TcpListener};
use std::time::{Duration, Instant};

#[test]
fn the_client_waits_for_its_server() {
    // A port outside the system's ephemeral range, so that no other process gets it.
    let port = (20_000 + std::process::id() % 10_000) as u16;
    let start = Instant::now();
    let error = TcpStore::connect("127.0.0.1", port, Duration::from_millis(200)).err().unwrap();
    assert!(start.elapsed() >= Duration::from_millis(200) && start.elapsed() < TIMEOUT / 2);
    let text = error.to_string();
    assert!(matches!(error, Error::StoreTimeout { .. }) && text.contains("MASTER_PORT"), "{text}");
    assert!(text.contains(&format!("127.0.0.1:{port}")) && text.contains("refused"), "{text}");
    std::thread::scope(|scope| {
        let client = scope.spawn(|| TcpStore::connect("localhost", port, TIMEOUT)?.set("k", b"v"));
        std::thread::sleep(Duration::from_millis(100));
        let _server = TcpStoreServer::bind((Ipv6Addr::UNSPECIFIED, port), Default::default()).unwrap();
        client.join().unwrap().unwrap();
    });
    let error = TcpStore::connect("no-such-host.invalid", 1, Duration::from_millis(300)).err().unwrap();
    assert!(error.to_string().contains("cannot resolve the name \"no-such-host.invalid\""), "{error}");
}

#[test]
fn the_client_times_out_and_rejects_other_servers() {
    // A server that listens and never replies.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let start = Instant::now();
    let port = silent.local_addr().unwrap().port();
    let error = TcpStore::connect("127.0.0.1", port, Duration::from_millis(200)).err().unwrap();
    assert!(matches!(error, Error::StoreTimeout { .. }) && start.elapsed() < TIMEOUT / 2, "{error}");
    // A server of another kind is an error at once.
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = other.accept().unwrap();
            stream.write_all(b"SSH-2.0-OpenSSH\r\n").unwrap();
            // Closing before the client has sent everything would break its connection before it reads this.
            let _ = std::io::copy(&mut stream, &mut std::io::sink());
        });
        assert_error(TcpStore::connect("127.0.0.1", port, TIMEOUT), &["a program other than a TCPStore"]);
    });
    assert!(start.elapsed() < TIMEOUT / 2);
    // Keys and values beyond the limits are refused before anything is sent.
    let (_server, store) = server();
    let error = store.set("k", &vec![0; (8 << 20) + 1]).unwrap_err();
    assert!(error.to_string().contains("8388609 bytes") && error.to_string().contains("set(\"k\")"), "{error}");
    assert_error(store.get(&"k".repeat(8192)), &["8193 bytes"]);
    store.set(&"k".repeat(8191), &vec![0; 8 << 20]).unwrap();
    // Many large values are sent in several requests.
    let value = vec![5; 8 << 20];
    let keys: Vec<String> = (0..10).map(|key| format!("large {key}")).collect();
    let pairs: Vec<(&str, &[u8])> = keys.iter().map(|key| (key.as_str(), value.as_slice())).collect();
    store.multi_set(&pairs).unwrap();
    assert!(store.check(&keys.iter().map(String::as_str).collect::<Vec<_>>()).unwrap());
    let many: Vec<String> = (0..20_000).map(|key| key.to_string()).collect();
    let pairs: Vec<(&str, &[u8])> = many.iter().map(|key| (key.as_str(), key.as_bytes())).collect();
    store.multi_set(&pairs).unwrap();
    let names: Vec<&str> = many.iter().map(String::as_str).collect();
    assert!(store.multi_get(&names).unwrap().iter().zip(&many).all(|(value, key)| value == key.as_bytes()));
}
