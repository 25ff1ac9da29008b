//! DistributedDataParallel with ranks as real processes: under the real launcher, and with ranks that are killed.
//!
//! The processes are this test binary itself.
use crate::common::bad_batches::bad_batches;
use crate::common::{Mlp, assert_close, fill, floats, free_port, succeed, tensor, test_arguments, var};
use candle_core::{DType, Device, Module, Tensor};
use candle_ddp::rendezvous::{FileStore, Store, TcpStore};
use candle_ddp::{
    DdpOptions, DistributedDataParallel, InitOptions, ProcessGroup, ReplicaCheck, Result, Role, init_process_group,
};
use candle_nn::{Optimizer, SGD, VarBuilder, VarMap, linear};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The variable that names a rank's job.
const JOB: &str = "CANDLE_DDP_TEST_JOB";
/// The folder to which ranks write their results.
const FOLDER: &str = "CANDLE_DDP_TEST_FOLDER";
/// Long enough for a busy machine: no wait takes this long unless something hangs.
const PATIENCE: Duration = Duration::from_secs(120);

fn net(vb: VarBuilder) -> candle_core::Result<Mlp> {
    Mlp::new([4, 8, 2], ["a", "b"], vb)
}

/// The entry point of ranks.
#[test]
#[ignore = "started by other tests"]
fn rank_of_another_test() {
    let [job, folder] = [JOB, FOLDER].map(|variable| std::env::var(variable).unwrap());
    let timeout = Duration::from_secs(match job.as_str() {
        "frozen" | "init-frozen" => 15,
        _ => 120,
    });
    let init_method = std::env::var("INIT_METHOD").unwrap_or_else(|_| "env://".to_string());
    let die_with_parent = job == "orphan";
    let rank = std::env::var("RANK").unwrap();
    let report = |text: &str| std::fs::write(format!("{folder}/{job}-rank{rank}"), text).unwrap();
    if let Ok(pause) = std::env::var(PAUSE) {
        log::set_boxed_logger(Box::new(Interrupting { panics: pause == "panic", go: format!("{folder}/go") })).unwrap();
        log::set_max_level(log::LevelFilter::Info);
    }
    let options = InitOptions { timeout, init_method, die_with_parent, ..Default::default() };
    let pg = match init_process_group(options) {
        Ok(pg) => pg,
        Err(error) if job.starts_with("init") => {
            return report(&error.to_string());
        }
        Err(error) => panic!("{error}"),
    };
    match job.as_str() {
        "init" => report(&pg.barrier().map_or_else(|error| error.to_string(), |()| "all is well".to_string())),
        "train" => report(&train(&pg).unwrap()),
        "bad-batches" => {
            let weights = bad_batches(&pg).unwrap();
            report(&weights.iter().map(f32::to_string).collect::<Vec<_>>().join(" "));
        }
        // Runs until something happens to one of the ranks.
        "killed" | "frozen" => loop {
            if let Err(error) = exchange(&pg, &folder) {
                return report(&error.to_string());
            }
        },
        "comparing" => report(&compare_again_and_again(&pg, &folder).unwrap_err().to_string()),
        // Runs until its parent dies.
        "orphan" | "left_alone" => {
            report(&std::process::id().to_string());
            std::thread::sleep(timeout);
        }
        // Rank 1 does not join the creation of the new group.
        "joining" => {
            exchange(&pg, &folder).unwrap();
            match pg.rank() {
                1 => std::thread::sleep(timeout),
                _ => report(&pg.new_group(&[0, 1, 2]).map(drop).unwrap_err().to_string()),
            }
        }
        other => panic!("no such job: {other}"),
    }
}

/// A rank's action between the rendezvous and connecting to its peers: `panic`, or wait for the file `go`.
const PAUSE: &str = "CANDLE_DDP_TEST_PAUSE";

/// A logger is the program's own code that runs in the middle of initialisation.
struct Interrupting {
    panics: bool,
    go: String,
}

impl log::Log for Interrupting {
    fn enabled(&self, _: &log::Metadata) -> bool {
        true
    }

