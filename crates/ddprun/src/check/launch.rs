//! A check as a run, and what follows from it.
use crate::command::check::{Check, Manner, WORKER};
use crate::command::cli::Cli;
use crate::command::config::Config;
use crate::console::message;
use crate::error::{Error, Result};
use crate::verdict::WorkerError;
use clap::Parser;
use std::ffi::OsString;
use std::process::Command;

/// The check as a run.
pub(crate) fn cli(check: Check) -> Result<Cli> {
    let Check { ranks, manner: Manner { tolerance, quick, json, most_bytes, joint: _ }, numa_binding, no_secret } =
        check;
    let program = std::env::current_exe().map_err(|error| Error::io("finding the program of ddprun", error))?;
    let mut words: Vec<OsString> = ["ddprun", "--max-restarts=0", "--redirects=0", "--tee=0"].map(Into::into).into();
    words.extend([program.into_os_string(), WORKER.into(), format!("--tolerance={tolerance}").into()]);
    words.push(format!("--most-bytes={most_bytes}").into());
    words.extend(quick.then(|| "--quick".into()));
    words.extend(json.then(|| "--json".into()));
    let mut cli = Cli::try_parse_from(words).map_err(|error| Error::usage("check", error.to_string()))?;
    cli.ranks = ranks;
    (cli.options.numa_binding, cli.options.no_secret, cli.options.log_dir) = (numa_binding, no_secret, None);
    Ok(cli)
}

/// The command of a rank of the check that all nodes make together before a run, with `--check`.
pub(crate) fn joint(config: &Config) -> Result<Command> {
    let program = std::env::current_exe().map_err(|error| Error::io("finding the program of ddprun", error))?;
    let mut command = Command::new(program);
    let tolerance = config.options.check.unwrap_or_default();
    command.args([WORKER, "--quick", "--joint", &format!("--tolerance={tolerance}")]);
    Ok(command)
}

/// The exit code of a check whose workers have succeeded, and the first one may have told an `error`. Names the outliers, unless rank 0 has shown them here.
pub(crate) fn code(error: Option<WorkerError>, node_rank: usize) -> u8 {
    let Some(error) = error else { return 0 };
    if node_rank > 0 {
        message(error.message);
    }
    1
}
