//! The owner of the frozen tensors of models with adapters.
use candle_core::{Result, Tensor};
use std::cell::RefCell;
use std::rc::Rc;

/// Takes over the tensor of this name, and returns what the model holds instead.
type Keep = Rc<dyn Fn(&str, &Tensor) -> Result<Tensor>>;

thread_local! {
    static KEEP: RefCell<Option<Keep>> = const { RefCell::new(None) };
}

/// Runs `build`. `keep` takes over the frozen tensors, but for running statistics, of the models with adapters that it builds on this
/// thread.
pub fn keeping_frozen<T>(keep: Keep, build: impl FnOnce() -> T) -> T {
    /// Restores what was there, even if `build` panics.
    struct Scope(Option<Keep>);
    impl Drop for Scope {
        fn drop(&mut self) {
            KEEP.set(self.0.take());
        }
    }
    let _scope = Scope(KEEP.replace(Some(keep)));
    build()
}

/// Returns the tensor that the model holds in place of a frozen one.
pub(super) fn kept(name: &str, tensor: Tensor) -> Result<Tensor> {
    match KEEP.with_borrow(Clone::clone) {
        Some(keep) => keep(name, &tensor),
        None => Ok(tensor),
    }
}
