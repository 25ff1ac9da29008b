//! How a bench starts and ends: its options and its errors.
#![allow(dead_code)] // each bench uses only some of it
use clap::Parser;
use std::fmt::Display;
use std::process::{Command, ExitCode};

/// Cargo's own argument for benches.
const BENCH: &str = "--bench";

/// Whether `cargo bench` has started this program. Under `cargo test`, other arguments are for cargo's own harness.
pub(crate) fn is_bench() -> bool {
    std::env::args().any(|argument| argument == BENCH)
}

/// The options of the command line.
pub(crate) fn options<O: Parser>() -> O {
    O::parse_from(std::env::args().filter(|argument| argument != BENCH))
}

/// The options of the command line, or of `smoke` unless `cargo bench` has started this program.
pub(crate) fn options_or<O: Parser>(smoke: &[&str]) -> O {
    if is_bench() { options() } else { O::parse_from(["bench"].iter().chain(smoke)) }
}

/// Prints the error, if there is one.
pub(crate) fn exit_code<T, E: Display>(result: Result<T, E>) -> ExitCode {
    match result {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs `bench` with so many threads of candle's kernels. Their number is read from the environment, which a program can only set for
/// its children.
pub(crate) fn with_threads<T, E: Display>(threads: usize, bench: impl FnOnce() -> Result<T, E>) -> ExitCode {
    const THREADS: &str = "RAYON_NUM_THREADS";
    let threads = threads.to_string();
    if std::env::var(THREADS).as_deref() == Ok(&threads) {
        return exit_code(bench());
    }
    let restart =
        || Command::new(std::env::current_exe()?).args(std::env::args_os().skip(1)).env(THREADS, threads).status();
    match restart() {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => exit_code::<(), _>(Err(error)),
    }
}
