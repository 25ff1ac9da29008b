//! Uneven inputs and the flight recorder with ranks as real processes.
//!
//! The processes are this test binary itself.
use crate::common::{assert_close, fill, floats, launch_test, succeed, tensor};
use candle_core::{DType, Device, Module, Tensor};
use candle_ddp::flight_recorder::FlightRecorderOptions;
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW};
use candle_ddp::{
    DistributedDataParallel, InitOptions, JoinOptions, ProcessGroup, ReduceOp, Result, init_process_group,
};
use candle_nn::{Linear, VarBuilder, VarMap, linear};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The variable that names a rank's job.
const JOB: &str = "CANDLE_DDP_TEST_DIAGNOSTICS_JOB";
/// The variable that names the folder of the flight records.
const FOLDER: &str = "CANDLE_DDP_FLIGHT_RECORDER";
const RESULT: &str = "CANDLE_DDP_TEST_RESULT";

/// The entry point of ranks.
#[test]
#[ignore = "started by other tests"]
fn rank_of_another_test() {
    let job = std::env::var(JOB).unwrap();
    let timeout = Duration::from_secs(if job == "diverge" { 15 } else { 120 });
    let flight_recorder = FlightRecorderOptions { on_sigusr1: job == "signal", ..Default::default() };
    let pg = init_process_group(InitOptions { timeout, flight_recorder, ..Default::default() }).unwrap();
    match job.as_str() {
        "uneven" => uneven(&pg).unwrap(),
        "diverge" => diverge(&pg),
        "signal" => signal(&pg).unwrap(),
        other => panic!("no such job: {other}"),
    }
}

/// This test binary as `world` ranks under the launcher.
fn launch(job: &str, world: usize, variables: &[(&str, &Path)]) {
    let mut launcher = launch_test(module_path!(), world, &["--standalone"]);
    succeed(launcher.env(JOB, job).env("RAYON_NUM_THREADS", "1").envs(variables.iter().copied()));
}

fn batch(rank: usize, step: usize) -> Tensor {
    tensor(&[5, 4], (10 * rank + step) as u64)
}

/// Rank r has r + 1 batches.
fn uneven(pg: &ProcessGroup) -> Result<()> {
    let varmap = VarMap::new();
    let ddp = DistributedDataParallel::new(pg, &varmap, |vb| linear(4, 2, vb))?;
    fill(&varmap, 3);
    let mut optimizer = AdamW::new(&ddp, ParamsAdamW { lr: 0.1, ..Default::default() })?;
    let joined = ddp.join(JoinOptions::default(), || {
        (0..=pg.rank()).try_for_each(|step| {
            let grads = ddp.backward(&ddp.forward(&batch(pg.rank(), step))?.sqr()?.mean_all()?)?;
            optimizer.step(&grads)
        })
    })?;
    joined.sync(&mut optimizer)?;
    let weights: Vec<f32> = ddp.parameters().iter().flat_map(|var| floats(var)).collect();
    let path = format!("{}/rank{}", std::env::var(RESULT).unwrap(), pg.rank());
    std::fs::write(path, serde_json::to_string(&weights).unwrap()).unwrap();
    pg.barrier()
}

#[test]
fn processes_with_different_numbers_of_batches_train_like_one() {
    const WORLD: usize = 3;
    let folder = tempfile::tempdir().unwrap();
    launch("uneven", WORLD, &[(RESULT, folder.path())]);
    let varmap = VarMap::new();
    let net: Linear = linear(4, 2, VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu)).unwrap();
    fill(&varmap, 3);
    let named = ["weight", "bias"].map(|name| (name.to_string(), varmap.data().lock().unwrap()[name].clone()));
    let vars: Vec<_> = named.iter().map(|(_, var)| var.clone()).collect();
    let mut optimizer = AdamW::new(named.to_vec(), ParamsAdamW { lr: 0.1, ..Default::default() }).unwrap();
    for step in 0..WORLD {
        let losses = (step..WORLD).map(|rank| net.forward(&batch(rank, step))?.sqr()?.mean_all());
        let losses = losses.collect::<candle_core::Result<Vec<_>>>().unwrap();
        let loss = (Tensor::stack(&losses, 0).unwrap().sum_all().unwrap() / WORLD as f64).unwrap();
        optimizer.step(&loss.backward().unwrap()).unwrap();
    }
    let expected: Vec<f32> = vars.iter().flat_map(|var| floats(var)).collect();
    for rank in 0..WORLD {
        let text = std::fs::read_to_string(folder.path().join(format!("rank{rank}"))).unwrap();
        assert_close(&serde_json::from_str::<Vec<f32>>(&text).unwrap(), &expected, 1e-5, &format!("rank {rank}"));
    }
}

