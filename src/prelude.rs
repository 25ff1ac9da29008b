//! The names that most programs use: `use candle_ddp::prelude::*;`.
//!
//! It has candle's types that every model needs, this crate's door (process group, model, data, optimizer, checkpoints), and no
//! layers: take those from [`nn`](crate::nn). `Optimizer` is this crate's trait.
#[doc(no_inline)]
pub use crate::checkpoint::{self, Parts, StateDict};
#[doc(no_inline)]
pub use crate::data::{
    DataLoader, Dataset, DistributedSampler, LoaderOptions, Remainder, SamplerOptions, TensorDataset,
};
#[doc(no_inline)]
pub use crate::optim::{Adam, AdamW, Optimizer, ParamsAdam, ParamsAdamW, ParamsSgd, Sgd};
#[doc(no_inline)]
pub use crate::{
    DdpOptions, DistributedDataParallel, Error, InitOptions, ProcessGroup, ReduceOp, Result, init_process_group,
};
#[doc(no_inline)]
pub use candle_core::{D, DType, Device, Module, ModuleT, Tensor};
#[doc(no_inline)]
pub use candle_nn::{VarBuilder, VarMap};
