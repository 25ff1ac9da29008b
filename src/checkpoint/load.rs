//! Reading a checkpoint into the variables of a model.
use super::error::unreadable;
use super::{own_names, read_file};
use crate::error::describe;
use crate::state::file::Readable;
use crate::variables::NamePredicate;
use crate::{Error, Result};
use candle_core::{DType, Tensor, Var};
use candle_nn::VarMap;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::Path;
use std::sync::{Arc, PoisonError};

/// A map from names in a checkpoint to those of the model.
pub type Rename = Arc<dyn Fn(&str) -> String + Send + Sync>;

/// How [`load_with`] reads a checkpoint. The predicates get names as the model has them: without the prefixes of PyTorch's
/// wrappers, and after [`rename`](Self::rename).
///
/// Transfer learning, from a checkpoint whose head is for other classes and whose body has another name:
///
/// ```
/// use candle_ddp::checkpoint::LoadOptions;
/// use std::sync::Arc;
///
/// let options = LoadOptions {
///     rename: Some(Arc::new(|name| name.replacen("backbone.", "encoder.", 1))),
///     skip: Arc::new(|name| name.starts_with("head.")),
///     ..Default::default()
/// };
/// ```
#[derive(Clone)]
pub struct LoadOptions {
    /// Whether a name that only the file or only the model has is an error; otherwise they are returned, and the
    /// variables that the file does not have keep their values. Default: true.
    pub strict: bool,
    /// Where in a file of PyTorch's the state dict is. Default (None): under `state_dict`, `model_state_dict`, `model`,
    /// `module` or `net`, the first of them that holds tensors, or else at the top.
    pub key: Option<String>,
    /// What the names of the file become. Default: none, they stay.
    pub rename: Option<Rename>,
    /// What is not loaded, also if `strict`: such variables keep their values, whether the file has them or not and in
    /// whatever shape, and such tensors of the file are passed over. Default: nothing.
    pub skip: NamePredicate,
    /// Which of the file's tensors are passed over where the model has no such variable, also if `strict`; beside
    /// `num_batches_tracked`, which PyTorch's batch norms have and candle's do not, and which is always among them.
    /// Default: nothing.
    pub ignored: NamePredicate,
}

impl Default for LoadOptions {
    fn default() -> Self {
        let none: NamePredicate = Arc::new(|_| false);
        Self { strict: true, key: None, rename: None, skip: Arc::clone(&none), ignored: none }
    }
}

impl LoadOptions {
    fn is_ignored(&self, name: &str) -> bool {
        name.rsplit('.').next() == Some("num_batches_tracked") || (self.ignored)(name)
    }
}

impl fmt::Debug for LoadOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadOptions").field("strict", &self.strict).field("key", &self.key).finish_non_exhaustive()
    }
}

/// What [`load_with`] found. All names are sorted, and are those that the model has or would have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// The variables that have got their values from the file.
    pub loaded: Vec<String>,
    /// The variables that the file does not have.
    pub missing: Vec<String>,
    /// The file's tensors that the model has no variable for.
    pub unexpected: Vec<String>,
    /// The file's tensors that the model has no variable for, and that were passed over because of
    /// [`LoadOptions::ignored`].
    pub ignored: Vec<String>,
    /// The variables, and the file's tensors, that were left out because of [`LoadOptions::skip`].
    pub skipped: Vec<String>,
}

/// Reads a checkpoint into the variables of `varmap`, converting floating-point values to each one's dtype. The model and
/// the file must have the same names and shapes: [`load_with`] can do with less.
///
/// # Errors
/// In all cases the variables have kept their values. [`Error::CheckpointMismatch`] lists all names that are missing or
/// too many, and all that have another shape; [`Error::CheckpointFile`] says what is wrong with the file; [`Error::Io`].
pub fn load(varmap: &VarMap, path: impl AsRef<Path>) -> Result<()> {
    load_with(varmap, path, &LoadOptions::default()).map(|_| ())
}

/// [`load`] with options of one's own.
///
/// # Errors
/// As with [`load`]. Shapes have to fit also where `strict` is off, but for what is skipped.
pub fn load_with(varmap: &VarMap, path: impl AsRef<Path>, options: &LoadOptions) -> Result<LoadReport> {
    Prepared::new(varmap, path.as_ref(), options)?.apply()
}

