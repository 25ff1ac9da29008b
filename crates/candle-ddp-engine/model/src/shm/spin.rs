//! Nobody spins: a thread that finds nothing sleeps at once.

pub(super) fn spin<E>(_: usize, _: impl Fn() -> bool, _: impl Fn() -> Result<(), E>) -> Result<bool, E> {
    Ok(false)
}
