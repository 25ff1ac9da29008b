//! This crate's store and PyTorch's, each as client and as server of the other.
//!
//! Needs PyTorch for the interpreter named by CANDLE_DDP_PYTHON (default: python3); otherwise skipped with a message.
use crate::common::assert_error;
use candle_ddp::rendezvous::{Error, PrefixStore, Result, Store, TcpStore, TcpStoreServer};
use std::io::{BufRead, BufReader};
use std::net::Ipv6Addr;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(120);
const SHORT: Duration = Duration::from_millis(100);

/// Returns a function that builds the helper script's command, or `None` without PyTorch.
fn python(test: &str) -> Option<impl Fn(&[&str]) -> Command> {
    let interpreter = crate::pytorch::python(test)?;
    Some(move |arguments: &[&str]| {
        let mut command = Command::new(&interpreter);
        command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/interop/store.py")).args(arguments);
        command
    })
}

fn bytes() -> Vec<u8> {
    (0..=255).collect()
}

/// Returns bytes as PyTorch sends them: its bindings take text and send it as UTF-8.
fn as_torch_sends() -> Vec<u8> {
    (0..=255u8).map(char::from).collect::<String>().into_bytes()
}

#[test]
fn torch_client_on_our_server() -> Result<()> {
    let Some(python) = python("torch_client_on_our_server") else { return Ok(()) };
    let server = TcpStoreServer::bind((Ipv6Addr::UNSPECIFIED, 0), Default::default())?;
    let store = Arc::new(TcpStore::connect("localhost", server.port(), TIMEOUT)?);
    let room = PrefixStore::new("room", store.clone());
    store.set("from_rust", &bytes())?;
    room.set("from_rust", b"in the room")?;
    for host in ["127.0.0.1", "localhost"] {
        let output = python(&["client", host, &server.port().to_string()]).output().unwrap();
        assert!(output.status.success(), "{host}: {}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(store.get("from_torch")?, as_torch_sends());
        assert_eq!(room.get("from_torch")?, b"in the room");
        // Reset for the next round.
        for key in ["done", "from_torch", "c", "n", "log", "y", "late", "two", "two_never", "alone"] {
            assert!(store.delete(key)?, "{key}");
        }
    }
    Ok(())
}

#[test]
fn our_client_on_torchs_server() -> Result<()> {
    let Some(python) = python("our_client_on_torchs_server") else { return Ok(()) };
    let mut process = python(&["server"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines().map(|line| line.unwrap());
    let port = lines.find_map(|line| line.strip_prefix("port ").map(|port| port.parse().unwrap())).unwrap();
    let store = Arc::new(TcpStore::connect("127.0.0.1", port, TIMEOUT).unwrap());
    let result = every_operation(&store);
    // The end of the server is reported as such.
    drop(process.stdin.take());
    let status = process.wait().unwrap();
    result?;
    assert!(status.success());
    assert_error(store.set("a", b""), &["the server is gone"]);
    Ok(())
}

#[test]
fn torch_process_group_on_our_server() -> Result<()> {
    let Some(python) = python("torch_process_group_on_our_server") else { return Ok(()) };
    let server = TcpStoreServer::bind((Ipv6Addr::UNSPECIFIED, 0), Default::default())?;
    let rank = |rank: usize| {
        let mut command = python(&["group"]);
        command.env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string()).env("WORLD_SIZE", "2");
        command.env("MASTER_ADDR", "localhost").env("MASTER_PORT", server.port().to_string());
        command.env("TORCHELASTIC_USE_AGENT_STORE", "True").env("TORCHELASTIC_RESTART_COUNT", "0");
        command.stderr(Stdio::piped()).spawn().unwrap()
    };
    for rank in [rank(0), rank(1)] {
        let output = rank.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

fn every_operation(store: &Arc<TcpStore>) -> Result<()> {
    let room = PrefixStore::new("room", store.clone());
    assert_eq!(store.get("from_torch")?, as_torch_sends());
    assert_eq!(room.get("from_torch")?, b"in the room");
    store.set("from_rust", &bytes())?;
    room.set("from_rust", b"in the room")?;

    let large = vec![7; 8 << 20];
    store.set("large", &large)?;
    assert_eq!(store.get("large")?, large);
    store.set("empty", b"")?;
    assert_eq!(store.get("empty")?, b"");
    assert_eq!([store.add("n", 5)?, store.add("n", -7)?], [5, -2]);
    assert_eq!(store.compare_set("c", b"x", b"y")?, b"x");
    assert!(!store.check(&["c"])?);
    assert_eq!(store.compare_set("c", b"", b"first")?, b"first");
    assert_eq!(store.compare_set("c", b"x", b"second")?, b"first");
    assert_eq!(store.compare_set("c", b"", b"second")?, b"first");
    assert_eq!(store.compare_set("c", b"first", b"second")?, b"second");
    let before = store.num_keys()?;
    store.append("log", b"one ")?;
    store.append("log", b"two")?;
    assert_eq!(store.get("log")?, b"one two");
    store.multi_set(&[("x", b"1"), ("y", b"2")])?;
    assert_eq!(store.multi_get(&["y", "x"])?, [b"2", b"1"]);
    assert_eq!(store.num_keys()?, before + 3);
    assert!(store.delete("x")? && !store.delete("x")?);
    assert!(store.check(&["y", "log"])? && !store.check(&["y", "x"])?);

    for _ in 0..3 {
        let error = store.wait(&["y", "never"], Some(SHORT)).unwrap_err();
        assert!(matches!(&error, Error::StoreTimeout { reason, .. } if reason.contains("[\"never\"]")), "{error}");
        assert_eq!(store.get("y")?, b"2");
    }
    std::thread::scope(|scope| {
        let wait = scope.spawn(|| store.get("late"));
        std::thread::sleep(SHORT);
        store.set("late", b"here").unwrap();
        assert_eq!(wait.join().unwrap().unwrap(), b"here");
    });
    store.set("word", b"word")?;
    assert_error(store.add("word", 1), &["refused the request"]);
    assert_eq!(store.get("word")?, b"word");
    Ok(())
}
