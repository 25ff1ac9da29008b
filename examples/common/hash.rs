//! A hash of numbers, by which people and tests see that tensors are equal bit for bit.
use candle_core::{DType, Device, Result, Tensor};

/// FNV-1a over the bytes of f32 values.
#[derive(Clone, Copy)]
pub(crate) struct Hash(pub(crate) u64);

impl Hash {
    /// Returns the hash of no values.
    pub(crate) fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    /// Adds the values of a tensor, in f32.
    pub(crate) fn add(&mut self, tensor: &Tensor) -> Result<()> {
        let tensor = tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
        for byte in tensor.flatten_all()?.to_vec1::<f32>()?.into_iter().flat_map(f32::to_le_bytes) {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        Ok(())
    }

    /// Returns the hash of a model's variables, in the order of their names.
    pub(crate) fn of_variables(variables: impl IntoIterator<Item = (String, Tensor)>) -> Result<Self> {
        let mut variables: Vec<_> = variables.into_iter().collect();
        variables.sort_by(|(a, _), (b, _)| a.cmp(b));
        let mut hash = Self::new();
        for (_, variable) in &variables {
            hash.add(variable)?;
        }
        Ok(hash)
    }
}

impl std::fmt::Display for Hash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}
