//! The metrics of a run, for TensorBoard and as JSON lines.
mod appended;
mod events;
mod field;
mod histogram;
#[cfg(feature = "vision")]
mod image;
mod lines;
mod message;
#[cfg(test)]
mod tests;

pub use field::Field;

use crate::{Error, ProcessGroup, Result};
use candle_core::{DType, Tensor};
use candle_ddp_base::metrics::{hide_written_metrics, show_written_metric};
use events::Events;
use field::{Position, check_step, check_tag};
use histogram::Histogram;
use lines::Lines;
use message::Value;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Options for [`Writer::new`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct WriterOptions {
    /// The folder for TensorBoard's event files, which is created if necessary. Default: none are written.
    pub log_dir: Option<PathBuf>,
    /// The file of JSON lines, or a pipe; not a symbolic link to a file. Default: none is written.
    pub lines: Option<PathBuf>,
    /// The first step, or epoch, that this run writes. Entries that earlier runs wrote from that step on are superseded:
    /// TensorBoard hides them, and they are removed from the file of lines. After a checkpoint of step N it is N + 1, since `SummaryWriter`
    /// hides the step itself as well. Default: 0, a run from the beginning. Where another writer is still open, nothing is hidden or
    /// removed, with a warning.
    pub purge_step: u64,
    /// Every rank writes: into the folder `rank<N>` of `log_dir`, and a file whose name ends in `.rank<N>`. Default: only rank 0 does.
    pub all_ranks: bool,
}

/// Writes the metrics of a run: event files for TensorBoard, JSON lines, or both at once. Its methods are those of PyTorch's
/// `SummaryWriter`, and `write`, for values that belong together. The newest numbers are also in `ddprun status --json` and
/// `ddprun --metrics-port`, without files as well, unless the program [puts](super::put_metric) a number of the same name itself.
///
/// Rank 0 writes, and the methods do nothing on other ranks, unless [`WriterOptions::all_ranks`] is set. Nothing is collected over ranks:
/// write the [mean over all](ProcessGroup::all_reduce_scalars).
///
/// Each call writes its record at once and as a whole, so a run that is killed leaves what it has written, and TensorBoard shows a run while
/// it goes on. A disk that is full is an [`Error::Io`], and leaves no part of the record.
///
/// ```
/// use candle_ddp::metrics::{Writer, WriterOptions};
///
/// # fn main() -> candle_ddp::Result<()> {
/// # let folder = tempfile::tempdir().unwrap();
/// # let runs = folder.path();
/// candle_ddp::spawn(2, |pg| {
///     let options = WriterOptions { log_dir: Some(runs.join("first")), lines: Some(runs.join("first.jsonl")), ..Default::default() };
///     let mut writer = Writer::new(&pg, options)?;
///     for step in 1..=3u64 {
///         let loss = 1. / step as f64;
///         writer.write(&[("step", step.into()), ("loss", loss.into()), ("learning_rate", 0.1.into())])?;
///     }
///     writer.add_scalar("accuracy", 0.9, 3)?;
///     writer.flush()
/// })?;
/// let lines = std::fs::read_to_string(runs.join("first.jsonl")).unwrap();
/// assert_eq!(lines.lines().next(), Some(r#"{"learning_rate":0.1,"loss":1.0,"step":1}"#));
/// assert_eq!(lines.lines().last(), Some(r#"{"accuracy":0.9,"step":3}"#));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Writer {
    /// Whether this rank writes.
    is_open: bool,
    events: Option<Events>,
    lines: Option<Lines>,
}

impl Writer {
    /// Creates the files. No message is sent.
    ///
    /// # Errors
    /// [`Error::Io`] if a file cannot be written.
    pub fn new(pg: &ProcessGroup, options: WriterOptions) -> Result<Self> {
        let WriterOptions { mut log_dir, mut lines, purge_step, all_ranks } = options;
        check_step(purge_step)?;
        let rank = pg.rank();
        if all_ranks {
            log_dir = log_dir.map(|folder| folder.join(format!("rank{rank}")));
            lines = lines.map(|file| of_rank(&file, rank));
        } else if rank > 0 {
            hide_written_metrics();
            return Ok(Self { is_open: false, events: None, lines: None });
        }
        Ok(Self {
            is_open: true,
            lines: lines.map(|file| Lines::open(&file, purge_step)).transpose()?,
            events: log_dir.map(|folder| Events::create(&folder, purge_step)).transpose()?,
        })
    }

