use super::reducer::Reducer;
use crate::state::StateDict;
use crate::{Error, Result};
use candle_core::Tensor;
use std::collections::HashMap;
use std::fmt;

/// The state of the registered communication hook on this rank.
pub(super) struct CommHookState<'a> {
    pub(super) reducer: &'a Reducer,
}

impl fmt::Debug for CommHookState<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CommHookState").finish_non_exhaustive()
    }
}

impl StateDict for CommHookState<'_> {
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        self.reducer.with_comm_hook(|hook| hook.state_dict())
    }

    fn load_state_dict(&mut self, state: &HashMap<String, Tensor>) -> Result<()> {
        self.reducer.with_comm_hook(|hook| hook.load_state_dict(state))
    }

    /// Returns the hook's state on this rank.
    fn sharded_state_dict(&self) -> Result<Option<HashMap<String, Tensor>>> {
        self.state_dict().map(Some)
    }

    /// Loads this rank's own state.
    ///
    /// # Errors
    /// Also [`Error::InvalidArgument`] when the states are from a world of another size.
    fn load_sharded_state_dict(
        &mut self,
        shards: &[HashMap<String, Tensor>],
        rank: usize,
        world_size: usize,
    ) -> Result<()> {
        if shards.len() != world_size {
            let reason = format!(
                "these are the hook states of {} ranks, but the group has {world_size}: resume with as many ranks as \
                 before, or do not load them",
                shards.len()
            );
            return Err(Error::invalid("shards", reason));
        }
        self.load_state_dict(&shards[rank])
    }
}
