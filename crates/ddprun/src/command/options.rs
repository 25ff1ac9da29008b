//! The options whose values act as they were typed, whatever the others are.
use super::prefix::{self, Template};
use super::streams::{LocalRanks, StreamSelection, parse_ranks};
use crate::numa::{self, Binding};
use crate::signal::{self, Signals};
use clap::Arg;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

// The headings of the help.
pub(crate) const RANKS: &str = "Ranks";
pub(crate) const BUILD: &str = "Building with cargo";
pub(crate) const OUTPUT: &str = "Output";
pub(crate) const ENDING: &str = "Shutdown";

/// A number, perhaps with blanks around it, as environment variables may have.
pub(crate) fn trimmed<T: FromStr>(text: &str) -> Result<T, T::Err> {
    text.trim().parse()
}

/// Gives an option torchrun's spelling too, with `_` between words, and leaves its environment variable out of the help.
pub(crate) fn like_torchruns(arg: Arg) -> Arg {
    let name = arg.get_id().clone();
    let is_spelt_otherwise = arg.get_long().is_some_and(|long| long != name.as_str());
    let arg = arg.hide_env(true);
    if is_spelt_otherwise { arg.alias(name) } else { arg }
}

/// A number of seconds.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.trim().parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.ok_or_else(|| "it must be a non-negative number of seconds".to_string())
}

/// How much slower than others a rank may be: a factor above 1, in hundredths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tolerance(u64);

impl Tolerance {
    pub(crate) fn factor(self) -> f64 {
        self.0 as f64 / 100.0
    }
}

impl Default for Tolerance {
    fn default() -> Self {
        Self(150)
    }
}

impl fmt::Display for Tolerance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.factor())
    }
}

impl FromStr for Tolerance {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let factor: Option<f64> = text.trim().parse().ok();
        let factor = factor.filter(|factor| (1.0..=1e9).contains(factor));
        // Rounded, as the cast of what is left is exact.
        factor
            .map(|factor| Self((factor * 100.0).round() as u64))
            .ok_or_else(|| "it must be a number from 1 to 1e9".into())
    }
}

/// Part of the command line.
#[derive(Debug, Clone, PartialEq, Eq, clap::Args)]
pub(crate) struct Options {
    /// Makes no secret for this run, and gives none to the workers: anyone who reaches the store can use it, as with
    /// torchrun. By default, ddprun takes the secret from CANDLE_DDP_SECRET or from the file that
    /// CANDLE_DDP_SECRET_FILE names, which must be the same on all machines, or makes one if the run is on this machine
    /// alone. PyTorch's programs know no secret: they need this option if one is set, or if they share the store with
    /// programs of candle-ddp.
    #[arg(long)]
    pub(crate) no_secret: bool,

    /// Role of the workers: ROLE_NAME in their environment, and the prefix of --tee.
    #[arg(long, env = "PET_ROLE", value_name = "NAME", default_value = "default")]
    pub(crate) role: String,

    /// Folder for log files: DIR/RUN_ID/attempt_RESTARTS/LOCAL_RANK/{stdout.log,stderr.log,error.json}, and
    /// DIR/RUN_ID/verdict.json, which says why the run has failed. Existing logs are
    /// never overwritten: if RUN_ID is taken, a number is appended to it. [default: a new folder in the system's
    /// temporary folder, if --redirects or --tee needs files]
    #[arg(long, env = "PET_LOG_DIR", value_name = "DIR", help_heading = OUTPUT)]
    pub(crate) log_dir: Option<PathBuf>,

    /// Output to write to log files instead of showing it: 0 none, 1 stdout, 2 stderr, 3 both; or by local rank, as in
    /// `0:1,1:3`.
    #[arg(short, long, env = "PET_REDIRECTS", value_name = "STREAMS", default_value = "0", help_heading = OUTPUT)]
    pub(crate) redirects: StreamSelection,

    /// Output to write to log files and also show, each line with a prefix of the role and local rank, `[default0]:`; same
    /// values as --redirects.
    #[arg(short, long, env = "PET_TEE", value_name = "STREAMS", default_value = "0", help_heading = OUTPUT)]
    pub(crate) tee: StreamSelection,

