//! Communication hooks replace DistributedDataParallel's all-reduce of a full bucket.
//!
//! | hook | sends for each gradient element | result |
//! |---|---|---|
//! | none, [`AllReduce`] | itself | the mean over the ranks |
//! | [`Fp16Compress`], [`Bf16Compress`] | 2 bytes | the mean, rounded to 11 (8) bits |
//! | [`Int8Compress`] | 17/16 byte, twice | the mean, rounded to 8 bits in each block of 64 elements; the rest comes next time |
//! | [`PowerSgd`] | two thin factors of each matrix | a low-rank approximation of the mean; the rest comes next time |
//! | [`Noop`] | nothing | this rank's own gradient |
//!
//! Register a hook with [`register_comm_hook`](crate::DistributedDataParallel::register_comm_hook), PyTorch's name:
//!
//! ```
//! use candle_core::{DType, Tensor};
//! use candle_ddp::comm_hook::{PowerSgd, PowerSgdOptions};
//! use candle_ddp::{DdpOptions, DistributedDataParallel};
//! use candle_nn::{VarMap, linear};
//!
//! # fn main() -> candle_ddp::Result<()> {
//! candle_ddp::spawn(2, |pg| {
//!     let build = |vb| linear(64, 32, vb);
//!     let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), build)?;
//!     ddp.register_comm_hook(PowerSgd::new(PowerSgdOptions { start_iter: 2, ..Default::default() })?)?;
//!     for _ in 0..4 {
//!         let x = Tensor::randn(0f32, 1.0, (8, 64), pg.device())?;
//!         ddp.backward(&ddp.forward(&x)?.sqr()?.mean_all()?)?;
//!     }
//!     let (gradient_bytes, bytes_sent) = ddp.comm_hook_traffic().expect("a hook is registered");
//!     assert!(bytes_sent.unwrap() < gradient_bytes);
//!     Ok(())
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! # Writing a hook
//! [`CommHook::run`] gets a bucket of this rank's gradients, undivided, starts collectives, and returns a
//! [`HookWork`] that says what follows them. `backward` returns the bucket's final contents. This hook adds noise to
//! the gradients that leave the rank:
//!
//! ```
//! use candle_core::{DType, Tensor};
//! use candle_ddp::comm_hook::{CommHook, GradBucket, HookWork};
//! use candle_ddp::{DdpOptions, DistributedDataParallel, ProcessGroup, ReduceOp, Result};
//! use candle_nn::{VarMap, linear};
//!
//! struct Noise {
//!     scale: f64,
//! }
//!
//! impl CommHook for Noise {
//!     fn describe(&self) -> String {
//!         format!("noise of {}", self.scale)
//!     }
//!
//!     fn run(&mut self, bucket: &GradBucket, group: &ProcessGroup) -> Result<HookWork<Self>> {
//!         let gradients = bucket.buffer(); // the flat view; bucket.gradients() has one for each parameter
//!         let noise = (gradients.randn_like(0.0, 1.0)? * self.scale)?;
//!         let noisy = ((gradients + noise)? / group.world_size() as f64)?; // DDP does not divide for a hook
//!         let work = group.all_reduce_async(&noisy, ReduceOp::Sum)?;
//!         // Runs later, when the sum is complete, on the thread that called `backward`.
//!         Ok(HookWork::then([work], move |_hook: &mut Self, bucket, _group| {
//!             bucket.set_buffer(&noisy)?;
//!             Ok(HookWork::done())
//!         }))
//!     }
//! }
//!
//! # fn main() -> Result<()> {
//! candle_ddp::spawn(2, |pg| {
//!     let build = |vb| linear(4, 1, vb);
//!     let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), build)?;
//!     ddp.register_comm_hook(Noise { scale: 1e-3 })?;
//!     let x = Tensor::ones((8, 4), DType::F32, pg.device())?;
//!     let grads = ddp.backward(&ddp.forward(&x)?.mean_all()?)?;
//!     let weight = &ddp.parameters()[0];
//!     let error = (grads.get(weight).expect("a gradient") - 1.0)?.abs()?.max_all()?.to_scalar::<f32>()?;
//!     assert!(error > 0.0 && error < 0.01);
//!     Ok(())
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! # Guarantees and requirements
//! - **Order.** In every synchronised backward pass, `run` is called for buckets 0, 1, … in order, on one thread. After
//!   the backward pass, the buckets are processed in rounds: for each bucket in turn, DDP waits for its collectives and
//!   runs its next stage. So collectives start in the same order on all ranks, provided that the hooks start the same
//!   ones for the same bucket, and one bucket's next stage is computed while others are in flight. Only first stages
//!   overlap the backward pass.
//! - **Parameters that a rank did not use** are zeros in its bucket. DDP sends which rank used which parameter
//!   separately: one small all-reduce per backward pass, with one byte per parameter and one or two more. So a parameter that no rank used
//!   has no gradient with any hook, and the hook's result for it is dropped.
//! - **Buckets change once**, after the first synchronised backward pass, when the order of the gradients is known.
//!   Keep state between passes by parameter name ([`GradBucket::names`]), as the hooks here do; PyTorch's hooks start
//!   anew.
//! - **Under `no_sync`** no hook runs; the next synchronised pass gives it the sum.
//! - **Gradients that are not finite** are zeros in the bucket if [`DdpOptions::on_non_finite`](crate::DdpOptions::on_non_finite) is set. All
//!   ranks leave out such a step, or a step in which the result of one rank's hook is not finite.
//! - **Dtypes.** A bucket has the dtype of the gradients, or [`reduce_dtype`](crate::Buckets::reduce_dtype) if set.
//! - **Errors** end the group on all ranks, with the reason.
//! - **Deadlock**: a hook must not call its own DDP model.
mod compress;
mod int8;
mod orthonormal;
mod power_sgd;

