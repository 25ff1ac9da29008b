//! The safetensors format, read tensor by tensor, so that no file is in memory twice.
use super::bytes::{Bytes, Hashed, PartHashes};
use crate::state::fingerprint::{FileHash, of_content, summary};
use crate::{Error, Result};
use candle_core::safetensors::Load;
use candle_core::{DType, Device, Tensor};
use candle_ddp_base::hash::content_of_parts;
pub use candle_ddp_tensor::Readable;
use candle_ddp_tensor::read_tensor;
use safetensors::tensor::{Dtype, Metadata, TensorInfo, TensorView};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The fault of a file, as the end of a sentence that begins with `it is`.
#[derive(Debug)]
pub enum Flaw {
    /// It does not have this format.
    Format(String),
    /// Its tensors are not the tensors that were saved.
    Damage,
}

impl fmt::Display for Flaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Format(reason) => write!(f, "not a safetensors file: {reason}"),
            Self::Damage => write!(
                f,
                "damaged: its tensors do not have the hash that was saved with them. Load another file. (If a program has \
                 changed them intentionally, let it remove the entry {HASH} from the file's metadata)"
            ),
        }
    }
}

/// The entry of the metadata with the hash of the tensors.
pub(super) const HASH: &str = "candle_ddp.hash";
/// How a header begins, up to the hash. Transformers refuses a file that has metadata without a format.
pub(super) const BEGINNING: &str = r#"{"__metadata__":{"format":"pt","candle_ddp.hash":""#;
/// The length of the header's length, with which a file begins.
pub(super) const LENGTH: usize = 8;

/// The format's own library refuses longer headers.
pub const LONGEST_HEADER: u64 = 100_000_000;

/// Reads all tensors of the file of a state.
pub fn read_safetensors(path: &Path) -> Result<HashMap<String, Tensor>> {
    read_state(path, None)
}

/// Reads all tensors of the file of a state, which must have this hash.
pub fn read_state(path: &Path, expected: Option<FileHash>) -> Result<HashMap<String, Tensor>> {
    let tensors = SafetensorsFile::of_state(path, expected)?.read_all()?;
    let tensors = tensors.map_err(|flaw| wrong(path, format_args!("is {flaw}")))?;
    require_all(tensors).map_err(|reason| wrong(path, format_args!("cannot be read: {reason}")))
}

/// The error for the file of a state.
pub fn wrong(path: &Path, reason: impl fmt::Display) -> Error {
    Error::invalid("path", format!("{} {reason}", path.display()))
}

/// Returns the tensors if all of them can be read; otherwise why the first one cannot.
pub(crate) fn require_all(tensors: HashMap<String, Readable>) -> std::result::Result<HashMap<String, Tensor>, String> {
    let first = tensors.iter().filter_map(|(name, tensor)| Some((name, tensor.as_ref().err()?))).min();
    match first {
        Some((name, reason)) => Err(format!("{name}: {reason}")),
        None => Ok(tensors.into_iter().filter_map(|(name, tensor)| Some((name, tensor.ok()?))).collect()),
    }
}

/// A safetensors file whose tensors, or parts of them, are read when they are asked for.
#[derive(Debug)]
pub struct SafetensorsFile {
    path: PathBuf,
    file: File,
    metadata: Metadata,
    /// The offset of the tensors' bytes.
    data: u64,
}

impl SafetensorsFile {
    pub(crate) fn open(path: &Path) -> Result<std::result::Result<Self, Flaw>> {
        let io = |error| Error::io(format!("reading {}", path.display()), error);
        let mut file = File::open(path).map_err(io)?;
        let header = parse_header(&mut file).map_err(io)?.map_err(Flaw::Format);
        Ok(header.map(|(metadata, data)| Self { path: path.to_path_buf(), file, metadata, data }))
    }

