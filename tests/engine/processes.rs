//! The CPU engine with one process per rank, some of which are killed or stopped.
//!
//! The test binary starts itself as each rank; ranks meet in a file in a temporary folder.
use crate::common::test_process;
use candle_core::{DType, Device, Tensor};
use candle_ddp::backend::cpu::{CpuCommunicator, CpuOptions};
use candle_ddp::backend::{Collective, Communicator};
use candle_ddp::rendezvous::{FileStore, Store};
use candle_ddp::{P2pOp, ReduceOp, Result};
use rustix::process::{Pid, Signal, kill_process};
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// The time-out of calls where a test waits for it: longer than a healthy call on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The time-out, or the wait, where it shows only that something hangs.
const PATIENCE: Duration = Duration::from_secs(120);
const WORLD_SIZE: usize = 4;
const VICTIM: usize = 2;

/// The transports as the environment variable names them, and the number of ranks per host.
const TRANSPORTS: [(&str, usize); 3] = [("shm", WORLD_SIZE), ("tcp", WORLD_SIZE), ("auto", 2)];

const RANK: &str = "CANDLE_DDP_TEST_RANK";
const SCENARIO: &str = "CANDLE_DDP_TEST_SCENARIO";
const FOLDER: &str = "CANDLE_DDP_TEST_FOLDER";

/// The scenario whose calls time out soon.
const STOPPED: &str = "stopped";
/// The scenario in which ranks repeat batches instead of all-reduces.
const BATCHES: &str = "batches";
/// The scenario in which ranks wait for a first message from the victim once they know that it is gone.
const AWAITED: &str = "awaited";

/// The folder in which ranks meet and write down their results.
fn store_in(folder: &Path) -> FileStore {
    FileStore::open(folder.join("store"), PATIENCE).unwrap()
}

/// Sends `tensor` to all other ranks, and receives theirs.
fn exchange(communicator: &CpuCommunicator, tensor: &Tensor, received: &[Tensor]) -> Result<()> {
    let peers = || (0..WORLD_SIZE).filter(|peer| *peer != communicator.rank());
    let sends = peers().map(|peer| P2pOp::Send { tensor: tensor.clone(), peer });
    let recvs = peers().map(|peer| P2pOp::Recv { tensor: received[peer].clone(), peer });
    communicator.start_batch(sends.chain(recvs).collect())?.wait()
}

/// A rank: repeats all-reduces of 4 MiB, or batches, until one fails, and writes down the error.
#[test]
#[ignore = "started by other tests"]
fn rank_process() {
    let [rank, folder] = [RANK, FOLDER].map(|variable| std::env::var(variable).unwrap());
    let store = Arc::new(store_in(folder.as_ref()));
    let scenario = std::env::var(SCENARIO).unwrap();
    let timeout = if scenario == STOPPED { TIMEOUT } else { PATIENCE };
    let options = CpuOptions { timeout, construction_timeout: Some(PATIENCE), ..CpuOptions::default() };
    let communicator = CpuCommunicator::new(store.clone(), rank.parse().unwrap(), WORLD_SIZE, options).unwrap();
    let tensor = Tensor::zeros(1 << 20, DType::F32, &Device::Cpu).unwrap();
    let all_reduce = || Collective::AllReduce { tensor: tensor.clone(), op: ReduceOp::Sum };
    let received: Vec<Tensor> = (0..WORLD_SIZE).map(|_| tensor.zeros_like().unwrap()).collect();
    if scenario == AWAITED {
        store.set(&format!("ready/{rank}"), b"").unwrap();
        if communicator.rank() == VICTIM {
            std::thread::sleep(PATIENCE);
        }
        while !communicator.gone().contains(&VICTIM) {
            std::thread::sleep(Duration::from_millis(5));
        }
        // A lower rank waits to be called; a higher one would call the victim, and notice its end itself.
        if communicator.rank() != 0 {
            store.wait(&["error/0"], Some(PATIENCE)).unwrap();
        }
    }
    for round in 0.. {
        let error = match round % 2 {
            _ if scenario == BATCHES => exchange(&communicator, &tensor, &received),
            _ if scenario == AWAITED => communicator.run(Collective::Recv { tensor: tensor.clone(), peer: VICTIM }),
            0 => communicator.run(all_reduce()),
            _ => communicator.start(all_reduce()).and_then(|work| work.wait()),
        };
        if let Err(error) = error {
            store.set(&format!("error/{rank}"), error.to_string().as_bytes()).unwrap();
            return;
        }
        if round == 2 {
            store.set(&format!("ready/{rank}"), b"").unwrap();
        }
    }
}

