//! Files that `torch.save` writes: a zip archive of a pickle, which says what there is, and of the tensors' storages.
use super::{CPU, unreadable};
use crate::process_group::panic_message;
use crate::{Error, Result};
use candle_core::pickle::{Object, Stack};
use candle_core::{DType, Tensor};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use zip::ZipArchive;

/// Where state dicts are kept in files that hold more: PyTorch Lightning, PyTorch's tutorials, and others.
const KEYS: [&str; 5] = ["state_dict", "model_state_dict", "model", "module", "net"];

/// What a check found wrong, without the file's name.
type Checked<T> = std::result::Result<T, String>;

/// The tensors of the state dict under `key`, or where one usually is.
pub(super) fn read(path: &Path, mut file: File, key: Option<&str>) -> Result<HashMap<String, Tensor>> {
    let io = |error| Error::io(format!("reading {}", path.display()), error);
    let length = file.metadata().map_err(io)?.len();
    file.rewind().map_err(io)?;
    Archive::open(file, length)
        .and_then(|mut archive| {
            let pickle = archive.pickle()?;
            let tensors = tensors(state_dict(&pickle, key)?)?;
            archive.load(tensors)
        })
        .map_err(|reason| unreadable(path, reason))
}

struct Archive {
    zip: ZipArchive<BufReader<File>>,
    /// The folder within the archive, with a slash at its end.
    folder: String,
    /// Of the file, in bytes: no part of it can be longer.
    length: u64,
}

impl Archive {
    fn open(file: File, length: u64) -> Checked<Self> {
        let zip = ZipArchive::new(BufReader::new(file)).map_err(|error| {
            format!("it begins like a file of torch.save, but cannot be read: {error}. Is it complete?")
        })?;
        let name = zip
            .file_names()
            .filter_map(|name| Some(name.ok()?.into_owned()))
            .find(|name| name.rsplit('/').next() == Some("data.pkl"));
        let Some(name) = name else {
            return Err(
                "it is a zip archive, but not one that torch.save has written: there is no data.pkl".to_string()
            );
        };
        let folder = name.strip_suffix("data.pkl").unwrap_or_default().to_string();
        let mut archive = Self { zip, folder, length };
        if archive.bytes("byteorder").is_ok_and(|order| order.starts_with(b"big")) {
            return Err("its tensors are big-endian: write it again on a little-endian machine".to_string());
        }
        Ok(archive)
    }

    /// A part of the archive.
    fn bytes(&mut self, name: &str) -> Checked<Vec<u8>> {
        let name = format!("{}{name}", self.folder);
        let damaged = |error: &dyn std::fmt::Display| format!("{name} cannot be read: {error}. Is the file complete?");
        let entry = self.zip.by_name(&name).map_err(|error| damaged(&error))?;
        if entry.size() > self.length {
            return Err(damaged(&"it claims to be longer than the file"));
        }
        let mut bytes = Vec::with_capacity(entry.size() as usize);
        // Checks the sum at its end.
        entry.take(self.length).read_to_end(&mut bytes).map_err(|error| damaged(&error))?;
        Ok(bytes)
    }

    fn pickle(&mut self) -> Checked<Object> {
        let bytes = self.bytes("data.pkl")?;
        let parse = || {
            let mut stack = Stack::empty();
            stack.read_loop(&mut bytes.as_slice())?;
            stack.finalize()
        };
        // candle's reader panics on some damaged pickles, and on integers of more than eight bytes.
        catch_unwind(AssertUnwindSafe(parse))
            .map_err(|panic| panic_message(&*panic))
            .and_then(|object| object.map_err(|error| error.to_string()))
            .map_err(|reason| format!("candle's reader of pickles fails: {reason}"))
    }

    /// Reads each storage once, and makes the tensors that are parts of it.
    fn load(&mut self, views: Vec<(String, View)>) -> Checked<HashMap<String, Tensor>> {
        let mut of_storage: BTreeMap<String, Vec<(String, View)>> = BTreeMap::new();
        for (name, view) in views {
            of_storage.entry(view.storage.clone()).or_default().push((name, view));
        }
        let mut tensors = HashMap::new();
        for (storage, views) in of_storage {
            let bytes = self.bytes(&format!("data/{storage}"))?;
            for (name, view) in views {
                let tensor = view.read(&bytes, self.length).map_err(|reason| format!("{name}: {reason}"))?;
                tensors.insert(name, tensor);
            }
        }
        Ok(tensors)
    }
}

