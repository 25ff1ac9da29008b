//! The perplexity of a language model.
use super::{check_class, classes, ratio};
use crate::backend::ReduceOp;
use crate::error::describe;
use crate::nn::{autocast_off, log_softmax, no_grad};
use crate::process_group::ProcessGroup;
use crate::{Error, Result};
use candle_core::{D, DType, Tensor};

/// e to the power of the mean cross entropy of tokens: torchmetrics' `Perplexity`.
#[derive(Clone, Debug, Default)]
pub struct Perplexity {
    ignore_index: Option<i64>,
    cross_entropy: f64,
    tokens: f64,
}

impl Perplexity {
    /// A metric without tokens.
    pub fn new() -> Self {
        Self::default()
    }

    /// Does not count tokens with the target `ignore_index`.
    pub fn with_ignore_index(self, ignore_index: i64) -> Self {
        Self { ignore_index: Some(ignore_index), ..self }
    }

    /// Counts tokens, `targets` of shape (…) and dtype u8, u32 or i64, with `logits` of shape (…, vocabulary). Waits for the device.
    /// Gradients end here.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for other shapes and dtypes, and tokens that are not in the vocabulary. Then nothing is
    /// counted.
    pub fn update(&mut self, logits: &Tensor, targets: &Tensor) -> Result<()> {
        let Some((vocabulary, _)) = logits.dims().split_last().filter(|(_, rest)| *rest == targets.dims()) else {
            let [logits, targets] = [logits, targets].map(|tensor| describe(tensor.dtype(), tensor.shape()));
            let reason = format!(
                "they must have the targets' shape and a dimension for the vocabulary, not {logits} for {targets}"
            );
            return Err(Error::invalid("logits", reason));
        };
        let all = classes(targets)?;
        let is_counted = |class: &i64| Some(*class) != self.ignore_index;
        all.iter()
            .copied()
            .filter(is_counted)
            .try_for_each(|class| check_class("targets", class, *vocabulary).map(drop))?;
        if all.is_empty() {
            return Ok(());
        }
        let indices: Vec<u32> = all.iter().map(|class| if is_counted(class) { *class as u32 } else { 0 }).collect();
        let indices = Tensor::from_vec(indices, (all.len(), 1usize), logits.device())?;
        let of_targets = || -> candle_core::Result<Vec<f32>> {
            let logits = logits.detach().to_dtype(DType::F32)?.reshape((indices.dim(0)?, *vocabulary))?;
            log_softmax(&logits, D::Minus1)?.gather(&indices, 1)?.flatten_all()?.to_vec1()
        };
        let of_targets = no_grad(|| autocast_off(of_targets))?;
        let counted = all.iter().zip(of_targets).filter(|(class, _)| is_counted(class));
        for (_, log) in counted {
            self.cross_entropy -= f64::from(log);
            self.tokens += 1.;
        }
        Ok(())
    }

    /// The perplexity of the tokens of all ranks, on every rank; NaN without any.
    ///
    /// # Errors
    /// Returns errors of the group.
    #[track_caller]
    pub fn compute(&self, pg: &ProcessGroup) -> Result<f64> {
        let [sum, tokens] = pg.all_reduce_scalars([self.cross_entropy, self.tokens], ReduceOp::Sum)?;
        Ok(ratio(sum, tokens).exp())
    }
}
