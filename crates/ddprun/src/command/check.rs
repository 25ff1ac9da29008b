//! The command line of a check.
use super::options::{RANKS, Tolerance};
use super::ranks::Ranks;
use crate::numa::{self, Binding};

/// The name of the hidden mode.
pub(crate) const WORKER: &str = "check-worker";

/// How a check is made and shown.
#[derive(Debug, Clone, PartialEq, clap::Args)]
pub(crate) struct Manner {
    /// How many times slower than most a rank must be to count as an outlier. Connections between ranks may differ by twice
    /// this.
    #[arg(long, value_name = "FACTOR", default_value_t)]
    pub(crate) tolerance: Tolerance,

    /// Measures less, in about a third of the time.
    #[arg(long)]
    pub(crate) quick: bool,

    /// Shows all measurements as one line of JSON.
    #[arg(long)]
    pub(crate) json: bool,

    /// Measures only what concerns several nodes, and shows only what is wrong.
    #[arg(long, hide = true)]
    pub(crate) joint: bool,

    /// The most bytes of a call or a copy, for tests of builds without optimisation.
    #[arg(long, hide = true, default_value_t = usize::MAX)]
    pub(crate) most_bytes: usize,
}

/// The command line of `ddprun check`.
#[derive(Debug, Clone, PartialEq, clap::Args)]
pub(crate) struct Check {
    #[command(flatten)]
    pub(crate) ranks: Ranks,

    #[command(flatten)]
    pub(crate) manner: Manner,

    /// Binds each rank to processors, as in a run.
    #[arg(long, value_name = "KIND", value_parser = numa::parse, help_heading = RANKS)]
    pub(crate) numa_binding: Option<Binding>,

    /// The store has no secret, as in a run.
    #[arg(long, help_heading = RANKS)]
    pub(crate) no_secret: bool,
}