pub use compress::{AllReduce, Bf16Compress, Fp16Compress, Noop};
pub use int8::Int8Compress;
pub use power_sgd::{PowerSgd, PowerSgdOptions};

use crate::backend::Work;
use crate::process_group::ProcessGroup;
use crate::tensor::copy;
use crate::{Error, Result};
use candle_core::Tensor;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

/// Replaces DDP's all-reduce of a full bucket, like PyTorch's DDP communication hook. The [module](self) has an example
/// and lists the guarantees.
pub trait CommHook: Sized + Send + 'static {
    /// The hook's name and everything on which ranks must agree; registration compares it between ranks. Default: the
    /// type's name.
    fn describe(&self) -> String {
        std::any::type_name::<Self>().to_string()
    }

    /// Takes a bucket of this rank's gradients, undivided, and starts the communication. At the end the bucket must
    /// hold what `backward` is to return. To compute a mean, the hook must divide.
    ///
    /// # Errors
    /// An error ends the group on all ranks, and `backward` returns it.
    fn run(&mut self, bucket: &GradBucket, group: &ProcessGroup) -> Result<HookWork<Self>>;

    /// Whether this hook sends nothing. Then DDP sends nothing for it either: each rank keeps its own gradients, and a
    /// parameter has one if this rank used it. Default: false.
    fn is_local(&self) -> bool {
        false
    }

    /// The bytes that this rank has passed to collectives so far, for
    /// [`comm_hook_traffic`](crate::DistributedDataParallel::comm_hook_traffic). Default: None, not counted.
    fn bytes_sent(&self) -> Option<u64> {
        None
    }

    /// The hook's state on this rank as named tensors, for
    /// [`comm_hook_state`](crate::DistributedDataParallel::comm_hook_state). Default: empty.
    ///
    /// # Errors
    /// An error if the state cannot be read. A save then fails on all ranks.
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        Ok(HashMap::new())
    }

    /// Restores what [`state_dict`](Self::state_dict) returned. A state that does not fit is refused and changes
    /// nothing. Gradients end here: a state is values. The default accepts only an empty state.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a state that does not fit, with the parameter's name.
    fn load_state_dict(&mut self, state: &HashMap<String, Tensor>) -> Result<()> {
        match state.keys().min() {
            Some(key) => Err(Error::parameter(
                key,
                format!(
                    "the hook {} has no state, so this state must be from another hook: register that hook, or do \
                         not load its state",
                    self.describe()
                ),
            )),
            None => Ok(()),
        }
    }
}