/// Processes that are killed when the test ends. A store ends with its last user, so the test uses it as long as the ranks:
/// they may all end before the test reads their results.
struct Ranks(Vec<Child>, FileStore);

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A rank: sends the second half of its tensor to the next rank, receives into the first
/// half, and reports when done.
#[test]
#[ignore = "started by other tests"]
fn halo_process() {
    const COUNT: usize = 1 << 18;
    let [rank, folder] = [RANK, FOLDER].map(|variable| std::env::var(variable).unwrap());
    let (store, rank): (_, usize) = (Arc::new(store_in(folder.as_ref())), rank.parse().unwrap());
    let options = CpuOptions { timeout: PATIENCE, ..CpuOptions::default() };
    let communicator = CpuCommunicator::new(store.clone(), rank, WORLD_SIZE, options).unwrap();
    let field = Tensor::full(rank as f32, 2 * COUNT, &Device::Cpu).unwrap();
    let part = |index: usize| field.narrow(0, index * COUNT, COUNT).unwrap();
    let (left, right) = ((rank + WORLD_SIZE - 1) % WORLD_SIZE, (rank + 1) % WORLD_SIZE);
    let halo = communicator.start(Collective::Recv { tensor: part(0), peer: left }).unwrap();
    // By then, all ranks are waiting to receive.
    std::thread::sleep(Duration::from_millis(300));
    let inner = communicator.start(Collective::Send { tensor: part(1), peer: right }).unwrap();
    halo.wait().and_then(|()| inner.wait()).unwrap();
    assert!(part(0).to_vec1::<f32>().unwrap().iter().all(|value| *value == left as f32));
    store.set(&format!("ready/{rank}"), b"").unwrap();
}

/// Starts the ranks in the given test and returns once all are ready.
fn start_in(test: &str, scenario: &str, folder: &Path, (transport, host_size): (&str, usize)) -> Ranks {
    let rank = |rank: usize| {
        let mut command = test_process(module_path!(), test);
        command.env(RANK, rank.to_string()).env(FOLDER, folder).env(SCENARIO, scenario);
        command.env("CANDLE_DDP_CPU_TRANSPORT", transport);
        command.env("CANDLE_DDP_CPU_HOST", (rank / host_size).to_string());
        command.stdout(Stdio::null()).spawn().unwrap()
    };
    let store = store_in(folder);
    let ranks = Ranks((0..WORLD_SIZE).map(rank).collect(), store);
    let ready: Vec<String> = (0..WORLD_SIZE).map(|rank| format!("ready/{rank}")).collect();
    ranks.1.wait(&ready.iter().map(String::as_str).collect::<Vec<_>>(), Some(PATIENCE)).unwrap();
    ranks
}

/// Returns the errors of all ranks but the victim.
fn survivors(folder: &Path) -> Vec<String> {
    errors_of(folder, (0..WORLD_SIZE).filter(|rank| *rank != VICTIM))
}

#[test]
fn slices_of_one_tensor_cross_between_processes() {
    for transport in TRANSPORTS {
        let folder = tempfile::tempdir().unwrap();
        drop(start_in("halo_process", "", folder.path(), transport));
    }
}

#[test]
fn every_survivor_names_a_killed_rank_at_once() {
    let scenarios = [
        ("", "closed during all_reduce(f32[1048576])"),
        (BATCHES, "(f32[1048576]) for batch_isend_irecv"),
        (AWAITED, "closed during recv(f32[1048576]"),
    ];
    for (scenario, call) in scenarios {
        for (transport, segments) in TRANSPORTS.into_iter().zip([1, 0, 1]) {
            let folder = tempfile::tempdir().unwrap();
            let mut ranks = start_in("rank_process", scenario, folder.path(), transport);
            // Each rank maps the shared memory of its host once, and no more.
            for rank in &ranks.0 {
                let maps = std::fs::read_to_string(format!("/proc/{}/maps", rank.id())).unwrap();
                assert_eq!(maps.matches("/memfd:candle-ddp-").count(), segments, "{transport:?}: {maps}");
            }
            // The victim is at a different point each time.
            std::thread::sleep(Duration::from_millis(u64::from(std::process::id() % 50)));
            ranks.0[VICTIM].kill().unwrap();
            for error in survivors(folder.path()) {
                assert!(error.starts_with("rank 2 is gone: its connection to rank "), "{transport:?}: {error}");
                assert!(error.contains(call), "{transport:?}: {error}");
            }
        }
    }
}

