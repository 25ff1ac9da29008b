//! The accuracy over all ranks.
use super::model::BertForSequenceClassification;
use candle_core::{DType, Tensor};
use candle_ddp::nn::no_grad;
use candle_ddp::{DistributedDataParallel, ReduceOp, Result};

/// Returns the fraction of the sentences of all ranks that the model classifies correctly. Ranks may have different
/// numbers of `batches`, each the tokens and the mask u32[B, T], and the classes u32[B].
pub(crate) fn accuracy(
    ddp: &DistributedDataParallel<BertForSequenceClassification>,
    batches: impl IntoIterator<Item = Result<(Tensor, Tensor, Tensor)>>,
) -> Result<f64> {
    let (mut correct, mut tested) = (0., 0.);
    for batch in batches {
        let (ids, mask, labels) = batch?;
        let classify = || ddp.call(|bert| bert.forward(&ids, &ids.zeros_like()?, &mask, false));
        let guesses = no_grad(classify)?.argmax(1)?;
        correct += f64::from(guesses.eq(&labels)?.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()?);
        tested += labels.elem_count() as f64;
    }
    let [correct, tested] = ddp.process_group().all_reduce_scalars([correct, tested], ReduceOp::Sum)?;
    Ok(correct / tested)
}
