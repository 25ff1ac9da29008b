//! Communication hooks: what DistributedDataParallel does with a full bucket, instead of all-reducing it as it is.
//!
//! | hook | sends, of each gradient element | result |
//! |---|---|---|
//! | none, [`AllReduce`] | itself | the mean over the ranks |
//! | [`Fp16Compress`], [`Bf16Compress`] | 2 bytes | the mean, rounded to 11 (8) bits |
//! | [`PowerSgd`] | two thin factors of each matrix | the part of low rank of the mean; the rest counts next time |
//! | [`TopK`] | the largest, with their places | the mean of what was sent; the rest counts next time |
//! | [`Noop`] | nothing | this rank's own gradient |
//!
//! A hook is registered with
//! [`register_comm_hook`](crate::DistributedDataParallel::register_comm_hook) (PyTorch's name):
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
//!     let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), DType::F32, build, DdpOptions::default())?;
//!     ddp.register_comm_hook(PowerSgd::new(PowerSgdOptions { start_iter: 2, ..Default::default() })?)?;
//!     for _ in 0..4 {
//!         let x = Tensor::randn(0f32, 1.0, (8, 64), pg.device())?;
//!         ddp.backward(&ddp.forward(&x)?.sqr()?.mean_all()?)?;
//!     }
//!     let traffic = ddp.comm_hook_traffic().expect("a hook is registered");
//!     assert!(traffic.bytes_sent.unwrap() < traffic.gradient_bytes);
//!     Ok(())
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! # A hook of one's own
//! [`CommHook::run`] gets a bucket of this rank's gradients, undivided, starts collectives, and returns a [`HookWork`] that
//! says what comes after them. `backward` returns the bucket's final contents. This
//! one adds noise to what leaves the rank:
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
//!         // Later, when the sum is there, on the thread that called `backward`:
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
//!     let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), DType::F32, build, DdpOptions::default())?;
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
//! # What a hook can rely on, and has to keep to
//! - **Order.** `run` is called for the buckets in their order, 0, 1, …, in every synchronised backward pass, on the same
//!   thread. When the backward pass is over, the buckets are gone through in rounds: of each in turn, the collectives
//!   that it waits for are waited for, and what comes after them is run. So collectives start in the same order on all
//!   ranks, as long as the hooks start the same ones for the same bucket, and a bucket's next stage is calculated while
//!   others' are on their way. Only the first stage runs beside the backward pass.
//! - **Parameters that a rank did not use** are zeros in its bucket. Which rank used which parameter is sent beside the hook: one
//!   small all-reduce per backward pass, one byte for each parameter, so that a parameter that no rank used has no
//!   gradient, with every hook (what the hook makes of it is dropped).
//! - **Buckets change once**, after the first synchronised backward pass, when the order in which gradients come is
//!   known. State that lasts from pass to pass is best kept by parameter name ([`GradBucket::names`]), as the hooks here
//!   do; PyTorch's start anew.
//! - **Under `no_sync`** no hook runs; the next synchronised pass gives it the sum.
//! - **Dtypes.** A bucket has the dtype of the gradients, or `mixed_precision.reduce_dtype`.
//! - **An error** ends the group, with the reason, on all ranks.
//! - **Deadlock**: a hook must not call its own DDP model.
mod compress;
mod orthonormal;
mod power_sgd;
mod top_k;

pub use crate::ddp::hook_state::CommHookState;
pub use compress::{AllReduce, Bf16Compress, Fp16Compress, Noop};
pub use power_sgd::{PowerSgd, PowerSgdOptions};
pub use top_k::{TopK, TopKOptions};

use crate::backend::Work;
use crate::process_group::ProcessGroup;
use crate::tensor::copy;
use crate::{Error, Result};
use candle_core::Tensor;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

