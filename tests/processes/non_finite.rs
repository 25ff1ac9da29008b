//! Steps that are not finite, on ranks that are processes under the launcher, over shared memory and TCP.
use crate::common::{fill, floats, launch_test, tensor, tiny};
use candle_ddp::nn::linear;
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW};
use candle_ddp::{
    DdpOptions, DistributedDataParallel, Error, Failure, InitOptions, OnNonFinite, ProcessGroup, Result, StopSignals,
    init_process_group,
};
use candle_nn::VarMap;
use rustix::process::{Signal, getpid, kill_process};
use std::path::Path;
use std::process::Output;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The variable that names a rank's job.
const JOB: &str = "CANDLE_DDP_TEST_NON_FINITE_JOB";
const FOLDER: &str = "CANDLE_DDP_TEST_FOLDER";

/// The entry point of ranks.
#[test]
#[ignore = "started by other tests"]
fn rank_of_another_test() {
    // The launcher ends the others when one was killed; they come to their own end first.
    let stop_signals = StopSignals { sigterm: true, ..Default::default() };
    let options = InitOptions { timeout: Duration::from_secs(120), stop_signals, ..Default::default() };
    let pg = init_process_group(options).unwrap();
    let result = match std::env::var(JOB).unwrap().as_str() {
        "dies" => dies(&pg),
        job => train(&pg, job).unwrap(),
    };
    std::fs::write(Path::new(&std::env::var_os(FOLDER).unwrap()).join(format!("rank{}", pg.rank())), result).unwrap();
}

fn options(policy: OnNonFinite) -> DdpOptions {
    DdpOptions { on_non_finite: Some(policy), ..tiny() }
}

/// Trains. The last rank's inputs are bad in two steps, or nobody makes these steps. At the end they are bad too often.
fn train(pg: &ProcessGroup, job: &str) -> Result<String> {
    let varmap = VarMap::new();
    let ddp = DistributedDataParallel::with_options(
        pg,
        &varmap,
        |vb| linear(3, 2, vb),
        options(OnNonFinite::Skip { at_most: 2 }),
    )?;
    fill(&varmap, 1);
    let mut optimizer = AdamW::new(&ddp, ParamsAdamW { lr: 0.1, ..Default::default() })?;
    let is_last = pg.rank() + 1 == pg.world_size();
    let backward = |step: u64, factor: f64| {
        let x = (tensor(&[4, 3], 10 * step + pg.rank() as u64) * if is_last { factor } else { 1. })?;
        ddp.backward(&ddp.forward(&x)?.sqr()?.mean_all()?)
    };
    for step in 0..8 {
        let factor = match step {
            2 => f64::NAN,
            3 => f64::INFINITY,
            _ => 1.,
        };
        if job == "bad" || factor == 1. {
            optimizer.step(&backward(step, factor)?)?;
        }
    }
    assert_eq!(ddp.skipped_steps(), if job == "bad" { 2 } else { 0 });
    let state: Vec<f32> = ddp.parameters().iter().flat_map(|var| floats(var)).collect();
    for _ in 0..2 {
        optimizer.step(&backward(9, f64::NAN)?)?;
    }
    let error = backward(9, f64::NAN).map(drop).unwrap_err();
    Ok(format!("{state:?}\n{error}"))
}

/// Each pass ends in the question which gradient was the first. Rank 1 is killed at some moment of these.
fn dies(pg: &ProcessGroup) -> String {
    static PASSES: AtomicU64 = AtomicU64::new(0);
    if pg.rank() == 1 {
        std::thread::spawn(|| {
            while PASSES.load(Ordering::Relaxed) < 20 {
                std::hint::spin_loop();
            }
            kill_process(getpid(), Signal::KILL).unwrap();
        });
    }
    let ddp =
        DistributedDataParallel::with_options(pg, &VarMap::new(), |vb| linear(3, 2, vb), options(OnNonFinite::Stop))
            .unwrap();
    loop {
        let loss = ddp.forward(&(tensor(&[4, 3], 1) * f64::NAN).unwrap()).unwrap().mean_all().unwrap();
        match ddp.backward(&loss).map(drop).unwrap_err() {
            Error::NonFinite { rank: Some(0), .. } => PASSES.fetch_add(1, Ordering::Relaxed),
            error => {
                assert!(matches!(&error, Error::Group(Failure::PeerGone { peer: 1, .. })), "{error:?}");
                return error.to_string();
            }
        };
    }
}

/// Runs this test binary as `world_size` ranks of `job`. Returns the results of the ranks that have one.
fn run(job: &str, world_size: usize, transport: &str) -> (Vec<String>, Output) {
    let folder = tempfile::tempdir().unwrap();
    let mut launcher = launch_test(module_path!(), world_size, &["--standalone"]);
    launcher.env(JOB, job).env(FOLDER, folder.path()).env("CANDLE_DDP_CPU_TRANSPORT", transport);
    let output = launcher.env("RAYON_NUM_THREADS", "1").env("OMP_NUM_THREADS", "1").output().unwrap();
    let result = |rank| std::fs::read_to_string(folder.path().join(format!("rank{rank}"))).ok();
    ((0..world_size).filter_map(result).collect(), output)
}

#[test]
fn processes_leave_out_the_same_steps() {
    for (world_size, transport) in [(1, "shm"), (2, "shm"), (2, "tcp"), (3, "tcp")] {
        let [bad, left_out] = ["bad", "left-out"].map(|job| run(job, world_size, transport));
        assert!(bad.1.status.success() && bad.0.len() == world_size, "{bad:?}");
        assert!(bad.0.iter().chain(&left_out.0).all(|rank| rank == &bad.0[0]), "{bad:?}\n{left_out:?}");
        let expected = format!("on rank {} contains a NaN, and 3 steps in a row were not finite", world_size - 1);
        assert!(bad.0[0].contains(&expected), "{bad:?}");
    }
}

#[test]
fn a_rank_that_is_killed_while_ranks_ask_each_other_ends_them_all() {
    for transport in ["shm", "tcp"] {
        let (ranks, output) = run("dies", 3, transport);
        assert!(!output.status.success());
        assert_eq!(ranks.len(), 2, "{ranks:?} {output:?}");
    }
}
