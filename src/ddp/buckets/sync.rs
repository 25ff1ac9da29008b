//! Broadcasts one rank's values, nearly always rank 0's: parameters at construction, buffers in every step.
use crate::backend::{Purpose, Work};
use crate::ddp::buckets::groups::Groups;
use crate::tensor::copy;
use crate::tensor::pack::packs;
use crate::{Error, Result};
use candle_core::{Tensor, Var};

static DDP_BUFFERS: Purpose = Purpose::of("rank 0's variables, which DistributedDataParallel broadcasts");

/// A broadcast in flight.
#[must_use]
pub(in crate::ddp) struct Broadcast<'a> {
    chunks: Vec<Chunk<'a>>,
    is_source: bool,
}

/// Variables that are sent together.
struct Chunk<'a> {
    vars: Vec<&'a Var>,
    flat: Tensor,
    work: Work,
}

/// Starts sending rank `root`'s values of `vars`, which every rank must list in the same order. They are sent in [packs],
/// each through the group of its device.
pub(in crate::ddp) fn broadcast<'a>(
    groups: &Groups,
    vars: impl IntoIterator<Item = &'a Var>,
    root: usize,
) -> Result<Broadcast<'a>> {
    let is_source = groups.main().rank() == root;
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
        let work = DDP_BUFFERS.during(|| group.broadcast_async(&flat, root))?;
        chunks.push(Chunk { vars, flat, work });
    }
    Ok(Broadcast { chunks, is_source })
}

impl Broadcast<'_> {
    /// Waits, and writes the received values into the variables.
    pub(in crate::ddp) fn finish(self) -> Result<()> {
        for Chunk { vars, flat, work } in self.chunks {
            work.wait()?;
            if self.is_source {
                continue;
            }
            let parts = copy::views(&flat, vars.iter().map(|var| var.shape()))?;
            copy::copy_all(vars.iter().map(|var| var.as_tensor()).zip(&parts)).map_err(|error| {
                match Error::from(error) {
                    Error::Candle(error) => {
                        Error::Candle(error.context("writing variables that another rank broadcast"))
                    }
                    error => error,
                }
            })?;
        }
        Ok(())
    }
}
