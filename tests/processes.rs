//! DistributedDataParallel with ranks as real processes: under the real launcher, and with ranks that really die.
//!
//! The processes are this test binary itself, told by an environment variable to be a rank.
#![allow(clippy::unwrap_used)] // a failed test may panic
mod common;

use candle_core::{DType, Device, IndexOp, Module, Tensor};
use candle_ddp::{DdpOptions, DistributedDataParallel, InitOptions, ProcessGroup, Result, init_process_group};
use candle_nn::{Linear, Optimizer, SGD, VarBuilder, VarMap, linear};
use common::{assert_close, fill, floats, tensor, var};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Names the job of a rank; unset in the test's own process.
const JOB: &str = "CANDLE_DDP_TEST_JOB";
/// The folder in which ranks leave what they found.
const FOLDER: &str = "CANDLE_DDP_TEST_FOLDER";

struct Net(Linear, Linear);

impl Net {
    fn new(vb: VarBuilder) -> candle_core::Result<Self> {
        Ok(Self(linear(4, 8, vb.pp("a"))?, linear(8, 2, vb.pp("b"))?))
    }
}

impl Module for Net {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.1.forward(&self.0.forward(x)?.tanh()?)
    }
}

/// The entrance for ranks: libtest runs it in every process, and it does nothing in the test's own.
#[test]
fn rank_of_another_test() {
    let Ok(job) = std::env::var(JOB) else { return };
    let folder = std::env::var(FOLDER).unwrap();
    let timeout = Duration::from_secs(if job == "frozen" { 3 } else { 60 });
    let init_method = std::env::var("INIT_METHOD").unwrap_or_else(|_| "env://".to_string());
    let die_with_parent = job == "orphan";
    let pg = init_process_group(InitOptions { timeout, init_method, die_with_parent, ..Default::default() }).unwrap();
    let report = |text: &str| std::fs::write(format!("{folder}/{job}-rank{}", pg.rank()), text).unwrap();
    match job.as_str() {
        "train" => report(&train(&pg).unwrap()),
        // Until something happens to one of the ranks.
        "killed" | "frozen" => loop {
            if let Err(error) = exchange(&pg, &folder) {
                return report(&error.to_string());
            }
        },
        // Until its parent dies.
        "orphan" | "left_alone" => {
            report(&std::process::id().to_string());
            std::thread::sleep(timeout);
        }
        // Rank 1 does not come to make the new group.
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

/// Five steps; returns the final parameters.
fn train(pg: &ProcessGroup) -> Result<String> {
    let varmap = VarMap::new();
    let ddp = DistributedDataParallel::new(pg, &varmap, DType::F32, |vb| Net::new(vb), DdpOptions::default())?;
    fill(&varmap, 3);
    let mut optimizer = SGD::new(ddp.parameters(), 0.3)?;
    let x = tensor(&[pg.world_size() * 5, 4], 1).i(pg.rank() * 5..(pg.rank() + 1) * 5)?;
    for _ in 0..5 {
        let loss = ddp.forward(&x)?.sqr()?.mean_all()?;
        optimizer.step(&ddp.backward(&loss)?)?;
    }
    let parameters: Vec<f32> = ddp.parameters().iter().flat_map(|var| floats(var)).collect();
    Ok(parameters.iter().map(f32::to_string).collect::<Vec<_>>().join(" "))
}

/// A large all-reduce, and a sign that ranks are in the middle of such.
fn exchange(pg: &ProcessGroup, folder: &str) -> Result<()> {
    let large = Tensor::ones(4 << 20, DType::F32, &Device::Cpu)?;
    pg.all_reduce(&large, candle_ddp::ReduceOp::Sum)?;
    let sign = format!("{folder}/running-rank{}", pg.rank());
    std::fs::write(&sign, "").map_err(candle_core::Error::msg)?;
    Ok(())
}

fn rank_command(program: &Path, job: &str, folder: &Path) -> Command {
    let mut command = Command::new(program);
    command.env(JOB, job).env(FOLDER, folder).env("RAYON_NUM_THREADS", "1");
    command
}

const RANK_ARGUMENTS: [&str; 4] = ["rank_of_another_test", "--exact", "--nocapture", "--test-threads=1"];

/// As under torchrun, which gives its workers no parent-death signal.
#[test]
#[cfg(target_os = "linux")]
fn a_rank_dies_with_its_parent_where_it_was_asked_to() {
    for (job, dies) in [("orphan", true), ("left_alone", false)] {
        let folder = tempfile::tempdir().unwrap();
        let mut parent = rank_command(Path::new("sh"), job, folder.path());
        parent.args(["-c", r#""$0" "$@"; true"#]).arg(std::env::current_exe().unwrap()).args(RANK_ARGUMENTS);
        parent.envs([("RANK", "0"), ("WORLD_SIZE", "1")]);
        parent.env("INIT_METHOD", format!("file://{}", folder.path().join("store").display())).stdout(Stdio::null());
        let mut parent = parent.spawn().unwrap();
        let report = folder.path().join(format!("{job}-rank0"));
        let start = Instant::now();
        let rank = loop {
            match std::fs::read_to_string(&report).unwrap_or_default().parse::<i32>() {
                Ok(rank) => break rustix::process::Pid::from_raw(rank).unwrap(),
                Err(_) => assert!(start.elapsed() < Duration::from_secs(60), "the rank does not start"),
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        parent.kill().unwrap();
        parent.wait().unwrap();
        // Whoever adopted it may take its time to wait for it.
        let gone = || {
            let stat = std::fs::read_to_string(format!("/proc/{rank}/stat")).unwrap_or_default();
            stat.is_empty() || stat.contains(") Z ")
        };
        let start = Instant::now();
        while dies && !gone() && start.elapsed() < Duration::from_secs(30) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let died = gone();
        if !died {
            rustix::process::kill_process(rank, rustix::process::Signal::KILL).unwrap();
        }
        assert_eq!(died, dies, "{job}");
    }
}

#[test]
fn processes_under_the_launcher_train_like_one() {
    let this = std::env::current_exe().unwrap();
    for world in [2, 3] {
        let folder = tempfile::tempdir().unwrap();
        let mut launcher = rank_command(Path::new(env!("CARGO_BIN_EXE_ddprun")), "train", folder.path());
        launcher.args(["--standalone", "--nproc-per-node", &world.to_string()]).arg(&this).args(RANK_ARGUMENTS);
        let output = launcher.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let varmap = VarMap::new();
        let net = Net::new(VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu)).unwrap();
        fill(&varmap, 3);
        let vars: Vec<_> = ["a.weight", "a.bias", "b.weight", "b.bias"].map(|name| var(&varmap, name)).into();
        let mut optimizer = SGD::new(vars.clone(), 0.3).unwrap();
        let x = tensor(&[world * 5, 4], 1);
        for _ in 0..5 {
            optimizer.backward_step(&net.forward(&x).unwrap().sqr().unwrap().mean_all().unwrap()).unwrap();
        }
        let expected: Vec<f32> = vars.iter().flat_map(|var| floats(var)).collect();
        let found: Vec<String> = (0..world)
            .map(|rank| std::fs::read_to_string(folder.path().join(format!("train-rank{rank}"))).unwrap())
            .collect();
        assert!(found.iter().all(|other| *other == found[0]), "ranks must agree bit for bit");
        let found: Vec<f32> = found[0].split(' ').map(|value| value.parse().unwrap()).collect();
        assert_close(&found, &expected, 1e-5, &format!("{world} processes"));
    }
}

/// Three ranks that exchange large tensors until `harm` befalls rank 1; returns what the others report.
fn survivors(job: &str, harm: impl Fn(&Child)) -> [String; 2] {
    let folder = tempfile::tempdir().unwrap();
    let this = std::env::current_exe().unwrap();
    let init_method = format!("file://{}", folder.path().join("store").display());
    let mut ranks: Vec<Child> = (0..3)
        .map(|rank| {
            let mut command = rank_command(&this, job, folder.path());
            command.args(RANK_ARGUMENTS).env("INIT_METHOD", &init_method);
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", "3");
            command.stdout(Stdio::null()).spawn().unwrap()
        })
        .collect();
    let deadline = Instant::now() + Duration::from_secs(60);
    while !(0..3).all(|rank| folder.path().join(format!("running-rank{rank}")).exists()) {
        assert!(Instant::now() < deadline, "the ranks did not start");
        std::thread::sleep(Duration::from_millis(20));
    }
    harm(&ranks[1]);
    let reports = [0, 2].map(|rank| {
        ranks[rank].wait().unwrap();
        std::fs::read_to_string(folder.path().join(format!("{job}-rank{rank}"))).unwrap()
    });
    // SIGKILL ends a stopped process as well.
    let _ = ranks[1].kill();
    ranks[1].wait().unwrap();
    reports
}

#[test]
fn the_death_of_a_rank_is_an_error_that_names_it_on_all_others() {
    for job in ["killed", "joining"] {
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
        assert!(report.contains("timed out after 3s") && report.contains("rank 1"), "{report}");
    }
}
