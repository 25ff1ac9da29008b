//! Copies, in host memory, of the states that are saved.
use crate::Result;
use crate::state::{Dict, StateDict, fingerprint};
use crate::tensor::copy;
use candle_core::{Device, Tensor};
use std::collections::{BTreeMap, HashMap};

/// Host memory that the next snapshot reuses: allocating new memory costs more than copying into it.
#[derive(Debug, Default)]
pub(super) struct Buffers(HashMap<String, Dict>);

/// How the states of the ranks are related.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// It is the same on all ranks; rank 0 writes it.
    Same,
    /// Rank 0's counts for all ranks.
    RankZero,
    /// Each rank writes its own.
    PerRank,
}

/// This rank's copy of a part.
#[derive(Debug)]
pub(super) struct PartSnapshot {
    pub(super) name: String,
    pub(super) kind: Kind,
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
            let shard = state.sharded_state_dict()?;
            let kind = match &shard {
                Some(_) => Kind::PerRank,
                None if state.is_rank_zeros() => Kind::RankZero,
                None => Kind::Same,
            };
            let own = match (shard, kind) {
                (None, Kind::RankZero) if !has_whole => None,
                (None, _) => Some(state.state_dict()?),
                (shard, _) => shard,
            };
            let tensors = match &own {
                Some(own) if has_whole || kind == Kind::PerRank => Some(self.copy(name, own, &mut devices)?),
                _ => None,
            };
            Ok((PartSnapshot { name: name.to_string(), kind, tensors, fingerprint: BTreeMap::new() }, own))
        });
        let parts = parts.collect::<Result<Vec<_>>>()?;
        for device in devices {
            device.synchronize()?;
        }
        // Hashes the copies, if there are any: they are in host memory already.
        let hashed = parts.into_iter().map(|(mut part, own)| {
            if part.kind == Kind::Same
                && let Some(dict) = part.tensors.as_ref().or(own.as_ref())
            {
                part.fingerprint = fingerprint(dict)?;
            }
            Ok(part)
        });
        hashed.collect()
    }

    /// Like [`snapshot`](Self::snapshot), of this rank's own states, to restore them: nothing is compared.
    pub(super) fn backup(&mut self, parts: &[(&str, &mut dyn StateDict)]) -> Result<Vec<Dict>> {
        let mut devices = Vec::new();
        let copies = parts.iter().map(|(name, state)| self.copy(name, &state.state_here()?, &mut devices));
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
            assert_eq!(part.kind, Kind::Same);
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
