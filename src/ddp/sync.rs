//! Rank 0's values for everybody: parameters at construction, buffers at every step.
use super::groups::Groups;
use crate::backend::{Label, Work};
use crate::tensor::copy;
use crate::tensor::pack::packs;
use crate::{Error, Result};
use candle_core::{Tensor, Var};

/// Variables on their way from rank 0.
#[must_use]
pub(super) struct Broadcast<'a> {
    chunks: Vec<Chunk<'a>>,
    is_source: bool,
}

/// Variables that travel together.
struct Chunk<'a> {
    vars: Vec<&'a Var>,
    flat: Tensor,
    work: Work,
}

/// Starts sending rank 0's values of `vars`, which every rank lists in the same order. They travel in [packs], each
/// through the group of its device.
pub(super) fn broadcast<'a>(groups: &Groups, vars: impl IntoIterator<Item = &'a Var>) -> Result<Broadcast<'a>> {
    let is_source = groups.main().rank() == 0;
    let mut chunks = Vec::new();
    if groups.main().world_size() == 1 {
        return Ok(Broadcast { chunks, is_source });
    }
    for vars in packs(vars) {
        let group = groups.of(vars[0].device());
        let elements: usize = vars.iter().map(|var| var.elem_count()).sum();
        let flat = Tensor::zeros(elements, vars[0].dtype(), vars[0].device())?;
        if is_source {
            let parts = copy::views(&flat, vars.iter().map(|var| var.shape()))?;
            copy::copy_all(parts.iter().zip(vars.iter().map(|var| var.as_tensor())))?;
        }
        let work = Label::DDP_BUFFERS.during(|| group.broadcast_async(&flat, 0))?;
        chunks.push(Chunk { vars, flat, work });
    }
    Ok(Broadcast { chunks, is_source })
}

impl Broadcast<'_> {
    /// Waits, and writes what came into the variables.
    pub(super) fn finish(self) -> Result<()> {
        for Chunk { vars, flat, work } in self.chunks {
            work.wait()?;
            if self.is_source {
                continue;
            }
            let parts = copy::views(&flat, vars.iter().map(|var| var.shape()))?;
            copy::copy_all(vars.iter().map(|var| var.as_tensor()).zip(&parts)).map_err(|error| match error {
                Error::Candle(error) => Error::Candle(error.context("writing variables that rank 0 broadcast")),
                error => error,
            })?;
        }
        Ok(())
    }
}
