//! Samples that share a row.
use super::Batch;
use candle_core::{Device, Tensor};
use candle_ddp_state::{Error, Result};

/// Documents one after the other in a row of T tokens: what [`pack`] makes.
#[derive(Debug, Clone)]
pub struct Packed {
    /// The tokens, u32\[1, T\].
    pub tokens: Tensor,
    /// The token that follows each in its document, i64\[1, T\]. For the last token of each document it is −100, which `cross_entropy` and
    /// `linear_cross_entropy` ignore by default.
    pub targets: Tensor,
    /// The place of each token in its document, from 0 on, u32\[T\]. It selects the rows of a table of positions:
    /// `rope(&q, &cos.index_select(&positions, 0)?, &sin.index_select(&positions, 0)?)`.
    pub positions: Tensor,
    /// Where each of the N documents begins, and where the last one ends, u32\[N + 1\]: the `cu_seq` of `nn::AttentionOptions`. It stays on
    /// the CPU, where attention reads it.
    pub cu_seq: Tensor,
}

impl Batch for Packed {
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        let Self { tokens, targets, positions, cu_seq } = self;
        Ok(Self { tokens: f(tokens)?, targets: f(targets)?, positions: f(positions)?, cu_seq })
    }
}

/// Puts documents one after the other into one row, without padding, as [`LengthBatches::packed`](super::LengthBatches::packed) chooses
/// them. With attention by [`cu_seq`](Packed::cu_seq) and these positions and targets, the sum of the losses and its gradients are those of the
/// documents by themselves.
///
/// ```
/// use candle_ddp::data::pack;
///
/// let row = pack([&[5, 6, 7][..], &[8, 9]])?;
/// assert_eq!(row.tokens.to_vec2::<u32>()?, [[5, 6, 7, 8, 9]]);
/// assert_eq!(row.targets.to_vec2::<i64>()?, [[6, 7, -100, 9, -100]]);
/// assert_eq!(row.positions.to_vec1::<u32>()?, [0, 1, 2, 0, 1]);
/// assert_eq!(row.cu_seq.to_vec1::<u32>()?, [0, 3, 5]);
/// # Ok::<(), candle_ddp::Error>(())
/// ```
///
/// # Errors
/// [`Error::InvalidArgument`] if there are 2³² tokens or more; candle's.
pub fn pack<S: AsRef<[u32]>>(documents: impl IntoIterator<Item = S>) -> Result<Packed> {
    let (mut tokens, mut targets, mut positions, mut cu_seq) = (Vec::new(), Vec::new(), Vec::new(), vec![0]);
    for document in documents {
        let document = document.as_ref();
        tokens.extend_from_slice(document);
        targets.extend(document.iter().skip(1).map(|token| i64::from(*token)));
        // An empty document has no last token.
        targets.resize(tokens.len(), -100);
        let Ok(end) = u32::try_from(tokens.len()) else {
            let reason = format!("a row must have less than 2³² tokens, and these have at least {}", tokens.len());
            return Err(Error::invalid("documents", reason));
        };
        positions.extend(0..document.len() as u32);
        cu_seq.push(end);
    }
    let (count, ends, cpu) = (tokens.len(), cu_seq.len(), &Device::Cpu);
    Ok(Packed {
        tokens: Tensor::from_vec(tokens, (1, count), cpu)?,
        targets: Tensor::from_vec(targets, (1, count), cpu)?,
        positions: Tensor::from_vec(positions, count, cpu)?,
        cu_seq: Tensor::from_vec(cu_seq, ends, cpu)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_may_be_empty_and_their_ends_stay_on_the_cpu() {
        let row = pack([&[][..], &[4], &[], &[1, 2], &[]]).unwrap();
        assert_eq!(row.cu_seq.to_vec1::<u32>().unwrap(), [0, 0, 1, 1, 3, 3]);
        let mut moved = Vec::new();
        let row = row.map_tensors(&mut |tensor| {
            moved.push(tensor.dims().to_vec());
            Ok(tensor)
        });
        assert_eq!(moved, [vec![1, 3], vec![1, 3], vec![3]]);
        assert_eq!(row.unwrap().targets.to_vec2::<i64>().unwrap(), [[-100, 2, -100]]);
        let none = pack::<Vec<u32>>([]).unwrap();
        assert_eq!((none.tokens.dims(), none.cu_seq.to_vec1::<u32>().unwrap()), (&[1, 0][..], vec![0]));
    }
}
