//! A job under the real launcher while strangers attack its store: it continues, and they cost little.
//!
//! `CANDLE_DDP_LOAD` sets how many connections each kind of stranger holds or makes (default 300); with 10000, the test needs
//! `ulimit -n 20000`.
#![cfg(target_os = "linux")]
use crate::common::test_arguments;
use candle_core::{Device, Tensor};
use candle_ddp::rendezvous::Store;
use candle_ddp::{InitOptions, ReduceOp, init_process_group};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const FOLDER: &str = "CANDLE_DDP_TEST_FOLDER";
const PATIENCE: Duration = Duration::from_secs(120);
const VALIDATE: [u8; 5] = [0, 0xce, 0xf7, 0x85, 0x3c];
const OFFER: [u8; 5] = [0x0d, 0x01, 0x00, 0xd9, 0xcd];

fn load() -> usize {
    std::env::var("CANDLE_DDP_LOAD").map_or(300, |count| count.parse().unwrap())
}

/// A rank: makes group after group, whose ranks find each other by the store, until the test ends it.
#[test]
#[ignore = "started by other tests"]
fn rank() {
    let folder = std::env::var(FOLDER).unwrap();
    let path = |name: &str| Path::new(&folder).join(name);
    let pg = init_process_group(InitOptions { timeout: PATIENCE, ..Default::default() }).unwrap();
    if pg.rank() == 0 {
        std::fs::write(path("port"), std::env::var("MASTER_PORT").unwrap()).unwrap();
    }
    let mut keys = None;
    for round in 1.. {
        let group = pg.new_group(&[0, 1]).unwrap().unwrap();
        let is_over = if path("go").exists() { 1f32 } else { 0. };
        let sum = Tensor::full(is_over, 1, &Device::Cpu).unwrap();
        group.all_reduce(&sum, ReduceOp::Sum).unwrap();
        // The groups leave nothing behind in the store.
        let now = pg.store().num_keys().unwrap();
        assert_eq!(*keys.get_or_insert(now), now, "round {round}");
        group.barrier().unwrap();
        if pg.rank() == 0 {
            std::fs::write(path("round.new"), format!("{round}\n")).unwrap();
            std::fs::rename(path("round.new"), path("round")).unwrap();
        }
        if sum.to_vec1::<f32>().unwrap()[0] > 0. {
            return;
        }
    }
}

/// Ends the run if its test fails.
struct Run(Child);

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(started.elapsed() < PATIENCE, "timed out waiting for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The resident memory of a process in bytes, and its number of descriptors.
fn usage(pid: u32) -> (u64, usize) {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let resident: u64 = resident.trim().trim_end_matches("kB").trim().parse().unwrap();
    (resident << 10, std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count())
}

/// A connection, which may be refused or reset.
fn connect(port: u16) -> Option<TcpStream> {
    let stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    Some(stream)
}

fn field(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes(), bytes].concat()
}

/// The bytes that a kind of stranger sends, by the number of its connection.
type Bytes = Box<dyn Fn(usize) -> Vec<u8> + Send + Sync>;

/// The kinds of strangers.
fn kinds() -> Vec<(&'static str, Bytes)> {
    let set = |index: usize| [&[1][..], &field(format!("/flood {index}").as_bytes()), &field(&[7; 1 << 18])].concat();
    let garbage = |index: usize| -> Vec<u8> {
        (0..1000u64)
            .map(|byte| ((byte + index as u64 * 7919).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8)
            .collect()
    };
    vec![
        ("half-open", Box::new(|_| Vec::new())),
        ("half a greeting", Box::new(|_| VALIDATE[..3].to_vec())),
        ("no proof", Box::new(|_| [VALIDATE, OFFER].concat())),
        ("a guess", Box::new(|index| [&VALIDATE[..], &OFFER, &[0xdd], &[index as u8; 64]].concat())),
        ("HTTP", Box::new(|_| b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: a scanner\r\n\r\n".to_vec())),
        ("garbage", Box::new(garbage)),
        ("garbage after a greeting", Box::new(move |index| [&VALIDATE[..], &garbage(index)].concat())),
        ("SET", Box::new(move |index| [&VALIDATE[..], &set(index), &set(index + 1)].concat())),
        // Lists of all keys, never read.
        ("slow readers", Box::new(|_| [&VALIDATE[..], &[17; 4096]].concat())),
    ]
}

#[test]
fn a_job_goes_on_while_strangers_attack_its_store() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let mut command = Command::new(crate::common::ddprun());
    command.args(["--nproc-per-node", "2"]).arg(std::env::current_exe().unwrap());
    command.args(test_arguments(module_path!(), "rank")).env(FOLDER, folder.path()).env("RAYON_NUM_THREADS", "1");
    command.env_remove("CANDLE_DDP_SECRET").stdout(std::fs::File::create(path("out")).unwrap());
    let mut run = Run(command.stderr(std::fs::File::create(path("err")).unwrap()).spawn().unwrap());
    let said = || std::fs::read_to_string(path("err")).unwrap() + &std::fs::read_to_string(path("out")).unwrap();
    let port = wait_for("the store", || number(&path("port"))) as u16;
    let rounds = |more: u64| {
        let now = number(&path("round")).unwrap_or(0);
        wait_for("the job to continue", || number(&path("round")).filter(|round| *round >= now + more))
    };
    rounds(3);
    let started = Instant::now();
    let (memory, descriptors) = usage(run.0.id());
    let count = load();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Strangers that reconnect all the time.
        for (_, bytes) in kinds() {
            let stop = &stop;
            scope.spawn(move || {
                for index in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let Some(mut stream) = connect(port) else { continue };
                    let _ = stream.write_all(&bytes(index));
                    let _ = stream.read(&mut [0; 64]);
                }
            });
        }
        // And strangers that hold their connections.
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for (kind, bytes) in kinds() {
                let mut held = Vec::with_capacity(count);
                for index in 0..count {
                    let Some(mut stream) = connect(port) else { continue };
                    let _ = stream.write_all(&bytes(index));
                    held.push(stream);
                    if index % 100 == 0 {
                        let (resident, open) = usage(run.0.id());
                        assert!(resident < memory + (96 << 20), "{kind} {index}: {resident} bytes, {memory} before");
                        assert!(open < descriptors + 550, "{kind} {index}: {open} descriptors, {descriptors} before");
                    }
                }
                assert!(held.len() > count / 2, "{kind}: only {} of {count} connections", held.len());
                rounds(2);
            }
        }));
        stop.store(true, Ordering::Relaxed);
        if let Err(panic) = result {
            println!("{}", said());
            std::panic::resume_unwind(panic);
        }
    });
    std::fs::write(path("go"), "").unwrap();
    let status = run.0.wait().unwrap();
    assert!(status.success(), "{}", said());
    // The strangers are reported, a few of them.
    let err = std::fs::read_to_string(path("err")).unwrap();
    let reports = err.matches("closes the connection of 127.0.0.1").count() as u64;
    assert!(reports > 0 && reports <= 10 * (2 + started.elapsed().as_secs() / 10), "{err}");
}
