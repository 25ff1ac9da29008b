//! The check of this machine before it joins a run (`--check`), and what the other machines need to know of it.
use super::measured::Report;
use super::outliers::of_most;
use super::table;
use crate::child;
use crate::command::cli::Cli;
use crate::command::config::Config;
use crate::command::options::Tolerance;
use crate::console::{Console, Target, message};
use crate::error::{Error, Result};
use crate::tail::plain;
use candle_ddp_rendezvous::secret;
use clap::{CommandFactory, ValueEnum};
use serde::{Deserialize, Serialize};
use std::process::{Command, Stdio};

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
