//! Starting the ranks of a test.
use candle_ddp::Result;
use std::io::Write;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Names the test that a process is a rank of.
const TEST: &str = "CANDLE_DDP_TEST_MPI";
/// Ends a test that hangs, also on a busy machine.
const LIMIT: Duration = Duration::from_secs(600);

/// Runs `body` on so many ranks, which must all succeed. `test` is the path of the calling test.
pub(crate) fn ranks(test: &str, count: usize, body: impl FnOnce() -> Result<()>) {
    ranks_in(&[], test, count, body);
}

/// The same with further environment variables.
pub(crate) fn ranks_in(variables: &[(&str, &str)], test: &str, count: usize, body: impl FnOnce() -> Result<()>) {
    if let Some(output) = outcome_in(variables, test, count, body) {
        let text = text(&output);
        assert!(output.status.success(), "{}:\n{text}", output.status);
        assert_eq!(text.matches(DONE).count(), count, "{text}");
    }
}

const DONE: &str = "rank is done";

/// Runs `body` on so many ranks and returns how mpirun ended, or does not return on a rank.
pub(crate) fn outcome(test: &str, count: usize, body: impl FnOnce() -> Result<()>) -> Option<Output> {
    outcome_in(&[], test, count, body)
}

fn outcome_in(
    variables: &[(&str, &str)],
    test: &str,
    count: usize,
    body: impl FnOnce() -> Result<()>,
) -> Option<Output> {
    if std::env::var(TEST).is_ok_and(|name| name == test) {
        let result = body();
        let line = result.as_ref().map_or_else(|error| format!("error: {error}\n"), |()| format!("{DONE}\n"));
        // In one piece, since the ranks write at the same time.
        std::io::stderr().write_all(line.as_bytes()).unwrap();
        std::process::exit(i32::from(result.is_err()));
    }
    Some(start(variables, test, count))
}

fn start(variables: &[(&str, &str)], test: &str, count: usize) -> Output {
    let program = std::env::var("MPIRUN").unwrap_or_else(|_| "mpirun".to_string());
    let count = count.to_string();
    let mut command = Command::new(&program);
    command.args(["-n", &count]).arg(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads", "1"]);
    command.env(TEST, test).env("RAYON_NUM_THREADS", "1");
    // For Open MPI 4 and 5: ranks may outnumber processors, are not bound to them, and the user may be root.
    for (name, value) in [
        ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
        ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
        ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
        ("OMPI_MCA_hwloc_base_binding_policy", "none"),
        ("OMPI_MCA_mpi_yield_when_idle", "1"),
        ("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"),
        ("PRTE_MCA_hwloc_default_binding_policy", "none"),
    ] {
        command.env(name, value);
    }
    command.envs(variables.iter().copied());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child =
        command.spawn().unwrap_or_else(|error| panic!("{program}: {error}; set MPIRUN to the launcher of this MPI"));
    let pid = child.id().to_string();
    let waiting = std::thread::spawn(move || child.wait_with_output().unwrap());
    let begun = Instant::now();
    while !waiting.is_finished() {
        if begun.elapsed() > LIMIT {
            let _ = Command::new("kill").arg(&pid).status();
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    waiting.join().unwrap()
}

/// What all ranks wrote.
pub(crate) fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}
