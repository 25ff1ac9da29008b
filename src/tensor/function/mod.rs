//! Differentiable functions of any number of tensors, as `torch.autograd.Function` makes them.
//!
//! candle's own custom operations take three arguments at most, and candle adds every gradient that one returns to zeros
//! before it goes on. Between the functions of this module gradients travel beside candle's graph instead, and are not
//! touched on their way:
//!
//! ```text
//!   x ──(Lift)── token ─┐                         token of y ──(Attach)── y ── candle's operations
//!   y' (Attach) ─ token ┴──(Backward: function)──┘    └──(Backward: next function)── token ── …
//! ```
//!
//! A token is a tensor of one element that stands for a result in candle's graph, so that candle comes to a function
//! after everything that uses its result. A result's gradient is collected in a [`GradientSum`]: by the functions that use the
//! result, and by `Attach`, to which candle gives what its own operations add. An argument that no function of this
//! module has made is lifted: its gradient leaves the sum for candle's graph.
mod leaf;
mod operation;
mod rerun;
mod token;

pub(crate) use leaf::{Leaves, leaf};
pub(crate) use operation::{apply, op1, op2, op3};
pub(crate) use rerun::rerun;
pub(crate) use token::Function;
