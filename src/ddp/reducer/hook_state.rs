use super::Reducer;
use crate::Result;
use crate::state::StateDict;
use candle_core::Tensor;
use candle_ddp_base::debug_fields;
use std::collections::HashMap;

/// The state of the registered communication hook on this rank.
pub(in crate::ddp) struct CommHookState<'a> {
    pub(in crate::ddp) reducer: &'a Reducer,
}

debug_fields!(CommHookState<'_>);

impl StateDict for CommHookState<'_> {
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        self.reducer.with_comm_hook(|hook| hook.state_dict())
    }

    fn load_state_dict(&mut self, state: &HashMap<String, Tensor>) -> Result<()> {
        self.reducer.with_comm_hook(|hook| hook.load_state_dict(state))
    }
}
