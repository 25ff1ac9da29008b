//! Programs that the compiler refuses. Each promise has two examples with the same beginning: one that breaks it and must not compile, and
//! one that keeps it and must, so that the first fails for the right reason.
//!
//! # The guard of `no_sync` is held
//! ```compile_fail
//! #![deny(unused_must_use)]
//! fn accumulate<M>(ddp: &candle_ddp::DistributedDataParallel<M>) {
//!     ddp.no_sync();
//! }
//! ```
//! ```no_run
//! #![deny(unused_must_use)]
//! fn accumulate<M>(ddp: &candle_ddp::DistributedDataParallel<M>) {
//!     let _guard = ddp.no_sync();
//! }
//! ```
//!
//! # The guard of `freeze` is held
//! ```compile_fail
//! #![deny(unused_must_use)]
//! fn train_another<M>(ddp: &candle_ddp::DistributedDataParallel<M>) {
//!     ddp.freeze();
//! }
//! ```
//! ```no_run
//! #![deny(unused_must_use)]
//! fn train_another<M>(ddp: &candle_ddp::DistributedDataParallel<M>) {
//!     let _guard = ddp.freeze();
//! }
//! ```
//!
//! # The work of a collective is waited for
//! ```compile_fail
//! #![deny(unused_must_use)]
//! fn sum(pg: &candle_ddp::ProcessGroup, tensor: &candle_core::Tensor) -> candle_ddp::Result<()> {
//!     pg.all_reduce_async(tensor, candle_ddp::ReduceOp::Sum)?;
//!     Ok(())
//! }
//! ```
//! ```no_run
//! #![deny(unused_must_use)]
//! fn sum(pg: &candle_ddp::ProcessGroup, tensor: &candle_core::Tensor) -> candle_ddp::Result<()> {
//!     pg.all_reduce_async(tensor, candle_ddp::ReduceOp::Sum)?.wait()?;
//!     Ok(())
//! }
//! ```
//!
//! # A communication hook owns what it uses
//! The model keeps the hook after the call that registers it.
//! ```compile_fail
//! # use candle_ddp::{ProcessGroup, Result};
//! # use candle_ddp::comm_hook::{CommHook, GradBucket, HookWork};
//! struct Scale<T>(T);
//!
//! impl<'a> CommHook for Scale<&'a f64> {
//! #   fn run(&mut self, _: &GradBucket, _: &ProcessGroup) -> Result<HookWork<Self>> { Ok(HookWork::done()) }
//! }
//! ```
//! ```no_run
//! # use candle_ddp::{ProcessGroup, Result};
//! # use candle_ddp::comm_hook::{CommHook, GradBucket, HookWork};
//! struct Scale<T>(T);
//!
//! impl CommHook for Scale<f64> {
//! #   fn run(&mut self, _: &GradBucket, _: &ProcessGroup) -> Result<HookWork<Self>> { Ok(HookWork::done()) }
//! }
//! ```
//!
//! # Threads may share a dataset
//! ```compile_fail
//! # use candle_ddp::{Result, data::Dataset, seed::Generator};
//! struct Rows(std::rc::Rc<Vec<f32>>);
//!
//! impl Dataset for Rows {
//! #   type Sample = f32;
//! #   fn len(&self) -> usize { self.0.len() }
//! #   fn get(&self, index: usize, _: &mut Generator) -> Result<f32> { Ok(self.0[index]) }
//! }
//! ```
//! ```no_run
//! # use candle_ddp::{Result, data::Dataset, seed::Generator};
//! struct Rows(std::sync::Arc<Vec<f32>>);
//!
//! impl Dataset for Rows {
//! #   type Sample = f32;
//! #   fn len(&self) -> usize { self.0.len() }
//! #   fn get(&self, index: usize, _: &mut Generator) -> Result<f32> { Ok(self.0[index]) }
//! }
//! ```
