//! Starting a worker, and how it ended.
use super::environment;
use super::folder::{RunFolder, STDERR, STDOUT};
use super::hosts;
use super::lines::Lines;
use super::output::{Intake, Source};
use super::terminal;
use crate::check;
use crate::child;
use crate::command::{Config, Options, Streams, Topology, prefix};
use crate::console::{Console, Target};
use crate::error::{Error, Result};
use crate::numa::OnCpus;
use crate::signal;
use crate::tail::Tail;
use candle_ddp_base::host::host_name;
use candle_ddp_rendezvous::error::FILE_VARIABLE;
use rustix::fs::{Access, access};
use rustix::io::Errno;
use rustix::process::{Pid, WaitStatus};
use rustix::thread::CpuSet;
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Exit {
    Code(i32),
    Signal(i32),
    /// The process that was to take its place was not started.
    NotReplaced,
}

impl Exit {
    /// Converts the system's status.
    pub(crate) fn new(status: WaitStatus) -> Self {
        match status.terminating_signal() {
            Some(signal) => Self::Signal(signal),
            None => Self::Code(status.exit_status().unwrap_or(1)),
        }
    }

    /// Returns the exit code as shells define it: the code, or 128 + the signal.
    pub(crate) fn code(self) -> u8 {
        let code = match self {
            Self::Code(code) => code,
            // Another node may tell any number.
            Self::Signal(signal) => signal.saturating_add(128),
            Self::NotReplaced => 1,
        };
        u8::try_from(code).unwrap_or(u8::MAX)
    }

    /// The code, or the signal.
    pub(crate) fn numbers(self) -> (Option<i32>, Option<i32>) {
        match self {
            Self::Code(code) => (Some(code), None),
            Self::Signal(signal) => (None, Some(signal)),
            Self::NotReplaced => (None, None),
        }
    }
}

impl std::fmt::Display for Exit {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Code(code) => write!(formatter, "exited with code {code}"),
            Self::Signal(number) => write!(formatter, "was killed by {}", signal::name(*number)),
            Self::NotReplaced => formatter.write_str("was not replaced, because a signal ends the run"),
        }
    }
}

#[cfg(test)]
#[test]
fn any_number_of_a_signal_has_an_exit_code() {
    assert_eq!([9, 127, 128, i32::MAX].map(|signal| Exit::Signal(signal).code()), [137, 255, 255, 255]);
}

/// How and when a worker ended.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ended {
    pub(crate) how: Exit,
    /// The time since the start of the run.
    pub(crate) after: Duration,
    pub(crate) at: SystemTime,
    /// Whether ddprun had asked it to exit.
    pub(crate) asked_to_exit: bool,
}

/// A worker that was started. It leads its own process group.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) local_rank: usize,
    pub(crate) rank: usize,
    pub(crate) pid: Pid,
    /// The number of restarts before it was started.
    pub(crate) restart_count: u32,
    pub(crate) ended: Option<Ended>,
    /// The other workers continue without it.
    pub(crate) given_up: bool,
}

impl Worker {
    /// Whether its process has exited with 0.
    pub(crate) fn has_succeeded(&self) -> bool {
        self.ended.is_some_and(|ended| ended.how == Exit::Code(0))
    }
}

/// Everything needed to start workers.
pub(crate) struct Starter<'a> {
    pub(crate) config: &'a Config,
    /// The ranks of the run, and those on this machine, at present.
    pub(crate) topology: Topology,
    pub(crate) program: &'a OsStr,
    /// Whether the check of all nodes together is started instead of the program (`--check`).
    pub(crate) is_joint_check: bool,
    pub(crate) folder: &'a RunFolder,
    pub(crate) master_port: u16,
    /// Whether the kernel kills workers when this process ends.
    pub(crate) is_bound: bool,
    /// The processors of each worker; empty if they are not bound.
    pub(crate) cpus: Vec<CpuSet>,
    /// Where the output streams of the workers go; `None` when no more will come.
    pub(crate) intake: Option<Intake>,
    /// The pseudo-terminals among these streams, with the local ranks of their workers.
    pub(crate) terminals: Vec<(usize, OwnedFd)>,
}

