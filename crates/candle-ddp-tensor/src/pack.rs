//! Packs of variables that are sent together, so that many small ones do not cost a message each.
use candle_core::{DType, DeviceLocation, Var};

/// The size of a pack in bytes: large enough that the time per message does not matter, and small compared with a
/// model.
const PACK_BYTES: usize = 32 << 20;

/// Groups variables into packs of one dtype and device, each of at most [`PACK_BYTES`] unless it is a single variable.
/// A pack keeps the order of `vars`.
pub fn packs<'a>(vars: impl IntoIterator<Item = &'a Var>) -> Vec<Vec<&'a Var>> {
    let mut packs: Vec<((DType, DeviceLocation), usize, Vec<&'a Var>)> = Vec::new();
    for var in vars {
        let kind = (var.dtype(), var.device().location());
        let bytes = var.elem_count() * var.dtype().size_in_bytes();
        match packs.iter_mut().rev().find(|(of, size, _)| *of == kind && size.saturating_add(bytes) <= PACK_BYTES) {
            Some((_, size, vars)) => {
                vars.push(var);
                *size += bytes;
            }
            None => packs.push((kind, bytes, vec![var])),
        }
    }
    packs.into_iter().map(|(_, _, vars)| vars).collect()
}
