//! Writing safetensors files tensor by tensor, so that no file is in memory twice.
use super::safetensors::{BEGINNING, LENGTH, LONGEST_HEADER};
use super::{PreparedFile, Progress};
use crate::hash::ContentHash;
use crate::state::fingerprint::{FileHash, of_content, summary};
use crate::{Error, Result};
use candle_core::{DType, Device, Shape, Tensor};
use safetensors::tensor::{Dtype, Metadata, TensorInfo, View};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Writes `tensors` to a file that appears complete or not at all.
pub fn write_safetensors(path: &Path, tensors: &HashMap<String, Tensor>) -> Result<()> {
    let none = || Err(io::Error::other("no rank sends values"));
    let (file, _) = WriteJob::new(path, tensors)?.run(&Progress::default(), &mut { none })?;
    Ok(file.commit()?)
}

/// The largest number of bytes that are in memory to be written: a multiple of what a hash takes at once.
const PART: usize = 8 << 20;

/// The values of a tensor of a file.
#[derive(Debug)]
pub enum Values {
    Here(Tensor),
    /// They come in [parts](WriteJob::parts) while the file is written.
    Sent(DType, Shape),
}

impl Values {
    fn kind(&self) -> (DType, &Shape) {
        match self {
            Self::Here(tensor) => (tensor.dtype(), tensor.shape()),
            Self::Sent(dtype, shape) => (*dtype, shape),
        }
    }
}

/// Returns the next part of the values that are sent, as a list.
pub type NextPart<'a> = dyn FnMut() -> io::Result<Tensor> + 'a;

/// Part of a tensor whose values are sent.
#[derive(Clone, Debug)]
pub struct Part {
    pub name: String,
    pub dtype: DType,
    pub elements: Range<usize>,
}

/// A file that is ready to be written, on any thread.
#[derive(Debug)]
pub struct WriteJob {
    path: PathBuf,
    header: Vec<u8>,
    tensors: Vec<(String, Values)>,
}

impl WriteJob {
    /// Waits for the work queued on the tensors' devices: on GPUs, another thread has another queue.
    pub fn new(path: &Path, tensors: &HashMap<String, Tensor>) -> Result<Self> {
        Self::of(path, tensors.iter().map(|(name, tensor)| (name.clone(), Values::Here(tensor.clone()))).collect())
    }

    /// Like [`new`](Self::new); some of the values come later.
    pub fn of(path: &Path, mut tensors: Vec<(String, Values)>) -> Result<Self> {
        let invalid = |reason: String| Error::invalid("tensors", format!("they cannot be written: {reason}"));
        let mut devices: Vec<&Device> = Vec::new();
        for (name, values) in &tensors {
            let (dtype, _) = values.kind();
            if matches!(dtype, DType::F6E2M3 | DType::F6E3M2 | DType::F4 | DType::F8E8M0) {
                return Err(Error::parameter(name, format!("candle cannot write dtype {}", dtype.as_str())));
            }
            if let Values::Here(tensor) = values
                && !devices.iter().any(|device| device.same_device(tensor.device()))
            {
                devices.push(tensor.device());
                tensor.device().synchronize()?;
            }
        }
        // The format requires dtypes of larger alignment first.
        let dtype = |values: &Values| Dtype::from(values.kind().0);
        tensors.sort_by(|(name, a), (other, b)| dtype(b).cmp(&dtype(a)).then(name.cmp(other)));
        let mut end = 0;
        let infos = tensors.iter().map(|(name, values)| {
            let (start, (dtype, shape)) = (end, values.kind());
            end += shape.elem_count() * dtype.size_in_bytes();
            let (dtype, shape) = (Dtype::from(dtype), shape.dims().to_vec());
            (name.clone(), TensorInfo { dtype, shape, data_offsets: (start, end) })
        });
        let metadata = Metadata::new(None, infos.collect()).map_err(|error| invalid(error.to_string()))?;
        let infos = serde_json::to_string(&metadata).map_err(|error| invalid(error.to_string()))?;
        let infos = infos.trim_start_matches('{');
        let comma = if infos == "}" { "" } else { "," };
        // `run` replaces the zeros.
        let mut header =
            format!(r#"{BEGINNING}{:0digits$}"}}{comma}{infos}"#, 0, digits = FileHash::DIGITS).into_bytes();
        header.resize(header.len().next_multiple_of(8), b' ');
        if header.len() as u64 > LONGEST_HEADER {
            return Err(invalid(format!(
                "their names and shapes take {} bytes, more than the format allows",
                header.len()
            )));
        }
        Ok(Self { path: path.to_path_buf(), header, tensors })
    }

    /// The parts that [`run`](Self::run) asks for, in this order.
    pub fn parts(&self) -> impl Iterator<Item = Part> {
        let sent = self.tensors.iter().filter_map(|(name, values)| match values {
            Values::Here(_) => None,
            Values::Sent(dtype, shape) => Some((name, *dtype, shape.elem_count())),
        });
        sent.flat_map(|(name, dtype, all)| {
            parts(dtype, all).map(move |elements| Part { name: name.clone(), dtype, elements })
        })
    }

    /// Writes the file, with the hash of its tensors, which is also returned.
    pub fn run(&self, progress: &Progress, next: &mut NextPart) -> Result<(PreparedFile, FileHash)> {
        let mut hash = FileHash(0);
        let file = PreparedFile::write(&self.path, progress, |file| {
            file.write_all(&(self.header.len() as u64).to_le_bytes())?;
            file.write_all(&self.header)?;
            let mut hashes = BTreeMap::new();
            for (name, values) in &self.tensors {
                let (dtype, shape) = values.kind();
                let mut content = ContentHash::default();
                for elements in parts(dtype, shape.elem_count()) {
                    let part = match values {
                        Values::Here(tensor) => part_of(tensor, elements).map_err(io::Error::other)?,
                        Values::Sent(..) => next()?,
                    };
                    // On the CPU, `data` does not fail.
                    let bytes = View::data(&part);
                    content.add(&bytes);
                    file.write_all(&bytes)?;
                }
                hashes.insert(name.clone(), of_content(dtype, shape.dims(), content.finish()));
            }
            hash = FileHash(summary(&hashes));
            file.overwrite((LENGTH + BEGINNING.len()) as u64, hash.to_string().as_bytes())
        })?;
        Ok((file, hash))
    }
}

/// The ranges of elements that are written at once.
fn parts(dtype: DType, all: usize) -> impl Iterator<Item = Range<usize>> {
    let elements = PART / dtype.size_in_bytes().max(1);
    (0..all).step_by(elements).map(move |start| start..all.min(start + elements))
}

fn part_of(tensor: &Tensor, elements: Range<usize>) -> candle_core::Result<Tensor> {
    tensor.flatten_all()?.narrow(0, elements.start, elements.len())?.to_device(&Device::Cpu)
}
