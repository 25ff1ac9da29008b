//! The safetensors format, read and written tensor by tensor, so that no file is in memory twice.
use super::{PreparedFile, Progress};
use crate::panic::lock;
use crate::state::fingerprint::{FileHash, of_bytes, of_tensor, summary};
use crate::{Error, Result};
use candle_core::safetensors::Load;
use candle_core::{DType, Device, Tensor};
pub(crate) use candle_ddp_tensor::Readable;
use candle_ddp_tensor::read_tensor;
use safetensors::tensor::{Dtype, Metadata, TensorInfo, TensorView, View};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// The contents of a file, or what is wrong with it.
pub(crate) type Parsed = std::result::Result<Contents, Flaw>;

/// The contents of a file.
pub(crate) struct Contents {
    pub(crate) tensors: HashMap<String, Readable>,
    /// The hash of the tensors, which the file has and which is right. Files of other programs have none.
    pub(crate) hash: Option<FileHash>,
}

/// The fault of a file, as the end of a sentence that begins with `it is`.
pub(crate) enum Flaw {
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
const HASH: &str = "candle_ddp.hash";
/// How a header begins, up to the hash. Transformers refuses a file that has metadata without a format.
const BEGINNING: &str = r#"{"__metadata__":{"format":"pt","candle_ddp.hash":""#;
/// The length of the header's length, with which a file begins.
const LENGTH: usize = 8;

/// The format's own library refuses longer headers.
pub(crate) const LONGEST_HEADER: u64 = 100_000_000;

/// Writes `tensors` to a file that appears complete or not at all.
pub(crate) fn write_safetensors(path: &Path, tensors: &HashMap<String, Tensor>) -> Result<()> {
    let (file, _) = WriteJob::new(path, tensors)?.run(&Progress::default())?;
    Ok(file.commit()?)
}

/// A file that is ready to be written, on any thread.
pub(crate) struct WriteJob {
    path: PathBuf,
    header: Vec<u8>,
    tensors: Vec<(String, Tensor)>,
}

impl WriteJob {
    /// Waits for the work queued on the tensors' devices: on GPUs, another thread has another queue.
    pub(crate) fn new(path: &Path, tensors: &HashMap<String, Tensor>) -> Result<Self> {
        let invalid = |reason: String| Error::invalid("tensors", format!("they cannot be written: {reason}"));
        let mut sorted = Vec::with_capacity(tensors.len());
        let mut devices: Vec<&Device> = Vec::new();
        for (name, tensor) in tensors {
            let dtype = tensor.dtype();
            if matches!(dtype, DType::F6E2M3 | DType::F6E3M2 | DType::F4 | DType::F8E8M0) {
                return Err(Error::parameter(name, format!("candle cannot write dtype {}", dtype.as_str())));
            }
            if !devices.iter().any(|device| device.same_device(tensor.device())) {
                devices.push(tensor.device());
                tensor.device().synchronize()?;
            }
            sorted.push((Dtype::from(dtype), name, tensor));
        }
        // The format requires dtypes of larger alignment first.
        sorted.sort_by(|(dtype, name, _), (other, other_name, _)| other.cmp(dtype).then(name.cmp(other_name)));
        let mut end = 0;
        let infos = sorted.iter().map(|(dtype, name, tensor)| {
            let start = end;
            end += View::data_len(*tensor);
            (name.to_string(), TensorInfo { dtype: *dtype, shape: tensor.dims().to_vec(), data_offsets: (start, end) })
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
        let tensors = sorted.into_iter().map(|(_, name, tensor)| (name.clone(), tensor.clone())).collect();
        Ok(Self { path: path.to_path_buf(), header, tensors })
    }

    /// Writes the file, with the hash of its tensors, which is also returned.
    pub(crate) fn run(&self, progress: &Progress) -> Result<(PreparedFile, FileHash)> {
        let mut hash = FileHash(0);
        let file = PreparedFile::write(&self.path, progress, |file| {
            file.write_all(&(self.header.len() as u64).to_le_bytes())?;
            file.write_all(&self.header)?;
            let mut hashes = BTreeMap::new();
            for (name, tensor) in &self.tensors {
                // On the CPU, `data` does not fail.
                let tensor = tensor.to_device(&Device::Cpu).map_err(io::Error::other)?;
                let values = View::data(&tensor);
                hashes.insert(name.clone(), of_bytes(tensor.dtype(), tensor.dims(), &values));
                file.write_all(&values)?;
            }
            hash = FileHash(summary(&hashes));
            file.overwrite((LENGTH + BEGINNING.len()) as u64, hash.to_string().as_bytes())
        })?;
        Ok((file, hash))
    }
}

/// Reads all tensors of a safetensors file.
pub(crate) fn read_safetensors(path: &Path) -> Result<HashMap<String, Tensor>> {
    read_with_hash(path).map(|(tensors, _)| tensors)
}

/// Reads all tensors of the safetensors file that has this hash.
pub(crate) fn read_hashed_safetensors(path: &Path, expected: FileHash) -> Result<HashMap<String, Tensor>> {
    match read_with_hash(path)? {
        (tensors, Some(hash)) if hash == expected => Ok(tensors),
        (_, other) => {
            let has = other.map_or("has no hash".to_string(), |other| format!("has the hash {other}"));
            let reason =
                format!("{} {has}, and the file that was saved had {expected}: it is another file", path.display());
            Err(Error::invalid("path", reason))
        }
    }
}

fn read_with_hash(path: &Path) -> Result<(HashMap<String, Tensor>, Option<FileHash>)> {
    let parsed = File::open(path).and_then(|mut file| parse_safetensors(&mut file));
    let Contents { tensors, hash } = parsed
        .map_err(|error| Error::io(format!("reading {}", path.display()), error))?
        .map_err(|flaw| Error::invalid("path", format!("{} is {flaw}", path.display())))?;
    let tensors = require_all(tensors);
    Ok((tensors.map_err(|reason| Error::invalid("path", format!("{}: {reason}", path.display())))?, hash))
}

/// Returns the tensors if all of them can be read; otherwise why the first one cannot.
pub(crate) fn require_all(tensors: HashMap<String, Readable>) -> std::result::Result<HashMap<String, Tensor>, String> {
    let first = tensors.iter().filter_map(|(name, tensor)| Some((name, tensor.as_ref().err()?))).min();
    match first {
        Some((name, reason)) => Err(format!("{name}: {reason}")),
        None => Ok(tensors.into_iter().filter_map(|(name, tensor)| Some((name, tensor.ok()?))).collect()),
    }
}

/// Reads the tensors of a safetensors file from its beginning, and checks their hash if the file has one.
pub(crate) fn parse_safetensors(file: &mut File) -> io::Result<Parsed> {
    let (metadata, data) = match parse_header(file)? {
        Ok(parsed) => parsed,
        Err(reason) => return Ok(Err(Flaw::Format(reason))),
    };
    let mut tensors = HashMap::new();
    for (name, info) in metadata.tensors() {
        file.seek(SeekFrom::Start(data + info.data_offsets.0 as u64))?;
        tensors.insert(name, read(file, info)?);
    }
    let Some(stated) = metadata.metadata().as_ref().and_then(|entries| entries.get(HASH)) else {
        return Ok(Ok(Contents { tensors, hash: None }));
    };
    // This crate writes no tensor that it cannot read.
    let readable = tensors.iter().filter_map(|(name, tensor)| Some((name, tensor.as_ref().ok()?)));
    let hashes = readable.map(|(name, tensor)| Ok((name.clone(), of_tensor(tensor)?)));
    let hash = FileHash(summary(&hashes.collect::<Result<_>>().map_err(io::Error::other)?));
    Ok(if *stated == hash.to_string() { Ok(Contents { tensors, hash: Some(hash) }) } else { Err(Flaw::Damage) })
}

/// A safetensors file whose tensors are read when they are asked for.
#[derive(Debug)]
pub(crate) struct SafetensorsFile {
    file: Mutex<File>,
    metadata: Metadata,
    /// Where the tensors' bytes begin.
    data: u64,
}

impl SafetensorsFile {
    pub(crate) fn open(path: &Path) -> io::Result<std::result::Result<Self, Flaw>> {
        let mut file = File::open(path)?;
        let header = parse_header(&mut file)?.map_err(Flaw::Format);
        Ok(header.map(|(metadata, data)| Self { file: Mutex::new(file), metadata, data }))
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.metadata.offset_keys()
    }

    /// None if the file has no tensor of this name.
    pub(crate) fn read(&self, name: &str) -> io::Result<Option<Readable>> {
        let Some(info) = self.metadata.info(name) else { return Ok(None) };
        let mut file = lock(&self.file);
        file.seek(SeekFrom::Start(self.data + info.data_offsets.0 as u64))?;
        read(&mut file, info).map(Some)
    }
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

fn read(file: &mut File, info: &TensorInfo) -> io::Result<Readable> {
    let TensorInfo { dtype, shape, data_offsets: (start, end) } = info;
    // candle multiplies dimensions without overflow checks, even if one of them is zero.
    if shape.iter().try_fold(1usize, |size, dim| size.checked_mul((*dim).max(1))).is_none() {
        return Ok(Err(format!("its shape {shape:?} is too large")));
    }
    match dtype {
        Dtype::BOOL => read_tensor(file, DType::U8, shape),
        // candle widens the first dtype, and keeps the others.
        Dtype::U16 | Dtype::F4 | Dtype::F6_E2M3 | Dtype::F6_E3M2 | Dtype::F8_E8M0 => {
            let mut bytes = vec![0; end - start];
            file.read_exact(&mut bytes)?;
            let view = TensorView::new(*dtype, shape.clone(), &bytes).map_err(|error| error.to_string());
            Ok(view.and_then(|view| view.load(&Device::Cpu).map_err(|error| error.to_string())))
        }
        _ => match DType::try_from(*dtype) {
            Ok(dtype) => read_tensor(file, dtype, shape),
            Err(_) => Ok(Err(format!("candle has no dtype for {dtype}"))),
        },
    }
}
