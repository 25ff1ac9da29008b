//! Hashes of states, by which ranks compare them.
use super::Dict;
use crate::Result;
use crate::hash::content_64;
use crate::tensor::borrow::with_slice;
use crate::tensor::dispatch;
use candle_core::{Device, Tensor};
use safetensors::tensor::View;
use std::collections::BTreeMap;

/// A hash of each tensor's dtype, shape and values, bit for bit.
pub(crate) fn fingerprint(dict: &Dict) -> Result<BTreeMap<String, u64>> {
    dict.iter().map(|(name, tensor)| Ok((name.clone(), of_tensor(tensor)?))).collect()
}

/// One hash of all tensors.
pub(crate) fn summary(fingerprint: &BTreeMap<String, u64>) -> u64 {
    content_64(format!("{fingerprint:?}").as_bytes())
}

fn of_tensor(tensor: &Tensor) -> Result<u64> {
    let kind = crate::error::describe(tensor.dtype(), tensor.shape());
    let tensor = tensor.to_device(&Device::Cpu)?.contiguous()?;
    let values = dispatch!(
        tensor.dtype(),
        E => with_slice::<E, _>(&tensor, |values| Ok(content_64(bytemuck::cast_slice(values))))?,
        else => content_64(&View::data(&tensor))
    );
    Ok(content_64(kind.as_bytes()).rotate_left(1) ^ values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::DType;

    #[test]
    fn values_shapes_and_dtypes_count() {
        let ones = Tensor::ones((2, 3), DType::F32, &Device::Cpu).unwrap();
        let hash = |tensor: &Tensor| of_tensor(tensor).unwrap();
        let others = [
            ones.reshape((3, 2)).unwrap(),
            ones.to_dtype(DType::F64).unwrap(),
            ones.to_dtype(DType::BF16).unwrap(),
            ones.to_dtype(DType::I64).unwrap(),
            ones.affine(1., 1e-7).unwrap(),
            Tensor::zeros((0, 3), DType::F32, &Device::Cpu).unwrap(),
        ];
        assert!(others.iter().all(|other| hash(other) != hash(&ones)));
        assert_eq!(hash(&ones.t().unwrap().t().unwrap()), hash(&ones));
        let rows = Tensor::arange(0u32, 6, &Device::Cpu).unwrap().reshape((2, 3)).unwrap();
        assert_eq!(hash(&rows.t().unwrap()), hash(&rows.t().unwrap().copy().unwrap()));
        assert_ne!(hash(&rows.t().unwrap()), hash(&rows.reshape((3, 2)).unwrap()));
    }
}
