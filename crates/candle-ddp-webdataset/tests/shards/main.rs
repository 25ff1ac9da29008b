//! Tar shards and the cache of what was read: archives of several programs, damage, changes, and sources that fail.
#![allow(clippy::unwrap_used)] // a failed test may panic
mod cache_files;
mod damaged_cache;
mod range_cache;
mod tar_archives;
mod tar_shards;
