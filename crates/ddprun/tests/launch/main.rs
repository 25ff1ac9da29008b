//! `ddprun` from its users' point of view: the real binary, with shell scripts as workers.
#![allow(clippy::unwrap_used)]
mod building;
mod cause;
mod check;
mod elastic_nodes;
mod ending;
mod environment;
mod hosts;
mod leftovers;
mod metrics;
mod modes;
mod nodes;
mod output;
mod restarts;
mod secret;
mod status;
mod surroundings;
mod terminal;
mod unread;
mod usage;
mod verdict;

use candle_ddp_testing::free_port;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Long enough for a loaded machine: no test takes this long unless it hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// Shell functions. `here` writes the process of a rank, and waits for all ranks: ddprun asks the others to exit a second after the
/// first has failed, and a slow one would not have begun. `after RANK` returns once ddprun has seen the end of that rank. It starts
/// no process, so that what follows comes long before ddprun asks the others to exit.
const AFTER: &str = r#"
    here() {
        echo $$ >pid$RANK; there=0
        while [ $there -lt $WORLD_SIZE ]; do [ -s pid$there ] && there=$((there + 1)); done
    }
    after() {
        { until read -r pid <pid$1; do :; done; while kill -0 $pid; do :; done; } 2>/dev/null
    }
"#;

/// A separate folder for each test: the workers' current folder, and the parent of ddprun's temporary folders.
struct Sandbox {
    folder: TempDir,
}

impl Sandbox {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("tmp")).unwrap();
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns a command for ddprun with these arguments.
    fn ddprun(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ddprun"));
        command.args(args).current_dir(self.folder.path()).env("TMPDIR", self.path("tmp"));
        let pet = std::env::vars_os().map(|(name, _)| name).filter(|name| name.to_string_lossy().starts_with("PET_"));
        let threads = ["RAYON_NUM_THREADS", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"].map(Into::into);
        for variable in pet.chain(threads) {
            command.env_remove(variable);
        }
        command
    }

    /// Runs ddprun with `script` as the workers' program until it exits.
    fn run(&self, args: &[&str], script: &str) -> Ran {
        Ran::of(self.start(args, script))
    }

    /// Starts ddprun with `script` as the workers' program and captures its output.
    fn start(&self, args: &[&str], script: &str) -> Running {
        let mut command = self.ddprun(&[args, &["sh", "-c", script]].concat());
        Running::new(command.stdout(Stdio::piped()).stderr(Stdio::piped()))
    }

    /// Waits until a file contains a whole line, and returns its content.
    fn wait_for(&self, name: &str) -> String {
        let mut content = String::new();
        wait_until(&format!("{name} to be written"), || {
            content = std::fs::read_to_string(self.path(name)).unwrap_or_default();
            content.ends_with('\n')
        });
        content.trim().to_owned()
    }

    fn pid(&self, name: &str) -> Pid {
        Pid::from_raw(self.wait_for(name).parse().unwrap()).unwrap()
    }
}

/// A shell function `fails MESSAGE [CULPRIT]`: writes the file by which a rank of candle-ddp reports its failure to the launcher.
const FAILS: &str = r#"
fails() {
    told="{\"rank\":$RANK,\"culprit\":${2:-null},\"variant\":\"${3:-PeerFailed}\",\"message\":\"$1\"}"
    extra="{\"py_callstack\":\"$1\",\"timestamp\":\"1\",\"candle_ddp\":$told}"
    printf '%s' "{\"message\":{\"message\":\"$1\",\"extraInfo\":$extra}}" >$TORCHELASTIC_ERROR_FILE
    echo "Error: $1" >&2
}
"#;

/// A running ddprun; if its test fails, it is killed together with its workers.
struct Running(Option<Child>);

impl Running {
    fn new(command: &mut Command) -> Self {
        Self(Some(command.spawn().unwrap()))
    }

    fn child(&mut self) -> &mut Child {
        self.0.as_mut().unwrap()
    }

    fn send(&mut self, signal: Signal) {
        kill_process(Pid::from_child(self.child()), signal).unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The result of a run.
#[derive(Debug)]
struct Ran {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Ran {
    /// Runs a command until it exits.
    fn new(command: &mut Command) -> Self {
        Self::of(Running::new(command.stdout(Stdio::piped()).stderr(Stdio::piped())))
    }

    /// Waits until ddprun exits. If it hangs, it is killed together with its workers.
    fn of(mut running: Running) -> Self {
        let child = running.0.take().unwrap();
        let pid = Pid::from_child(&child);
        let (ended, watch) = std::sync::mpsc::channel::<()>();
        let watchdog = std::thread::spawn(move || {
            let hangs = watch.recv_timeout(PATIENCE) == Err(std::sync::mpsc::RecvTimeoutError::Timeout);
            if hangs {
                kill_process(pid, Signal::KILL).unwrap();
            }
            hangs
        });
        let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
        drop(ended);
        let text = |bytes| String::from_utf8(bytes).unwrap();
        let ran = Self { code: status.code(), stdout: text(stdout), stderr: text(stderr) };
        assert!(!watchdog.join().unwrap(), "ddprun hung: {ran:?}");
        ran
    }

    /// Returns the lines of stdout, sorted because ranks run concurrently.
    fn sorted(&self) -> Vec<&str> {
        let mut lines: Vec<&str> = self.stdout.lines().collect();
        lines.sort_unstable();
        lines
    }

    /// Checks the exit code, and that stderr contains all `parts`.
    #[track_caller]
    fn ends(&self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:?}");
        for part in parts {
            self.says(part);
        }
    }

    #[track_caller]
    fn says(&self, part: &str) {
        assert!(self.stderr.contains(part), "no {part:?} in:\n{}", self.stderr);
    }
}

#[track_caller]
fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "timed out waiting for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Returns whether a process exists and is not a zombie.
fn is_alive(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat"));
    let state = stat.ok().and_then(|stat| stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()));
    test_kill_process(pid).is_ok() && !matches!(state, None | Some('Z' | 'X'))
}
