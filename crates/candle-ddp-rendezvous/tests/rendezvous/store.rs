//! The same tests for every kind of store.
use candle_ddp_rendezvous::{Error, Result};
use candle_ddp_rendezvous::{FileStore, HashStore, PrefixStore, Store, TcpStore, TcpStoreServer};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(120);
const SHORT: Duration = Duration::from_millis(50);

/// Stores that share their keys, and whatever keeps them alive.
struct Stores {
    clients: Vec<Arc<dyn Store>>,
    _keep: Box<dyn std::any::Any>,
}

fn hash() -> Stores {
    let store: Arc<dyn Store> = Arc::new(HashStore::new(TIMEOUT));
    Stores { clients: vec![store; 3], _keep: Box::new(()) }
}

fn prefix() -> Stores {
    let inner: Arc<dyn Store> = Arc::new(HashStore::new(TIMEOUT));
    inner.set("other/a", b"not mine").unwrap();
    let client = || Arc::new(PrefixStore::new("room", inner.clone())) as Arc<dyn Store>;
    Stores { clients: (0..3).map(|_| client()).collect(), _keep: Box::new(()) }
}

fn tcp() -> Stores {
    let server = TcpStoreServer::bind((Ipv6Addr::UNSPECIFIED, 0), Default::default()).unwrap();
    let client = || Arc::new(TcpStore::connect("localhost", server.port(), TIMEOUT).unwrap()) as Arc<dyn Store>;
    Stores { clients: (0..3).map(|_| client()).collect(), _keep: Box::new(server) }
}

/// A single client that all threads share.
fn tcp_shared() -> Stores {
    let server = TcpStoreServer::bind((Ipv4Addr::LOCALHOST, 0), Default::default()).unwrap();
    let store: Arc<dyn Store> = Arc::new(TcpStore::connect("127.0.0.1", server.port(), TIMEOUT).unwrap());
    Stores { clients: vec![store; 3], _keep: Box::new(server) }
}

fn file() -> Stores {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let client = || Arc::new(FileStore::open(&path, TIMEOUT).unwrap()) as Arc<dyn Store>;
    Stores { clients: (0..3).map(|_| client()).collect(), _keep: Box::new(folder) }
}

fn file_shared() -> Stores {
    let folder = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(FileStore::open(folder.path().join("store"), TIMEOUT).unwrap());
    Stores { clients: vec![store; 3], _keep: Box::new(folder) }
}

fn values(store: &dyn Store) -> Result<()> {
    store.set("a", b"1")?;
    assert_eq!(store.get("a")?, b"1");
    store.set("a", b"2")?;
    assert_eq!(store.get("a")?, b"2");
    store.set("", b"no name")?;
    assert_eq!(store.get("")?, b"no name");
    store.set("empty", b"")?;
    assert_eq!(store.get("empty")?, b"");
    assert!(store.check(&["empty", "a"])?);
    assert!(!store.check(&["a", "none"])?);
    assert!(store.check(&[])?);
    let binary: Vec<u8> = (0..=255).cycle().take(1 << 20).collect();
    store.set("λ/binary key", &binary)?;
    assert_eq!(store.get("λ/binary key")?, binary);
    assert!(store.delete("a")?);
    assert!(!store.delete("a")?);
    assert!(!store.check(&["a"])?);
    assert_eq!(store.timeout(), TIMEOUT);
    Ok(())
}

fn append(store: &dyn Store) -> Result<()> {
    store.append("log", b"one ")?;
    store.append("log", b"")?;
    store.append("log", b"two")?;
    assert_eq!(store.get("log")?, b"one two");
    Ok(())
}

fn counters(store: &dyn Store) -> Result<()> {
    assert_eq!(store.add("n", 5)?, 5);
    assert_eq!(store.add("n", -7)?, -2);
    assert_eq!(store.add("n", 0)?, -2);
    assert_eq!(store.get("n")?, b"-2");
    store.set("n", b"40")?;
    assert_eq!(store.add("n", 2)?, 42);
    store.set("max", i64::MAX.to_string().as_bytes())?;
    assert_eq!(store.add("max", 1)?, i64::MIN);
    store.set("word", b"word")?;
    let error = store.add("word", 1).unwrap_err();
    assert!(matches!(&error, Error::Store { operation, .. } if operation.contains("word")), "{error}");
    // The store still works.
    assert_eq!(store.get("word")?, b"word");
    Ok(())
}

