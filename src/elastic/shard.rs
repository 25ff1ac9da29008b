//! One rank's part of the states that are spread over the ranks, in few tensors, so that it is quick to copy and to
//! send.
use crate::state::Dict;
use crate::tensor::copy::copy_all;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::str::FromStr;

/// Where each tensor of a [`Shard`] is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Layout {
    flats: Vec<FlatLayout>,
    entries: Vec<Entry>,
}

/// A flat tensor, which holds all those with its dtype and on its device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct FlatLayout {
    dtype: String,
    is_cpu: bool,
    elements: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    key: String,
    flat: usize,
    offset: usize,
    shape: Vec<usize>,
}

/// A copy of one rank's tensors, by keys `part/key`.
#[derive(Clone, Debug)]
pub(super) struct Shard {
    pub(super) layout: Layout,
    /// In the order of the layout.
    pub(super) flats: Vec<Tensor>,
}

impl Layout {
    fn of(live: &BTreeMap<String, Tensor>) -> Self {
        let mut layout = Self::default();
        for (key, tensor) in live {
            let (dtype, is_cpu) = (tensor.dtype().as_str(), tensor.device().is_cpu());
            let known = layout.flats.iter().position(|flat| flat.dtype == dtype && flat.is_cpu == is_cpu);
            let flat = known.unwrap_or_else(|| {
                layout.flats.push(FlatLayout { dtype: dtype.to_string(), is_cpu, elements: 0 });
                layout.flats.len() - 1
            });
            let elements = &mut layout.flats[flat].elements;
            layout.entries.push(Entry { key: key.clone(), flat, offset: *elements, shape: tensor.dims().to_vec() });
            *elements += tensor.elem_count();
        }
        layout
    }
}

impl Shard {
    /// Copies `live` into the storage of `spare`, if that fits. Tensors that are not on the CPU are on `device`.
    pub(super) fn copy_of(live: &BTreeMap<String, Tensor>, spare: Option<Self>, device: &Device) -> Result<Self> {
        let shard = Self::empty(Layout::of(live), spare, device)?;
        let places = shard.layout.entries.iter().map(|entry| shard.view(entry)).collect::<Result<Vec<_>>>()?;
        // Both are in the order of keys.
        copy_all(places.iter().zip(live.values()))?;
        Ok(shard)
    }

    /// A shard to be filled.
    pub(super) fn empty(layout: Layout, spare: Option<Self>, device: &Device) -> Result<Self> {
        if let Some(spare) = spare.filter(|spare| spare.layout == layout) {
            return Ok(spare);
        }
        let flat = |FlatLayout { dtype, is_cpu, elements }: &FlatLayout| {
            let known = DType::from_str(dtype).map_err(|_| {
                Error::invalid("parts", format!("another rank has states in dtype {dtype}, which is not known here"))
            })?;
            Ok(Tensor::zeros(*elements, known, if *is_cpu { &Device::Cpu } else { device })?)
        };
        let flats = layout.flats.iter().map(flat).collect::<Result<_>>()?;
        Ok(Self { layout, flats })
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &str> {
        self.layout.entries.iter().map(|entry| entry.key.as_str())
    }

    fn view(&self, entry: &Entry) -> Result<Tensor> {
        let elements = entry.shape.iter().product();
        Ok(self.flats[entry.flat].narrow(0, entry.offset, elements)?.reshape(entry.shape.as_slice())?)
    }

    /// The tensors of the part `name`, in their own storage; none if the shard does not have that part.
    pub(super) fn part(&self, name: &str) -> Result<Dict> {
        let prefix = format!("{name}/");
        let of_the_part =
            self.layout.entries.iter().filter_map(|entry| Some((entry.key.strip_prefix(&prefix)?, entry)));
        of_the_part.map(|(key, entry)| Ok((key.to_string(), self.view(entry)?.copy()?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_is_a_copy_and_uses_storage_again() {
        let tensor = |values: &[f32], shape: (usize, usize)| Tensor::from_slice(values, shape, &Device::Cpu).unwrap();
        let live = |first: f32| {
            BTreeMap::from([
                ("a/x".to_string(), tensor(&[first, 2., 3., 4.], (2, 2)).t().unwrap()),
                ("a/count".to_string(), Tensor::new(&[7i64], &Device::Cpu).unwrap()),
                ("a/none".to_string(), tensor(&[], (0, 3))),
                ("b/x".to_string(), tensor(&[5., 6.], (1, 2))),
            ])
        };
        let shard = Shard::copy_of(&live(1.), None, &Device::Cpu).unwrap();
        assert_eq!(shard.flats.iter().map(Tensor::elem_count).collect::<Vec<_>>(), [1, 6]);
        let part = shard.part("a").unwrap();
        assert_eq!(part.len(), 3);
        assert_eq!(part["x"].to_vec2::<f32>().unwrap(), [[1., 3.], [2., 4.]]);
        assert_eq!((part["count"].to_vec1::<i64>().unwrap(), part["none"].dims()), (vec![7], &[0, 3][..]));
        assert!(shard.part("c").unwrap().is_empty());
        // The next copy overwrites the storage of this one, but not what parts were given.
        let again = Shard::copy_of(&live(9.), Some(shard.clone()), &Device::Cpu).unwrap();
        assert_eq!(shard.part("a").unwrap()["x"].to_vec2::<f32>().unwrap()[0][0], 9.);
        assert_eq!(part["x"].to_vec2::<f32>().unwrap()[0][0], 1.);
        // Another layout needs other storage.
        let other = BTreeMap::from([("b/x".to_string(), tensor(&[8.], (1, 1)))]);
        let other = Shard::copy_of(&other, Some(again.clone()), &Device::Cpu).unwrap();
        assert_eq!(other.part("b").unwrap()["x"].to_vec2::<f32>().unwrap(), [[8.]]);
        assert_eq!(again.part("b").unwrap()["x"].to_vec2::<f32>().unwrap(), [[5., 6.]]);
    }
}