/// The entries of the state dict.
fn state_dict<'a>(root: &'a Object, key: Option<&str>) -> Checked<&'a [(Object, Object)]> {
    let Object::Dict(entries) = root else {
        let class = class_of(root).unwrap_or_else(|| "something".to_string());
        return Err(format!(
            "it holds {class} and not a dict of tensors: write it with torch.save(model.state_dict(), path)"
        ));
    };
    let under = |key: &str| {
        entries.iter().find_map(|(name, value)| match value {
            Object::Dict(entries) if is_text(name, key) => Some(entries.as_slice()),
            _ => None,
        })
    };
    let has_tensors = |entries: &[(Object, Object)]| entries.iter().any(|(_, value)| !matches!(view(value), Ok(None)));
    let found = match key {
        Some(key) => under(key),
        None => KEYS.iter().filter_map(|key| under(key)).chain([entries.as_slice()]).find(|found| has_tensors(found)),
    };
    found.ok_or_else(|| {
        let names: Vec<&str> = entries.iter().take(20).filter_map(|(name, _)| text(name)).collect();
        match key {
            Some(key) => format!("it has no dict under {key:?}; there are: {}", names.join(", ")),
            None => format!(
                "no tensors were found at its top or under {}; there are: {}. `LoadOptions::key` says where they are",
                KEYS.join(", "),
                names.join(", ")
            ),
        }
    })
}

/// The tensors of a state dict. What is not a tensor is passed over.
fn tensors(entries: &[(Object, Object)]) -> Checked<Vec<(String, View)>> {
    let mut tensors = Vec::new();
    for (name, value) in entries {
        let Some(name) = text(name) else { continue };
        if let Some(view) = view(value).map_err(|reason| format!("{name}: {reason}"))? {
            tensors.push((name.to_string(), view));
        }
    }
    Ok(tensors)
}

/// What a tensor shows of a storage: `torch.as_strided`'s arguments, in elements.
struct View {
    storage: String,
    dtype: DType,
    offset: usize,
    shape: Vec<usize>,
    strides: Vec<usize>,
}

/// The tensor that `object` is, if it is one.
fn view(object: &Object) -> Checked<Option<View>> {
    let Object::Reduce { callable, args } = object else { return Ok(None) };
    let (Object::Class { module_name, class_name }, Object::Tuple(args)) = (&**callable, &**args) else {
        return Ok(None);
    };
    match (module_name.as_str(), class_name.as_str(), args.as_slice()) {
        ("torch._utils", "_rebuild_tensor_v2", [storage, offset, shape, strides, ..]) => {
            let view = view_of_storage(storage, offset, shape, strides);
            view.map(Some)
        }
        ("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state", [tensor, ..]) => view(tensor),
        ("torch._tensor", "_rebuild_from_type_v2", [callable, _, args, ..]) => {
            view(&Object::Reduce { callable: Box::new(callable.clone()), args: Box::new(args.clone()) })
        }
        ("torch._utils" | "torch._tensor", kind, _) if kind.starts_with("_rebuild") => {
            Err(format!("it is a tensor of a kind that cannot be read ({kind})"))
        }
        _ => Ok(None),
    }
}

fn view_of_storage(storage: &Object, offset: &Object, shape: &Object, strides: &Object) -> Checked<View> {
    let damaged = || "its description is damaged".to_string();
    let Object::PersistentLoad(storage) = storage else { return Err(damaged()) };
    let Object::Tuple(storage) = &**storage else { return Err(damaged()) };
    let [_, Object::Class { class_name, .. }, Object::Unicode(key), ..] = storage.as_slice() else {
        return Err(damaged());
    };
    let dtype = match class_name.as_str() {
        "FloatStorage" => DType::F32,
        "DoubleStorage" => DType::F64,
        "HalfStorage" => DType::F16,
        "BFloat16Storage" => DType::BF16,
        "ByteStorage" | "BoolStorage" => DType::U8,
        "ShortStorage" => DType::I16,
        "IntStorage" => DType::I32,
        "LongStorage" => DType::I64,
        other => return Err(format!("candle has no dtype for {other}")),
    };
    let number = |object: &Object| match object {
        Object::Int(value) => usize::try_from(*value).map_err(|_| damaged()),
        Object::Long(value) => usize::try_from(*value).map_err(|_| damaged()),
        _ => Err(damaged()),
    };
    let numbers = |object: &Object| match object {
        Object::Tuple(values) => values.iter().map(number).collect::<Checked<Vec<_>>>(),
        _ => Err(damaged()),
    };
    let (offset, shape, strides) = (number(offset)?, numbers(shape)?, numbers(strides)?);
    if shape.len() != strides.len() {
        return Err(damaged());
    }
    Ok(View { storage: key.clone(), dtype, offset, shape, strides })
}

