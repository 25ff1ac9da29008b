//! The zip archive that a file of `torch.save` is: its parts, and the tensors that are views of its storages.
use crate::checked::Checked;
use crate::view::{Extent, View};
use candle_core::{Device, Tensor};
use candle_ddp_tensor::{Readable, read_tensor};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::io::{self, BufReader, Read, Seek};
use zip::result::ZipError;
use zip::{CompressionMethod, ZipArchive};

/// A limit for the tensors' memory, since many small entries of a file may refer to the same large one.
pub(crate) struct Budget {
    all: u64,
    left: u64,
}

impl Budget {
    const TIMES: u64 = 16;

    pub(crate) fn of_file(length: u64) -> Self {
        // The tensors of a small file may be small, and yet many times larger than the file.
        let all = length.saturating_mul(Self::TIMES).saturating_add(1 << 20);
        Self { all, left: all }
    }

    pub(crate) fn take(&mut self, bytes: u64) -> Checked<()> {
        let (times, all) = (Self::TIMES, self.all);
        self.left = self.left.checked_sub(bytes).ok_or_else(|| {
            format!(
                "its tensors would need more than {times} times its size in memory ({all} bytes), because many are \
                 views of the same values"
            )
        })?;
        Ok(())
    }
}

pub(crate) struct Archive<R> {
    zip: ZipArchive<BufReader<R>>,
    /// The folder within the archive, with a slash at its end.
    folder: String,
    /// The file's length in bytes: no entry can be longer.
    length: u64,
}

impl<R: Read + Seek> Archive<R> {
    pub(crate) fn open(file: R, length: u64) -> Checked<Self> {
        let zip = ZipArchive::new(BufReader::new(file)).map_err(|error| {
            format!("it begins like a file of torch.save, but cannot be read: {error}. Is it complete?")
        })?;
        let name = zip
            .file_names()
            .filter_map(|name| Some(name.ok()?.into_owned()))
            .find(|name| name.rsplit('/').next() == Some("data.pkl"));
        let Some(name) = name else {
            return Err("it is a zip archive, but not a file of torch.save: it has no data.pkl".to_string());
        };
        let folder = name.strip_suffix("data.pkl").unwrap_or_default().to_string();
        let mut archive = Self { zip, folder, length };
        if archive.bytes("byteorder").is_ok_and(|order| order.starts_with(b"big")) {
            return Err("its tensors are big-endian: write it again on a little-endian machine".to_string());
        }
        Ok(archive)
    }

    /// Returns the position and length of an entry of the archive.
    fn find(&mut self, name: &str) -> Checked<(usize, u64)> {
        let part = match self.zip.index_for_name(name) {
            Some(index) => self.zip.by_index_raw(index).map(|part| (index, part.size(), part.compression())),
            None => Err(ZipError::FileNotFound),
        };
        match part.map_err(|error| damaged(name, error))? {
            (_, length, _) if length > self.length => Err(damaged(name, "it claims to be longer than the file")),
            (index, length, CompressionMethod::Stored) => Ok((index, length)),
            (.., method) => Err(format!(
                "{name} is compressed ({method}), and torch.save compresses nothing: extract the archive and pack it again \
                 without compression (zip -0 -r), or load it in PyTorch and write it with torch.save"
            )),
        }
    }

    /// Passes `read` an entry of the archive and its length. `read` must read all of it, since the checksum is at the
    /// end.
    fn part<T>(&mut self, name: &str, read: impl FnOnce(&mut dyn Read, usize) -> io::Result<T>) -> Checked<T> {
        let name = format!("{}{name}", self.folder);
        let (index, length) = self.find(&name)?;
        let mut part = self.zip.by_index(index).map_err(|error| damaged(&name, error))?;
        let result = read(&mut part, length as usize).and_then(|result| match part.read(&mut [0])? {
            0 => Ok(result),
            _ => Err(io::Error::other("it is longer than it claims")),
        });
        result.map_err(|error| damaged(&name, error))
    }

