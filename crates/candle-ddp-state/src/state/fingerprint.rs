//! Hashes of states, by which ranks compare them, and by which a file shows that it is as it was written.
use super::Dict;
use crate::Result;
use crate::hash::content_64;
use crate::tensor::borrow::with_slice;
use crate::tensor::{dispatch, finite};
use candle_core::{DType, Device, Tensor};
use safetensors::tensor::View;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// A hash of each tensor's dtype, shape and values, bit for bit.
pub fn fingerprint(dict: &Dict) -> Result<BTreeMap<String, u64>> {
    dict.iter().map(|(name, tensor)| Ok((name.clone(), of_tensor(tensor)?))).collect()
}

/// One hash of all tensors. Files keep it, so it must never change.
pub fn summary(fingerprint: &BTreeMap<String, u64>) -> u64 {
    let mut bytes = Vec::new();
    for (name, hash) in fingerprint {
        bytes.extend((name.len() as u64).to_le_bytes());
        bytes.extend(name.as_bytes());
        bytes.extend(hash.to_le_bytes());
    }
    content_64(&bytes)
}

/// The hash of one tensor.
pub(crate) fn of_tensor(tensor: &Tensor) -> Result<u64> {
    let tensor = tensor.to_device(&Device::Cpu)?.contiguous()?;
    let of = |bytes: &[u8]| of_bytes(tensor.dtype(), tensor.dims(), bytes);
    Ok(dispatch!(
        tensor.dtype(),
        E => with_slice::<E, _>(&tensor, |values| Ok(of(bytemuck::cast_slice(values))))?,
        else => of(&View::data(&tensor))
    ))
}

/// The hash of a tensor with these values. Files keep it, so it must never change.
pub(crate) fn of_bytes(dtype: DType, dims: &[usize], values: &[u8]) -> u64 {
    of_content(dtype, dims, content_64(values))
}

/// The hash of a tensor whose values have this one.
pub(crate) fn of_content(dtype: DType, dims: &[usize], content: u64) -> u64 {
    let kind = format!("{} {dims:?}", dtype.as_str());
    content_64(kind.as_bytes()).rotate_left(1) ^ content
}

/// The first tensor by name that has an infinity or a NaN, as text: `a NaN in layer.weight`. Single numbers may have one: a best loss
/// begins as infinity.
pub fn non_finite(dict: &Dict) -> Result<Option<String>> {
    // Elements that this rank does not need are one finite element, repeated.
    let is_one = |tensor: &Tensor| tensor.elem_count() <= 1 || tensor.stride() == [0];
    let mut tensors: Vec<_> = dict.iter().filter(|(_, tensor)| !is_one(tensor)).collect();
    tensors.sort_by_key(|(name, _)| *name);
    for (name, tensor) in tensors {
        if let Some(value) = finite::non_finite(tensor)? {
            return Ok(Some(format!("{value} in {name}")));
        }
    }
    Ok(None)
}

/// The [`summary`] of the tensors of a file, which keeps it as a hexadecimal number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct FileHash(pub u64);

impl FileHash {
    /// The length of its text.
    pub(crate) const DIGITS: usize = 16;
}

impl fmt::Display for FileHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:0digits$x}", self.0, digits = Self::DIGITS)
    }
}

impl From<FileHash> for String {
    fn from(hash: FileHash) -> Self {
        hash.to_string()
    }
}

impl TryFrom<String> for FileHash {
    type Error = String;

    fn try_from(text: String) -> std::result::Result<Self, String> {
        let hash = u64::from_str_radix(&text, 16).map(Self);
        // One text for each hash.
        hash.ok().filter(|hash| hash.to_string() == text).ok_or_else(|| format!("{text:?} is not a hash"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files of earlier versions must remain readable.
    #[test]
    fn a_hash_is_the_same_in_every_version() {
        let (small, large) = (Tensor::new(&[1f32, -2.5], &Device::Cpu), Tensor::arange(0i64, 300_000, &Device::Cpu));
        let dict = Dict::from([("a".to_string(), small.unwrap()), ("b.c".to_string(), large.unwrap())]);
        assert_eq!(summary(&fingerprint(&dict).unwrap()), 12_312_160_585_305_274_341);
    }

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
