//! The launcher `ddprun`: starts the ranks of a program on this machine, with torchrun's options and environment.
//!
//! - The kernel kills the workers when the launcher dies, however that happens. Whatever they have started is ended by
//!   the launcher, also where it detached itself. If the launcher is killed by SIGKILL, that survives; use `exec` in
//!   wrapper scripts.
//! - The first failure ends the others (a second to end by themselves, then SIGTERM, then SIGKILL after a grace period)
//!   and decides the exit code.
//! - Output is passed on line by line, by threads of its own: whoever does not read it stops the workers, as a full pipe
//!   does, but not the launcher. Where the launcher writes to a terminal the workers see one too (a pseudo-terminal),
//!   so that progress bars and colours work as if the program had been started by hand.
//! - The store at which ranks meet is hosted here, on machine 0, and outlives the workers
//!   (TORCHELASTIC_USE_AGENT_STORE).
//!
//! `Cli` is the command line as it was typed, `Config` what it means; `run` does it.
mod cargo;
mod child;
mod cli;
mod config;
mod console;
mod descendants;
mod environment;
mod error;
mod error_text;
mod folder;
mod lines;
mod output;
mod printer;
mod processes;
mod root_cause;
mod signal;
mod store;
mod streams;
mod summary;
mod supervisor;
mod tail;
mod terminal;
mod time;
mod worker;

use cargo::Built;
use clap::{CommandFactory, Parser};
use cli::Cli;
use config::{Config, Program};
use console::{Console, message};
use error::{Error, Result, USAGE};
use folder::RunFolder;
use processes::Host;
use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;
use supervisor::{Events, Outcome, Supervisor};
use worker::{Exit, Starter};

/// How long output may stay unread at the end of a run that is to end at once.
const UNREAD: Duration = Duration::from_secs(5);

/// `ddprun`: reads the command line of this process and does what it says, to the end.
pub fn main() -> ExitCode {
    match parse() {
        Ok(cli) => run(cli),
        Err(code) => code,
    }
}

/// Reads the command line of this process. Shows help, or what is wrong with it; `Err` is then the exit code.
fn parse() -> Result<Cli, ExitCode> {
    Cli::try_parse().map_err(|error| {
        // Nobody may be there to read it.
        let _ = error.print();
        if error.use_stderr() {
            say_variables();
            Console::get().finish(UNREAD, || false);
        }
        ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(USAGE))
    })
}

/// Does what `cli` says, and shows what goes wrong. Returns when all workers have ended.
///
/// It takes over the signals, the child processes and the output of this process, and must be called from a thread that
/// lives as long as the process, as the main thread does: workers die with it.
fn run(cli: Cli) -> ExitCode {
    let result = match &cli.merge_traces {
        Some(folder) => merge_traces(folder),
        None => Config::resolve(cli, &Host::detect()).and_then(|config| execute(&config)),
    };
    let End { code, patience, events } = result.unwrap_or_else(|error| {
        message(describe(&error));
        if matches!(error, Error::Usage { .. }) {
            say_variables();
        }
        End::now(error.exit_code())
    });
    Console::get().finish(patience, || events.as_ref().is_some_and(Events::interrupted));
    ExitCode::from(code)
}

/// The exit code, and how long whoever reads the output may stand still before the rest of it is given up.
struct End {
    code: u8,
    patience: Duration,
    /// A signal ends the wait, too.
    events: Option<Events>,
}

impl End {
    fn now(code: u8) -> Self {
        Self { code, patience: UNREAD, events: None }
    }
}

/// An error, and what to do when the system has run out of something.
fn describe(error: &Error) -> String {
    let hint = match error {
        Error::Library(crate::Error::Io { error, .. }) => worker::lack(error),
        _ => None,
    };
    hint.map_or_else(|| error.to_string(), |hint| format!("{error}. Perhaps {hint}"))
}

/// Names the variables that options came from, or may have come from, since the command line does not show them.
fn say_variables() {
    let command = Cli::command();
    let variables = command.get_arguments().filter_map(|argument| argument.get_env()?.to_str());
    let set: Vec<String> = variables.filter_map(|name| Some(format!("{name}={}", std::env::var(name).ok()?))).collect();
    if !set.is_empty() {
        message(format_args!("options also come from the environment: {}", set.join(" ")));
    }
}

fn merge_traces(folder: &Path) -> Result<End> {
    let (path, ranks) = crate::trace::merge(folder)?;
    message(format_args!("{} shows {ranks} ranks: open it at https://ui.perfetto.dev", path.display()));
    Ok(End::now(0))
}

fn execute(config: &Config) -> Result<End> {
    let program: OsString = match &config.program {
        Program::Path(path) => path.clone(),
        Program::Cargo(target) => match target.build()? {
            Built::Executable(path) => path.into(),
            Built::Failed(status) => {
                let exit = status.signal().map_or(Exit::Code(status.code().unwrap_or(1)), Exit::Signal);
                return Ok(End::now(exit.code()));
            }
        },
    };
    let events = Events::listen(&config.signals)?;
    store::check_address(config)?;
    let (_store, master_port) = store::host(config)?;
    let folder = RunFolder::create(config)?;
    let console = Console::get();
    let mut supervisor = Supervisor::new(config.shutdown_timeout);
    let (sources, terminals) = (Vec::new(), Vec::new());
    let mut starter = Starter { config, program: &program, folder: &folder, master_port, console, sources, terminals };
    for local_rank in 0..config.topology.local_world_size {
        supervisor.workers.push(starter.start(local_rank)?);
    }
    let Starter { sources, terminals, .. } = starter;
    say_threads(config);
    let (closing, keep_open) = std::io::pipe().map_err(|error| Error::io("creating a pipe", error))?;
    events.forward(sources, closing.into())?;
    let (outcome, remains) = supervisor.watch(&events, terminals, keep_open);
    let patience = config.shutdown_timeout;
    let (code, patience) = match outcome {
        Outcome::Success => (0, patience),
        Outcome::Signalled(signal) => (Exit::Signal(signal).code(), patience.min(UNREAD)),
        Outcome::Failure(first) => {
            let workers = &supervisor.workers;
            let cause = root_cause::cause(workers, first, &remains, &config.topology);
            if let Some(summary) = summary::of_failure(workers, cause, &remains, &folder, &config.topology) {
                message(summary);
            }
            // The cause need not have failed itself.
            let failed = [cause.worker, first].into_iter().filter_map(|index| workers.get(index));
            let ended = failed.filter(|worker| root_cause::failed(worker)).find_map(|worker| worker.ended);
            (ended.map_or(1, |ended| ended.how.code()), patience)
        }
    };
    Ok(End { code, patience, events: Some(events) })
}

fn say_threads(config: &Config) {
    let set = environment::threads(config);
    if !set.is_empty() {
        let list: Vec<String> = set.iter().map(|(name, count)| format!("{name}={count}")).collect();
        let (cores, workers) = (config.cores, config.topology.local_world_size);
        message(format_args!("{} for each worker: {cores} cores shared by {workers}", list.join(" and ")));
    }
}
