//! Random bytes from the operating system, for names and identities that must be unique and hard to guess.
use crate::{Error, Result};

/// `N` random bytes.
pub fn random_bytes<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| Error::io("drawing a random number", error))?;
    Ok(bytes)
}