    /// Prefix of each line that --tee shows: text with ${role_name}, ${local_rank}, ${rank} (the global rank), ${host},
    /// ${group_rank} (the machine's rank) and ${restart_count} in it. [default: [${role_name}${local_rank}]:]
    #[arg(
        long,
        env = prefix::VARIABLE,
        value_name = "TEXT",
        default_value = prefix::DEFAULT,
        hide_default_value = true,
        help_heading = OUTPUT
    )]
    pub(crate) log_line_prefix_template: Template,

    /// Local ranks whose output is shown, as in `0,2`; that of the others is not, but goes to log files as --redirects and
    /// --tee say, and its last lines are shown if the rank fails. [default: all]
    #[arg(long, env = "PET_LOCAL_RANKS_FILTER", value_name = "LIST", value_parser = parse_ranks, help_heading = OUTPUT)]
    pub(crate) local_ranks_filter: Option<LocalRanks>,

    /// Serves the metrics of the run at http://ADDRESS:PORT/metrics, in the text format of Prometheus: steps, speed and waits of
    /// each rank, what the programs report, restarts and more. 0 means a free port. The ddprun that hosts the store serves
    /// them: `ddprun host-store`, if the run has one; otherwise the one on machine 0, or at --rdzv-endpoint.
    #[arg(long, value_name = "PORT", value_parser = trimmed::<u16>, help_heading = OUTPUT)]
    pub(crate) metrics_port: Option<u16>,

    /// Address for --metrics-port. Whoever reaches it can read the metrics: 0.0.0.0 means all interfaces. [default:
    /// 127.0.0.1]
    #[arg(long, value_name = "ADDRESS", value_parser = trimmed::<IpAddr>, help_heading = OUTPUT)]
    pub(crate) metrics_addr: Option<IpAddr>,

    /// Seconds between asking workers to exit (with SIGTERM, or with the signal that ddprun received) and killing them:
    /// time to write a final checkpoint.
    #[arg(
        long,
        value_name = "SECONDS",
        value_parser = seconds,
        default_value = "30",
        allow_negative_numbers = true,
        help_heading = ENDING
    )]
    pub(crate) shutdown_timeout: Duration,

    /// Signals that end the run. ddprun forwards the first to the workers and exits after them. A second signal of any
    /// kind kills them at once, unless it arrives within half a second of the first.
    #[arg(
        long,
        env = "PET_SIGNALS_TO_HANDLE",
        value_name = "LIST",
        value_parser = signal::parse_list,
        default_value = "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        help_heading = ENDING
    )]
    pub(crate) signals_to_handle: Signals,

    /// How often ddprun restarts workers after one has failed. As with torchrun, all workers are ended and restarted,
    /// with TORCHELASTIC_RESTART_COUNT one higher. If the program runs candle_ddp::elastic::run, only the worker that
    /// died is replaced; the others continue. [default: 0]
    #[arg(
        long,
        env = "PET_MAX_RESTARTS",
        value_name = "N",
        value_parser = trimmed::<u32>,
        default_value = "0",
        hide_default_value = true,
        help_heading = ENDING
    )]
    pub(crate) max_restarts: u32,

    /// Measures this machine for a few seconds before it joins the run, as `ddprun check --quick` does. ddprun ends with exit
    /// code 1 if it is not fit; of several machines that were started so, one that is slower than the others is refused, and they measure the
    /// connections between them before the workers start. A rank, or a machine, is too slow if others are FACTOR (1.5) times as fast.
    #[arg(long, value_name = "FACTOR", num_args = 0..=1, require_equals = true, default_missing_value = "1.5")]
    pub(crate) check: Option<Tolerance>,

    /// Binds each worker to processors near its GPU: those of its NUMA `node`, those of the node's `socket`, cores of
    /// the node that no other worker has (`exclusive`), or those that share a cache (`core-complex`). Without GPUs,
    /// workers are distributed evenly over the nodes.
    #[arg(long, env = "PET_NUMA_BINDING", value_name = "KIND", value_parser = numa::parse)]
    pub(crate) numa_binding: Option<Binding>,

    /// Also gives each worker its local rank as its last argument, `--local-rank=N`, as torch.distributed.launch does; with
    /// `--pass-local-rank=--local_rank`, as older versions of it do. Programs for torchrun read LOCAL_RANK instead.
    #[arg(long, value_name = "NAME", num_args = 0..=1, require_equals = true, default_missing_value = "--local-rank")]
    pub(crate) pass_local_rank: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors() {
        assert_eq!("1.25".parse::<Tolerance>().unwrap().to_string(), "1.25");
        assert_eq!("1e9".parse::<Tolerance>().unwrap().factor(), 1e9);
        assert_eq!("1.5".parse::<Tolerance>().unwrap(), Tolerance::default());
        for wrong in ["0.9", "", "x", "NaN", "inf", "1e10", "-2"] {
            assert!(wrong.parse::<Tolerance>().is_err(), "{wrong}");
        }
    }
}
