use crate::process_group::InitOptions;
use std::time::Duration;

/// How [`run`](super::run) joins the ranks, and when it continues without some of them. For the defaults, pass
/// [`InitOptions`] alone.
#[derive(Clone, Debug)]
pub struct ElasticOptions {
    /// How each group is made. Its time-out also bounds how long ranks that have lost a peer wait for each other.
    pub init: InitOptions,
    /// The smallest number of ranks with which training continues. Default (None): all of them, so a lost rank must be
    /// replaced.
    pub min_world_size: Option<usize>,
    /// If the ranks agree among themselves: how long they wait for a rank that does not come but is not known to be
    /// gone. A rank notices a failure at its next collective, so this must be longer than a step takes. torchelastic's
    /// `last_call_timeout`. Default: 30 s; at most half of the time-out, since the surviving ranks meet in the other
    /// half.
    pub last_call_timeout: Duration,
    /// Whether the run starts from scratch, with a warning, when all ranks were lost at once and there is no checkpoint
    /// to continue from ([`State::on_total_loss`](super::State::on_total_loss)). Otherwise, all ranks get an error.
    /// Default: true.
    pub start_over: bool,
}

impl Default for ElasticOptions {
    fn default() -> Self {
        Self {
            init: InitOptions::default(),
            min_world_size: None,
            last_call_timeout: Duration::from_secs(30),
            start_over: true,
        }
    }
}

impl From<InitOptions> for ElasticOptions {
    fn from(init: InitOptions) -> Self {
        Self { init, ..Self::default() }
    }
}
