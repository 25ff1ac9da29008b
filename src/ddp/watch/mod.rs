//! Observations of training: gradients that are not finite, ranks that differ, the pace.
pub(in crate::ddp) mod first;
pub(crate) mod non_finite;
pub(in crate::ddp) mod pace;
pub(in crate::ddp) mod replica_check;
pub(in crate::ddp) mod replicas;
pub(in crate::ddp) mod verify;
pub(in crate::ddp) mod window;
