//! Metrics of an evaluation that are merged over ranks, with the numbers of torchmetrics, the [`Throughput`] of training, and the
//! [`Writer`] of a run's metrics.
//!
//! Each rank updates its own metric with its own samples, and `compute`, or `all_reduce`, gives every rank the result for all. Samples are
//! counted once if the sampler does not pad ([why](crate::data::Remainder::Uneven)); ranks may have different numbers of them.
//!
//! ```
//! use candle_core::Tensor;
//! use candle_ddp::metrics::{Average, ConfusionMatrix};
//!
//! # fn main() -> candle_ddp::Result<()> {
//! candle_ddp::spawn(2, |pg| {
//!     let mut matrix = ConfusionMatrix::new(2);
//!     // For each batch, the outputs of the model, and the classes. Rank 1 has one sample more.
//!     let logits = Tensor::new(&[[0.3f32, 0.7], [0.8, 0.2]], pg.device())?.narrow(0, 0, 1 + pg.rank())?;
//!     let targets = Tensor::new(&[1u32, 1], pg.device())?.narrow(0, 0, 1 + pg.rank())?;
//!     matrix.update(&logits, &targets)?;
//!
//!     let all = matrix.all_reduce(&pg)?;
//!     assert_eq!(all.accuracy(Average::Micro), 2. / 3.);
//!     Ok(())
//! })?;
//! # Ok(())
//! # }
//! ```
mod confusion_matrix;
mod in_order;
mod multiclass_auroc;
mod perplexity;
mod scores;
mod throughput;
mod transformer_flops;
mod writer;

#[doc(inline)]
pub use candle_ddp_base::metrics::put_metric;
pub use confusion_matrix::{Average, ConfusionMatrix};
pub use in_order::gather_in_order;
pub use multiclass_auroc::MulticlassAuroc;
pub use perplexity::Perplexity;
pub use scores::{BinaryAuroc, TopKAccuracy};
pub use throughput::{Rate, Throughput, ThroughputOptions};
pub use transformer_flops::TransformerFlops;
pub use writer::{Field, Writer, WriterOptions};

use crate::{Error, Result};
use candle_core::{DType, Tensor};

/// The targets as numbers.
fn classes(targets: &Tensor) -> Result<Vec<i64>> {
    match targets.dtype() {
        DType::U8 | DType::U32 | DType::I64 => Ok(targets.to_dtype(DType::I64)?.flatten_all()?.to_vec1()?),
        dtype => {
            Err(Error::invalid("targets", format!("they must be classes, of dtype U8, U32 or I64, not {dtype:?}")))
        }
    }
}

/// The values in f32, without NaN.
fn floats(name: &'static str, values: &Tensor) -> Result<Vec<f32>> {
    if !values.dtype().is_float() {
        return Err(Error::invalid(name, format!("they must be floating-point numbers, not {:?}", values.dtype())));
    }
    let values: Vec<f32> = values.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
    match values.iter().position(|value| value.is_nan()) {
        Some(at) => Err(Error::invalid(name, format!("element {at} is NaN"))),
        None => Ok(values),
    }
}

/// Refuses a class that does not exist.
fn check_class(name: &'static str, class: i64, classes: usize) -> Result<usize> {
    let found = usize::try_from(class).ok().filter(|class| *class < classes);
    found
        .ok_or_else(|| Error::invalid(name, format!("they must be at least 0 and below {classes}, but one is {class}")))
}

/// A quotient; NaN if nothing was counted.
fn ratio(of: f64, all: f64) -> f64 {
    if all == 0. { f64::NAN } else { of / all }
}
