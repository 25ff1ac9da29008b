#![doc = include_str!("../README.md")]

pub mod activity;
pub mod deadline;
mod debug;
pub mod descriptors;
mod error;
pub mod file;
pub mod flight_record;
pub mod hash;
pub mod host;
mod limits;
pub mod metrics;
pub mod panic;
pub mod random;
pub mod reading;
pub mod text;
pub mod thread;
pub mod trace;
pub mod warnings;
pub mod wire;

pub use error::{Error, Result};
pub use limits::MOST_RANKS;

/// Runs this crate's fuzz functions on the seeds in `fuzz/`.
#[cfg(test)]
mod fuzz_seeds {
    use std::path::Path;

    #[test]
    fn no_seed_fails() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/json");
        let mut known = 0;
        for entry in folder.read_dir().unwrap() {
            let seed = std::fs::read(entry.unwrap().path()).unwrap();
            let fuzz = match seed.first().map(|kind| kind % 3) {
                Some(1) => crate::flight_record::fuzz_records,
                Some(2) => crate::trace::fuzz_events,
                _ => continue,
            };
            fuzz(&seed[1..]);
            known += 1;
        }
        assert!(known > 0, "{} has no seeds of records and traces", folder.display());
    }
}
