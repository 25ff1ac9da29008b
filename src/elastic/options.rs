use crate::process_group::InitOptions;
use std::time::Duration;

/// How [`run`](super::run) joins the ranks, and when it goes on without some of them. [`InitOptions`] alone will do for the
/// defaults.
#[derive(Clone, Debug)]
pub struct ElasticOptions {
    /// How each group is made. Its time-out also bounds how long ranks that have lost a peer wait for each other.
    pub init: InitOptions,
    /// The smallest number of ranks with which training goes on. Default (None): all of them, so that a rank must be replaced.
    pub min_world_size: Option<usize>,
    /// Where the ranks agree themselves: how long they wait for one that is not known to be gone, and does not come. A rank
    /// notices a failure at its next collective, so this must be longer than a step takes. torchelastic's
    /// `last_call_timeout`. Default: 30 s; at most half of the time-out, since the ranks that are left meet in the other half.
    pub last_call_timeout: Duration,
    /// Whether the run starts from scratch when all ranks were lost at once and there is no checkpoint to continue from
    /// ([`State::on_total_loss`](super::State::on_total_loss)). It then says so. Otherwise, all ranks get an error. Default:
    /// true.
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
