//! Tensors that are spread over the ranks, put together.
use crate::{Error, Result};
use candle_core::{DType, Tensor};
use std::collections::HashMap;

/// How the kinds of states begin that have parts of tensors.
pub const PART_OF: &str = "part of ";

/// The key of the elements of `whole` from `start` on.
pub(super) fn piece_key(whole: &str, start: usize) -> String {
    format!("{whole}@{start}")
}

/// The arguments of [`piece_key`], if `key` is one.
pub(super) fn of_piece_key(key: &str) -> Option<(&str, usize)> {
    let (whole, start) = key.rsplit_once('@')?;
    // Ends of parts are computed without checks.
    start.parse().ok().filter(|start| *start <= isize::MAX as usize).map(|start| (whole, start))
}

/// Parts of tensors by the names of the whole ones, each with the element at which it starts, in this order.
#[derive(Debug, Default)]
pub(super) struct Pieces(HashMap<String, Vec<(usize, Tensor)>>);

impl Pieces {
    /// Adds a part, unless it is there: ranks that have the same part may all have given it.
    pub(super) fn add(&mut self, whole: &str, start: usize, part: &Tensor) -> Result<()> {
        let parts = self.0.entry(whole.to_string()).or_default();
        if !parts.iter().any(|(at, known)| (*at, known.elem_count()) == (start, part.elem_count())) {
            let place = parts.partition_point(|(at, known)| (*at, known.elem_count()) < (start, part.elem_count()));
            parts.insert(place, (start, part.flatten_all()?));
        }
        Ok(())
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &String> {
        self.0.keys()
    }

    /// Checks the dtype of the parts, and that they add up to `elements` if that is given.
    pub(super) fn check(&self, key: &str, elements: Option<usize>, dtype: DType) -> Result<()> {
        let parts = self.0.get(key).map(Vec::as_slice).unwrap_or_default();
        let next = |end, (start, part): &(usize, Tensor)| (*start == end).then(|| end + part.elem_count());
        let end = || parts.iter().try_fold(0, next);
        if let Some(elements) = elements
            && end() != Some(elements)
        {
            let reason = format!("its parts in the shards do not add up to the {elements} elements that it has here");
            return Err(Error::parameter(key, reason));
        }
        match parts.iter().find(|(_, part)| part.dtype() != dtype) {
            Some((_, part)) => {
                let (is, needed) = (part.dtype().as_str(), dtype.as_str());
                Err(Error::parameter(key, format!("the shards hold {is}, but it must be {needed}")))
            }
            None => Ok(()),
        }
    }

    /// A copy of the elements of a whole state from `start` on.
    pub(super) fn copy(&self, key: &str, start: usize, elements: usize) -> Result<Tensor> {
        Ok(self.get(key, start, elements)?.copy()?)
    }

    /// The elements of a whole state from `start` on, which only the caller has then: a part itself if it has just these.
    pub(super) fn take(&mut self, key: &str, start: usize, elements: usize) -> Result<Tensor> {
        let is_it = |(offset, part): &(usize, Tensor)| {
            (*offset, part.elem_count()) == (start, elements)
                && part.is_contiguous()
                && part.layout().start_offset() == 0
        };
        let parts = self.0.get_mut(key);
        let part = parts.and_then(|parts| Some(parts.remove(parts.iter().position(is_it)?)));
        part.map_or_else(|| self.copy(key, start, elements), |(_, part)| Ok(part))
    }

    /// The elements of a whole state from `start` on, which may share memory with a part.
    fn get(&self, key: &str, start: usize, elements: usize) -> Result<Tensor> {
        let (mut found, mut next, end) = (Vec::new(), start, start + elements);
        for (offset, part) in self.0.get(key).into_iter().flatten() {
            if *offset > next {
                break;
            }
            let to = end.min(offset + part.elem_count());
            if next < to {
                found.push(part.narrow(0, next - offset, to - next)?);
                next = to;
            }
        }
        if next != end {
            let reason = format!("elements {next} to {end} of it are missing from the shards");
            return Err(Error::parameter(key, reason));
        }
        Ok(Tensor::cat(&found, 0)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    /// Parts come from the shards of other numbers of ranks, in any order, and may overlap.
    #[test]
    fn parts_are_joined_in_the_order_of_their_elements() -> Result<()> {
        let all = Tensor::arange(0f32, 12., &Device::Cpu)?;
        let mut pieces = Pieces::default();
        for (start, len) in [(8usize, 4usize), (0, 3), (3, 5), (2, 2), (0, 3)] {
            let part = Tensor::arange(start as f32, (start + len) as f32, &Device::Cpu)?;
            pieces.add("weight", start, &part)?;
        }
        for (start, len) in [(0, 12), (2, 7), (7, 2), (4, 1)] {
            let expected = all.narrow(0, start, len)?.to_vec1::<f32>()?;
            assert_eq!(pieces.get("weight", start, len)?.to_vec1::<f32>()?, expected, "{len} from {start}");
        }
        assert_eq!(pieces.take("weight", 3, 5)?.to_vec1::<f32>()?, [3., 4., 5., 6., 7.]);
        // Two parts that overlap do not make up for one that is missing.
        let error = pieces.get("weight", 0, 7).unwrap_err().to_string();
        assert!(error.contains("elements 4 to 7 of it are missing"), "{error}");
        Ok(())
    }
}