    pub(crate) fn bytes(&mut self, name: &str) -> Checked<Vec<u8>> {
        self.part(name, |part, length| {
            let mut bytes = vec![0; length];
            part.read_exact(&mut bytes)?;
            Ok(bytes)
        })
    }

    /// Reads each storage once, and makes the tensors that are views of it.
    pub(crate) fn load(
        &mut self,
        views: HashMap<&str, Checked<View>>,
        budget: &mut Budget,
    ) -> Checked<HashMap<String, Readable>> {
        let mut of_storage: BTreeMap<_, Vec<_>> = BTreeMap::new();
        let mut tensors = HashMap::with_capacity(views.len());
        for (name, view) in views {
            match view {
                Ok(view) => of_storage.entry((view.storage, view.dtype.as_str())).or_default().push((name, view)),
                Err(reason) => drop(tensors.insert(name.to_string(), Err(reason))),
            }
        }
        for ((storage, _), views) in of_storage {
            let storage = format!("data/{storage}");
            let (_, held) = self.find(&format!("{}{storage}", self.folder))?;
            let mut found = Vec::with_capacity(views.len());
            for (name, view) in views {
                match view.extent(held, self.length) {
                    Ok(extent) => found.push((name, view, extent)),
                    Err(reason) => drop(tensors.insert(name.to_string(), Err(reason))),
                }
            }
            self.load_storage(&storage, held, &found, budget, &mut tensors)?;
        }
        Ok(tensors)
    }

    /// Views of the same dtype, of one storage of `held` bytes.
    fn load_storage(
        &mut self,
        name: &str,
        held: u64,
        views: &[(&str, View, Extent)],
        budget: &mut Budget,
        tensors: &mut HashMap<String, Readable>,
    ) -> Checked<()> {
        let Some((_, View { dtype, .. }, _)) = views.first() else { return Ok(()) };
        let size = dtype.size_in_bytes();
        budget.take(held)?;
        let bytes_of = |(.., extent): &(&str, View, Extent)| (extent.count * size) as u64;
        let contiguous = |(.., extent): &&(&str, View, Extent)| extent.is_contiguous;
        // Contiguous views share its memory, unless most of that memory would be kept for nothing.
        let shared = views.iter().filter(contiguous).map(bytes_of).fold(0, u64::saturating_add) >= held / 2;
        let elements = held as usize / size;
        let whole_bytes = elements * size;
        let (bytes, whole) = if shared && views.iter().all(|view| contiguous(&view)) && whole_bytes as u64 == held {
            (Vec::new(), Some(self.part(name, |mut part, _| read_tensor(&mut part, *dtype, &[elements]))??))
        } else {
            let bytes = self.bytes(name)?;
            let whole =
                shared.then(|| Tensor::from_raw_buffer(&bytes[..whole_bytes], *dtype, &[elements], &Device::Cpu));
            (bytes, whole.transpose().map_err(|error| error.to_string())?)
        };
        for (name, view, extent) in views {
            let tensor = match &whole {
                Some(whole) if extent.is_contiguous && extent.count > 0 => {
                    whole.narrow(0, extent.start, extent.count).and_then(|part| part.reshape(&view.shape[..]))
                }
                _ if extent.is_contiguous => {
                    let bytes = if extent.count > 0 { &bytes[extent.start * size..extent.end * size] } else { &[] };
                    Tensor::from_raw_buffer(bytes, *dtype, &view.shape, &Device::Cpu)
                }
                _ => {
                    budget.take((extent.count * size) as u64)?;
                    let gathered = view.gather(&bytes[extent.start * size..extent.end * size], extent.count);
                    Tensor::from_raw_buffer(&gathered, *dtype, &view.shape, &Device::Cpu)
                }
            };
            tensors.insert(name.to_string(), tensor.map_err(|error| error.to_string()));
        }
        Ok(())
    }
}

fn damaged(name: &str, reason: impl fmt::Display) -> String {
    format!("{name} cannot be read: {reason}. Is the file complete?")
}
