//! Copies, in host memory, of the states that are saved.
use crate::Result;
use crate::placement::Spread;
use crate::state::{Dict, StateDict, fingerprint};
use crate::tensor::copy;
use candle_core::{Device, Tensor};
use std::collections::{BTreeMap, HashMap};

/// Host memory that the next snapshot reuses: allocating new memory costs more than copying into it.
#[derive(Debug, Default)]
pub(super) struct Buffers(HashMap<String, Dict>);

/// This rank's copy of a part.
#[derive(Debug)]
pub(super) struct PartSnapshot {
    pub(super) name: String,
    pub(super) spread: Spread,
    /// `None` if another rank writes the part.
    pub(super) tensors: Option<Dict>,
    /// The hashes of the tensors, for a part that must be the same on all ranks.
    pub(super) fingerprint: BTreeMap<String, u64>,
}

impl Buffers {
    /// Copies this rank's share of `parts`: its own shards and, if `has_whole`, the states that are the same on all
    /// ranks. Every rank hashes the latter. Once this returns, changes of the states no longer affect the copies.
    pub(super) fn snapshot(
        &mut self,
        parts: &[(&str, &mut dyn StateDict)],
        has_whole: bool,
    ) -> Result<Vec<PartSnapshot>> {
        let mut devices = Vec::new();
        let parts = parts.iter().map(|(name, state)| {
            let share = state.share()?;
            let (spread, writes) = (share.spread, has_whole || share.spread.is_per_rank());
            let tensors = writes.then(|| self.copy(name, &share.dict, &mut devices)).transpose()?;
            let part = PartSnapshot { name: name.to_string(), spread, tensors, fingerprint: BTreeMap::new() };
            Ok((part, share.dict))
        });
        let parts = parts.collect::<Result<Vec<_>>>()?;
        for device in devices {
            device.synchronize()?;
        }
        // Hashes the copies, if there are any: they are in host memory already.
        let hashed = parts.into_iter().map(|(mut part, own)| {
            if part.spread == Spread::Replicate {
                part.fingerprint = fingerprint(part.tensors.as_ref().unwrap_or(&own))?;
            }
            Ok(part)
        });
        hashed.collect()
    }

    /// Like [`snapshot`](Self::snapshot), of this rank's own states, to restore them: nothing is compared.
    pub(super) fn backup(&mut self, parts: &[(&str, &mut dyn StateDict)]) -> Result<Vec<Dict>> {
        let mut devices = Vec::new();
        let copies = parts.iter().map(|(name, state)| self.copy(name, &state.share()?.all(), &mut devices));
        let copies = copies.collect::<Result<Vec<_>>>()?;
        devices.iter().try_for_each(Device::synchronize)?;
        Ok(copies)
    }

    fn copy(&mut self, part: &str, tensors: &Dict, devices: &mut Vec<Device>) -> Result<Dict> {
        let mut buffers = self.0.remove(part).unwrap_or_default();
        let mut copies = Dict::with_capacity(tensors.len());
        for (name, tensor) in tensors {
            let copied = if tensor.device().is_cpu() {
                let fits = |buffer: &Tensor| buffer.shape() == tensor.shape() && buffer.dtype() == tensor.dtype();
                let buffer = match buffers.remove(name).filter(fits) {
                    Some(buffer) => buffer,
                    None => Tensor::zeros(tensor.shape(), tensor.dtype(), &Device::Cpu)?,
                };
                copy::copy(&buffer, tensor)?;
                buffer
            } else {
                if !devices.iter().any(|device| device.same_device(tensor.device())) {
                    devices.push(tensor.device().clone());
                }
                tensor.to_device(&Device::Cpu)?
            };
            copies.insert(name.clone(), copied);
        }
        self.0.insert(part.to_string(), copies.clone());
        Ok(copies)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Var};
    use candle_nn::{Init, VarMap};

    #[test]
    fn a_snapshot_does_not_change_with_the_state_and_uses_its_memory_again() {
        let varmap = VarMap::new();
        varmap.get((2, 3), "w", Init::Const(1.), DType::BF16, &Device::Cpu).unwrap();
        // Not contiguous, of integers, and without elements.
        let transposed = Tensor::new(&[[1i64, 2], [3, 4]], &Device::Cpu).unwrap().t().unwrap();
        varmap.data().lock().unwrap().insert("t".to_string(), Var::from_tensor(&transposed).unwrap());
        varmap.get((0, 3), "e", Init::Const(1.), DType::F32, &Device::Cpu).unwrap();
        let var = |name: &str| varmap.data().lock().unwrap()[name].clone();
        let mut buffers = Buffers::default();
        let mut take = || {
            let [part] = &mut *buffers.snapshot(&[("model", &mut varmap.clone())], true).unwrap() else {
                panic!("one part")
            };
            assert_eq!(part.spread, Spread::Replicate);
            part.tensors.take().unwrap()
        };
        let first = take();
        var("w").set(&var("w").affine(0., 2.).unwrap()).unwrap();
        let values = |dict: &Dict| dict["w"].to_dtype(DType::F32).unwrap().to_vec2::<f32>().unwrap();
        assert_eq!(values(&first), [[1.0; 3]; 2]);
        assert_eq!(first["t"].to_vec2::<i64>().unwrap(), [[1, 3], [2, 4]]);
        assert_eq!(first["e"].dims(), [0, 3]);
        let second = take();
        assert_eq!(values(&second), [[2.0; 3]; 2]);
        // The first snapshot has been dropped by then.
        assert_eq!(values(&first), [[2.0; 3]; 2]);
        let [own, others] =
            [true, false].map(|first| buffers.snapshot(&[("model", &mut varmap.clone())], first).unwrap().remove(0));
        assert!(others.tensors.is_none(), "another rank writes it");
        assert_eq!((others.fingerprint.len(), &others.fingerprint), (3, &own.fingerprint));
    }
}
