//! Limits that hold everywhere.

/// The largest number of ranks. It bounds the memory and the time that ranks cost, whatever the environment, a program or the store
/// says.
pub const MOST_RANKS: usize = 1 << 20;
