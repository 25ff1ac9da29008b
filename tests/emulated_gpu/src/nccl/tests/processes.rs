//! Tests that need separate processes: deaths, aborts of the process, and injected faults.
use super::super::Code;
use super::support::*;
use std::ffi::c_int;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const JOB: &str = "EMULATED_NCCL_TEST_JOB";
const ID: &str = "EMULATED_NCCL_TEST_ID";

/// The entry point of the other processes.
#[test]
#[ignore = "started by other tests"]
fn process_of_another_test() {
    match std::env::var(JOB).unwrap().as_str() {
        "member" => member(),
        "maker" => maker(),
        "leaver" => leaver(),
        "two threads" => two_threads(),
        "after an abort" => after_an_abort(),
        "after finalize" => after_finalize(),
        "fault" => fault(),
        "delay" => delay(),
        "ends" => ends(),
        other => panic!("no such job: {other}"),
    }
}

fn process(job: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["nccl::tests::processes::process_of_another_test", "--exact", "--include-ignored"]);
    command.args(["--nocapture", "--test-threads=1"]).env(JOB, job).stdout(Stdio::piped());
    command
}

fn name(id: &UniqueId) -> String {
    id.name().unwrap().to_string()
}

fn id_of(name: &str) -> UniqueId {
    UniqueId::new(name)
}

/// Waits for a line of the process that contains `word` and returns the rest of the line.
fn wait_for_line(child: &mut Child, word: &str) -> String {
    let mut lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    // The test harness may have written the beginning of the line.
    lines.find_map(|line| Some(line.unwrap().split_once(word)?.1.trim().to_string())).unwrap()
}

/// Rank 1 of 2; runs until it is killed.
fn member() {
    settle_down("host", 1, false);
    let rank = Rank::connect(id_of(&std::env::var(ID).unwrap()), 1, 2, false);
    assert_eq!(rank.sum(&[1.0]), [2.0]);
    println!("connected:");
    std::thread::sleep(PATIENCE * 2);
}

/// Rank 0 of 2, which creates the id; runs until it is killed.
fn maker() {
    settle_down("host", 0, false);
    let id = id();
    println!("id:{}", name(&id));
    let rank = Rank::connect(id, 0, 2, false);
    assert_eq!(rank.sum(&[1.0]), [2.0]);
    std::thread::sleep(PATIENCE * 2);
}

#[test]
fn the_death_of_a_rank_is_an_error_for_the_other() {
    settle_down("host", 0, false);
    let id = id();
    let mut child = process("member").env(ID, name(&id)).spawn().unwrap();
    let rank = Rank::connect(id, 0, 2, false);
    assert_eq!(rank.sum(&[1.0]), [2.0]);
    wait_for_line(&mut child, "connected:");
    let mut sums = [0.0];
    rank.done(rank.all_reduce(&[1.0], &mut sums));
    child.kill().unwrap();
    assert_eq!(rank.await_error().0, Code::RemoteError as c_int);
    child.wait().unwrap();
    rank.abort();
    assert!(rank.synchronize(PATIENCE));
}

#[test]
fn the_death_of_the_process_with_the_hub_is_an_error_for_the_other() {
    settle_down("host", 1, false);
    let mut child = process("maker").spawn().unwrap();
    let id = id_of(&wait_for_line(&mut child, "id:"));
    let rank = Rank::connect(id, 1, 2, false);
    assert_eq!(rank.sum(&[1.0]), [2.0]);
    child.kill().unwrap();
    let (code, text) = rank.await_error();
    assert_eq!(code, Code::RemoteError as c_int);
    assert!(text.contains("the process that made the id"), "{text}");
    child.wait().unwrap();
    rank.abort();
    // The other rank no longer exists.
    let (_, late) = begin(id, 1, 2, false);
    assert_eq!(late.await_error().0, Code::RemoteError as c_int);
    late.abort();
}

/// Rank 0 of 2, which creates the id; leaves after two calls, the second of which is large.
fn leaver() {
    settle_down("a", 0, false);
    let id = id();
    println!("id:{}", name(&id));
    let rank = Rank::connect(id, 0, 2, false);
    assert_eq!(rank.sum(&[1.0]), [2.0]);
    rank.sum(&[1.0; MANY]);
}

const MANY: usize = 8 << 20;

#[test]
fn the_process_with_the_hub_leaves_before_another_host_does() {
    for round in 0..3 {
        settle_down("b", 0, false);
        let mut child = process("leaver").spawn().unwrap();
        let id = id_of(&wait_for_line(&mut child, "id:"));
        let rank = Rank::connect(id, 1, 2, round == 1);
        assert_eq!(rank.sum(&[1.0]), [2.0]);
        // Data in flight is not lost.
        assert!(rank.sum(&[1.0; MANY]).iter().all(|sum| *sum == 2.0));
        assert!(child.wait().unwrap().success());
        std::thread::sleep(WHILE);
        assert_eq!(rank.settle(), 0, "{}", rank.text());
        rank.done(rank.finalize());
        rank.destroy();
    }
}

