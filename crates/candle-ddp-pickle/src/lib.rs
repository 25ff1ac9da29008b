#![doc = include_str!("../README.md")]

mod archive;
mod checked;
#[cfg(any(test, fuzzing))]
mod fuzz;
mod reader;
mod view;

#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub use fuzz::pickle as fuzz_pickle;

use archive::{Archive, Budget};
use candle_core::Tensor;
use candle_ddp_tensor::Readable;
use checked::Checked;
use reader::{Id, Pickle, Value};
use std::collections::{HashMap, HashSet};
use std::io::{Read, Seek, SeekFrom};
use view::View;

/// The reason why a file cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused something.
    #[error(transparent)]
    Io(#[from] std::io::Error),

    /// The file is damaged, is of another kind, or would take too much memory.
    #[error("{0}")]
    File(String),
}

/// Keys under which larger files hold state dicts: those of PyTorch Lightning, PyTorch's tutorials, and others.
const KEYS: [&str; 5] = ["state_dict", "model_state_dict", "model", "module", "net"];

/// Returns the tensors of the state dict under `key`, or in one of the usual places: the whole file, or `state_dict`,
/// `model_state_dict`, `model`, `module` or `net` in it. Values that are no tensors are ignored.
///
/// # Errors
/// [`Error::Io`] if the file's length cannot be found out; [`Error::File`] if it cannot be read, or has no such dict. A single tensor that
/// candle cannot represent is an error in its place.
pub fn read(mut file: impl Read + Seek, key: Option<&str>) -> Result<HashMap<String, Result<Tensor, String>>, Error> {
    let length = file.seek(SeekFrom::End(0))?;
    tensors(file, length, key).map_err(Error::File)
}

fn tensors(file: impl Read + Seek, length: u64, key: Option<&str>) -> Checked<HashMap<String, Readable>> {
    let mut budget = Budget::of_file(length);
    let mut archive = Archive::open(file, length)?;
    let bytes = archive.bytes("data.pkl")?;
    let pickle = Pickle::parse(&bytes).map_err(|reason| format!("its pickle cannot be read: {reason}"))?;
    let views = views(&pickle, state_dict(&pickle, key)?, &mut budget)?;
    archive.load(views, &mut budget)
}

/// The entries of the state dict.
fn state_dict<'a>(pickle: &'a Pickle, key: Option<&str>) -> Checked<&'a [(Id, Id)]> {
    let Value::Dict(entries) = &pickle[pickle.root()] else {
        return Err(format!(
            "it must hold a dict of tensors, not {}: write it with torch.save(model.state_dict(), path)",
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
            Some(key) => format!("it has no dict under {key:?}; its keys are: {}", names.join(", ")),
            None => format!(
                "it has no tensors at its top level or under {}; its keys are: {}. Set `LoadOptions::key` to the one \
                 that holds the tensors",
                KEYS.join(", "),
                names.join(", ")
            ),
        }
    })
}

/// The tensors of a state dict. Other values are ignored.
fn views<'a>(
    pickle: &Pickle<'a>,
    entries: &[(Id, Id)],
    budget: &mut Budget,
) -> Checked<HashMap<&'a str, Checked<View<'a>>>> {
    let (mut seen, mut views) = (HashSet::new(), HashMap::new());
    // Of several entries with one name, the last counts. All keys may refer to one long name, which is examined once.
    for &(name, value) in entries.iter().rev().filter(|(name, _)| seen.insert(*name)) {
        let (Some(name), Some(view)) = (pickle.text(name), View::of(pickle, value).transpose()) else { continue };
        budget.take(view.as_ref().map_or_else(|reason| reason.len() as u64, View::description_bytes))?;
        views.entry(name).or_insert(view);
    }
    Ok(views)
}

/// Describes a value in words.
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
