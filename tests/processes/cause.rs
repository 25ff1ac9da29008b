//! `ddprun`'s report about ranks that fail because of another one. Each rank knows which one, and reports it.
//!
//! The processes are this test binary itself; an environment variable makes it a rank.
use crate::common::test_arguments;
use candle_core::Tensor;
use candle_ddp::checkpoint::{Checkpointer, CheckpointerOptions, StateDict};
use candle_ddp::{Error, InitOptions, ProcessGroup, Result, init_process_group};
use rustix::process::{Pid, test_kill_process};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;
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
        "surplus" => pg.abort_on_error(|| surplus(&pg, &folder)).map_err(|error| error.to_string()),
        "subgroup" => pg.abort_on_error(|| subgroup(&pg)).map_err(|error| error.to_string()),
        // `abort_on_error` does not report its ranks.
        "absent" => absent(&pg).map_err(|error| error.to_string()),
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
        2 => sub.unwrap().monitored_barrier(Some(timeout), true),
        3 => loop {
            std::thread::park();
        },
        _ => pg.barrier(),
    }
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
    let folder = tempfile::tempdir().unwrap();
    let mut launcher = Command::new(crate::common::ddprun());
    launcher.env(JOB, job).env(FOLDER, folder.path()).env("RAYON_NUM_THREADS", "1").env("OMP_NUM_THREADS", "1");
    launcher.args(["--standalone", "--nproc-per-node", &world.to_string()]).arg(std::env::current_exe().unwrap());
    let output = launcher.args(test_arguments(module_path!(), "rank_of_another_test")).output().unwrap();
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let start = text.rfind("\nddprun: rank ").unwrap_or_else(|| panic!("no summary in {text}"));
    text[start + 1..].to_string()
}

#[test]
fn a_checkpoint_that_one_rank_cannot_save_is_blamed_on_it() {
    let text = summary("save", 4);
    assert!(text.starts_with("ddprun: rank 0 failed first: it exited with code 101, "), "{text}");
    assert!(
        text.contains("its error:\n    training broke off: ") && text.contains("No space left on device"),
        "{text}"
    );
    assert!(text.contains("\n  ranks [1, 2, 3]: each exited with code 101 by itself because of rank 0"), "{text}");
}

#[test]
fn a_call_too_many_is_blamed_on_the_rank_that_makes_it() {
    let text = summary("surplus", 4);
    assert!(text.starts_with("ddprun: rank 2 failed first: it exited with code 101, "), "{text}");
}

#[test]
fn a_rank_that_others_wait_for_in_a_subgroup_is_blamed_by_its_global_number() {
    let text = summary("subgroup", 4);
    assert!(text.starts_with("ddprun: rank 3 made the other ranks fail: it was killed by SIGTERM"), "{text}");
    assert!(text.contains("\n  rank 2 exited with code 101 by itself because of rank 3"), "{text}");
}

#[test]
fn a_group_that_fails_tells_why_without_the_programs_help() {
    let text = summary("absent", 3);
    assert!(text.starts_with("ddprun: rank 1 made the other ranks fail: it was killed by SIGTERM"), "{text}");
}