fn assert_aborts(job: &str, expected: &str) {
    let output = process(job).stderr(Stdio::piped()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    use std::os::unix::process::ExitStatusExt;
    assert_eq!(output.status.signal(), Some(6), "{text}");
    assert!(text.contains(expected), "{text}");
}

#[test]
fn simultaneous_use_by_two_threads_ends_the_process() {
    assert_aborts("two threads", "emulated NCCL: ncclAllReduce on a communicator that another thread is using");
}

fn two_threads() {
    settle_down("host", 0, false);
    let rank = Rank::connect(id(), 0, 1, true);
    let (comm, stream) = (rank.comm.get() as usize, rank.stream as usize);
    // SAFETY: the buffers live until the process ends.
    unsafe {
        assert_eq!(ncclGroupStart(), 0);
        assert_eq!(rank.all_reduce(&[1.0], &mut [0.0]), 0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (send, mut receive) = ([0.0f32], [0.0f32]);
                let to = receive.as_mut_ptr().cast();
                ncclAllReduce(send.as_ptr().cast(), to, 1, F32, SUM, comm as *mut _, stream as *mut _)
            });
        });
    }
}

#[test]
fn the_use_of_a_communicator_after_its_end_ends_the_process() {
    assert_aborts("after an abort", "emulated NCCL: ncclCommFinalize on a communicator that was destroyed or aborted");
    assert_aborts("after finalize", "emulated NCCL: ncclAllReduce on a communicator that was finalized");
}

fn after_an_abort() {
    settle_down("host", 0, false);
    let rank = Rank::connect(id(), 0, 1, true);
    let comm = rank.comm.get();
    rank.abort();
    // SAFETY: the test checks that this invalid call ends the process.
    unsafe { ncclCommFinalize(comm) };
}

fn after_finalize() {
    settle_down("host", 0, false);
    let rank = Rank::connect(id(), 0, 1, true);
    rank.done(rank.finalize());
    rank.all_reduce(&[1.0], &mut [0.0]);
}

#[test]
fn faults_are_injected() {
    for (job, variable, value) in
        [("fault", "EMULATED_NCCL_FAIL_AFTER", "3"), ("delay", "EMULATED_NCCL_DELAY_MS", "3000")]
    {
        let output = process(job).env(variable, value).output().unwrap();
        assert!(output.status.success(), "{job}: {}", String::from_utf8_lossy(&output.stdout));
    }
}

fn fault() {
    settle_down("host", 0, false);
    let rank = Rank::connect(id(), 0, 1, false);
    assert_eq!([rank.sum(&[1.0]), rank.sum(&[2.0])], [[1.0], [2.0]]);
    let mut sums = [0.0];
    assert_eq!(rank.all_reduce(&[1.0], &mut sums), Code::InProgress as c_int);
    let (code, text) = rank.await_error();
    assert_eq!(code, Code::SystemError as c_int);
    assert!(text.contains("EMULATED_NCCL_FAIL_AFTER"), "{text}");
    assert!(!rank.synchronize(WHILE));
    rank.abort();
    assert!(rank.synchronize(PATIENCE));
    assert_eq!(sums, [0.0]);
}

fn delay() {
    settle_down("host", 0, false);
    let rank = Rank::connect(id(), 0, 1, false);
    let start = Instant::now();
    let mut sums = [0.0];
    rank.done(rank.all_reduce(&[1.0], &mut sums));
    assert!(start.elapsed() < Duration::from_millis(2500), "the caller waited");
    assert!(rank.synchronize(PATIENCE));
    assert!(start.elapsed() >= Duration::from_secs(3));
    assert_eq!(sums, [1.0]);
}

/// A communicator that is aborted, and one that is finalized and destroyed.
fn ends() {
    settle_down("host", 0, false);
    Rank::connect(id(), 0, 1, false).abort();
    drop(Rank::connect(id(), 0, 1, false));
}

#[test]
fn beginnings_and_ends_are_logged() {
    let file = std::env::temp_dir().join(format!("emulated-nccl-log-{}", std::process::id()));
    let logged = |level: &str| {
        let mut child = process("ends").env("NCCL_DEBUG", level).env("NCCL_DEBUG_FILE", &file).spawn().unwrap();
        assert!(child.wait().unwrap().success());
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        let _ = std::fs::remove_file(&file);
        text
    };
    let text = logged("INFO");
    let lines: Vec<&str> = text.lines().filter_map(|line| Some(line.split_once(" - ")?.1)).collect();
    assert_eq!(lines, ["Init COMPLETE", "Abort COMPLETE", "Init COMPLETE", "Destroy COMPLETE"], "{text}");
    assert!(text.lines().all(|line| line.contains(" rank 0 nranks 1 ")), "{text}");
    assert_eq!(logged("WARN"), "");
}
