//! Elements of tensors and access to them, for loops on the CPU and on GPUs.
pub(crate) mod borrow;
pub(crate) mod copy;
pub(crate) mod element;
mod float16;
pub(crate) mod function;
mod math;
mod number;
pub(crate) mod pack;
mod simd;
pub(crate) mod variables;

pub(crate) use element::{DTYPES, Element, Real, dispatch};
pub(crate) use number::{Arithmetic, Number};
pub(crate) use simd::vectorise;
