//! Differentiable functions of any number of tensors, like `torch.autograd.Function`.
//!
//! candle's own custom operations take at most three arguments, and candle adds every gradient that one returns to
//! zeros before passing it on. Between the functions of this module, gradients travel outside candle's graph instead,
//! unchanged:
//!
//! ```text
//!   x ──(Lift)── token ─┐                         token of y ──(Attach)── y ── candle's operations
//!   y' (Attach) ─ token ┴──(Backward: function)──┘    └──(Backward: next function)── token ── …
//! ```
//!
//! A token is a tensor without elements that represents a result in candle's graph, so that candle visits a function
//! after everything that uses its result. A result's gradient is collected in a `GradientSum`, by the functions that
//! use the result, and by `Attach`, to which candle passes what its own operations contribute. A result in channels_last is candle's
//! view of what `Attach` makes, and has the same token. A result of candle's own operations may have a token
//! too (`adopt.rs`), so that views between functions cost nothing. Sums belong to one backward
//! pass (`pass.rs`): a pass that fails leaves none to the next. An argument that was not
//! made by a function of this module is lifted: its gradient leaves the sum for candle's graph, once for all functions that
//! use it.
mod add;
mod adopt;
mod grad_mode;
mod input;
mod keyed;
mod leaf;
mod operation;
mod pass;
mod rerun;
mod token;

pub use add::add;
pub use grad_mode::{enable_grad, is_grad_enabled, no_grad, set_grad_enabled};
pub use operation::{apply, op1, op2, op3};
pub use token::Function;

#[doc(hidden)]
pub use self::{
    add::added,
    adopt::adopt,
    grad_mode::{argument, is_tracked},
    input::{NO_SECOND_ORDER, input, is_input_gradient},
    keyed::{Keys, keyed},
    leaf::{Leaves, leaf},
    operation::{apply_in, op1_in},
    pass::Pass,
    rerun::rerun,
    token::Earlier,
};
