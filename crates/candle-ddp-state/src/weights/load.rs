//! Reading a checkpoint into the variables of a model.
use super::error::unreadable;
use super::hashes::Hashes;
use super::own_names;
use super::source::{Source, Values, Wanted};
use crate::error::describe;
use crate::panic::lock;
use crate::placement::Placement;
use crate::state::file::Hashed;
use crate::variables::NamePredicate;
use crate::{Error, Result};
use candle_core::{Tensor, Var};
use candle_ddp_base::debug_fields;
use candle_nn::VarMap;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

/// A map from names in a checkpoint to names in the model.
pub type Rename = Arc<dyn Fn(&str) -> String + Send + Sync>;

/// Options of [`load_with`]. The predicates get the model's names: without the prefixes of PyTorch's wrappers, and
/// after [`rename`](Self::rename).
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
    /// Whether a name that only the file or only the model has is an error. Otherwise such names are returned, and
    /// variables that the file lacks keep their values. Default: true.
    pub strict: bool,
    /// The key of the state dict in a PyTorch file. Default (None): the first of `state_dict`, `model_state_dict`,
    /// `model`, `module` and `net` that holds tensors, or else the top level.
    pub key: Option<String>,
    /// Maps the file's names to the model's. Default: none, names stay.
    pub rename: Option<Rename>,
    /// Selects names that are not loaded, even if `strict`: such variables keep their values, whatever the file has
    /// under these names, and such tensors of the file are ignored. Default: nothing.
    pub skip: NamePredicate,
    /// Selects tensors of the file that are ignored if the model has no such variable, even if `strict`.
    /// `num_batches_tracked`, which PyTorch's batch norms have and candle's do not, is always ignored. Default:
    /// nothing.
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

debug_fields!(LoadOptions: strict, key);

/// The result of [`load_with`]. All names are sorted, and are the model's, or the names that the model would have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// The variables that were loaded from the file.
    pub loaded: Vec<String>,
    /// The variables that are missing from the file.
    pub missing: Vec<String>,
    /// The file's tensors without a variable in the model.
    pub unexpected: Vec<String>,
    /// The file's tensors without a variable in the model that were ignored because of [`LoadOptions::ignored`].
    pub ignored: Vec<String>,
    /// The variables and the file's tensors that were skipped because of [`LoadOptions::skip`].
    pub skipped: Vec<String>,
}

/// Reads a checkpoint into the variables of `varmap`, converting floating-point values to each one's dtype. The model
/// and the file must have the same names and shapes; [`load_with`] can be more lenient.
///
/// # Errors
/// After every error the variables have their previous values. [`Error::CheckpointMismatch`] lists all missing and
/// surplus names, and all with another shape; [`Error::CheckpointFile`] says what is wrong with the file;
/// [`Error::Io`].
pub fn load(varmap: &VarMap, path: impl AsRef<Path>) -> Result<()> {
    load_with(varmap, path, LoadOptions::default()).map(|_| ())
}

/// Like [`load`], with options.
///
/// # Errors
/// As with [`load`]. Shapes must match even if `strict` is off, except for skipped names.
pub fn load_with(varmap: &VarMap, path: impl AsRef<Path>, options: LoadOptions) -> Result<LoadReport> {
    let path = path.as_ref();
    Prepared::of(varmap, path, Source::open(path, options.key.as_deref())?, &options)?.apply()
}

/// Like [`load_with`], for tensors in memory: those that [`read`](super::read) returned, changed as the model needs
/// them. `options.key` has no effect here.
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
/// checkpoint::load_tensors(&varmap, tensors, LoadOptions::default())?;
/// # std::fs::remove_file(&folder).unwrap();
/// # Ok(())
/// # }
/// ```
///
/// Gradients end here: variables get the values of `tensors`, without the graph to which they may belong.
///
/// # Errors
/// As with [`load_with`], with "the map of tensors" in place of a path.
pub fn load_tensors(varmap: &VarMap, tensors: HashMap<String, Tensor>, options: LoadOptions) -> Result<LoadReport> {
    Prepared::of_tensors(varmap, tensors, &options)?.apply()
}

/// A checkpoint that has been read and fits. Nothing has been changed yet.
#[derive(Debug)]
pub struct Prepared {
    report: LoadReport,
    values: Values,
}

impl From<Values> for Prepared {
    fn from(values: Values) -> Self {
        Self { report: LoadReport::default(), values }
    }
}

impl Prepared {
    /// Prepares the tensors of the file `path`.
    pub fn of(varmap: &VarMap, path: &Path, source: Source, options: &LoadOptions) -> Result<Self> {
        let (prepared, hashes) = Self::read(varmap, path, source, options, Hashed::All)?;
        hashes.check().map(|()| prepared)
    }

    /// Prepares tensors in memory.
    pub(super) fn of_tensors(varmap: &VarMap, tensors: HashMap<String, Tensor>, options: &LoadOptions) -> Result<Self> {
        let readable = tensors.into_iter().map(|(name, tensor)| (name, Ok(tensor))).collect();
        Self::of(varmap, Path::new("the map of tensors"), Source::Tensors(readable), options)
    }

    /// As [`of`](Self::of), but the hashes are still to be checked. What does not fit is known before values are read.
    pub fn read(
        varmap: &VarMap,
        path: &Path,
        source: Source,
        options: &LoadOptions,
        hashed: Hashed,
    ) -> Result<(Self, Hashes)> {
        let vars = lock(varmap.data()).clone();
        // The names in the file, by those in the model.
        let names = source.names().into_iter().map(|name| (name.clone(), name));
        let mut file = own_names(path, names, |name| vars.contains_key(name), options.rename.as_ref())?;
        let vars: BTreeMap<String, Var> = vars.into_iter().collect();
        let (mut report, mut different, mut wanted) = (LoadReport::default(), Vec::new(), HashMap::new());
        for (name, var) in vars {
            let found = file.remove(&name);
            if (options.skip)(&name) {
                report.skipped.push(name);
                continue;
            }
            let Some(found) = found else {
                report.missing.push(name);
                continue;
            };
            let (dtype, has) = source.entry(&found).map_err(|reason| unreadable(path, format!("{name}: {reason}")))?;
            let Placement { shape, range, .. } = Placement::of(&var);
            if has != shape || dtype.is_float() != var.dtype().is_float() {
                let (has, needs) = (describe(dtype, &has), describe(var.dtype(), &shape));
                different.push(format!("{name} ({has} in the file, {needs} in the model)"));
                continue;
            }
            report.loaded.push(name.clone());
            wanted.insert(found, Wanted { name, var, range });
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
        let (values, hashes) = source.into_values(path, wanted, hashed)?;
        Ok((Self { report, values }, hashes))
    }

    /// Gives the variables their values.
    pub fn apply(self) -> Result<LoadReport> {
        for (name, var, tensor) in self.values {
            let set = tensor.to_device(var.device()).and_then(|tensor| var.set(&tensor));
            set.map_err(|error| Error::parameter(name, format!("its value cannot be set: {error}")))?;
        }
        Ok(self.report)
    }
}