    fn log(&self, record: &log::Record) {
        if record.args().to_string().contains("backend Cpu") {
            assert!(!self.panics, "out of luck");
            while !Path::new(&self.go).exists() {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }

    fn flush(&self) {}
}

/// Trains five steps and returns the final parameters.
fn train(pg: &ProcessGroup) -> Result<String> {
    let varmap = VarMap::new();
    let ddp = DistributedDataParallel::new(pg, &varmap, |vb| net(vb))?;
    fill(&varmap, 3);
    let mut optimizer = SGD::new(ddp.parameters(), 0.3)?;
    let x = tensor(&[pg.world_size() * 5, 4], 1).narrow(0, 5 * pg.rank(), 5)?;
    for _ in 0..5 {
        optimizer.step(&ddp.backward(&ddp.forward(&x)?.sqr()?.mean_all()?)?)?;
    }
    let parameters: Vec<f32> = ddp.parameters().iter().flat_map(|var| floats(var)).collect();
    Ok(parameters.iter().map(f32::to_string).collect::<Vec<_>>().join(" "))
}

/// Runs a large all-reduce, and signals that the ranks are in the middle of such calls.
fn exchange(pg: &ProcessGroup, folder: &str) -> Result<()> {
    let large = Tensor::ones(4 << 20, DType::F32, &Device::Cpu)?;
    pg.all_reduce(&large, candle_ddp::ReduceOp::Sum)?;
    let sign = format!("{folder}/running-rank{}", pg.rank());
    std::fs::write(&sign, "").map_err(candle_core::Error::msg)?;
    Ok(())
}

/// Most of the time, the ranks hash a large variable or wait for the other ranks' hashes.
fn compare_again_and_again(pg: &ProcessGroup, folder: &str) -> Result<()> {
    let role = Arc::new(|name: &str| if name == "frozen" { Role::Frozen } else { Role::Parameter });
    let check = ReplicaCheck { every: 1, ..Default::default() };
    let options = DdpOptions { role, replica_check: Some(check), ..Default::default() };
    let build = |vb: VarBuilder| {
        vb.get(8 << 20, "frozen")?;
        linear(4, 2, vb)
    };
    let ddp = DistributedDataParallel::with_options(pg, &VarMap::new(), build, options)?;
    loop {
        ddp.backward(&ddp.forward(&tensor(&[1, 4], 1))?.sum_all()?)?;
        std::fs::write(format!("{folder}/running-rank{}", pg.rank()), "").map_err(candle_core::Error::msg)?;
    }
}

fn rank_command(program: &Path, job: &str, folder: &Path) -> Command {
    let mut command = Command::new(program);
    command.env(JOB, job).env(FOLDER, folder).env("RAYON_NUM_THREADS", "1");
    command
}

/// The arguments with which this test binary becomes a rank.
fn rank_arguments() -> [String; 5] {
    test_arguments(module_path!(), "rank_of_another_test")
}

/// torchrun, too, gives its workers no parent-death signal.
#[test]
#[cfg(target_os = "linux")]
fn a_rank_dies_with_its_parent_if_it_asked_for_that() {
    for (job, dies) in [("orphan", true), ("left_alone", false)] {
        let folder = tempfile::tempdir().unwrap();
        let mut parent = rank_command(Path::new("sh"), job, folder.path());
        parent.args(["-c", r#""$0" "$@"; true"#]).arg(std::env::current_exe().unwrap()).args(rank_arguments());
        parent.envs([("RANK", "0"), ("WORLD_SIZE", "1")]);
        parent.env("INIT_METHOD", format!("file://{}", folder.path().join("store").display())).stdout(Stdio::null());
        let mut parent = parent.spawn().unwrap();
        let report = folder.path().join(format!("{job}-rank0"));
        let start = Instant::now();
        let rank = loop {
            match std::fs::read_to_string(&report).unwrap_or_default().parse::<i32>() {
                Ok(rank) => break rustix::process::Pid::from_raw(rank).unwrap(),
                Err(_) => assert!(start.elapsed() < PATIENCE, "the rank does not start"),
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        parent.kill().unwrap();
        parent.wait().unwrap();
        // The process that adopted the rank may take a while to reap it.
        let gone = || {
            let stat = std::fs::read_to_string(format!("/proc/{rank}/stat")).unwrap_or_default();
            stat.is_empty() || stat.contains(") Z ")
        };
        let start = Instant::now();
        while dies && !gone() && start.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(10));
        }
        let died = gone();
        if !died {
            rustix::process::kill_process(rank, rustix::process::Signal::KILL).unwrap();
        }
        assert_eq!(died, dies, "{job}");
    }
}

/// Returns the reports of `world` ranks that the launcher started with `job`; they must agree bit for bit.
fn launched(job: &str, world: usize) -> Vec<f32> {
    let folder = tempfile::tempdir().unwrap();
    let mut launcher = rank_command(crate::common::ddprun(), job, folder.path());
    launcher.args(["--standalone", "--nproc-per-node", &world.to_string()]);
    succeed(launcher.arg(std::env::current_exe().unwrap()).args(rank_arguments()));
    let report = |rank| std::fs::read_to_string(folder.path().join(format!("{job}-rank{rank}"))).unwrap();
    let found: Vec<String> = (0..world).map(report).collect();
    assert!(found.iter().all(|other| *other == found[0]), "ranks must agree bit for bit");
    found[0].split(' ').map(|value| value.parse().unwrap()).collect()
}

#[test]
fn processes_under_the_launcher_skip_batches_together() {
    for world in [2, 3] {
        launched("bad-batches", world);
    }
}

#[test]
fn processes_under_the_launcher_train_like_one() {
    for world in [2, 3] {
        let varmap = VarMap::new();
        let net = net(VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu)).unwrap();
        fill(&varmap, 3);
        let vars: Vec<_> = ["a.weight", "a.bias", "b.weight", "b.bias"].map(|name| var(&varmap, name)).into();
        let mut optimizer = SGD::new(vars.clone(), 0.3).unwrap();
        let x = tensor(&[world * 5, 4], 1);
        for _ in 0..5 {
            optimizer.backward_step(&net.forward(&x).unwrap().sqr().unwrap().mean_all().unwrap()).unwrap();
        }
        let expected: Vec<f32> = vars.iter().flat_map(|var| floats(var)).collect();
        assert_close(&launched("train", world), &expected, 1e-5, &format!("{world} processes"));
    }
}

/// Runs three ranks that exchange large tensors until `harm` happens to rank 1; returns the others' reports.
fn survivors(job: &str, harm: impl Fn(&Child)) -> [String; 2] {
    let folder = tempfile::tempdir().unwrap();
    let this = std::env::current_exe().unwrap();
    let init_method = format!("file://{}", folder.path().join("store").display());
    let mut ranks: Vec<Child> = (0..3)
        .map(|rank| {
            let mut command = rank_command(&this, job, folder.path());
            command.args(rank_arguments()).env("INIT_METHOD", &init_method);
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", "3");
            command.stdout(Stdio::null()).spawn().unwrap()
        })
        .collect();
    let deadline = Instant::now() + PATIENCE;
    while !(0..3).all(|rank| folder.path().join(format!("running-rank{rank}")).exists()) {
        assert!(Instant::now() < deadline, "the ranks did not start");
        std::thread::sleep(Duration::from_millis(20));
    }
    harm(&ranks[1]);
    let reports = [0, 2].map(|rank| {
        ranks[rank].wait().unwrap();
        std::fs::read_to_string(folder.path().join(format!("{job}-rank{rank}"))).unwrap()
    });
    // SIGKILL also ends a stopped process.
    let _ = ranks[1].kill();
    ranks[1].wait().unwrap();
    reports
}

#[test]
fn the_death_of_a_rank_is_an_error_that_names_it_on_all_others() {
    for job in ["killed", "comparing", "joining"] {
        let reports = survivors(job, |child| {
            let pid = rustix::process::Pid::from_child(child);
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        });
        for report in reports {
            assert!(report.contains("rank 1 is gone"), "{job}: {report}");
        }
    }
}

#[test]
fn a_frozen_rank_is_a_time_out_that_names_it_on_all_others() {
    let reports = survivors("frozen", |child| {
        rustix::process::kill_process(rustix::process::Pid::from_child(child), rustix::process::Signal::STOP).unwrap();
    });
    for report in reports {
        assert!(report.contains("timed out after 15s") && report.contains("rank 1"), "{report}");
    }
}

/// Returns the command of a rank that joins the group.
fn joining(job: &str, folder: &Path, init_method: &str, rank: usize, world_size: usize) -> Command {
    let mut command = rank_command(&std::env::current_exe().unwrap(), job, folder);
    command.args(rank_arguments()).env("INIT_METHOD", init_method).stdout(Stdio::null()).stderr(Stdio::null());
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", world_size.to_string());
    command
}

/// Returns the error with which initialisation ended on a rank.
fn outcome(job: &str, folder: &Path, rank: usize, process: &mut Child) -> String {
    process.wait().unwrap();
    std::fs::read_to_string(folder.join(format!("{job}-rank{rank}"))).unwrap()
}

fn signal(process: &Child, signal: rustix::process::Signal) {
    rustix::process::kill_process(rustix::process::Pid::from_child(process), signal).unwrap();
}

/// Starts ranks 0 to `started` of a world with one more rank, and returns when they wait for the last one.
fn waiting_for_the_last(job: &str, folder: &Path, started: usize) -> Vec<Child> {
    let port = free_port();
    let init_method = format!("tcp://127.0.0.1:{port}");
    let start = |rank| joining(job, folder, &init_method, rank, started + 1).spawn().unwrap();
    let ranks: Vec<Child> = (0..started).map(start).collect();
    let store = TcpStore::connect("127.0.0.1", port, PATIENCE).unwrap();
    let keys: Vec<String> = (0..started).map(|rank| format!("candle_ddp/0/0/join/host/{rank}")).collect();
    store.wait(&keys.iter().map(String::as_str).collect::<Vec<_>>(), None).unwrap();
    ranks
}

#[test]
fn initialisation_times_out_if_the_stores_host_is_suspended() {
    let folder = tempfile::tempdir().unwrap();
    let mut ranks = waiting_for_the_last("init-frozen", folder.path(), 4);
    signal(&ranks[0], rustix::process::Signal::STOP);
    for (rank, process) in ranks.iter_mut().enumerate().skip(1) {
        let error = outcome("init-frozen", folder.path(), rank, process);
        assert!(error.contains("timed out after 15s on the store 127.0.0.1:"), "{error}");
        assert!(error.contains("the store does not answer"), "{error}");
    }
    ranks[0].kill().unwrap();
    ranks[0].wait().unwrap();
}

#[test]
fn the_death_of_a_rank_during_initialisation_is_noticed() {
    // One job dies in the rendezvous, which its store notices. The other dies while connecting: ranks wait for its address and
    // for its connection, and its store is a file, which notices nothing.
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let meeting = waiting_for_the_last("init", folders[0].path(), 3);
    let init_method = format!("file://{}", folders[1].path().join("store").display());
    let start = |rank: usize| {
        let mut command = joining("init", folders[1].path(), &init_method, rank, 3);
        if rank == 1 {
            command.env(PAUSE, "wait");
        }
        command.spawn().unwrap()
    };
    let connecting: Vec<Child> = (0..3).map(start).collect();
    let store = FileStore::open(folders[1].path().join("store"), PATIENCE).unwrap();
    store.wait(&["candle_ddp/0/0/cpu/addr/0", "candle_ddp/0/0/backend/1"], None).unwrap();
    let mut jobs = [meeting, connecting];
    for ranks in &mut jobs {
        ranks[1].kill().unwrap();
        ranks[1].wait().unwrap();
    }
    let reasons = ["its process on host ", "it gave no sign of life for 8 s"];
    for ((mut ranks, folder), reason) in jobs.into_iter().zip(&folders).zip(reasons) {
        for rank in [0, 2] {
            let error = outcome("init", folder.path(), rank, &mut ranks[rank]);
            assert!(error.contains(&format!("rank 1 ended the group: {reason}")), "{error}");
        }
    }
}

#[test]
fn an_error_or_a_panic_during_initialisation_is_reported_to_all_ranks() {
    let transport = ("CANDLE_DDP_CPU_TRANSPORT", "none");
    let refused = "CANDLE_DDP_CPU_TRANSPORT=\"none\": it must be auto, tcp or shm (on host ";
    for (failing, (variable, value), expected) in [
        // The rank that hosts the store, and other ranks.
        (0, transport, refused),
        (1, transport, refused),
        (2, (PAUSE, "panic"), "it panicked during initialisation (on host "),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let init_method = format!("tcp://127.0.0.1:{}", free_port());
        let mut ranks: Vec<Child> = (0..3)
            .map(|rank| {
                let mut command = joining("init", folder.path(), &init_method, rank, 3);
                if rank == failing {
                    command.env(variable, value);
                }
                command.spawn().unwrap()
            })
            .collect();
        for rank in (0..3).filter(|rank| *rank != failing) {
            let error = outcome("init", folder.path(), rank, &mut ranks[rank]);
            assert!(error.contains(&format!("rank {failing} ended the group: {expected}")), "rank {rank}: {error}");
        }
        ranks[failing].wait().unwrap();
    }
}

#[test]
fn silent_connections_do_not_end_a_rank_that_has_few_descriptors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let init_method = format!("file://{}", path.display());
    let rank_0 = joining("init", folder.path(), &init_method, 0, 2);
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -n 64; exec \"$0\" \"$@\""]).arg(rank_0.get_program()).args(rank_0.get_args());
    limited.envs(rank_0.get_envs().filter_map(|(name, value)| Some((name, value?)))).stdout(Stdio::null());
    let mut ranks = vec![limited.spawn().unwrap()];
    ranks.push(joining("init", folder.path(), &init_method, 1, 2).env(PAUSE, "wait").spawn().unwrap());
    let store = FileStore::open(&path, PATIENCE).unwrap();
    let address = String::from_utf8(store.get("candle_ddp/0/0/cpu/addr/0").unwrap()).unwrap();
    let address = address.split(' ').next().unwrap().to_string();
    let silent: Vec<_> = (0..100).map(|_| std::net::TcpStream::connect(&address).unwrap()).collect();
    std::fs::write(folder.path().join("go"), "").unwrap();
    for (rank, process) in ranks.iter_mut().enumerate() {
        process.wait().unwrap();
        let report = std::fs::read_to_string(folder.path().join(format!("init-rank{rank}"))).unwrap();
        assert_eq!(report, "all is well", "rank {rank}");
    }
    drop(silent);
}
