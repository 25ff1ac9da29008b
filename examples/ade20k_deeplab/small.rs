//! A small data set in ADE20K's layout: drawings of a sky, a building, a tree and grass.
use super::pictures::{write_grey_png, write_jpeg};
use candle_ddp::seed::Generator;
use std::fs;
use std::io::Result;
use std::ops::Range;
use std::path::Path;

/// To be raised whenever the files become others.
pub(crate) const VERSION: u32 = 1;
const HEIGHT: usize = 64;
const WIDTH: usize = 80;

/// A class's number in ADE20K's annotations, and its colour.
type Class = (u8, [u8; 3]);
const BUILDING: Class = (2, [150, 90, 70]);
const SKY: Class = (3, [130, 180, 230]);
const TREE: Class = (5, [30, 80, 30]);
const GRASS: Class = (10, [110, 170, 60]);
/// The label of pixels without a class, here the margin.
const OTHER: u8 = 0;

/// Writes `images/training/ADE_train_NUMBER.jpg` and `annotations/training/ADE_train_NUMBER.png`, and those for validation.
pub(crate) fn write(folder: &Path) -> Result<()> {
    let mut random = Generator::new(0);
    for (split, prefix, count) in [("training", "train", 96), ("validation", "val", 24)] {
        let [images, annotations] = ["images", "annotations"].map(|kind| folder.join(kind).join(split));
        fs::create_dir_all(&images)?;
        fs::create_dir_all(&annotations)?;
        for number in 1..=count {
            let name = format!("ADE_{prefix}_{number:08}");
            let (pixels, labels) = scene(&mut random);
            write_jpeg(&images.join(format!("{name}.jpg")), [HEIGHT, WIDTH], &pixels)?;
            write_grey_png(&annotations.join(format!("{name}.png")), [HEIGHT, WIDTH], &labels)?;
        }
    }
    Ok(())
}

/// Returns the RGB values and the labels of a drawing.
fn scene(random: &mut Generator) -> (Vec<u8>, Vec<u8>) {
    let mut between = |range: Range<usize>| range.start + random.below(range.len() as u64) as usize;
    let horizon = between(24..40);
    let (left, wide, roof) = (between(4..40), between(12..32), between(8..22));
    let (x, y, radius) = (between(10..70), between(24..44), between(6..13));
    let (mut pixels, mut labels) = (Vec::new(), Vec::new());
    for (row, column) in (0..HEIGHT).flat_map(|row| (0..WIDTH).map(move |column| (row, column))) {
        let in_tree = row.abs_diff(y).pow(2) + column.abs_diff(x).pow(2) < radius * radius;
        let in_building = (left..left + wide).contains(&column) && (roof..horizon + 6).contains(&row);
        let (label, colour) = match () {
            () if in_tree => TREE,
            () if in_building => BUILDING,
            () if row < horizon => SKY,
            () => GRASS,
        };
        let is_margin = row.min(HEIGHT - 1 - row).min(column).min(WIDTH - 1 - column) < 2;
        labels.push(if is_margin { OTHER } else { label });
        let noise = between(0..25) as u8;
        pixels.extend(colour.map(|value| value + noise));
    }
    (pixels, labels)
}