#[test]
fn every_survivor_names_a_stopped_rank_in_time() {
    // All transports at once, since most of the test is waiting.
    let stopped = TRANSPORTS.map(|transport| {
        let folder = tempfile::tempdir().unwrap();
        let ranks = start_in("rank_process", STOPPED, folder.path(), transport);
        let pid = Pid::from_child(&ranks.0[VICTIM]);
        kill_process(pid, Signal::STOP).unwrap();
        (transport, folder, ranks)
    });
    for (transport, folder, _ranks) in &stopped {
        let errors = survivors(folder.path());
        for error in errors {
            assert!(error.contains("all_reduce(f32[1048576])"), "{transport:?}: {error}");
            assert!(error.contains("timed out after 10s"), "{transport:?}: {error}");
            assert!(error.contains("rank 2 does not answer: its process is stopped"), "{transport:?}: {error}");
        }
    }
}

/// Shared memory has no name that could be left behind, and no descriptor that a child could inherit.
#[test]
fn nothing_is_left_of_killed_ranks() {
    let named = || -> Vec<String> {
        let entries = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    };
    let before = named();
    let folder = tempfile::tempdir().unwrap();
    let mut ranks = start_in("rank_process", "", folder.path(), TRANSPORTS[0]);
    for rank in &ranks.0 {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", rank.id())).unwrap();
        assert!(maps.contains("/memfd:candle-ddp-"), "it does not use shared memory: {maps}");
        for descriptor in std::fs::read_dir(format!("/proc/{}/fd", rank.id())).unwrap().flatten() {
            let target = std::fs::read_link(descriptor.path()).unwrap_or_default();
            if target.to_string_lossy().contains("candle-ddp-") {
                let number = descriptor.file_name().into_string().unwrap();
                let info = std::fs::read_to_string(format!("/proc/{}/fdinfo/{number}", rank.id())).unwrap();
                let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap().trim();
                let closes = i32::from_str_radix(flags, 8).unwrap() & 0o2000000 != 0;
                assert!(closes, "{target:?} stays open in a child: {flags}");
            }
        }
    }
    for rank in &mut ranks.0 {
        rank.kill().unwrap();
        rank.wait().unwrap();
    }
    let left: Vec<String> = named().into_iter().filter(|name| !before.contains(name)).collect();
    assert!(left.iter().all(|name| !name.contains("candle")), "{left:?}");
}

/// A rank in a scenario in which processes end without dropping their group. It writes
/// down its error, or an empty text, and ends in the same way.
#[test]
#[ignore = "started by other tests"]
fn ending_rank_process() {
    let [rank, folder] = [RANK, FOLDER].map(|variable| std::env::var(variable).unwrap());
    let (store, rank) = (Arc::new(store_in(folder.as_ref())), rank.parse::<usize>().unwrap());
    let scenario = std::env::var(SCENARIO).unwrap();
    let options = CpuOptions { timeout: PATIENCE, ..CpuOptions::default() };
    let communicator = CpuCommunicator::new(store.clone(), rank, WORLD_SIZE, options).unwrap();
    store.set(&format!("ready/{rank}"), b"").unwrap();
    let result = match scenario.as_str() {
        "given" => give_everything(&communicator, &store),
        "waiting" => give_in_turn(&communicator, &store),
        _ => broadcast_after_a_death(&communicator, &store),
    };
    let text = result.map_or_else(|error| error.to_string(), |()| String::new());
    store.set(&format!("error/{rank}"), text.as_bytes()).unwrap();
    std::process::exit(0);
}

const COUNT: usize = 1000;

fn values(value: f32) -> Tensor {
    Tensor::full(value, COUNT, &Device::Cpu).unwrap()
}

fn assert_values(tensor: &Tensor, expected: &[f32]) {
    let expected: Vec<f32> = expected.iter().flat_map(|value| [*value; COUNT]).collect();
    assert_eq!(tensor.to_vec1::<f32>().unwrap(), expected);
}

/// The last rank receives everything after the others are gone, and fails when it needs more.
fn give_everything(communicator: &CpuCommunicator, store: &FileStore) -> Result<()> {
    let (rank, last) = (communicator.rank(), WORLD_SIZE - 1);
    if rank == last {
        store.wait(&["gone"], Some(PATIENCE))?;
    }
    let own = values(rank as f32);
    let broadcast = values(rank as f32 + 5.0);
    communicator.run(Collective::Broadcast { tensor: broadcast.clone(), root: 0 })?;
    assert_values(&broadcast, &[5.0]);
    let all = || Tensor::zeros(WORLD_SIZE * COUNT, DType::F32, &Device::Cpu).unwrap();
    let gathered = all();
    let output = (rank == last).then(|| gathered.clone());
    communicator.run(Collective::Gather { output, input: own.clone(), root: last })?;
    let reduced = values(rank as f32);
    communicator.run(Collective::Reduce { tensor: reduced.clone(), root: last, op: ReduceOp::Sum })?;
    let scattered = values(-1.0);
    let input = (rank == 1).then(|| Tensor::cat(&[values(0.0), values(1.0), values(2.0), values(3.0)], 0).unwrap());
    communicator.run(Collective::Scatter { output: scattered.clone(), input, root: 1 })?;
    assert_values(&scattered, &[rank as f32]);
    if rank != last {
        return communicator.run(Collective::Send { tensor: own, peer: last });
    }
    assert_values(&gathered, &[0.0, 1.0, 2.0, 3.0]);
    assert_values(&reduced, &[6.0]);
    for peer in 0..last {
        let received = values(-1.0);
        communicator.run(Collective::Recv { tensor: received.clone(), peer })?;
        assert_values(&received, &[peer as f32]);
    }
    // Rank 1 did not send a second message.
    communicator.run(Collective::Recv { tensor: own, peer: 1 })
}