/// What happens to a full bucket, instead of DDP's own all-reduce: PyTorch's DDP communication hook. See the
/// [module](self) for an example and for what it can rely on.
pub trait CommHook: Sized + Send + 'static {
    /// The hook's name and everything on which ranks have to agree; registration compares it between the ranks. The
    /// default is the type's name.
    fn describe(&self) -> String {
        std::any::type_name::<Self>().to_string()
    }

    /// Takes a bucket of this rank's gradients (not divided by anything) and starts what is to be sent of it.
    /// In the end the bucket holds what `backward` returns. For a mean, this hook has to divide.
    fn run(&mut self, bucket: &GradBucket, group: &ProcessGroup) -> Result<HookWork<Self>>;

    /// Whether this hook sends nothing at all. Then nothing else is sent for it either: gradients are each rank's own,
    /// and a parameter has one where this rank used it. Default: false.
    fn is_local(&self) -> bool {
        false
    }

    /// How many bytes this rank has handed to collectives as its part since the beginning, for
    /// [`comm_hook_traffic`](crate::DistributedDataParallel::comm_hook_traffic). Default: None, not counted.
    fn bytes_sent(&self) -> Option<u64> {
        None
    }

    /// What this rank's hook remembers from pass to pass, as named tensors, for
    /// [`comm_hook_state`](crate::DistributedDataParallel::comm_hook_state). Default: nothing.
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        Ok(HashMap::new())
    }

    /// Takes over what [`state_dict`](Self::state_dict) gave. What does not fit is refused, and then nothing has changed.
    /// The default accepts only an empty state.
    fn load_state_dict(&mut self, state: &HashMap<String, Tensor>) -> Result<()> {
        match state.keys().min() {
            Some(key) => Err(Error::parameter(
                key,
                format!("{} remembers nothing: this is the state of another hook", self.describe()),
            )),
            None => Ok(()),
        }
    }
}

/// What was remembered of the parameter `name` is not for a gradient as it is now.
fn of_another_model(name: &str) -> Error {
    Error::parameter(
        name,
        "what the communication hook remembers of it has another shape or dtype: its state is of another model",
    )
}

type Continuation<H> = Box<dyn FnOnce(&mut H, &GradBucket, &ProcessGroup) -> Result<HookWork<H>> + Send>;

/// What a hook has started for a bucket, and what it does afterwards: PyTorch's future.
#[must_use = "the bucket is only finished when its work is"]
pub struct HookWork<H> {
    pub(super) works: Vec<Work>,
    pub(super) then: Option<Continuation<H>>,
}

impl<H> HookWork<H> {
    /// The bucket holds its result.
    pub fn done() -> Self {
        Self { works: Vec::new(), then: None }
    }

    /// The bucket holds its result when `works` are over.
    pub fn wait(works: impl IntoIterator<Item = Work>) -> Self {
        Self { works: works.into_iter().collect(), then: None }
    }

    /// When `works` are over, `next` is given the hook, the bucket and the group, and returns what comes after it. Move
    /// tensors that `works` read or write into `next`: so they stay alive.
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
        f.debug_struct("HookWork").field("works", &self.works.len()).field("goes_on", &self.then.is_some()).finish()
    }
}

/// The gradients of some parameters, one behind the other: PyTorch's `GradBucket`. Clones show the same gradients.
#[derive(Clone, Debug)]
pub struct GradBucket {
    pub(super) index: usize,
    pub(super) is_last: bool,
    pub(super) buffer: Tensor,
    pub(super) gradients: Arc<[Tensor]>,
    pub(super) names: Arc<[String]>,
}

impl GradBucket {
    /// The bucket's place among the buckets: the one with 0 is sent first.
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

    /// Each parameter's gradient in its shape: views of the buffer.
    pub fn gradients(&self) -> &[Tensor] {
        &self.gradients
    }

    /// The names of the parameters, in the order of [`gradients`](Self::gradients).
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Writes the elements of `values` into the buffer, in its dtype. `values` has as many, a floating-point dtype, and
    /// storage of its own.
    pub fn set_buffer(&self, values: &Tensor) -> Result<()> {
        let (count, expected) = (values.elem_count(), self.buffer.elem_count());
        if count != expected {
            return Err(Error::invalid("values", format!("{count} elements for a bucket of {expected}")));
        }
        copy::copy(&self.buffer, &values.flatten_all()?)
    }

    /// The size of the gradients in bytes.
    pub fn bytes(&self) -> usize {
        self.buffer.elem_count() * self.buffer.dtype().size_in_bytes()
    }
}

/// What a hook has saved: see [`comm_hook_traffic`](crate::DistributedDataParallel::comm_hook_traffic).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CommHookTraffic {
    /// The size of all gradients that the hook was given since it was registered.
    pub gradient_bytes: u64,
    /// What this rank handed to collectives for them, with the byte per parameter that says whether it was used; None if
    /// the hook does not count it.
    pub bytes_sent: Option<u64>,
}
