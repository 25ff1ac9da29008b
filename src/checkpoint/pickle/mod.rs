//! Files that `torch.save` writes: a zip archive of a pickle, which says what there is, and of the tensors' storages.
mod reader;
mod view;

use super::{CPU, unreadable};
use crate::file::Readable;
use crate::{Error, Result};
use reader::{Id, Pickle, Value};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;
use view::View;
use zip::ZipArchive;

/// Where state dicts are kept in files that hold more: PyTorch Lightning, PyTorch's tutorials, and others.
const KEYS: [&str; 5] = ["state_dict", "model_state_dict", "model", "module", "net"];

/// What a check found wrong, without the file's name.
type Checked<T> = std::result::Result<T, String>;

/// The tensors of the state dict under `key`, or where one usually is.
pub(super) fn read(path: &Path, file: File, key: Option<&str>) -> Result<HashMap<String, Readable>> {
    let metadata = file.metadata().map_err(|error| Error::io(format!("reading {}", path.display()), error))?;
    Archive::open(file, metadata.len())
        .and_then(|mut archive| {
            let bytes = archive.bytes("data.pkl")?;
            let pickle = Pickle::parse(&bytes).map_err(|reason| format!("its pickle cannot be read: {reason}"))?;
            archive.load(tensors(&pickle, state_dict(&pickle, key)?))
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

    /// Reads each storage once, and makes the tensors that are parts of it.
    fn load(&mut self, views: HashMap<String, Checked<View>>) -> Checked<HashMap<String, Readable>> {
        let mut of_storage: BTreeMap<String, Vec<(String, View)>> = BTreeMap::new();
        let mut tensors = HashMap::with_capacity(views.len());
        for (name, view) in views {
            match view {
                Ok(view) => of_storage.entry(view.storage.clone()).or_default().push((name, view)),
                Err(reason) => drop(tensors.insert(name, Err(reason))),
            }
        }
        for (storage, views) in of_storage {
            let bytes = self.bytes(&format!("data/{storage}"))?;
            for (name, view) in views {
                tensors.insert(name, view.read(&bytes, self.length));
            }
        }
        Ok(tensors)
    }
}

/// The entries of the state dict.
fn state_dict<'a>(pickle: &'a Pickle, key: Option<&str>) -> Checked<&'a [(Id, Id)]> {
    let Value::Dict(entries) = &pickle[pickle.root()] else {
        return Err(format!(
            "it holds {} and not a dict of tensors: write it with torch.save(model.state_dict(), path)",
            kind_of(pickle, pickle.root())
        ));
    };
    let under = |key: &str| {
        entries.iter().find_map(|&(name, value)| match &pickle[value] {
            Value::Dict(entries) if pickle.text(name) == Some(key) => Some(entries.as_slice()),
            _ => None,
        })
    };
    let has_tensors =
        |entries: &[(Id, Id)]| entries.iter().any(|(_, value)| !matches!(View::of(pickle, *value), Ok(None)));
    let found = match key {
        Some(key) => under(key),
        None => KEYS.iter().filter_map(|key| under(key)).chain([entries.as_slice()]).find(|found| has_tensors(found)),
    };
    found.ok_or_else(|| {
        let names: Vec<&str> = entries.iter().take(20).filter_map(|(name, _)| pickle.text(*name)).collect();
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
fn tensors(pickle: &Pickle, entries: &[(Id, Id)]) -> HashMap<String, Checked<View>> {
    let view = |&(name, value): &(Id, Id)| {
        let name = pickle.text(name)?.to_string();
        Some((name, View::of(pickle, value).transpose()?))
    };
    entries.iter().filter_map(view).collect()
}

/// What a value is, in words.
fn kind_of(pickle: &Pickle, id: Id) -> String {
    let class = |id: Id| match pickle[id] {
        Value::Class { module, name } => Some(format!("{module}.{name}")),
        _ => None,
    };
    match pickle[id] {
        Value::Class { .. } => class(id),
        Value::Object { callable, .. } => Some(class(callable).unwrap_or_else(|| "an object".to_string())),
        Value::List => Some("a list".to_string()),
        Value::Tuple(_) => Some("a tuple".to_string()),
        _ => None,
    }
    .unwrap_or_else(|| "something".to_string())
}
