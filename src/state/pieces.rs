//! Tensors that are spread over the ranks, put together.
use crate::{Error, Result};
use candle_core::{DType, Tensor};
use std::collections::HashMap;

/// Parts of tensors by the names of the whole ones, each with the element at which it starts.
#[derive(Default)]
pub(crate) struct Pieces(HashMap<String, Vec<(usize, Tensor)>>);

impl Pieces {
    pub(crate) fn add(&mut self, whole: &str, start: usize, part: &Tensor) -> Result<()> {
        self.0.entry(whole.to_string()).or_default().push((start, part.flatten_all()?));
        Ok(())
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &String> {
        self.0.keys()
    }

    /// Checks the dtype of the parts, and that they add up to `elements` if that is given.
    pub(crate) fn check(&self, key: &str, elements: Option<usize>, dtype: DType) -> Result<()> {
        let parts = self.0.get(key).map_or(&[][..], Vec::as_slice);
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

    /// The elements of a whole state from `start` on.
    pub(crate) fn take(&self, key: &str, start: usize, elements: usize) -> Result<Tensor> {
        let mut found = Vec::new();
        for (offset, part) in self.0.get(key).into_iter().flatten() {
            let (from, to) = (start.max(*offset), (start + elements).min(offset + part.elem_count()));
            if from < to {
                found.push(part.narrow(0, from - offset, to - from)?);
            }
        }
        if found.iter().map(Tensor::elem_count).sum::<usize>() != elements {
            let reason = format!("elements {start} to {} of it are missing from the shards", start + elements);
            return Err(Error::parameter(key, reason));
        }
        // A copy, since the kernels change it in place.
        Ok(Tensor::cat(&found, 0)?.copy()?)
    }
}
