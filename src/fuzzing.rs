//! The functions that the fuzz targets in `fuzz/` run, and tests of their seeds. Each function takes arbitrary bytes,
//! and panics if the code under test panics or contradicts itself. Only fuzzing builds and these tests contain this
//! module.

/// Bytes that a store's server receives from clients.
#[cfg(fuzzing)]
pub fn store_protocol(data: &[u8]) {
    candle_ddp_rendezvous::fuzz_store_protocol(data);
}

/// Files of weights.
#[cfg_attr(test, allow(unreachable_pub))]
pub fn checkpoint_file(data: &[u8]) {
    crate::checkpoint::fuzz_checkpoint_file(data);
}

/// The pickle in a file of weights.
#[cfg(fuzzing)]
pub fn pickle(data: &[u8]) {
    candle_ddp_state::fuzz_pickle(data);
}

/// Indexes of checkpoints, the flight recorder's files, and traces; the first byte selects one. The tests of
/// candle-ddp-base cover the seeds of the formats that it reads.
#[cfg_attr(test, allow(unreachable_pub))]
pub fn json(data: &[u8]) {
    let Some((kind, text)) = data.split_first() else { return };
    match kind % 3 {
        0 => crate::checkpoint::fuzz_index(text),
        #[cfg(fuzzing)]
        1 => candle_ddp_base::flight_record::fuzz_records(text),
        #[cfg(fuzzing)]
        2 => candle_ddp_base::trace::fuzz_events(text),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// The seeds that the fuzzer starts from, and the inputs that it has found since.
    #[test]
    fn no_seed_of_the_fuzz_targets_fails() {
        type Target = (&'static str, fn(&[u8]));
        let targets: [Target; 2] = [("checkpoint_file", checkpoint_file), ("json", json)];
        for (name, target) in targets {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds").join(name);
            let files = folder.read_dir().unwrap().map(|entry| entry.unwrap().path());
            let mut count = 0;
            for file in files {
                println!("{}", file.display());
                target(&std::fs::read(&file).unwrap());
                count += 1;
            }
            assert!(count > 0, "{} is empty", folder.display());
        }
    }
}
