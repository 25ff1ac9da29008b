//! Broadcasts named tensors.
use super::ProcessGroup;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use std::collections::{BTreeMap, HashMap};
use std::str::FromStr;

impl ProcessGroup {
    /// Returns rank `root`'s `tensors` on every rank: on the CPU or on the group's device, depending on where they are
    /// on `root`. Every rank must call it; the others' `tensors` are ignored.
    pub(crate) fn broadcast_tensors(
        &self,
        tensors: &HashMap<String, Tensor>,
        root: usize,
    ) -> Result<HashMap<String, Tensor>> {
        let describe = |(name, tensor): (&String, &Tensor)| {
            let (dtype, is_cpu) = (tensor.dtype().as_str().to_string(), tensor.device().is_cpu());
            (name.clone(), (dtype, tensor.dims().to_vec(), is_cpu))
        };
        let is_root = self.rank() == root;
        let own = is_root.then(|| tensors.iter().map(describe).collect::<BTreeMap<_, _>>());
        let entries = self.broadcast_object(own.as_ref(), root)?;
        let mut all = HashMap::new();
        for (name, (dtype, shape, is_cpu)) in entries {
            let group = if is_cpu { self.cpu_group()? } else { self.clone() };
            let tensor = match tensors.get(&name).filter(|_| is_root) {
                Some(tensor) => tensor.detach().contiguous()?,
                None => {
                    let device = if is_cpu { &Device::Cpu } else { self.device() };
                    let dtype = DType::from_str(&dtype).map_err(|_| {
                        Error::parameter(&name, format!("rank {root} has it in the unknown dtype {dtype}"))
                    })?;
                    Tensor::zeros(shape, dtype, device)?
                }
            };
            if tensor.elem_count() > 0 {
                group.broadcast_async(&tensor, root)?.synchronize()?;
            }
            all.insert(name, tensor);
        }
        Ok(all)
    }
}
