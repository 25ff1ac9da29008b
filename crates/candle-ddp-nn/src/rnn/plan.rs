//! The plan of a recurrent layer in one direction, on any device.
use super::steps::Steps;
use std::marker::PhantomData;

/// The sizes and options of a pass over the steps. Arguments: the input, both weights, the states, and the biases that there are.
pub(super) struct Plan<C> {
    pub(super) steps: Steps,
    pub(super) inputs: usize,
    pub(super) hidden: usize,
    pub(super) has_bias: [bool; 2],
    pub(super) cells: bool,
    pub(super) cell: PhantomData<C>,
}
