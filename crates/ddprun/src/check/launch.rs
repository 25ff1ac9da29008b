//! The ways to start a check, and what follows from it: as a run, on this machine alone before it joins a run, and on all nodes of
//! a run together (`--check`).
use super::measured::Report;
use super::outliers::of_most;
use super::table;
use crate::child;
use crate::command::{Check, Cli, Config, Manner, Tolerance, WORKER};
use crate::console::{Console, Target, message};
use crate::error::{Error, Result};
use crate::tail::plain;
use crate::verdict::WorkerError;
use candle_ddp_rendezvous::secret;
use clap::{CommandFactory, Parser, ValueEnum};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::process::{Command, Stdio};

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

/// A machine is as fast as its slowest rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Fitness {
    /// MFLOP/s of matrix products on the slowest core.
    product: u64,
    /// MB/s of copies.
    copy: u64,
    /// How much slower than others it may be.
    tolerance: Tolerance,
}

/// Checks this machine alone.
///
/// # Errors
/// Returns [`Error::Unfit`] if there is an outlier, after all measurements were shown.
pub(crate) fn of_this_machine(config: &Config, tolerance: Tolerance) -> Result<Fitness> {
    let program = std::env::current_exe().map_err(|error| Error::io("finding the program of ddprun", error))?;
    let mut command = Command::new(program);
    command.args(["check", "--quick", "--json", "--standalone"]);
    command.arg(format!("--tolerance={tolerance}"));
    command.arg(format!("--nproc-per-node={}", config.topology.local_world_size()));
    let binding = config.options.numa_binding.and_then(|binding| binding.to_possible_value());
    command.args(binding.map(|binding| format!("--numa-binding={}", binding.get_name())));
    // Options and the secret are for the run.
    let cli = Cli::command();
    cli.get_arguments().filter_map(|argument| argument.get_env()).for_each(|name| {
        command.env_remove(name);
    });
    command.env_remove(secret::VARIABLE).env_remove(secret::FILE_VARIABLE);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    child::bind_to_launcher(&mut command);
    let child = command.spawn().map_err(|error| Error::io("starting ddprun check", error))?;
    let output = child.wait_with_output().map_err(|error| Error::io("waiting for ddprun check", error))?;
    let report: Report = serde_json::from_slice(&output.stdout)
        .map_err(|_| Error::Unfit(format!("ddprun check failed ({}): its output is above", output.status)))?;
    if !report.verdict.outliers.is_empty() {
        let text = plain(&table::text(&report.ranks, &report.verdict));
        // The text is lost if stdout has no reader.
        let _ = Console::get().show(0, Target::Stdout, text.into_bytes());
        return Err(Error::Unfit(report.verdict.outliers.join("; ")));
    }
    report.verdict.notes.iter().for_each(message);
    let least = |values: Vec<f64>| values.into_iter().min_by(f64::total_cmp).unwrap_or(0.0);
    let product = least(report.ranks.iter().map(|rank| rank.product()).collect());
    let copy = least(report.ranks.iter().map(|rank| rank.copy).collect());
    message(format_args!(
        "this machine is fit: {product:.1} GFLOP/s on its slowest core, memory is copied at {copy:.1} GB/s"
    ));
    Ok(Fitness { product: (product * 1e3) as u64, copy: (copy * 1e3) as u64, tolerance })
}

impl Fitness {
    /// Why a machine is not fit for a run with `all` of them, if it is slower than most.
    pub(crate) fn lacks(self, all: &[Self]) -> Option<String> {
        let one = |what: &str, unit: &str, of: fn(Self) -> u64| {
            let most = of_most(all.iter().map(|other| of(*other) as f64).collect())?;
            let own = of(self) as f64;
            let texts = [own, most].map(|speed| format!("{:.1} {unit}", speed / 1e3));
            (own * self.tolerance.factor() < most)
                .then(|| format!("{what} at {}, on others at {} (--check)", texts[0], texts[1]))
        };
        one("its slowest core multiplies matrices", "GFLOP/s", |speed| speed.product)
            .or_else(|| one("its slowest rank copies memory", "GB/s", |speed| speed.copy))
    }

    #[cfg(test)]
    pub(crate) fn of(product: u64, copy: u64) -> Self {
        Self { product, copy, tolerance: Tolerance::default() }
    }
}
