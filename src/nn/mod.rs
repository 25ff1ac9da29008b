//! Layers that candle lacks, or that it cannot train fast: drop-in replacements with the same names in the `VarMap`.
mod channels;
mod sync_batch_norm;

pub use sync_batch_norm::{SyncBatchNorm, sync_batch_norm};
