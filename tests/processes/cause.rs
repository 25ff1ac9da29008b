//! `ddprun`'s report about ranks that fail because of another one. Each rank knows which one, and reports it.
//!
//! The processes are this test binary itself; an environment variable makes it a rank.
use crate::common::launch_test;
use candle_core::{DType, Tensor};
use candle_ddp::checkpoint::{Checkpointer, CheckpointerOptions, StateDict};
use candle_ddp::{
    DistributedDataParallel, Error, Failure, InitOptions, ProcessGroup, ReduceOp, Result, init_process_group,
};
use candle_nn::{VarMap, linear};
use rustix::process::{Pid, Signal, getpid, kill_process, test_kill_process};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The variable that names a rank's job.
const JOB: &str = "CANDLE_DDP_TEST_CAUSE_JOB";
const FOLDER: &str = "CANDLE_DDP_TEST_FOLDER";

/// The entry point of ranks.
#[test]
#[ignore = "started by other tests"]
fn rank_of_another_test() -> Result<(), String> {
    let job = std::env::var(JOB).unwrap();
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    let timeout = Duration::from_secs(if job == "absent" { 3 } else { 60 });
    let pg = init_process_group(InitOptions { timeout, ..Default::default() }).unwrap();
    let own = folder.join(format!("rank{}", pg.rank()));
    std::fs::write(&own, std::process::id().to_string()).unwrap();
    pg.barrier().unwrap();
    let ended = match job.as_str() {
        // The program returns the errors of ranks in its own words.
        "save" => pg.abort_on_error(|| save(&pg, &folder).map_err(|error| format!("training broke off: {error}"))),
        "leaves-before-save" => pg.abort_on_error(|| save_late(&pg, &folder)).map_err(|error| error.to_string()),
        "own-words" => pg.abort_on_error(|| own_words(&pg)),
        "got-over" => pg.abort_on_error(|| got_over(&pg, &folder)),
        "surplus" => pg.abort_on_error(|| surplus(&pg, &folder)).map_err(|error| error.to_string()),
        "subgroup" => pg.abort_on_error(|| subgroup(&pg)).map_err(|error| error.to_string()),
        // `abort_on_error` does not report its ranks.
        "absent" => absent(&pg).map_err(|error| error.to_string()),
        "leaves" => leaves(&pg, &folder, |pg, sum| pg.all_reduce_async(sum, ReduceOp::Sum)?.wait()),
        "leaves-subgroup" => {
            let sub = pg.new_group(&[1, 2, 0]).unwrap().unwrap();
            leaves(&pg, &folder, |_, sum| sub.all_reduce_async(sum, ReduceOp::Sum)?.wait())
        }
        "dies-subgroup" => {
            dies(&pg, &folder);
            Err("training broke off".to_string())
        }
        "leaves-backward" => {
            let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), |vb| linear(2, 1, vb)).unwrap();
            leaves(&pg, &folder, |_, x| ddp.backward(&ddp.forward(&x.reshape((1, 2))?)?.sum_all()?).map(drop))
        }
        other => panic!("no such job: {other}"),
    };
    if job == "save" && pg.rank() == 0 {
        (1..4).for_each(|rank| wait_for_end(&folder, rank));
    }
    ended
}

