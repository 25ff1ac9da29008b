//! Ranks that rendezvous: threads of this process, and processes with a launcher's environment.
use candle_ddp_rendezvous::Failure;
use candle_ddp_rendezvous::{Error, Result};
use candle_ddp_rendezvous::{Rendezvous, RendezvousOptions, Store, TcpStore, TcpStoreServer, rendezvous};
use candle_ddp_testing::{assert_error, free_port, test_process};
use std::net::{IpAddr, Ipv6Addr, TcpListener, TcpStream, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(120);

fn options(init_method: &str, rank: usize, world_size: usize) -> RendezvousOptions {
    let init_method = init_method.to_string();
    let (rank, world_size) = (Some(rank), Some(world_size));
    RendezvousOptions { init_method, rank, world_size, timeout: TIMEOUT, ..Default::default() }
}

fn meet(options: Vec<RendezvousOptions>) -> Vec<Result<Rendezvous>> {
    std::thread::scope(|scope| {
        let ranks: Vec<_> = options.into_iter().map(|options| scope.spawn(|| rendezvous(options))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn all_meet(init_method: &str, world_size: usize) -> Vec<Rendezvous> {
    let options = (0..world_size).map(|rank| options(init_method, rank, world_size)).collect();
    meet(options).into_iter().collect::<Result<_>>().unwrap()
}

/// Checks that every rank sees what every rank has set.
fn exchange(ranks: &[Rendezvous], word: &str) {
    for rank in ranks {
        rank.store.set(&format!("word/{}", rank.rank), word.as_bytes()).unwrap();
    }
    for rank in ranks {
        for peer in 0..rank.world_size {
            assert_eq!(rank.store.get(&format!("word/{peer}")).unwrap(), word.as_bytes());
        }
    }
}

#[test]
fn over_tcp() {
    for host in ["127.0.0.1", "localhost"] {
        for world_size in [1, 2, 4, 7] {
            let ranks = all_meet(&format!("tcp://{host}:{}", free_port()), world_size);
            for (rank, met) in ranks.iter().enumerate() {
                assert_eq!((met.rank, met.world_size), (rank, world_size));
                // All ranks are on this host, which they can only learn from the store.
                assert_eq!((met.local_rank, met.local_world_size), (rank, world_size));
                assert!(met.address.unwrap().is_loopback());
            }
            exchange(&ranks, "hello");
        }
    }
}

#[test]
fn repeatedly_at_the_same_address() {
    let init_method = format!("tcp://127.0.0.1:{}", free_port());
    let first = all_meet(&init_method, 2);
    exchange(&first, "first");
    // While the first group exists.
    let second = all_meet(&init_method, 2);
    assert!(!second[1].store.check(&["word/0"]).unwrap(), "keys of the first group");
    exchange(&second, "second");
    exchange(&first, "still first");
    drop((first, second));
    // After the first group, with a new server.
    exchange(&all_meet(&init_method, 2), "third");
}

/// Returns an address of this host that others can reach, if it has one.
fn outer_address() -> Option<IpAddr> {
    // Nothing is sent: this only looks up the route to an address reserved for documentation.
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("203.0.113.5:1").ok()?;
    socket.local_addr().ok().map(|address| address.ip()).filter(|ip| !ip.is_loopback() && !ip.is_unspecified())
}

#[test]
fn the_store_listens_only_where_its_ranks_reach_it() {
    let is_served = |ip: IpAddr, port: u16| TcpStream::connect((ip, port)).is_ok();
    let [loopback, other] = ["127.0.0.1", "127.0.0.2"].map(|ip| ip.parse().unwrap());
    for host in ["127.0.0.1", "localhost"] {
        let port = free_port();
        let ranks = all_meet(&format!("tcp://{host}:{port}"), 2);
        assert!(is_served(loopback, port) && !is_served(other, port), "{host}");
        assert!(outer_address().is_none_or(|address| !is_served(address, port)), "{host}");
        exchange(&ranks, host);
    }
    if let Some(address) = outer_address() {
        let port = free_port();
        let ranks = all_meet(&format!("tcp://{address}:{port}"), 2);
        assert!(is_served(address, port) && !is_served(loopback, port), "{address}");
        assert_eq!(ranks[0].address, Some(address));
        exchange(&ranks, "outer");
    }
}

#[test]
fn over_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("meeting");
    let init_method = format!("file://{}", path.display());
    for round in ["first", "second"] {
        let ranks = all_meet(&init_method, 3);
        exchange(&ranks, round);
        assert_eq!((ranks[2].local_rank, ranks[2].local_world_size, ranks[2].address), (2, 3, None));
        assert!(path.exists());
        drop(ranks);
        assert!(!path.exists(), "the last rank removes the file");
    }
}

#[test]
fn a_different_world_size_is_an_error_on_all() {
    let folder = tempfile::tempdir().unwrap();
    let init_method = format!("file://{}", folder.path().join("meeting").display());
    let start = Instant::now();
    let results = meet(vec![options(&init_method, 0, 2), options(&init_method, 1, 3)]);
    for result in results {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("world size") && error.contains('2') && error.contains('3'), "{error}");
    }
    assert!(start.elapsed() < TIMEOUT / 2);
}

#[test]
fn a_timeout_may_be_endless() {
    let init_method = format!("tcp://127.0.0.1:{}", free_port());
    let endless = |rank| RendezvousOptions { timeout: Duration::MAX, ..options(&init_method, rank, 2) };
    let ranks: Vec<_> = meet(vec![endless(0), endless(1)]).into_iter().collect::<Result<_>>().unwrap();
    exchange(&ranks, "endless");
}

#[test]
fn missing_ranks_are_named() {
    let init_method = format!("tcp://127.0.0.1:{}", free_port());
    let short = |rank| RendezvousOptions { timeout: Duration::from_secs(6), ..options(&init_method, rank, 4) };
    let start = Instant::now();
    let results = meet(vec![short(0), short(2)]);
    assert!(start.elapsed() < TIMEOUT / 2);
    // Each rank fails by its own time-out, or by that of the other rank, which arrived earlier: rank 0 takes the store
    // with it.
    for result in results {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::RanksMissing { .. } | Error::Group(Failure::PeerFailed { .. })), "{error}");
        let text = error.to_string();
        assert!(text.contains("2 of 4 ranks arrived, missing: 1, 3."), "{text}");
        assert!(text.contains(&init_method["tcp://".len()..]), "{text}");
    }
}

/// No rendezvous is possible without rank 2.
#[test]
fn the_first_time_out_ends_all_ranks() {
    let init_method = format!("tcp://127.0.0.1:{}", free_port());
    for impatient in 0..2 {
        let start = Instant::now();
        let mut options = [0, 1].map(|rank| options(&init_method, rank, 3)).to_vec();
        options[impatient].timeout = Duration::from_secs(6);
        let mut results = meet(options);
        assert!(start.elapsed() < TIMEOUT / 2);
        let other = results.remove(1 - impatient).unwrap_err();
        assert!(matches!(other, Error::Group(Failure::PeerFailed { peer, .. }) if peer == impatient), "{other}");
        for error in [other, results.remove(0).unwrap_err()] {
            assert!(error.to_string().contains("2 of 3 ranks arrived, missing: 2."), "{error}");
        }
    }
}

#[test]
fn a_missing_store_is_an_error() {
    let init_method = format!("tcp://127.0.0.1:{}", free_port());
    let alone = RendezvousOptions { timeout: Duration::from_millis(300), ..options(&init_method, 1, 2) };
    assert_error(rendezvous(alone), &["Rank 0", "refused"]);
}

#[test]
fn a_port_in_use_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = rendezvous(options(&format!("tcp://127.0.0.1:{port}"), 0, 2)).unwrap_err().to_string();
    assert!(error.contains(&port.to_string()) && error.contains("another program uses it"), "{error}");
}

