//! The examples' cache of small data sets: runs that make one at the same time, another version of it, and a failure.
//!
//! The processes are this test binary itself.
use crate::common::{assert_error, launch_test};
use candle_ddp::{InitOptions, Result, init_process_group};
use std::fs;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

#[path = "../../examples/common/cache.rs"]
mod cache;

/// The variables that say in which version the data set is made, and by how many runs at once.
const VERSION: &str = "CANDLE_DDP_TEST_CACHE_VERSION";
const RUNS: &str = "CANDLE_DDP_TEST_CACHE_RUNS";
/// The version whose writing fails.
const BROKEN: &str = "9";

/// The entry point of ranks.
#[test]
#[ignore = "started by other tests"]
fn rank_of_another_test() {
    let [version, runs] = [VERSION, RUNS].map(|variable| std::env::var(variable).unwrap());
    rank(&version, runs.parse().unwrap()).unwrap();
}

fn rank(version: &str, runs: usize) -> Result<()> {
    let pg = init_process_group(InitOptions::default())?;
    let write = |folder: &Path| {
        fs::write(folder.join("first"), version)?;
        // All runs have begun, though some may be done.
        let deadline = Instant::now() + Duration::from_secs(180);
        while count(folder.parent().unwrap(), "made") < runs {
            assert!(Instant::now() < deadline, "the other run does not write");
            std::thread::sleep(Duration::from_millis(5));
        }
        if version == BROKEN {
            return Err(std::io::Error::other("no space left"));
        }
        fs::write(folder.join("second"), version)
    };
    let folder = pg.abort_on_error(|| cache::folder(&pg, "made", version.parse().unwrap(), write))?;
    for name in ["first", "second"] {
        assert_eq!(fs::read_to_string(folder.join(name)).unwrap(), version, "rank {}", pg.rank());
    }
    Ok(())
}

/// Returns how many names in the folder contain `part`.
fn count(folder: &Path, part: &str) -> usize {
    let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    names.filter(|name| name.to_string_lossy().contains(part)).count()
}

/// Starts a run of two ranks with the cache in `home`.
fn start(home: &Path, version: &str, runs: usize) -> Child {
    let mut command = launch_test(module_path!(), 2, &["--standalone"]);
    command.envs([(VERSION, version), (RUNS, &runs.to_string())]).env("XDG_CACHE_HOME", home);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits for the run, and returns its output if it fails.
fn end(run: Child) -> std::result::Result<(), String> {
    let output = run.wait_with_output().unwrap();
    let printed = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    if output.status.success() { Ok(()) } else { Err(printed) }
}

/// Returns the names in the cache, in order.
fn names(home: &Path) -> Vec<String> {
    let entries = fs::read_dir(home.join("candle-ddp")).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn two_runs_make_it_at_once() {
    let home = tempfile::tempdir().unwrap();
    let runs = [start(home.path(), "1", 2), start(home.path(), "1", 2)];
    for run in runs {
        end(run).unwrap();
    }
    assert_eq!(names(home.path()), ["made-v1"]);
}

#[test]
fn another_version_is_made_beside_it() {
    let home = tempfile::tempdir().unwrap();
    end(start(home.path(), "1", 1)).unwrap();
    end(start(home.path(), "2", 1)).unwrap();
    assert_eq!(names(home.path()), ["made-v1", "made-v2"]);
    // Existing data are not made again: nobody would come to write next to them.
    end(start(home.path(), "1", 2)).unwrap();
    let first = fs::read_to_string(home.path().join("candle-ddp/made-v1/first")).unwrap();
    assert_eq!(first, "1");
}

#[test]
fn what_could_not_be_written_is_an_error_and_leaves_nothing() {
    let home = tempfile::tempdir().unwrap();
    assert_error(end(start(home.path(), BROKEN, 1)), &["writing a small data set to", "no space left"]);
    assert_eq!(names(home.path()), [""; 0]);
}