impl View {
    /// The tensor, contiguous, of at most `limit` bytes.
    fn read(&self, storage: &[u8], limit: u64) -> Checked<Tensor> {
        let size = self.dtype.size_in_bytes();
        // candle multiplies dimensions without looking, also where one of them is zero.
        let all = self.shape.iter().try_fold(1usize, |all, dim| all.checked_mul((*dim).max(1)));
        let count = if self.shape.contains(&0) { all.map(|_| 0) } else { all };
        let length = count.and_then(|count| count.checked_mul(size)).filter(|length| *length as u64 <= limit);
        let (Some(count), Some(_)) = (count, length) else {
            return Err(format!("its shape {:?} is larger than the file", self.shape));
        };
        // The bytes from the first element to the last.
        let reach = self.shape.iter().zip(&self.strides).try_fold(1usize, |reach, (dim, stride)| {
            dim.saturating_sub(1).checked_mul(*stride).and_then(|further| reach.checked_add(further))
        });
        let end = reach.filter(|_| count > 0).unwrap_or(0).checked_add(self.offset);
        let range = match (self.offset.checked_mul(size), end.and_then(|end| end.checked_mul(size))) {
            (Some(start), Some(end)) if reach.is_some() || count == 0 => start..end,
            _ => return Err("its description is damaged".to_string()),
        };
        let held = storage.len();
        let bytes = if count == 0 { Some(&storage[..0]) } else { storage.get(range) };
        let bytes = bytes.ok_or_else(|| format!("it lies outside of its storage, which has {held} bytes"))?;
        let made = if self.is_contiguous() {
            Tensor::from_raw_buffer(bytes, self.dtype, &self.shape, &CPU)
        } else {
            Tensor::from_raw_buffer(&self.gather(bytes, count, size), self.dtype, &self.shape, &CPU)
        };
        made.map_err(|error| error.to_string())
    }

    fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        self.shape.iter().zip(&self.strides).rev().all(|(&dim, &stride)| {
            let fits = dim <= 1 || stride == expected;
            expected *= dim.max(1);
            fits
        })
    }

    /// The elements in the order of their indices; `bytes` begin with the first.
    fn gather(&self, bytes: &[u8], count: usize, size: usize) -> Vec<u8> {
        let mut gathered = Vec::with_capacity(count * size);
        let mut index = vec![0usize; self.shape.len()];
        for _ in 0..count {
            let element: usize = index.iter().zip(&self.strides).map(|(index, stride)| index * stride).sum();
            gathered.extend_from_slice(&bytes[element * size..][..size]);
            for (index, dim) in index.iter_mut().zip(&self.shape).rev() {
                *index += 1;
                if *index < *dim {
                    break;
                }
                *index = 0;
            }
        }
        gathered
    }
}

fn text(object: &Object) -> Option<&str> {
    match object {
        Object::Unicode(text) => Some(text),
        _ => None,
    }
}

fn is_text(object: &Object, expected: &str) -> bool {
    text(object) == Some(expected)
}

/// The name of the class of which `object` was made.
fn class_of(object: &Object) -> Option<String> {
    match object {
        Object::Class { module_name, class_name } => Some(format!("{module_name}.{class_name}")),
        Object::Reduce { callable, .. } | Object::Build { callable, .. } => class_of(callable),
        Object::List(_) => Some("a list".to_string()),
        Object::Tuple(_) => Some("a tuple".to_string()),
        _ => None,
    }
}
