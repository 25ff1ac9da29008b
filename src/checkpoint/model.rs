//! The variables of a model as a state.
use super::{LoadOptions, load_tensors, tensors};
use crate::Result;
use crate::state::StateDict;
use candle_core::Tensor;
use candle_nn::VarMap;
use std::collections::HashMap;

/// The variables, under their own names. A state loads as [`load`](super::load) does: names and shapes must be the same, and
/// floating-point values are converted.
impl StateDict for VarMap {
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        Ok(tensors(self))
    }

    fn load_state_dict(&mut self, state: &HashMap<String, Tensor>) -> Result<()> {
        load_tensors(self, state.clone(), LoadOptions::default()).map(drop)
    }
}