fn wait_for_end(folder: &Path, rank: usize) {
    let pid = std::fs::read_to_string(folder.join(format!("rank{rank}"))).unwrap();
    while test_kill_process(Pid::from_raw(pid.parse().unwrap()).unwrap()).is_ok() {
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A part that cannot be saved on rank 0.
struct Part(usize);

impl StateDict for Part {
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        match self.0 {
            0 => Err(Error::Io { context: "writing".to_string(), error: std::io::Error::from_raw_os_error(28) }),
            _ => Ok(HashMap::new()),
        }
    }

    fn load_state_dict(&mut self, _: &HashMap<String, Tensor>) -> Result<()> {
        Ok(())
    }
}

/// Rank 0 fails and is the last to end.
fn save(pg: &ProcessGroup, folder: &Path) -> Result<()> {
    let mut checkpointer = Checkpointer::new(pg, folder.join("run"), CheckpointerOptions::default())?;
    checkpointer.save(1, ("part", &mut Part(pg.rank())))?;
    checkpointer.finish()
}

/// Rank 1 ends, and rank 0 most probably knows before it saves.
fn save_late(pg: &ProcessGroup, folder: &Path) -> Result<()> {
    let mut checkpointer = Checkpointer::new(pg, folder.join("run"), CheckpointerOptions::default())?;
    if pg.rank() == 1 {
        std::process::exit(0);
    }
    wait_for_end(folder, 1);
    std::thread::sleep(Duration::from_secs(1));
    checkpointer.save(1, ("part", &mut Part(1)))?;
    checkpointer.finish()
}

/// Rank 1 leaves, and the others do not say so.
fn own_words(pg: &ProcessGroup) -> Result<(), String> {
    if pg.rank() == 1 {
        std::process::exit(0);
    }
    pg.barrier().map_err(|_| "training broke off".to_string())
}

/// Rank 1 has nothing to send, which nobody minds. Later, rank 0 fails by itself.
fn got_over(pg: &ProcessGroup, folder: &Path) -> Result<(), String> {
    let error = pg.broadcast_object::<u64>(None, 1).unwrap_err();
    pg.barrier().unwrap();
    if pg.rank() == 0 {
        return Err(format!("there is no memory left to try again what has failed with: {error}"));
    }
    let error = pg.barrier().unwrap_err();
    wait_for_end(folder, 0);
    Err(error.to_string())
}

/// Rank 2 of 4 makes one call too many.
fn surplus(pg: &ProcessGroup, folder: &Path) -> Result<()> {
    if pg.rank() == 2 {
        [0, 1, 3].into_iter().for_each(|rank| wait_for_end(folder, rank));
        return pg.barrier();
    }
    Ok(())
}

/// Rank 3, which is rank 1 of the subgroup, hangs.
fn subgroup(pg: &ProcessGroup) -> Result<()> {
    let timeout = Duration::from_secs(3);
    let sub = pg.new_group(&[2, 3])?;
    match pg.rank() {
        2 => sub.unwrap().monitored_barrier(Some(timeout)),
        3 => loop {
            std::thread::park();
        },
        _ => pg.barrier(),
    }
}

/// Rank 1 ends with exit code 0 while the others wait for it in `call`. They do not return the group's error, but their own
/// words, and rank 2 is the first to end.
fn leaves(pg: &ProcessGroup, folder: &Path, call: impl Fn(&ProcessGroup, &Tensor) -> Result<()>) -> Result<(), String> {
    let tensor = || Tensor::zeros(2, DType::F32, pg.device()).unwrap();
    call(pg, &tensor()).unwrap();
    if pg.rank() == 1 {
        std::thread::sleep(Duration::from_millis(100));
        std::process::exit(0);
    }
    call(pg, &tensor()).unwrap_err();
    if pg.rank() != 2 {
        wait_for_end(folder, 2);
    }
    Err("training broke off".to_string())
}

/// Rank 1 is killed, and only rank 2 notices, in a subgroup. Rank 0 waits for a message of rank 2.
fn dies(pg: &ProcessGroup, folder: &Path) {
    let sub = pg.new_group(&[2, 1]).unwrap();
    let tensor = Tensor::zeros(2, DType::F32, pg.device()).unwrap();
    let error = match pg.rank() {
        0 => pg.recv(&tensor, 2).unwrap_err(),
        1 => {
            let sub = sub.unwrap();
            sub.barrier().unwrap();
            return kill_process(getpid(), Signal::KILL).unwrap();
        }
        _ => {
            let sub = sub.unwrap();
            sub.barrier().unwrap();
            // The subgroup numbers the ranks its own way.
            let error = pg.abort_on_error(|| sub.all_reduce(&tensor, ReduceOp::Sum)).unwrap_err();
            assert!(matches!(&error, Error::Group(Failure::PeerGone { rank: 0, peer: 1, .. })), "{error:?}");
            pg.barrier().unwrap_err()
        }
    };
    std::fs::write(folder.join(format!("error{}", pg.rank())), format!("{error:?}")).unwrap();
    wait_for_end(folder, 1);
}

/// Rank 1 hangs.
fn absent(pg: &ProcessGroup) -> Result<()> {
    while pg.rank() == 1 {
        std::thread::park();
    }
    pg.barrier()
}

/// Runs this test binary as `world` ranks of `job`, and returns `ddprun`'s report about its end.
fn summary(job: &str, world: usize) -> String {
    summary_in(tempfile::tempdir().unwrap().path(), job, world)
}

fn summary_in(folder: &Path, job: &str, world: usize) -> String {
    let mut launcher = launch_test(module_path!(), world, &["--standalone"]);
    launcher.env(JOB, job).env(FOLDER, folder).env("RAYON_NUM_THREADS", "1").env("OMP_NUM_THREADS", "1");
    let output = launcher.output().unwrap();
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let start = text.rfind("\nddprun: rank ").unwrap_or_else(|| panic!("no summary in {text}"));
    text[start + 1..].to_string()
}

#[test]
fn the_rank_that_made_the_others_fail_is_blamed() {
    let exited = "ddprun: rank 0 failed first: it exited with code 101, ";
    let ended = "ddprun: rank 1 ended while the other ranks needed it: it exited with code 0, ";
    let others = "\n  ranks [0, 2]: each exited with code 101 by itself because of rank 1";
    let cases: [(&str, usize, &str, &[&str]); 9] = [
        // A checkpoint that one rank cannot save.
        (
            "save",
            4,
            exited,
            &[
                "its error:\n    training broke off: ",
                "No space left on device",
                "\n  ranks [1, 2, 3]: each exited with code 101 by itself because of rank 0",
            ],
        ),
        ("leaves-before-save", 2, ended, &[]),
        // An error of a call counts in whatever words it is told.
        ("own-words", 3, ended, &[others]),
        // One that the program has got over is no cause, even if it is told.
        ("got-over", 2, exited, &["there is no memory left"]),
        // A call too many.
        ("surplus", 4, "ddprun: rank 2 failed first: it exited with code 101, ", &[]),
        // A rank that others wait for in a subgroup has its global number.
        (
            "subgroup",
            4,
            "ddprun: rank 3 made the other ranks fail: it was killed by SIGTERM",
            &["\n  rank 2 exited with code 101 by itself because of rank 3"],
        ),
        // A rank that ends while others wait for it, whatever call shows it.
        ("leaves", 3, ended, &[others]),
        ("leaves-subgroup", 3, ended, &[others]),
        ("leaves-backward", 3, ended, &[others]),
    ];
    for (job, world, start, parts) in cases {
        let text = summary(job, world);
        assert!(text.starts_with(start) && parts.iter().all(|part| text.contains(part)), "{job}: {text}");
    }
}

#[test]
fn a_group_that_fails_tells_why_without_the_programs_help() {
    let text = summary("absent", 3);
    assert!(text.starts_with("ddprun: rank 1 made the other ranks fail: it was killed by SIGTERM"), "{text}");
}

#[test]
fn a_death_that_only_one_rank_notices_in_a_subgroup_is_the_end_of_the_group_of_all() {
    let folder = tempfile::tempdir().unwrap();
    let text = summary_in(folder.path(), "dies-subgroup", 3);
    assert!(text.starts_with("ddprun: rank 1 failed first: it was killed by SIGKILL"), "{text}");
    for rank in [0, 2] {
        let error = std::fs::read_to_string(folder.path().join(format!("error{rank}"))).unwrap();
        assert!(
            error.starts_with("PeerGone: rank 1 is gone: its connection to rank 2 closed during all_reduce"),
            "{error}"
        );
    }
}