/// Ranks 1 and 2 take part in the call and end while the last rank is still in it; rank 0 comes later.
fn give_in_turn(communicator: &CpuCommunicator, store: &FileStore) -> Result<()> {
    let (rank, last) = (communicator.rank(), WORLD_SIZE - 1);
    if rank == 0 {
        store.wait(&["gone"], Some(PATIENCE))?;
    }
    let gathered = Tensor::zeros(WORLD_SIZE * COUNT, DType::F32, &Device::Cpu).unwrap();
    let output = (rank == last).then(|| gathered.clone());
    communicator.run(Collective::Gather { output, input: values(rank as f32), root: last })?;
    if rank == last {
        assert_values(&gathered, &[0.0, 1.0, 2.0, 3.0]);
    }
    Ok(())
}

/// Rank 0 starts a broadcast, for which the others wait, after one receiver was killed. A rank that completes it before
/// the death is noticed gets the error in its next call.
fn broadcast_after_a_death(communicator: &CpuCommunicator, store: &FileStore) -> Result<()> {
    match communicator.rank() {
        0 => store.wait(&["gone"], Some(PATIENCE))?,
        VICTIM => std::thread::sleep(PATIENCE),
        _ => {}
    }
    communicator.run(Collective::Broadcast { tensor: values(1.0), root: 0 })?;
    communicator.run(Collective::Barrier)
}

/// Returns the results that the given ranks wrote down.
fn errors_of(folder: &Path, ranks: impl IntoIterator<Item = usize>) -> Vec<String> {
    let store = store_in(folder);
    let error = |rank| String::from_utf8(store.get(&format!("error/{rank}")).unwrap()).unwrap();
    ranks.into_iter().map(error).collect()
}

#[test]
fn sent_data_arrives_after_the_senders_process_is_gone() {
    for transport in TRANSPORTS {
        let folder = tempfile::tempdir().unwrap();
        let mut ranks = start_in("ending_rank_process", "given", folder.path(), transport);
        ranks.0[..WORLD_SIZE - 1].iter_mut().for_each(|rank| assert!(rank.wait().unwrap().success()));
        store_in(folder.path()).set("gone", b"").unwrap();
        let errors = errors_of(folder.path(), 0..WORLD_SIZE);
        let (error, others) = errors.split_last().unwrap();
        assert!(others.iter().all(String::is_empty), "{transport:?}: {errors:?}");
        let expected = "rank 1 is gone: its connection to rank 3 closed during recv(f32[1000]), sequence 2";
        assert!(error.starts_with(expected), "{transport:?}: {error:?}");
    }
}

#[test]
fn a_rank_may_end_while_others_finish_a_call_it_took_part_in() {
    for transport in TRANSPORTS {
        let folder = tempfile::tempdir().unwrap();
        let mut ranks = start_in("ending_rank_process", "waiting", folder.path(), transport);
        ranks.0[1..WORLD_SIZE - 1].iter_mut().for_each(|rank| assert!(rank.wait().unwrap().success()));
        store_in(folder.path()).set("gone", b"").unwrap();
        let errors = errors_of(folder.path(), 0..WORLD_SIZE);
        assert!(errors.iter().all(String::is_empty), "{transport:?}: {errors:?}");
    }
}

#[test]
fn a_root_notices_a_dead_receiver_and_tells_the_others() {
    for transport in TRANSPORTS {
        let folder = tempfile::tempdir().unwrap();
        let mut ranks = start_in("ending_rank_process", "root", folder.path(), transport);
        ranks.0[VICTIM].kill().unwrap();
        ranks.0[VICTIM].wait().unwrap();
        store_in(folder.path()).set("gone", b"").unwrap();
        for error in survivors(folder.path()) {
            assert!(error.starts_with("rank 2 is gone: its connection to rank "), "{transport:?}: {error:?}");
        }
    }
}
