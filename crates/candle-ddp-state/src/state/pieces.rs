//! Tensors that are spread over the ranks, put together.
use super::{Dict, KIND};
use crate::placement::{Placement, Spread};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use std::collections::HashMap;
use std::ops::Range;

/// How the kinds of states begin that have parts of tensors.
pub const PART_OF: &str = "part of ";

/// Adds what this rank saves of the entry `key`: all of it, or its elements. `with_copies`: also those that another rank has as well, and
/// saves.
pub fn insert(dict: &mut Dict, key: &str, placement: &Placement, here: Tensor, with_copies: bool) -> Result<()> {
    let Placement { range, spread, .. } = placement;
    if *spread == Spread::Replicate {
        dict.insert(key.to_string(), here);
    } else if !range.is_empty() && (with_copies || *spread == Spread::Shard) {
        dict.insert(piece_key(key, range.start), here.flatten_all()?);
    }
    Ok(())
}

/// The key of the elements of `whole` from `start` on.
fn piece_key(whole: &str, start: usize) -> String {
    format!("{whole}@{start}")
}

/// The arguments of [`piece_key`], if `key` is one.
pub(super) fn of_piece_key(key: &str) -> Option<(&str, usize)> {
    let (whole, start) = key.rsplit_once('@')?;
    // Ends of parts are computed without checks.
    start.parse().ok().filter(|start| *start <= isize::MAX as usize).map(|start| (whole, start))
}

/// The parts that a rank holds, which say what it needs of the parts that others have saved.
#[derive(Debug)]
pub struct Held(HashMap<String, Vec<Range<usize>>>);

impl Held {
    /// None if `dict`, this rank's part of a state, is not made of such parts.
    pub fn of(dict: &Dict) -> Option<Self> {
        let kind = dict.get(KIND)?.to_vec1::<u8>().ok()?;
        if !kind.starts_with(PART_OF.as_bytes()) {
            return None;
        }
        let mut held: HashMap<String, Vec<Range<usize>>> = HashMap::new();
        for (key, part) in dict {
            if let Some((whole, start)) = of_piece_key(key) {
                held.entry(whole.to_string()).or_default().push(start..start + part.elem_count());
            }
        }
        // Without any, this rank may have copies of parts that another rank saves, and needs what is not said here.
        (!held.is_empty()).then_some(Self(held))
    }

    /// The elements of the entry `key`, which has `elements`, that this rank needs.
    pub fn needs(&self, key: &str, elements: usize) -> Range<usize> {
        let Some((whole, start)) = of_piece_key(key) else { return 0..elements };
        let within = |at: usize| at.clamp(start, start + elements) - start;
        let needed = self.0.get(whole).into_iter().flatten().map(|own| within(own.start)..within(own.end));
        let needed = needed.filter(|needed| !needed.is_empty());
        needed.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
    }

    /// Gives `dict` the entry `key` of this shape, of which only those elements that are [needed](Self::needs) are there: `part`, a
    /// list. The others are one element, repeated, and take no memory.
    pub fn add(dict: &mut Dict, key: &str, shape: &[usize], needed: Range<usize>, part: Tensor) -> Result<()> {
        let all = shape.iter().product();
        let Some((whole, start)) = of_piece_key(key).filter(|_| needed.len() < all) else {
            dict.insert(key.to_string(), part.reshape(shape)?);
            return Ok(());
        };
        for absent in [0..needed.start, needed.end..all].into_iter().filter(|absent| !absent.is_empty()) {
            let one = Tensor::zeros(1, part.dtype(), &Device::Cpu)?;
            dict.insert(piece_key(whole, start + absent.start), one.broadcast_as(absent.len())?);
        }
        if !needed.is_empty() {
            dict.insert(piece_key(whole, start + needed.start), part);
        }
        Ok(())
    }
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
