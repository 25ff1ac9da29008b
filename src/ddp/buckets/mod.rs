//! The memory in which gradients are reduced, and what travels with them.
pub(in crate::ddp) mod bucket;
pub(in crate::ddp) mod count;
pub(in crate::ddp) mod groups;
pub(in crate::ddp) mod leaf;
pub(in crate::ddp) mod plan;
pub(in crate::ddp) mod sums;
pub(in crate::ddp) mod sync;
pub(in crate::ddp) mod usage;