#[test]
fn the_end_of_rank_0_is_reported() {
    let ranks = all_meet(&format!("tcp://127.0.0.1:{}", free_port()), 2);
    let [rank_0, rank_1] = ranks.try_into().unwrap();
    drop(rank_0);
    assert_error(rank_1.store.set("a", b""), &["the server is gone", "rank 0"]);
}

/// A helper process rather than a test: a rank, started by the tests below. Reports its result by its exit code.
#[test]
#[ignore = "started by other tests"]
fn rank_process() {
    let met = rendezvous(RendezvousOptions { timeout: TIMEOUT, ..RendezvousOptions::default() }).unwrap();
    assert_eq!((met.local_rank, met.local_world_size), (met.rank, met.world_size));
    // Every rank counts itself; the last one releases the others.
    let count = met.store.add("count", 1).unwrap();
    assert!(count <= met.world_size as i64, "keys of another attempt");
    if count == met.world_size as i64 {
        met.store.set("go", b"").unwrap();
    }
    met.store.wait(&["go"], None).unwrap();
    // Rank 0 may host the store, so it leaves last.
    met.store.add("left", 1).unwrap();
    while met.rank == 0 && met.store.add("left", 0).unwrap() < met.world_size as i64 {
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Starts a rank that has no variables of a launcher but these.
pub(crate) fn start(variables: &[(&str, String)]) -> Child {
    start_in(test_process(module_path!(), "rank_process"), variables)
}

/// Starts a rank by the given command.
pub(crate) fn start_in(mut command: Command, variables: &[(&str, String)]) -> Child {
    let names = ["RANK", "WORLD_SIZE", "MASTER_", "SLURM_", "ELASTIC_", "OMPI_", "PMI"];
    for (name, _) in std::env::vars().filter(|(name, _)| names.iter().any(|part| name.contains(part))) {
        command.env_remove(name);
    }
    command
        .envs(variables.iter().map(|(name, value)| (name, value)))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn two_jobs_on_one_port_do_not_disturb_each_other() {
    let port = free_port();
    let run =
        |run: &str, rank| start(&[launched(rank, 2, port), vec![("TORCHELASTIC_RUN_ID", run.to_string())]].concat());
    let rank_0 = run("first", 0);
    // This rank waits for the first job's store and reaches it before that job is complete.
    let foreign = run("second", 1).wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&foreign.stderr);
    assert!(!foreign.status.success() && text.contains("the store belongs to the run \"first\""), "{text}");
    assert!(text.contains("belongs to the run \"second\"") && text.contains("MASTER_PORT"), "{text}");
    // A rank that does not know its run uses the store's run id.
    all_succeed(vec![start(&launched(1, 2, port)), rank_0]);
}

#[test]
fn two_jobs_on_one_external_store_use_separate_keys() {
    let server = TcpStoreServer::bind((Ipv6Addr::UNSPECIFIED, 0), Default::default()).unwrap();
    let rank = |run: &str, rank| {
        let agent = [("TORCHELASTIC_USE_AGENT_STORE", "True".to_string()), ("TORCHELASTIC_RUN_ID", run.to_string())];
        start(&[launched(rank, 2, server.port()), agent.to_vec()].concat())
    };
    all_succeed([rank("a", 0), rank("b", 0), rank("a", 1), rank("b", 1)].into());
}

pub(crate) fn all_succeed(ranks: Vec<Child>) {
    for rank in ranks {
        let output = rank.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

pub(crate) fn launched(rank: usize, world_size: usize, port: u16) -> Vec<(&'static str, String)> {
    vec![
        ("RANK", rank.to_string()),
        ("LOCAL_RANK", rank.to_string()),
        ("WORLD_SIZE", world_size.to_string()),
        ("LOCAL_WORLD_SIZE", world_size.to_string()),
        ("MASTER_ADDR", "localhost".to_string()),
        ("MASTER_PORT", port.to_string()),
    ]
}

#[test]
fn processes_without_a_launchers_store() {
    let port = free_port();
    let ranks: Vec<Child> = (0..3).map(|rank| start(&launched(rank, 3, port))).collect();
    all_succeed(ranks);
}

#[test]
fn processes_on_a_launchers_store_that_survives_restarts() {
    // Rank 0 would fail if it tried to bind this port, and so would the second attempt if it saw the first one's keys.
    let server = TcpStoreServer::bind((Ipv6Addr::UNSPECIFIED, 0), Default::default()).unwrap();
    for attempt in 0..2 {
        let agent =
            [("TORCHELASTIC_USE_AGENT_STORE", "True".to_string()), ("TORCHELASTIC_RESTART_COUNT", attempt.to_string())];
        let variables = |rank| [launched(rank, 2, server.port()), agent.to_vec()].concat();
        let ranks: Vec<Child> = (0..2).map(|rank| start(&variables(rank))).collect();
        all_succeed(ranks);
    }
    let store = TcpStore::connect("localhost", server.port(), TIMEOUT).unwrap();
    assert!(store.check(&["candle_ddp/0/0/go", "candle_ddp/1/0/go"]).unwrap());
}

#[test]
fn processes_under_slurm() {
    let server_port = free_port();
    let ranks: Vec<Child> = (0..2)
        .map(|rank: usize| {
            start(&[
                ("SLURM_PROCID", rank.to_string()),
                ("SLURM_LOCALID", rank.to_string()),
                ("SLURM_NTASKS", "2".to_string()),
                ("SLURM_STEP_NODELIST", "localhost".to_string()),
                ("SLURM_STEP_TASKS_PER_NODE", "2".to_string()),
                ("MASTER_PORT", server_port.to_string()),
            ])
        })
        .collect();
    all_succeed(ranks);
}

#[test]
fn a_duplicate_rank_is_an_error_on_all() {
    let server = TcpStoreServer::bind((Ipv6Addr::UNSPECIFIED, 0), Default::default()).unwrap();
    let agent = [("TORCHELASTIC_USE_AGENT_STORE", "True".to_string())];
    let start_time = Instant::now();
    let ranks = [0, 1, 1].map(|rank| start(&[launched(rank, 3, server.port()), agent.to_vec()].concat()));
    for rank in ranks {
        let output = rank.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains("two processes have rank 1"), "{text}");
    }
    assert!(start_time.elapsed() < TIMEOUT / 2);
}