/// The state of the parameter `name` does not fit its gradient.
fn of_another_model(name: &str) -> Error {
    Error::parameter(
        name,
        "the communication hook's state for this parameter has another shape or dtype: load the state that was saved \
         with this model",
    )
}

type Continuation<H> = Box<dyn FnOnce(&mut H, &GradBucket, &ProcessGroup) -> Result<HookWork<H>> + Send>;

/// The collectives that a hook has started for a bucket, and what follows them: PyTorch's future.
#[must_use = "the bucket is only finished when its work is"]
pub struct HookWork<H> {
    pub(super) works: Vec<Work>,
    pub(super) then: Option<Continuation<H>>,
}

impl<H> HookWork<H> {
    /// The bucket already holds its result.
    pub fn done() -> Self {
        Self { works: Vec::new(), then: None }
    }

    /// The bucket holds its result once `works` are complete.
    pub fn wait(works: impl IntoIterator<Item = Work>) -> Self {
        Self { works: works.into_iter().collect(), then: None }
    }

    /// Once `works` are complete, `next` gets the hook, the bucket and the group, and returns the next stage. Move
    /// tensors that `works` read or write into `next`, to keep them alive.
    pub fn then(
        works: impl IntoIterator<Item = Work>,
        next: impl FnOnce(&mut H, &GradBucket, &ProcessGroup) -> Result<HookWork<H>> + Send + 'static,
    ) -> Self {
        Self { works: works.into_iter().collect(), then: Some(Box::new(next)) }
    }

    pub(super) fn is_done(&self) -> bool {
        self.works.is_empty() && self.then.is_none()
    }
}

impl<H> fmt::Debug for HookWork<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HookWork").field("works", &self.works.len()).field("has_next", &self.then.is_some()).finish()
    }
}

/// The gradients of some parameters in one flat tensor: PyTorch's `GradBucket`. Clones share the gradients.
#[derive(Clone, Debug)]
pub struct GradBucket {
    pub(super) index: usize,
    pub(super) is_last: bool,
    pub(super) buffer: Tensor,
    pub(super) gradients: Arc<[Tensor]>,
    pub(super) names: Arc<[String]>,
}

impl GradBucket {
    /// The bucket's position; bucket 0 is sent first.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Whether it is the last bucket of the backward pass.
    pub fn is_last(&self) -> bool {
        self.is_last
    }

    /// All gradients as one flat, contiguous tensor, which collectives may change in place.
    pub fn buffer(&self) -> &Tensor {
        &self.buffer
    }

    /// Each parameter's gradient in its shape, as a view of the buffer.
    pub fn gradients(&self) -> &[Tensor] {
        &self.gradients
    }

    /// The names of the parameters, in the order of [`gradients`](Self::gradients).
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Copies `values` into the buffer and converts them to its dtype. `values` must have as many elements, a
    /// floating-point dtype, and its own storage. Gradients end here: the buffer takes the values alone.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another number of elements; candle's error for a dtype that cannot be converted.
    pub fn set_buffer(&self, values: &Tensor) -> Result<()> {
        let (count, expected) = (values.elem_count(), self.buffer.elem_count());
        if count != expected {
            return Err(Error::invalid(
                "values",
                format!(
                    "it must have as many elements as the bucket, {expected}, but \
                                                         has {count}"
                ),
            ));
        }
        Ok(copy::copy(&self.buffer, &values.flatten_all()?)?)
    }

    /// The size of the gradients in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.buffer.elem_count() * self.buffer.dtype().size_in_bytes()
    }
}
