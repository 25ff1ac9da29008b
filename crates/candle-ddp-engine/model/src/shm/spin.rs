//! Nobody spins: a thread that finds nothing sleeps at once.
use std::time::Instant;

#[allow(dead_code)]
pub(super) enum Spun {
    AtOnce,
    At(Instant),
    NotYet,
}

pub(super) fn spin<E>(_: usize, _: impl Fn() -> bool, _: impl Fn() -> Result<(), E>) -> Result<Spun, E> {
    Ok(Spun::NotYet)
}