/// [`load_with`] for tensors that the program has: those that [`read`](super::read) returned, changed as the model needs
/// them. `options.key` has no meaning here.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_ddp::checkpoint::{self, LoadOptions};
/// use candle_nn::{VarBuilder, VarMap, linear};
///
/// # fn main() -> candle_ddp::Result<()> {
/// # let folder = std::env::temp_dir().join(format!("tensors-{}", std::process::id()));
/// # let weight = Tensor::zeros((3, 4), DType::F32, &Device::Cpu)?;
/// # checkpoint::save_tensors(&[("weight".to_string(), weight)].into(), &folder)?;
/// let varmap = VarMap::new();
/// let model = linear(4, 2, VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?;
/// let mut tensors = checkpoint::read(&folder)?;
/// // The first two of its three classes, and no bias yet.
/// let weight = tensors["weight"].narrow(0, 0, 2)?;
/// tensors.insert("weight".to_string(), weight);
/// tensors.insert("bias".to_string(), Tensor::zeros(2, DType::F32, &Device::Cpu)?);
/// checkpoint::load_tensors(&varmap, tensors, &LoadOptions::default())?;
/// # std::fs::remove_file(&folder).unwrap();
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// As with [`load_with`], with "the map of tensors" in the place of a path.
pub fn load_tensors(varmap: &VarMap, tensors: HashMap<String, Tensor>, options: &LoadOptions) -> Result<LoadReport> {
    let readable = tensors.into_iter().map(|(name, tensor)| (name, Ok(tensor))).collect();
    Prepared::of(varmap, Path::new("the map of tensors"), readable, options)?.apply()
}

/// A checkpoint that was read and fits: nothing has been changed yet.
pub(super) struct Prepared {
    report: LoadReport,
    values: Vec<(String, Var, Tensor)>,
}

impl Prepared {
    pub(super) fn new(varmap: &VarMap, path: &Path, options: &LoadOptions) -> Result<Self> {
        Self::of(varmap, path, read_file(path, options.key.as_deref())?, options)
    }

    /// Of the tensors of the file `path`.
    fn of(varmap: &VarMap, path: &Path, file: HashMap<String, Readable>, options: &LoadOptions) -> Result<Self> {
        let vars = varmap.data().lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut file = own_names(path, file, |name| vars.contains_key(name), options.rename.as_ref())?;
        let vars: BTreeMap<String, Var> = vars.into_iter().collect();
        let (mut report, mut different, mut values) = (LoadReport::default(), Vec::new(), Vec::new());
        for (name, var) in vars {
            let found = file.remove(&name);
            if (options.skip)(&name) {
                report.skipped.push(name);
                continue;
            }
            let Some(tensor) = found else {
                report.missing.push(name);
                continue;
            };
            let tensor = tensor.map_err(|reason| unreadable(path, format!("{name}: {reason}")))?;
            if tensor.shape() != var.shape() || tensor.dtype().is_float() != var.dtype().is_float() {
                let (has, needs) = (describe(tensor.dtype(), tensor.shape()), describe(var.dtype(), var.shape()));
                different.push(format!("{name} ({has} in the file, {needs} in the model)"));
                continue;
            }
            // By way of f32, which holds every float8: candle may not come back from converting float8 to f64.
            let tensor = if tensor.dtype() == DType::F8E4M3 { tensor.to_dtype(DType::F32) } else { Ok(tensor) }
                .and_then(|tensor| tensor.to_dtype(var.dtype()))
                .map_err(|error| unreadable(path, format!("{name}: {error}")))?;
            report.loaded.push(name.clone());
            values.push((name, var, tensor));
        }
        for name in file.into_keys() {
            let list = match name {
                _ if (options.skip)(&name) => &mut report.skipped,
                _ if options.is_ignored(&name) => &mut report.ignored,
                _ => &mut report.unexpected,
            };
            list.push(name);
        }
        let LoadReport { loaded, missing, unexpected, ignored, skipped } = &mut report;
        for names in [loaded, missing, unexpected, ignored, skipped, &mut different] {
            names.sort();
        }
        let strange = options.strict && !(report.missing.is_empty() && report.unexpected.is_empty());
        if strange || !different.is_empty() {
            let LoadReport { missing, unexpected, .. } = report;
            return Err(Error::CheckpointMismatch { path: path.to_path_buf(), missing, unexpected, different });
        }
        Ok(Self { report, values })
    }

    pub(super) fn apply(self) -> Result<LoadReport> {
        for (name, var, tensor) in self.values {
            let set = tensor.to_device(var.device()).and_then(|tensor| var.set(&tensor));
            set.map_err(|error| Error::parameter(name, format!("its value cannot be set: {error}")))?;
        }
        Ok(self.report)
    }
}
