//! The accuracy of a classifier over all ranks.
use candle_core::{DType, ModuleT, Tensor};
use candle_ddp::nn::no_grad;
use candle_ddp::{DistributedDataParallel, ReduceOp, Result};

/// Returns the fraction of the images of all ranks that the model classifies correctly. Ranks may have different numbers of
/// `batches`, each the images and their labels u32[B].
pub(crate) fn accuracy<M: ModuleT>(
    ddp: &DistributedDataParallel<M>,
    batches: impl IntoIterator<Item = Result<(Tensor, Tensor)>>,
) -> Result<f64> {
    let (mut correct, mut tested) = (0., 0.);
    for batch in batches {
        let (images, labels) = batch?;
        let guesses = no_grad(|| ddp.forward_t(&images, false))?.argmax(1)?;
        correct += f64::from(guesses.eq(&labels)?.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()?);
        tested += labels.elem_count() as f64;
    }
    let [correct, tested] = ddp.process_group().all_reduce_scalars([correct, tested], ReduceOp::Sum)?;
    Ok(correct / tested)
}