/// Waits until all of `files` exist.
fn wait_for_files(files: &[PathBuf]) {
    let deadline = std::time::Instant::now() + Duration::from_secs(120);
    while !files.iter().all(|file| file.exists()) {
        assert!(std::time::Instant::now() < deadline, "one was not written: {files:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn records(ranks: std::ops::Range<usize>) -> Vec<PathBuf> {
    let folder = PathBuf::from(std::env::var(FOLDER).unwrap());
    ranks.map(|rank| folder.join(format!("rank{rank}.flight.json"))).collect()
}

/// Rank 2 broadcasts where ranks 0 and 1 all-reduce, and rank 3 never comes.
fn diverge(pg: &ProcessGroup) {
    (0..3).for_each(|_| pg.barrier().unwrap());
    let tensor = |elements: usize| Tensor::zeros(elements, DType::F32, pg.device()).unwrap();
    let called = |rank: usize| PathBuf::from(std::env::var(RESULT).unwrap()).join(format!("called{rank}"));
    let result = match pg.rank() {
        2 => {
            // Otherwise the failure could end the group before the others have made their call.
            wait_for_files(&[called(0), called(1)]);
            pg.broadcast(&tensor(10), 0)
        }
        3 => {
            // Its own too: it learns of the others' failure.
            wait_for_files(&records(0..4));
            Ok(())
        }
        rank => {
            let work = pg.all_reduce_async(&tensor(100), ReduceOp::Sum).unwrap();
            std::fs::write(called(rank), "").unwrap();
            work.wait()
        }
    };
    assert_eq!(result.is_ok(), pg.rank() == 3);
}

#[test]
fn the_launcher_explains_who_parted() {
    let folder = tempfile::tempdir().unwrap();
    // The recorder creates the folder.
    let records = folder.path().join("a/b");
    launch("diverge", 4, &[(FOLDER, &records), (RESULT, folder.path())]);
    let explain = |folder: &Path| {
        let output = Command::new(crate::common::ddprun()).arg("explain").arg(folder).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, text) = explain(&records);
    let expected = "rank 2 called broadcast(f32[10], root 0) as call 4 of group world, ranks 0 and 1 all_reduce(f32[100]); \
                    rank 3 never came to call 4: its last call, 3, barrier(), ";
    assert!(code == Some(0) && text.contains(expected), "{text}");
    assert!(text.contains("\nthe error was: rank 2 called broadcast(f32[10]) where rank "), "{text}");
    // The ranks, processes, have told each other the lines of their calls.
    let line = |call: &str| {
        let lines = include_str!("diagnostics.rs").lines().zip(1..);
        let found = lines.filter(|(line, _)| line.contains(call)).map(|(_, number)| number).next();
        format!(" is at {}:{}:", file!(), found.unwrap())
    };
    for (ranks, call) in
        [("rank 2", "pg.broadcast(&tensor(10), 0)"), ("ranks 0 and 1", "pg.all_reduce_async(&tensor(100)")]
    {
        assert!(text.contains(&format!("the call of {ranks}{}", line(call))), "{ranks}: {text}");
        assert!(text.split("the error was").nth(1).unwrap().contains(&line(call)), "{ranks}: {text}");
    }
    // A rank that was killed leaves no file.
    std::fs::remove_file(records.join("rank0.flight.json")).unwrap();
    std::fs::write(records.join(".rank0.flight.json.0123456789abcdef.tmp"), "{").unwrap();
    assert!(explain(&records).1.contains("there is no file of rank 0: its process was killed"), "{text}");
    std::fs::write(records.join("rank0.flight.json"), "{").unwrap();
    let (code, text) = explain(&records);
    assert!(code == Some(1) && text.contains("rank0.flight.json: EOF while parsing"), "{text}");
    let (code, text) = explain(folder.path());
    assert!(code == Some(2) && text.contains("CANDLE_DDP_FLIGHT_RECORDER=FOLDER"), "{text}");
}

/// Each rank signals itself, and continues.
fn signal(pg: &ProcessGroup) -> Result<()> {
    use rustix::process::{Signal, getpid, kill_process};
    pg.barrier()?;
    kill_process(getpid(), Signal::USR1).unwrap();
    wait_for_files(&records(pg.rank()..pg.rank() + 1));
    let file = Path::new(&std::env::var(FOLDER).unwrap()).join(format!("rank{}.flight.json", pg.rank()));
    let text = std::fs::read_to_string(file).unwrap();
    assert!(text.contains("\"reason\":\"SIGUSR1\"") && text.contains("\"operation\":\"barrier\""), "{text}");
    pg.barrier()
}

#[test]
fn a_signal_has_the_files_written_and_the_ranks_go_on() {
    let folder = tempfile::tempdir().unwrap();
    launch("signal", 2, &[(FOLDER, folder.path())]);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
}

#[test]
fn a_folder_that_cannot_be_created_is_an_error_at_the_start() {
    let flight_recorder = FlightRecorderOptions { folder: Some("/proc/nothing".into()), ..Default::default() };
    let error = init_process_group(InitOptions { flight_recorder, ..Default::default() }).unwrap_err().to_string();
    assert!(error.starts_with("creating the folder of flight records /proc/nothing: "), "{error}");
}
