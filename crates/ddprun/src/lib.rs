//! The launcher `ddprun`: starts the ranks of a program on one machine or several, with torchrun's options and environment.
//!
//! - If the launcher dies, for whatever reason, the kernel kills the workers. The launcher ends all other processes
//!   that they started, even detached ones. If the launcher is killed by SIGKILL, these survive; use `exec` in wrapper
//!   scripts.
//! - The first failure ends the other workers and decides the exit code. They get a second to exit by themselves, then
//!   SIGTERM, and SIGKILL after a grace period.
//! - Dedicated threads forward the output line by line. If it is not read, the workers block, as on a full pipe, but
//!   the launcher does not. If the launcher writes to a terminal, the workers see a pseudo-terminal, so that progress
//!   bars and colours work as if the program had been started by hand.
//! - The launcher on machine 0 hosts the rendezvous store, which outlives the workers (TORCHELASTIC_USE_AGENT_STORE). The
//!   launchers of several machines meet there (`nodes`).
//!
//! `Cli` is the command line as typed, `Config` is its meaning, and `run` executes it.
mod check;
mod child;
mod command;
mod console;
mod error;
mod numa;
mod printer;
mod signal;
mod supervise;
mod tail;
mod template;
mod time;
mod verdict;
mod view;

use candle_ddp_env::PROCESS;
use clap::{CommandFactory, Parser};
use command::{Cli, Mode};
use console::{Console, message};
use error::{Error, USAGE};
use std::process::ExitCode;
use supervise::{End, UNREAD, describe};

/// The program `ddprun`: executes the command line of this process and returns when the run has ended.
pub fn main() -> ExitCode {
    if let Err(error) = child::unblock_signals() {
        message(format_args!("cannot unblock signals: {error}"));
    }
    match Cli::try_parse() {
        Ok(cli) => run(cli),
        Err(error) => {
            // The text is lost if the stream has no reader.
            let _ = error.print();
            if error.use_stderr() {
                list_variables();
                Console::get().finish(UNREAD, || false);
            }
            ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(USAGE))
        }
    }
}

/// Executes `cli` and reports errors to the user. Returns when all workers have ended.
///
/// Takes over the signals, child processes and output of this process. Call it from a thread that lives as long as the
/// process, such as the main thread, because the workers die with that thread.
fn run(mut cli: Cli) -> ExitCode {
    console::show_warnings();
    signal::survive_file_limits();
    let result = match cli.mode.take() {
        Some(Mode::MergeTraces { folder }) => view::merge_traces(&folder).map(End::done),
        Some(Mode::Explain { folder, torchfrtrace }) => view::explain(&folder, torchfrtrace.as_deref()).map(End::done),
        Some(Mode::Report { folder, output }) => view::report(&folder, output.as_deref()).map(End::done),
        Some(Mode::Status { address, no_secret, json }) => view::status(&address, no_secret, json).map(End::done),
        Some(Mode::Check(check)) => check::cli(*check).and_then(|cli| supervise::start(cli, true)),
        Some(Mode::HostStore(options)) => supervise::host_store::serve(*options).map(End::now),
        Some(Mode::New { path, candle_ddp }) => template::create(&path, candle_ddp.as_deref()).map(End::done),
        Some(Mode::CheckWorker(manner)) => check::work(&manner).map(End::now),
        None => supervise::start(cli, false),
    };
    let end = result.unwrap_or_else(|error| {
        message(describe(&error));
        if matches!(error, Error::Usage { .. }) {
            list_variables();
        }
        End::now(error.exit_code())
    });
    Console::get().finish(end.patience, || end.interrupted());
    ExitCode::from(end.code)
}

/// Lists the environment variables that may have set options, because the command line does not show them.
fn list_variables() {
    let command = Cli::command();
    let variables = command.get_arguments().filter_map(|argument| argument.get_env()?.to_str());
    let set: Vec<String> = variables.filter_map(|name| Some(format!("{name}={}", PROCESS.raw(name)?))).collect();
    if !set.is_empty() {
        message(format_args!("options also come from the environment: {}", set.join(" ")));
    }
}