    /// Opens the file of a state, which must say that it has this hash if one is expected.
    pub fn of_state(path: &Path, expected: Option<FileHash>) -> Result<Self> {
        let file = Self::open(path)?.map_err(|flaw| wrong(path, format_args!("is {flaw}")))?;
        match expected.map(|hash| hash.to_string()) {
            Some(expected) if file.hash() != Some(&expected) => {
                let has = file.hash().map_or("has no hash".to_string(), |other| format!("has the hash {other}"));
                let reason = format_args!("{has}, and the file that was saved had {expected}: it is another file");
                Err(wrong(path, reason))
            }
            _ => Ok(file),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// In the order of their bytes.
    pub fn names(&self) -> Vec<String> {
        self.metadata.offset_keys()
    }

    /// The dtype with which a tensor is read, and its shape, or the reason why it cannot be read. None if the file does not have it.
    pub(crate) fn entry(&self, name: &str) -> Option<std::result::Result<(DType, &[usize]), String>> {
        let info = self.metadata.info(name)?;
        Some(dtype_of(info).map(|dtype| (dtype, info.shape.as_slice())))
    }

    /// None if the file has no tensor of this name.
    pub(crate) fn read(&self, name: &str) -> Result<Option<Readable>> {
        let Some(info) = self.metadata.info(name) else { return Ok(None) };
        let elements = read(&mut self.bytes_of(info, Hashed::Nothing), info, 0..info.shape.iter().product());
        elements.map_err(|error| self.reading(name, error)).map(|elements| Some(shaped(elements, &info.shape)))
    }

    /// Reads all tensors, and checks their hash if the file has one.
    pub(crate) fn read_all(&self) -> Result<std::result::Result<HashMap<String, Readable>, Flaw>> {
        let mut tensors = HashMap::new();
        let all = |_: &str, shape: &[usize]| Some(0..shape.iter().product());
        let hashes = self.scan(Hashed::All, all, |name, shape, elements| {
            tensors.insert(name.to_string(), shaped(elements, shape));
            Ok(())
        })?;
        Ok(self.check(&hashes).map(|()| tensors))
    }

    /// Gives `each` the elements of tensors for which `wanted` asks, in the order of the file; both get names and shapes, and elements
    /// come as a list. Returns the hashes of the parts of all tensors, in the same order, if the file has a hash.
    pub fn scan(
        &self,
        hashed: Hashed,
        wanted: impl Fn(&str, &[usize]) -> Option<Range<usize>>,
        mut each: impl FnMut(&str, &[usize], Readable) -> Result<()>,
    ) -> Result<Vec<PartHashes>> {
        let mut hashes = Vec::new();
        for name in self.names() {
            let Some(info) = self.metadata.info(&name) else { continue };
            let mut bytes = self.bytes_of(info, if self.hash().is_some() { hashed } else { Hashed::Nothing });
            if let Some(range) = wanted(&name, &info.shape) {
                let elements = read(&mut bytes, info, range).map_err(|error| self.reading(&name, error))?;
                each(&name, &info.shape, elements)?;
            }
            hashes.push(bytes.finish().map_err(|error| self.reading(&name, error))?);
        }
        Ok(hashes)
    }

    /// Reads and hashes the parts that have no hash and for which `is_own` says so.
    pub fn hash_rest(&self, hashes: &mut [PartHashes], mut is_own: impl FnMut() -> bool) -> Result<()> {
        for (name, hashes) in self.names().iter().zip(hashes) {
            let Some(info) = self.metadata.info(name) else { continue };
            for (index, hash) in hashes.iter_mut().enumerate().filter(|(_, hash)| hash.is_none()) {
                if is_own() {
                    *hash = self.bytes_of(info, Hashed::All).hash(index).map_err(|error| self.reading(name, error))?;
                }
            }
        }
        Ok(())
    }

    /// Checks the hash, if the file has one, by the hashes of all parts.
    pub fn check(&self, hashes: &[PartHashes]) -> std::result::Result<(), Flaw> {
        let Some(stated) = self.hash() else { return Ok(()) };
        let mut tensors = BTreeMap::new();
        for (name, hashes) in self.names().into_iter().zip(hashes) {
            let Some(info) = self.metadata.info(&name) else { continue };
            let length = info.data_offsets.1 - info.data_offsets.0;
            let content = content_of_parts(length, hashes.iter().map(|hash| hash.unwrap_or_default()));
            // This crate writes no tensor that it cannot read.
            if let Ok(dtype) = dtype_of(info) {
                tensors.insert(name, of_content(dtype, &info.shape, content));
            }
        }
        if *stated == FileHash(summary(&tensors)).to_string() { Ok(()) } else { Err(Flaw::Damage) }
    }

    /// The hash that the file says its tensors have.
    pub fn hash(&self) -> Option<&String> {
        self.metadata.metadata().as_ref()?.get(HASH)
    }

    fn bytes_of(&self, info: &TensorInfo, hashed: Hashed) -> Bytes<'_> {
        let (start, end) = info.data_offsets;
        Bytes::new(&self.file, self.data + start as u64..self.data + end as u64, hashed)
    }

    fn reading(&self, name: &str, error: io::Error) -> Error {
        Error::io(format!("reading {name} from {}", self.path.display()), error)
    }
}

/// A tensor of these elements.
fn shaped(elements: Readable, shape: &[usize]) -> Readable {
    elements.and_then(|elements| elements.reshape(shape).map_err(|error| error.to_string()))
}

/// Returns the header, and where the tensors' bytes begin.
fn parse_header(file: &mut File) -> io::Result<std::result::Result<(Metadata, u64), String>> {
    let mut start = Vec::with_capacity(LENGTH);
    file.rewind()?;
    file.by_ref().take(LENGTH as u64).read_to_end(&mut start)?;
    let rest = file.metadata()?.len().saturating_sub(LENGTH as u64);
    let is_zip = start.starts_with(b"PK\x03\x04");
    let Ok(length) = <[u8; LENGTH]>::try_from(start).map(u64::from_le_bytes) else {
        return Ok(Err("its header is too short".to_string()));
    };
    if length > LONGEST_HEADER || length > rest {
        if is_zip {
            let reason = "it is a zip archive, as torch.save writes: to load the weights of a model, use \
                          checkpoint::load; states of optimizers and other objects must be saved by this crate";
            return Ok(Err(reason.to_string()));
        }
        return Ok(Err(format!("its header has {length} bytes, which is too long")));
    }
    let mut header = vec![0; length as usize];
    file.read_exact(&mut header)?;
    // This checks that each tensor's bytes begin where those of another end, and have the length of its shape.
    let metadata: Metadata = match serde_json::from_slice(&header) {
        Ok(metadata) => metadata,
        Err(error) => return Ok(Err(format!("its header is damaged: {error}"))),
    };
    if metadata.data_len() as u64 != rest - length {
        let (all, there) = (metadata.data_len(), rest - length);
        return Ok(Err(format!(
            "its header describes {all} bytes of tensors, but the file has {there}: is it complete?"
        )));
    }
    Ok(Ok((metadata, LENGTH as u64 + length)))
}

/// The dtype with which a tensor is read.
fn dtype_of(TensorInfo { dtype, shape, .. }: &TensorInfo) -> std::result::Result<DType, String> {
    // candle multiplies dimensions without overflow checks, even if one of them is zero.
    if shape.iter().try_fold(1usize, |size, dim| size.checked_mul((*dim).max(1))).is_none() {
        return Err(format!("its shape {shape:?} is too large"));
    }
    match dtype {
        Dtype::BOOL => Ok(DType::U8),
        Dtype::U16 => Ok(DType::U32),
        _ => DType::try_from(*dtype).map_err(|_| format!("candle has no dtype for {dtype}")),
    }
}

/// Reads these elements of a tensor, as a list.
fn read(bytes: &mut Bytes, info: &TensorInfo, range: Range<usize>) -> io::Result<Readable> {
    let dtype = match dtype_of(info) {
        Ok(dtype) => dtype,
        Err(reason) => return Ok(Err(reason)),
    };
    match info.dtype {
        // candle widens the first dtype, and keeps the others.
        Dtype::U16 | Dtype::F4 | Dtype::F6_E2M3 | Dtype::F6_E3M2 | Dtype::F8_E8M0 => {
            let mut all = vec![0; info.data_offsets.1 - info.data_offsets.0];
            bytes.read_exact(&mut all)?;
            let view = TensorView::new(info.dtype, info.shape.clone(), &all).map_err(|error| error.to_string());
            let elements = |tensor: Tensor| tensor.flatten_all()?.narrow(0, range.start, range.len());
            Ok(view.and_then(|view| view.load(&Device::Cpu).and_then(elements).map_err(|error| error.to_string())))
        }
        _ => {
            bytes.skip((range.start * dtype.size_in_bytes()) as u64)?;
            read_tensor(bytes, dtype, &[range.len()])
        }
    }
}
