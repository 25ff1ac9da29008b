//! `ddprun` as its users meet it: the real binary, with shell scripts as workers.
#![cfg(feature = "launcher")]
mod building;
mod ending;
mod environment;
mod output;
mod pytorch;
mod terminal;
mod usage;

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Long enough for a loaded machine: nothing here takes that long unless it hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// A folder of its own for each test: the workers' current folder, and the parent of ddprun's temporary ones.
struct Place {
    folder: TempDir,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("tmp")).unwrap();
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// ddprun with these arguments.
    fn ddprun(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ddprun"));
        command.args(args).current_dir(self.folder.path()).env("TMPDIR", self.path("tmp"));
        for variable in ["RAYON_NUM_THREADS", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"] {
            command.env_remove(variable);
        }
        command
    }

    /// Runs ddprun with `script` as the workers' program, to its end.
    fn run(&self, args: &[&str], script: &str) -> Ran {
        Ran::new(self.ddprun(&[args, &["sh", "-c", script]].concat()).output().unwrap())
    }

    /// Starts ddprun with `script` as the workers' program, its output captured.
    fn start(&self, args: &[&str], script: &str) -> Child {
        let mut command = self.ddprun(&[args, &["sh", "-c", script]].concat());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// The content of a file, as soon as it has a whole line.
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

/// What came of a run.
#[derive(Debug)]
struct Ran {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Ran {
    fn new(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Self { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }

    fn of(child: Child) -> Self {
        Self::new(child.wait_with_output().unwrap())
    }

    /// The lines of stdout, sorted: ranks run side by side.
    fn sorted(&self) -> Vec<&str> {
        let mut lines: Vec<&str> = self.stdout.lines().collect();
        lines.sort_unstable();
        lines
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
        assert!(start.elapsed() < PATIENCE, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn send(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

/// Whether a process is there and not a zombie.
fn is_alive(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat"));
    let state = stat.ok().and_then(|stat| stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()));
    test_kill_process(pid).is_ok() && !matches!(state, None | Some('Z' | 'X'))
}
