//! Whether functions record how gradients flow through them: PyTorch's grad mode.
use candle_core::Tensor;
use std::cell::Cell;

thread_local! {
    static ENABLED: Cell<bool> = const { Cell::new(true) };
}

/// Runs `f` without recording graphs on this thread: `torch.no_grad`. The layers and functions of this family of crates keep
/// nothing for a backward pass, and their results depend on nothing, as if all tensors were detached. So a forward pass in
/// evaluation holds only the activations that it is computing with, instead of all.
///
/// The state ends with `f`, also if it panics. It may be nested, and [`enable_grad`] inside it records again. It belongs to this
/// thread; candle-ddp's `DataParallel` passes it on to its own threads.
///
/// **candle's own operations do not know it**: they record whenever an argument is a variable or depends on one. A model of
/// candle-ddp-nn's layers is free of graphs even so, as long as no operation of candle gets a parameter directly. For models in
/// which one does, such as `x.broadcast_add(&self.position_embedding)` or a layer of candle-nn itself, use tensors that candle does
/// not track: `DistributedDataParallel::with_no_grad_model` of candle-ddp makes a model of them that shares the memory of the
/// first.
///
/// ```
/// # use candle_core::{DType, Device, Var};
/// # fn main() -> candle_core::Result<()> {
/// # let weight = Var::zeros((2, 3), DType::F32, &Device::Cpu)?;
/// use candle_ddp_tensor::function::{add, no_grad};
/// let sum = no_grad(|| add(&weight, &weight))?;
/// assert!(!sum.track_op());
/// # Ok(())
/// # }
/// ```
pub fn no_grad<T>(f: impl FnOnce() -> T) -> T {
    set_grad_enabled(false, f)
}

/// Runs `f` and records graphs, inside of [`no_grad`] too: `torch.enable_grad`.
pub fn enable_grad<T>(f: impl FnOnce() -> T) -> T {
    set_grad_enabled(true, f)
}

/// Runs `f` under [`enable_grad`] or [`no_grad`]: `torch.set_grad_enabled`. A thread that works for another thread passes the
/// [`is_grad_enabled`] of that thread.
pub fn set_grad_enabled<T>(enabled: bool, f: impl FnOnce() -> T) -> T {
    let _restored = Restore(ENABLED.replace(enabled));
    f()
}

/// Whether functions record graphs on this thread: `torch.is_grad_enabled`. False inside of [`no_grad`].
pub fn is_grad_enabled() -> bool {
    ENABLED.get()
}

/// Gives the thread its earlier state back.
struct Restore(bool);

impl Drop for Restore {
    fn drop(&mut self) {
        ENABLED.set(self.0);
    }
}

/// Whether a function of this tensor records a graph.
pub fn is_tracked(tensor: &Tensor) -> bool {
    is_grad_enabled() && tensor.track_op()
}

/// The tensor as an argument of candle's own operations: without its graph under [`no_grad`].
pub fn argument(tensor: &Tensor) -> Tensor {
    if is_grad_enabled() { tensor.clone() } else { tensor.detach() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    fn the_state_is_nested_belongs_to_its_thread_and_ends_with_a_panic() {
        assert!(is_grad_enabled());
        no_grad(|| {
            assert!(!is_grad_enabled());
            enable_grad(|| {
                assert!(is_grad_enabled());
                no_grad(|| assert!(!is_grad_enabled()));
                assert!(is_grad_enabled());
            });
            assert!(!is_grad_enabled());
            assert!(std::thread::spawn(is_grad_enabled).join().unwrap());
            let panicked = catch_unwind(AssertUnwindSafe(|| enable_grad(|| panic!("in enable_grad"))));
            assert!(panicked.is_err() && !is_grad_enabled());
        });
        assert!(catch_unwind(AssertUnwindSafe(|| no_grad(|| panic!("in no_grad")))).is_err());
        assert!(is_grad_enabled());
    }
}
