//! A small data set in CIFAR-10's format: the handwritten digits.
use super::digits::{TEST_EVERY, digits};
use std::fs;
use std::io::{Error, Result};
use std::path::Path;

/// To be raised whenever the files become others.
pub(crate) const VERSION: u32 = 1;

/// Writes `data_batch_1.bin` to `data_batch_5.bin` and `test_batch.bin`.
pub(crate) fn write(folder: &Path) -> Result<()> {
    let mut files = vec![Vec::new(); TEST_EVERY];
    for (index, digit) in digits().map_err(Error::other)?.iter().enumerate() {
        // A record is the label, then the red, the green and the blue values.
        let record = &mut files[index % TEST_EVERY];
        record.push(digit.label);
        record.extend(digit.enlarged(4).repeat(3));
    }
    for (number, bytes) in files.into_iter().enumerate() {
        let name = if number == 0 { "test_batch.bin".to_string() } else { format!("data_batch_{number}.bin") };
        fs::write(folder.join(name), bytes)?;
    }
    Ok(())
}