fn compare_set(store: &dyn Store) -> Result<()> {
    // Absent, expected not empty: writes nothing and returns what was expected.
    assert_eq!(store.compare_set("c", b"x", b"y")?, b"x");
    assert!(!store.check(&["c"])?);
    // Absent, expected empty: sets the value.
    assert_eq!(store.compare_set("c", b"", b"first")?, b"first");
    // A different value, even against an empty expectation: returns the current one.
    assert_eq!(store.compare_set("c", b"x", b"second")?, b"first");
    assert_eq!(store.compare_set("c", b"", b"second")?, b"first");
    assert_eq!(store.compare_set("c", b"first", b"second")?, b"second");
    assert_eq!(store.get("c")?, b"second");
    // An empty value is a value.
    store.set("e", b"")?;
    assert_eq!(store.compare_set("e", b"", b"now")?, b"now");
    Ok(())
}

fn several(store: &dyn Store) -> Result<()> {
    let before = store.num_keys()?;
    store.multi_set(&[("x", b"1"), ("y", b""), ("z", b"3")])?;
    assert_eq!(store.multi_get(&["z", "x", "y", "x"])?, [&b"3"[..], b"1", b"", b"1"]);
    assert_eq!(store.num_keys()?, before + 3);
    store.multi_set(&[])?;
    assert!(store.multi_get(&[])?.is_empty());
    store.wait(&[], None)?;
    store.delete("y")?;
    assert_eq!(store.num_keys()?, before + 2);
    Ok(())
}

fn waiting(stores: &Stores) -> Result<()> {
    let [one, two, ..] = &stores.clients[..] else { unreachable!() };
    // No rank sets the key: the error names it, and the store keeps working.
    one.set("there", b"")?;
    let start = Instant::now();
    let error = one.wait(&["there", "missing"], Some(SHORT)).unwrap_err();
    assert!(start.elapsed() >= SHORT && start.elapsed() < TIMEOUT / 2, "{:?}", start.elapsed());
    let Error::StoreTimeout { timeout, reason, .. } = &error else { panic!("{error}") };
    assert_eq!(*timeout, SHORT);
    assert!(reason.contains("missing\"]") && !reason.contains("there"), "{error}");
    one.wait(&["there"], None)?;
    // A rank sets the key: the wait ends then, not at its time-out.
    let start = Instant::now();
    std::thread::scope(|scope| {
        let waits = [
            scope.spawn(|| two.wait(&["w1", "w2", "w1"], None).map(|()| Vec::new())),
            scope.spawn(|| two.get("w2").map(|value| vec![value])),
            scope.spawn(|| two.multi_get(&["w1", "w2"])),
        ];
        std::thread::sleep(SHORT);
        one.set("w1", b"1").unwrap();
        // Setting one key twice does not count as setting two.
        one.set("w1", b"1").unwrap();
        std::thread::sleep(SHORT);
        assert!(!waits.iter().any(|wait| wait.is_finished()));
        one.append("w2", b"2").unwrap();
        let results = waits.map(|wait| wait.join().unwrap().unwrap());
        assert_eq!(results, [vec![], vec![b"2".to_vec()], vec![b"1".to_vec(), b"2".to_vec()]]);
    });
    assert!(start.elapsed() < TIMEOUT / 2, "{:?}", start.elapsed());
    // Each way of setting a key ends a wait.
    type Setter = fn(&dyn Store) -> Result<()>;
    let setters: [(&str, Setter); 3] = [
        ("by add", |store| store.add("by add", 1).map(drop)),
        ("by compare_set", |store| store.compare_set("by compare_set", b"", b"x").map(drop)),
        ("by multi_set", |store| store.multi_set(&[("by multi_set", b"x")])),
    ];
    for (key, set) in setters {
        std::thread::scope(|scope| {
            let wait = scope.spawn(|| two.wait(&[key], None));
            std::thread::sleep(SHORT / 5);
            set(&**one).unwrap();
            wait.join().unwrap()
        })?;
    }
    Ok(())
}

