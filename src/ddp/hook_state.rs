use super::reducer::Reducer;
use crate::Result;
use crate::state::StateDict;
use candle_core::Tensor;
use std::collections::HashMap;
use std::fmt;

/// What the registered communication hook remembers, on this rank: PowerSGD's factors, what was left out and is to be
/// made up for, and how many passes there were. Each rank saves its own, since ranks remember different things:
///
/// ```no_run
/// # fn step<M>(ddp: &candle_ddp::DistributedDataParallel<M>, rank: usize) -> candle_ddp::Result<()> {
/// use candle_ddp::optim::StateDict;
/// if let Some(mut hook) = ddp.comm_hook_state() {
///     hook.save(format!("hook-{rank}.safetensors"))?;
///     hook.load(format!("hook-{rank}.safetensors"))?; // after register_comm_hook, in a world of the same size
/// }
/// # Ok(())
/// # }
/// ```
pub struct CommHookState<'a>(pub(super) &'a Reducer);

impl fmt::Debug for CommHookState<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CommHookState").finish_non_exhaustive()
    }
}

impl StateDict for CommHookState<'_> {
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        self.0.with_comm_hook(|hook| hook.state_dict())
    }

    fn load_state_dict(&mut self, state: &HashMap<String, Tensor>) -> Result<()> {
        self.0.with_comm_hook(|hook| hook.load_state_dict(state))
    }
}