    /// Writes one value of a curve. TensorBoard stores it as f32; NaN and infinities are allowed. The line of JSON has the keys `step` and
    /// `tag`, and null for NaN and infinities.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::InvalidArgument`] if `tag` is empty, "step" or "epoch".
    pub fn add_scalar(&mut self, tag: &str, value: f64, step: u64) -> Result<()> {
        if Position::NAMES.contains(&tag) {
            return Err(Error::invalid("tag", format!("it must not be {tag:?}, the name of the position")));
        }
        self.write(&[("step", step.into()), (tag, value.into())])
    }

    /// Writes values that belong together: as one line of JSON, and as a point in each number's curve, whose tag is the field's name, at
    /// the position `step`, or else `epoch`. Texts are only in the line.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::InvalidArgument`] if there is no position, or a name is empty or repeated.
    pub fn write(&mut self, fields: &[(&str, Field<'_>)]) -> Result<()> {
        let position = Position::of(fields)?;
        check_step(position)?;
        for (index, (name, _)) in fields.iter().enumerate() {
            check_tag(name)?;
            if fields[..index].iter().any(|(other, _)| other == name) {
                return Err(Error::invalid(
                    "fields",
                    format!("each name must be there once, but {name:?} is repeated"),
                ));
            }
        }
        if let Some(lines) = &mut self.lines {
            lines.write(fields)?;
        }
        let scalar = |field: Field<'_>| match field {
            Field::Integer(value) => Some(value as f64),
            Field::Number(value) => Some(value),
            Field::Text(_) => None,
        };
        let is_value = |name: &str| !Position::NAMES.contains(&name);
        let named = fields.iter().filter(|(name, _)| is_value(name));
        let values: Vec<_> = named.filter_map(|(name, field)| Some((*name, scalar(*field)?))).collect();
        if self.is_open {
            values.iter().for_each(|(name, value)| show_written_metric(name, *value));
        }
        let Some(events) = self.events.as_mut().filter(|_| !values.is_empty()) else { return Ok(()) };
        let values: Vec<_> = values.into_iter().map(|(name, value)| (name, Value::Scalar(value as f32))).collect();
        events.write(position, &values)
    }

    /// Writes an image of the shape (channels, height, width), with 1, 3 or 4 channels, to the event file: in U8, or as floats from 0
    /// to 1. Needs the feature `vision`. Gradients end here.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::InvalidArgument`] for another shape or dtype, and for NaN.
    #[cfg(feature = "vision")]
    pub fn add_image(&mut self, tag: &str, image: &Tensor, step: u64) -> Result<()> {
        check_tag(tag)?;
        check_step(step)?;
        let Some(events) = &mut self.events else { return Ok(()) };
        let image::Image { height, width, channels, png } = image::Image::of(image)?;
        let [height, width, channels] = [height, width, channels].map(|number| number as u64);
        events.write(step, &[(tag, Value::Image { height, width, channels, png: &png })])
    }

    /// Writes the histogram of a tensor of any shape and dtype to the event file, with the buckets that `SummaryWriter` has by default.
    /// NaN and infinities are left out, with a warning. Gradients end here.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::InvalidArgument`] if no value is finite.
    pub fn add_histogram(&mut self, tag: &str, values: &Tensor, step: u64) -> Result<()> {
        check_tag(tag)?;
        check_step(step)?;
        let Some(events) = &mut self.events else { return Ok(()) };
        let mut values: Vec<f64> = values.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?;
        let all = values.len();
        values.retain(|value| value.is_finite());
        if values.is_empty() {
            return Err(Error::invalid("values", format!("none of the {all} values of {tag:?} is finite")));
        }
        if values.len() < all {
            log::warn!("{} of the {all} values of {tag:?} at step {step} are not finite", all - values.len());
        }
        events.write(step, &[(tag, Value::Histogram(&Histogram::of(&values)))])
    }

    /// Waits until the disk has all that was written. The system does so by itself, in some seconds.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn flush(&mut self) -> Result<()> {
        self.lines.as_ref().map_or(Ok(()), Lines::flush)?;
        self.events.as_ref().map_or(Ok(()), Events::flush)
    }
}

fn of_rank(file: &Path, rank: usize) -> PathBuf {
    let mut name = OsString::from(file);
    name.push(format!(".rank{rank}"));
    name.into()
}