fn threads(stores: &Stores) {
    const ROUNDS: i64 = 400;
    let barrier = Barrier::new(stores.clients.len());
    let mut seen: Vec<i64> = std::thread::scope(|scope| {
        let barrier = &barrier;
        let work = |(rank, store): (usize, &Arc<dyn Store>)| {
            let store = store.clone();
            scope.spawn(move || {
                barrier.wait();
                let count = |_| {
                    store.append("letters", &[b'a' + rank as u8]).unwrap();
                    store.add("count", 1).unwrap()
                };
                (0..ROUNDS).map(count).collect::<Vec<_>>()
            })
        };
        let threads: Vec<_> = stores.clients.iter().enumerate().map(work).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    seen.sort_unstable();
    let all = ROUNDS * stores.clients.len() as i64;
    assert_eq!(seen, (1..=all).collect::<Vec<_>>(), "every count is seen once");
    assert_eq!(stores.clients[0].get("letters").unwrap().len() as i64, all);
}

/// When a call returns, its effect is visible to all.
fn visible(stores: &Stores) -> Result<()> {
    let [one, two, ..] = &stores.clients[..] else { unreachable!() };
    for round in 0..300 {
        let key = format!("{round}");
        one.set(&key, b"1")?;
        assert!(two.check(&[&key])?);
        one.append(&key, b"2")?;
        assert_eq!(two.compare_set(&key, b"12", b"3")?, b"3");
        one.multi_set(&[(&key, b"4")])?;
        assert_eq!(two.compare_set(&key, b"4", b"5")?, b"5");
    }
    Ok(())
}

/// Exactly one of several ranks wins, and all see the winner.
fn election(stores: &Stores) {
    let answers: Vec<Vec<u8>> = std::thread::scope(|scope| {
        let stand = |(rank, store): (usize, &Arc<dyn Store>)| {
            let store = store.clone();
            scope.spawn(move || store.compare_set("leader", b"", &[rank as u8]).unwrap())
        };
        let threads: Vec<_> = stores.clients.iter().enumerate().map(stand).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(answers.windows(2).all(|pair| pair[0] == pair[1]), "{answers:?}");
}

macro_rules! every_store {
    ($($kind:ident),*) => {$(
        mod $kind {
            use super::*;
            #[test]
            fn values() -> Result<()> { super::values(&*super::$kind().clients[0]) }
            #[test]
            fn append() -> Result<()> { super::append(&*super::$kind().clients[0]) }
            #[test]
            fn counters() -> Result<()> { super::counters(&*super::$kind().clients[0]) }
            #[test]
            fn compare_set() -> Result<()> { super::compare_set(&*super::$kind().clients[0]) }
            #[test]
            fn several() -> Result<()> { super::several(&*super::$kind().clients[0]) }
            #[test]
            fn waiting() -> Result<()> { super::waiting(&super::$kind()) }
            #[test]
            fn threads() { super::threads(&super::$kind()) }
            #[test]
            fn visible() -> Result<()> { super::visible(&super::$kind()) }
            #[test]
            fn election() { super::election(&super::$kind()) }
        }
    )*};
}

every_store!(hash, prefix, tcp, tcp_shared, file, file_shared);

#[test]
fn a_timeout_may_be_endless() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let server = TcpStoreServer::bind((Ipv4Addr::LOCALHOST, 0), Default::default())?;
    let stores: [Box<dyn Store>; 3] = [
        Box::new(HashStore::new(Duration::MAX)),
        Box::new(FileStore::open(folder.path().join("store"), Duration::MAX)?),
        Box::new(TcpStore::connect("127.0.0.1", server.port(), Duration::MAX)?),
    ];
    for store in stores {
        std::thread::scope(|scope| {
            let wait = scope.spawn(|| store.wait(&["late"], Some(Duration::MAX)));
            std::thread::sleep(SHORT);
            store.set("late", b"here")?;
            wait.join().unwrap()
        })?;
        assert_eq!(store.get("late")?, b"here");
    }
    Ok(())
}