impl Starter<'_> {
    /// Starts one worker as the leader of its own process group. There have been `restart_count` restarts. `agent` distinguishes it from
    /// earlier ones with the same rank.
    pub(crate) fn start(&mut self, local_rank: usize, restart_count: u32, agent: &str) -> Result<Worker> {
        let config = self.config;
        let rank = self.topology.rank(local_rank);
        let mut command = if self.is_joint_check { check::joint(config)? } else { Command::new(self.program) };
        if !self.is_joint_check {
            command.args(&config.args);
            let local_rank = || config.shown_local_rank(local_rank);
            command.args(config.options.pass_local_rank.iter().map(|name| format!("{name}={}", local_rank())));
        }
        let error_file = self.folder.prepare(restart_count, local_rank)?;
        if let Some(variables) = &config.agent {
            // A ddprun that the program starts is none of this run's.
            hosts::OWN.iter().for_each(|name| {
                command.env_remove(name);
            });
            command.envs(variables.iter().map(|(name, value)| (name, value)));
        }
        // The error file of an outer launcher is not for this worker.
        command.env_remove(FILE_VARIABLE).envs(error_file.map(|path| (FILE_VARIABLE, path)));
        command.envs(environment::of(config, &self.topology, local_rank, self.master_port, restart_count, agent));
        config.secret.give(&mut command);
        self.terminals.retain(|(rank, _)| *rank != local_rank);
        // A background process is stopped when it reads from the terminal.
        command.stdin(Stdio::null());
        let (stdout, source) = self.stream(local_rank, restart_count, Target::Stdout)?;
        let mut sources = vec![source];
        let stderr = if Console::get().is_one() && !self.logged(local_rank).iter().any(|streams| streams.any()) {
            // Both streams end in the same place, so a single stream keeps their order.
            stdout.try_clone().map_err(|error| cannot("duplicating an output stream", rank, error))?
        } else {
            let (stderr, source) = self.stream(local_rank, restart_count, Target::Stderr)?;
            sources.push(source);
            stderr
        };
        command.stdout(stdout).stderr(stderr);
        command.process_group(0);
        if self.is_bound {
            child::bind_to_launcher(&mut command);
        }
        let on_cpus = self.cpus.get(local_rank).map(OnCpus::of).transpose();
        let _on_cpus = on_cpus.map_err(|error| cannot("binding to processors (--numa-binding)", rank, error))?;
        let process = command.spawn().map_err(|source| match resource_hint(&source) {
            Some(_) => cannot("starting a process", rank, source),
            None => cannot_start(self.program, source),
        })?;
        let pid = Pid::from_child(&process);
        if let Some(intake) = &self.intake {
            sources.into_iter().for_each(|source| intake.add(source));
        }
        Ok(Worker { local_rank, rank, pid, restart_count, ended: None, given_up: false })
    }

    /// The streams of a worker that go to log files only, and those that are also shown.
    fn logged(&self, local_rank: usize) -> [Streams; 2] {
        let Options { redirects, tee, .. } = &self.config.options;
        if self.is_joint_check { Default::default() } else { [redirects.of(local_rank), tee.of(local_rank)] }
    }

    /// Creates one output stream, and returns the worker's end with what reads the other one.
    fn stream(&mut self, local_rank: usize, restart_count: u32, target: Target) -> Result<(OwnedFd, Source)> {
        let config = self.config;
        let [redirect, tee] = self.logged(local_rank).map(|streams| streams.has(target));
        let name = if target == Target::Stdout { STDOUT } else { STDERR };
        let file = (redirect || tee).then(|| self.folder.log_file(restart_count, local_rank, name)).transpose()?;
        let rank = self.topology.rank(local_rank);
        let filter = config.options.local_ranks_filter.as_ref().filter(|_| !self.is_joint_check);
        let is_shown = filter.is_none_or(|ranks| ranks.is_empty() || ranks.contains(&local_rank));
        let visible = is_shown && (tee || !redirect);
        let terminal = visible && Console::get().is_terminal(target);
        let (ours, theirs) = match terminal.then(terminal::open) {
            Some(Ok((ours, theirs))) => {
                let copy = ours.try_clone().map_err(|error| cannot("duplicating a pseudo-terminal", rank, error))?;
                self.terminals.push((local_rank, copy));
                (ours, theirs)
            }
            // The system has no pseudo-terminals.
            Some(Err(_)) | None => {
                let (reader, writer) = std::io::pipe().map_err(|error| cannot("creating a pipe", rank, error))?;
                (reader.into(), writer.into())
            }
        };
        let prefix = tee.then(|| {
            let (role_name, group_rank) = (&config.options.role, self.topology.node_rank);
            let whose = prefix::Source { role_name, local_rank, rank, host: &host_name(), group_rank, restart_count };
            config.options.log_line_prefix_template.of(&whose)
        });
        let shown = visible.then(|| Lines::new(prefix, terminal));
        let tail = Tail::default();
        Ok((theirs, Source { fd: Some(ours), local_rank, restart_count, target, shown, file, tail }))
    }
}

