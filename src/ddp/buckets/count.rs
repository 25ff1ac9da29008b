//! The count of a weighted backward pass on its way through the ranks: it travels in the first bucket that is sent.
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};

/// The bytes of a count in a bucket of a 16-bit dtype.
const BYTES: usize = 4;

/// Whether a bucket of `dtype` holds sums of counts too coarsely. Then it has room for the count of every rank, byte by
/// byte, since a 16-bit number holds a byte exactly, and so does its sum with zeros.
fn is_coarse(dtype: DType) -> bool {
    dtype.size_in_bytes() == 2
}

/// The number of elements that a bucket of `dtype` needs for it.
pub(in crate::ddp) fn elements(dtype: DType, world_size: usize) -> usize {
    if is_coarse(dtype) { BYTES * world_size } else { 1 }
}

/// The elements that rank `rank` adds to the others'.
pub(in crate::ddp) fn encode(
    count: f64,
    rank: usize,
    world_size: usize,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    let mut values = vec![0.; elements(dtype, world_size)];
    if is_coarse(dtype) {
        let bytes = (count as f32).to_le_bytes();
        values.iter_mut().skip(BYTES * rank).zip(bytes).for_each(|(value, byte)| *value = f64::from(byte));
    } else {
        values[0] = count;
    }
    Ok(Tensor::from_vec(values, elements(dtype, world_size), &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?)
}

/// The count of all ranks in the sum of their elements. On a GPU this waits for the sum.
pub(in crate::ddp) fn decode(sum: &Tensor) -> Result<f64> {
    let values = sum.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
    if !is_coarse(sum.dtype()) {
        return Ok(values.iter().sum());
    }
    let of_rank = |bytes: &[f64]| {
        let bytes: [u8; BYTES] = std::array::from_fn(|place| bytes[place] as u8);
        f64::from(f32::from_le_bytes(bytes))
    };
    Ok(values.chunks_exact(BYTES).map(of_rank).sum())
}

/// Whether sums can be divided by the count of all ranks.
pub(in crate::ddp) fn is_usable(total: f64) -> bool {
    total.is_finite() && total > 0.
}

/// Refuses what is not the number or weight of anything.
pub(in crate::ddp) fn check(count: f64) -> Result<()> {
    if count.is_finite() && count >= 0. {
        return Ok(());
    }
    Err(Error::invalid("count", format!("it must be a finite number of at least 0, but is {count}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DTYPES;

    #[test]
    fn counts_of_all_ranks_add_up_in_every_dtype() {
        let counts = [0., 4097., 16_777_215.];
        for dtype in DTYPES {
            let own = |(rank, count): (usize, &f64)| encode(*count, rank, 3, dtype, &Device::Cpu).unwrap();
            let sent: Vec<Tensor> = counts.iter().enumerate().map(own).collect();
            let sum = sent.iter().skip(1).try_fold(sent[0].clone(), |sum, next| sum + next).unwrap();
            assert_eq!(decode(&sum).unwrap(), 16_781_312., "{dtype:?}");
        }
    }
}
