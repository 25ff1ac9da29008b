//! Rank 0's values for everybody: parameters at construction, buffers at every step.
use super::copy;
use crate::backend::Work;
use crate::process_group::ProcessGroup;
use crate::{Error, Result};
use candle_core::{DType, DeviceLocation, Tensor, Var};

/// How many bytes travel together: enough that the time per message does not matter, little beside a model.
const PACK_BYTES: usize = 32 << 20;

/// Variables on their way from rank 0.
#[must_use]
pub(super) struct Broadcast<'a> {
    chunks: Vec<Chunk<'a>>,
    is_source: bool,
}

/// Variables that travel together.
struct Pack<'a> {
    kind: (DType, DeviceLocation),
    bytes: usize,
    vars: Vec<&'a Var>,
}

struct Chunk<'a> {
    vars: Vec<&'a Var>,
    flat: Tensor,
    work: Work,
}

/// Starts sending rank 0's values of `vars`, which every rank lists in the same order. They travel packed by dtype and
/// device, so that many small ones do not cost a message each.
pub(super) fn broadcast<'a>(group: &ProcessGroup, vars: impl IntoIterator<Item = &'a Var>) -> Result<Broadcast<'a>> {
    let is_source = group.rank() == 0;
    let mut packs: Vec<Pack> = Vec::new();
    for var in vars {
        let kind = (var.dtype(), var.device().location());
        let bytes = var.elem_count() * var.dtype().size_in_bytes();
        match packs.iter_mut().rev().find(|pack| pack.kind == kind && pack.bytes < PACK_BYTES) {
            Some(pack) => {
                pack.vars.push(var);
                pack.bytes += bytes;
            }
            None => packs.push(Pack { kind, bytes, vars: vec![var] }),
        }
    }
    let mut chunks = Vec::new();
    for Pack { vars, .. } in packs {
        let flat = if is_source {
            let parts: Vec<Tensor> = vars.iter().map(|var| var.flatten_all()).collect::<candle_core::Result<_>>()?;
            // With a single part, `cat` would return the variable itself.
            if let [part] = &parts[..] { part.copy()? } else { Tensor::cat(&parts, 0)? }
        } else {
            let elements: usize = vars.iter().map(|var| var.elem_count()).sum();
            Tensor::zeros(elements, vars[0].dtype(), vars[0].device())?
        };
        let flat = flat.detach();
        let work = group.broadcast_async(&flat, 0)?;
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
            let mut offset = 0;
            for var in vars {
                let part = flat.narrow(0, offset, var.elem_count())?.reshape(var.shape())?;
                copy::copy(var, &part).map_err(|error| match error {
                    Error::Candle(error) => Error::Candle(error.context("writing a variable that rank 0 broadcast")),
                    error => error,
                })?;
                offset += var.elem_count();
            }
        }
        Ok(())
    }
}