/// Returns a remedy if the system has run out of a resource.
pub(crate) fn resource_hint(error: &std::io::Error) -> Option<&'static str> {
    match Errno::from_io_error(error)? {
        Errno::MFILE => Some("raise the limit on open files, `ulimit -n`"),
        Errno::NFILE => Some("raise the machine's limit on open files, `sysctl fs.file-max`"),
        Errno::AGAIN => Some(candle_ddp_base::thread::HINT),
        Errno::NOMEM => Some("reduce the number of workers: there is too little memory"),
        _ => None,
    }
}

/// Builds the error for a resource that every worker needs; the program is not to blame.
fn cannot(doing: &str, rank: usize, error: std::io::Error) -> Error {
    Error::io(format!("{doing} for rank {rank}"), error)
}

/// Explains why a program could not be started and what to do.
fn cannot_start(program: &OsStr, error: std::io::Error) -> Error {
    let path = Path::new(program);
    let name = program.to_string_lossy();
    let plain_name = path.components().count() == 1 && !name.contains('/');
    let hint = match error.kind() {
        ErrorKind::NotFound if plain_name && path.exists() => {
            format!("It is not in PATH; use ./{name} for the one in this folder")
        }
        ErrorKind::NotFound if plain_name => {
            "It is not in PATH: build it first and give its path, or use --example NAME or --bin NAME".into()
        }
        ErrorKind::NotFound if path.exists() && !Path::new("/dev/null").exists() => {
            "The file exists, but /dev/null does not, from which it would read: mount /dev".into()
        }
        ErrorKind::NotFound if path.exists() => "The file exists, but its interpreter or loader does not".into(),
        ErrorKind::NotFound => "Build it first, or use --example NAME or --bin NAME".into(),
        _ if path.is_dir() => "It is a folder: give the path of a program".into(),
        _ if path.extension().is_some_and(|extension| extension == "py") => {
            format!("For a Python script use `ddprun … python {name}`")
        }
        _ if Errno::from_io_error(&error) == Some(Errno::PERM) => {
            "The system forbids it: a security profile of this container or machine (seccomp, AppArmor, SELinux) must allow \
             processes to be started"
                .into()
        }
        ErrorKind::PermissionDenied if !plain_name && access(path, Access::EXEC_OK).is_ok() => {
            "The file is executable, but its interpreter (the line that begins with #!) may not be".into()
        }
        ErrorKind::PermissionDenied => "Make it executable (chmod +x), or put its interpreter in front of it".into(),
        _ => "Check that the program was built for this architecture".into(),
    };
    Error::Program { program: name.into_owned(), error, hint }
}
