//! Surroundings in which schedulers, supervisors and containers may start `ddprun`: signals that are blocked or ignored, no folder
//! for files, and system calls that are forbidden.
use crate::{Ran, Running, Sandbox};
use candle_ddp_testing::skip;
use rustix::process::Signal;
use std::process::{Command, Stdio};

impl Sandbox {
    /// Starts ddprun by another program, with `script` as the workers' program.
    fn start_by(&self, starter: &[&str], args: &[&str], script: &str) -> Running {
        let ddprun = self.ddprun(&[args, &["sh", "-c", script]].concat());
        let mut command = Command::new(starter[0]);
        command.args(&starter[1..]).arg(ddprun.get_program()).args(ddprun.get_args());
        for (name, value) in ddprun.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.current_dir(self.path(""));
        Running::new(command.stdout(Stdio::piped()).stderr(Stdio::piped()))
    }
}

/// Whether this system's `env` can block and ignore signals.
fn env_has_signals(test: &str) -> bool {
    let tried = Command::new("env").args(["--block-signal=CHLD", "--ignore-signal=HUP", "true"]).output();
    let can = tried.is_ok_and(|output| output.status.success());
    if !can {
        skip(test, "env has no --block-signal (GNU coreutils 8.31)");
    }
    can
}

/// The signals of a mask in /proc/self/status, as the worker's output shows it.
fn has(mask: &str, signal: Signal) -> bool {
    u64::from_str_radix(mask.split_whitespace().nth(1).unwrap(), 16).unwrap() >> (signal.as_raw() - 1) & 1 == 1
}

/// A blocked SIGCHLD would never tell of the end of a worker, and a blocked SIGTERM would end nothing.
#[test]
fn blocked_signals_reach_ddprun_and_its_workers() {
    if !env_has_signals("blocked_signals_reach_ddprun_and_its_workers") {
        return;
    }
    let blocked = ["env", "--block-signal=CHLD,TERM,USR1,INT,CONT,RTMIN"];
    let sandbox = Sandbox::new();
    let ran = Ran::of(sandbox.start_by(&blocked, &["--nproc-per-node", "2"], "grep SigBlk /proc/self/status"));
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_eq!(ran.stdout, "SigBlk:\t0000000000000000\n".repeat(2));

    let mut running = sandbox.start_by(&blocked, &[], "echo >up; exec sleep 1000");
    sandbox.wait_for("up");
    running.send(Signal::TERM);
    assert_eq!(Ran::of(running).code, Some(128 + 15));
}

/// As by nohup, and by a shell that starts a command in the background.
#[test]
fn ignored_signals_stay_ignored_except_those_that_ddprun_needs() {
    if !env_has_signals("ignored_signals_stay_ignored_except_those_that_ddprun_needs") {
        return;
    }
    let sandbox = Sandbox::new();
    let ignored = ["env", "--ignore-signal=HUP,INT,CHLD"];
    let script = "grep SigIgn /proc/self/status >mask; echo >up; until [ -e go ]; do sleep 0.01; done";
    let mut running = sandbox.start_by(&ignored, &[], script);
    sandbox.wait_for("up");
    let mask = std::fs::read_to_string(sandbox.path("mask")).unwrap();
    assert_eq!([Signal::HUP, Signal::INT, Signal::CHILD].map(|signal| has(&mask, signal)), [true, true, false]);
    running.send(Signal::HUP);
    running.send(Signal::INT);
    std::fs::write(sandbox.path("go"), "").unwrap();
    let ran = Ran::of(running);
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""));
}

/// In a container with a read-only root, for example.
#[test]
fn without_a_folder_for_files_the_run_goes_on() {
    let sandbox = Sandbox::new();
    let run = |args: &[&str], script: &str| {
        let mut command = sandbox.ddprun(&[args, &["sh", "-c", script]].concat());
        command.env("TMPDIR", "/no/such/folder").env("TORCHELASTIC_ERROR_FILE", "/that/of/an/outer/launcher");
        Ran::new(command.stdout(Stdio::piped()).stderr(Stdio::piped()))
    };
    let ran = run(&[], "echo ${TORCHELASTIC_ERROR_FILE-none}");
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "none\n"), "{ran:?}");
    ran.says("cannot create /no/such/folder/ddprun.tmp-");
    ran.says("(give a folder that can be written by --log-dir or TMPDIR): No such file or directory");
    ran.says("Without one, the reason why a rank has failed is only in its output");
    // Failures and restarts need none.
    let ran =
        run(&["--nproc-per-node", "2", "--max-restarts", "1"], "echo last words; [ $RANK = 0 ] || exit 7; sleep 1000");
    assert_eq!(ran.code, Some(7), "{ran:?}");
    ran.says("restarting all workers (restart 1 of 1)");
    ran.says("rank 1 failed first: it exited with code 7");
    ran.says("    last words");
    // Log files do.
    let ran = run(&["--tee", "3"], "true");
    ran.ends(1, &["by --log-dir or TMPDIR"]);
}

/// Installs a filter that forbids one system call, and executes the rest of the command line.
const FORBID: &str = r"
import ctypes, os, struct, sys
call, libc = int(sys.argv[1]), ctypes.CDLL(None, use_errno=True)
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, call), (6, 0, 0, 0x50000 | 1), (6, 0, 0, 0x7FFF0000)]
steps = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *step) for step in steps))
filter = ctypes.create_string_buffer(struct.pack('HxxxxxxP', 4, ctypes.addressof(steps)))
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, filter, 0, 0):
    sys.exit(99)
os.execvp(sys.argv[2], sys.argv[2:])
";

/// The numbers of prctl and setpgid, if filters can be installed here.
fn forbidden(test: &str) -> Option<[&'static str; 2]> {
    let [prctl, setpgid] = match std::env::consts::ARCH {
        "x86_64" => ["157", "109"],
        "aarch64" => ["167", "154"],
        _ => {
            skip(test, "the numbers of system calls are unknown here");
            return None;
        }
    };
    let tried = Command::new("python3").args(["-c", FORBID, prctl, "true"]).output();
    if tried.is_ok_and(|output| output.status.success()) {
        return Some([prctl, setpgid]);
    }
    skip(test, "no seccomp filter can be installed here");
    None
}

#[test]
fn a_forbidden_prctl_costs_only_what_it_is_for() {
    let Some([prctl, _]) = forbidden("a_forbidden_prctl_costs_only_what_it_is_for") else { return };
    let ran = Ran::of(Sandbox::new().start_by(&["python3", "-c", FORBID, prctl], &[], "echo fine"));
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "fine\n"), "{ran:?}");
    ran.says("the system forbids the call prctl (Operation not permitted");
    ran.says("if ddprun is killed by SIGKILL, its workers live on");
}

/// The program is not to blame.
#[test]
fn a_forbidden_call_before_the_program_starts_is_not_taken_for_the_programs_mode() {
    const TEST: &str = "a_forbidden_call_before_the_program_starts_is_not_taken_for_the_programs_mode";
    let Some([_, setpgid]) = forbidden(TEST) else { return };
    let ran = Ran::of(Sandbox::new().start_by(&["python3", "-c", FORBID, setpgid], &[], "echo fine"));
    assert_eq!(ran.code, Some(126), "{ran:?}");
    ran.says("cannot start sh: Operation not permitted");
    ran.says("a security profile of this container or machine (seccomp, AppArmor, SELinux)");
    assert!(!ran.stderr.contains("chmod"), "{ran:?}");
}
