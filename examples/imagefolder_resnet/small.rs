//! A small data set in folders: the handwritten digits, as JPEG and PNG files.
use super::digits::{TEST_EVERY, digits};
use super::pictures::{write_grey_png, write_jpeg};
use std::fs;
use std::io::{Error, Result};
use std::path::Path;

/// To be raised whenever the files become others.
pub(crate) const VERSION: u32 = 1;
/// A class's folder, by its digit.
const CLASSES: [&str; 10] = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"];
/// The height and width of a picture, in pixels.
const SIZE: [usize; 2] = [48; 2];

/// Writes `train/CLASS/NUMBER.jpg` and `.png`, and the same in `val`.
pub(crate) fn write(folder: &Path) -> Result<()> {
    for (index, digit) in digits().map_err(Error::other)?.iter().enumerate() {
        let split = if index % TEST_EVERY == 0 { "val" } else { "train" };
        let class = folder.join(split).join(CLASSES[usize::from(digit.label)]);
        fs::create_dir_all(&class)?;
        let pixels = digit.enlarged(6);
        if index % 2 == 0 {
            write_grey_png(&class.join(format!("{index:04}.png")), SIZE, &pixels)?;
        } else {
            let rgb: Vec<u8> = pixels.into_iter().flat_map(|value| [value; 3]).collect();
            write_jpeg(&class.join(format!("{index:04}.jpg")), SIZE, &rgb)?;
        }
    }
    Ok(())
}
