//! The weights of pretrained models, in one or several safetensors files.
use super::convert::converted;
use super::error::{flawed, unreadable};
use crate::error::describe;
use crate::state::file::{LONGEST_HEADER, Readable, SafetensorsFile};
use crate::{Error, Result};
use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Component, Path, PathBuf};

/// The file that lists the files of a model.
pub const INDEX: &str = "model.safetensors.index.json";
/// The file of a model that has only one.
pub const SINGLE: &str = "model.safetensors";

/// The weights of a pretrained model as Hugging Face keeps them: `model.safetensors.index.json` and the files that it lists, or
/// `model.safetensors` alone.
///
/// Each tensor is read from its file when it is asked for, so a model that is built from the [`var_builder`](Self::var_builder) needs the
/// memory of its weights, and of one tensor in the file's dtype. Each rank has its own weights, while the system keeps the
/// files' pages once per host.
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_ddp::checkpoint::{self, Pretrained};
/// # use candle_nn::linear;
/// # fn main() -> candle_ddp::Result<()> {
/// # let folder = std::env::temp_dir().join(format!("pretrained-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder).unwrap();
/// # let tensors = [("head.weight", vec![2, 4]), ("head.bias", vec![2])]
/// #     .map(|(name, shape)| (name.to_string(), Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap()));
/// # checkpoint::save_tensors(&tensors.into(), folder.join("model.safetensors"))?;
/// let vb = Pretrained::open(&folder)?.var_builder(DType::BF16, &Device::Cpu);
/// let head = linear(4, 2, vb.pp("head"))?;
/// # std::fs::remove_dir_all(&folder).unwrap();
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Pretrained {
    path: PathBuf,
    files: Vec<SafetensorsFile>,
    /// The file of each tensor.
    tensors: BTreeMap<String, usize>,
    /// The tensors that the index lists and no file has, with the file that should have them.
    absent: BTreeMap<String, String>,
}

impl Pretrained {
    /// Opens a folder, such as one that `hf download` has filled, an index, or a single safetensors file. It reads the headers
    /// of all files.
    ///
    /// # Errors
    /// [`Error::CheckpointFile`] for a folder without these files, or with an index and a single file that it does not list, since these
    /// are two models; an index that lists a tensor that its file does not have, or names a file outside of its folder; and a damaged
    /// header; [`Error::Io`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let this = Self::open_incomplete(path.as_ref())?;
        this.check_complete().map(|()| this)
    }

    /// [`open`](Self::open) for an index that may list tensors that no file has.
    pub(super) fn open_incomplete(path: &Path) -> Result<Self> {
        let [index, single] = [INDEX, SINGLE].map(|name| path.join(name));
        let (path, unlisted) = match path.is_dir() {
            false => (path.to_path_buf(), None),
            true => match (index.exists(), single.exists()) {
                (true, is_there) => (index, is_there.then_some(single)),
                (false, true) => (single, None),
                _ => return Err(unreadable(path, format!("the folder has neither {INDEX} nor {SINGLE}"))),
            },
        };
        if is_index(&path) {
            let this = Self::of_index(path)?;
            return match unlisted.filter(|single| this.files.iter().all(|file| file.path() != single)) {
                Some(single) => {
                    let reason = format!(
                        "the folder also has {SINGLE}, which the index does not list: they are two models, of which one is old. Remove \
                         one, or open {} or the index itself",
                        single.display()
                    );
                    Err(unreadable(&this.path, reason))
                }
                None => Ok(this),
            };
        }
        let file = open(&path)?;
        let tensors = file.names().into_iter().map(|name| (name, 0)).collect();
        Ok(Self { path, files: vec![file], tensors, absent: BTreeMap::new() })
    }

    fn check_complete(&self) -> Result<()> {
        match self.absent.first_key_value() {
            Some((name, file)) => {
                let reason = format!(
                    "it says that {name} is in {file}, which does not have it: download the whole model, or load it with load_with or \
                     load_distributed, which take what the files have"
                );
                Err(unreadable(&self.path, reason))
            }
            None => Ok(()),
        }
    }

    /// The file of a tensor.
    pub(super) fn file_of(&self, name: &str) -> Option<&SafetensorsFile> {
        self.files.get(*self.tensors.get(name)?)
    }

    pub(super) fn into_files(self) -> Vec<SafetensorsFile> {
        self.files
    }

    /// Reads all tensors to the CPU, and checks the hashes of files that have one.
    pub(super) fn read_all(&self) -> Result<HashMap<String, Readable>> {
        self.check_complete()?;
        let mut all = HashMap::new();
        for file in &self.files {
            all.extend(file.read_all()?.map_err(|flaw| flawed(file.path(), flaw))?);
        }
        Ok(all)
    }

    fn of_index(path: PathBuf) -> Result<Self> {
        let io = |error| Error::io(format!("reading {}", path.display()), error);
        let mut text = Vec::new();
        File::open(&path).and_then(|file| file.take(LONGEST_HEADER).read_to_end(&mut text)).map_err(io)?;
        let index = serde_json::from_slice::<Index>(&text);
        let listed = index
            .map_err(|error| unreadable(&path, format!("it is not an index of safetensors files: {error}")))?
            .weight_map
            .0;
        let mut this = Self { path, files: Vec::new(), tensors: BTreeMap::new(), absent: BTreeMap::new() };
        let mut numbers = HashMap::new();
        for (name, file) in &listed {
            let components: Vec<_> = Path::new(file).components().collect();
            if components != [Component::Normal(file.as_ref())] {
                let reason = format!("it says that {name} is in {file:?}: a file must be in the folder of the index");
                return Err(unreadable(&this.path, reason));
            }
            if !numbers.contains_key(file.as_str()) {
                let at = this.path.with_file_name(file);
                if matches!(at.metadata(), Err(error) if error.kind() == ErrorKind::NotFound) {
                    let reason =
                        format!("it says that {name} is in {file}, which does not exist: download the whole model");
                    return Err(unreadable(&this.path, reason));
                }
                numbers.insert(file.as_str(), this.files.len());
                this.files.push(open(&at)?);
            }
            this.tensors.insert(name.clone(), numbers[file.as_str()]);
        }
        this.compare(listed)?;
        Ok(this)
    }

    /// Takes the tensors that the files have, `listed` or not. Refuses those that two files have, or another one than the listed.
    fn compare(&mut self, listed: BTreeMap<String, String>) -> Result<()> {
        let mut found = BTreeMap::new();
        for (number, file) in self.files.iter().enumerate() {
            let file_name = file.path().file_name().unwrap_or_default().to_string_lossy();
            for name in file.names() {
                let expected = self.tensors.get(&name).or(found.get(&name));
                if let Some(expected) = expected.filter(|expected| **expected != number) {
                    let other = self.files[*expected].path().file_name().unwrap_or_default().to_string_lossy();
                    let says = if listed.contains_key(&name) { "it says that " } else { "" };
                    let reason = format!("{says}{name} is in {other}, but {file_name} has it as well or instead");
                    return Err(unreadable(&self.path, reason));
                }
                found.insert(name, number);
            }
        }
        self.absent = listed.into_iter().filter(|(name, _)| !found.contains_key(name)).collect();
        self.tensors = found;
        Ok(())
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Reads a tensor to the CPU, in the file's dtype.
    ///
    /// # Errors
    /// [`Error::CheckpointFile`] for a name that no file has, or a tensor that candle cannot hold; [`Error::Io`].
    pub fn read(&self, name: &str) -> Result<Tensor> {
        let file = self.file_of(name).ok_or_else(|| unreadable(&self.path, format!("there is no tensor {name}")))?;
        let tensor = file.read(name)?.unwrap_or_else(|| Err("it is missing".to_string()));
        tensor.map_err(|reason| unreadable(file.path(), format!("{name}: {reason}")))
    }

    /// A `VarBuilder` whose tensors are read when a model requests them, and converted to `dtype`. They are not trained: a
    /// `LoraConfig` takes it as the `base` of its adapters.
    pub fn var_builder(self, dtype: DType, device: &Device) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self), dtype, device.clone())
    }
}

/// Whether a path names an index.
pub(super) fn is_index(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "json")
}

fn open(path: &Path) -> Result<SafetensorsFile> {
    SafetensorsFile::open(path)?.map_err(|flaw| flawed(path, flaw))
}

impl SimpleBackend for Pretrained {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        let tensor = self.get_unchecked(name, dtype, device)?;
        if *tensor.shape() != shape {
            let (has, needs) = (describe(tensor.dtype(), tensor.shape()), shape.dims());
            return Err(
                unreadable(&self.path, format!("{name} is {has}, and the model needs the shape {needs:?}")).into()
            );
        }
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        converted(&self.read(name)?, dtype)?.to_device(device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }
}

/// The content of an index. `metadata.total_size` is not read, since it is wrong in many models.
#[derive(Deserialize)]
struct Index {
    weight_map: WeightMap,
}

/// The file of each tensor, whose name must be there once.
struct WeightMap(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Names;
        impl<'de> Visitor<'de> for Names {
            type Value = WeightMap;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("the name of a file for each tensor")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<WeightMap, A::Error> {
                let mut names = BTreeMap::new();
                while let Some((name, file)) = map.next_entry::<String, String>()? {
                    if names.insert(name.clone(), file).is_some() {
                        return Err(A::Error::custom(format!("it lists {name} twice")));
                    }
                }
                Ok(WeightMap(names))
            }
        }
        deserializer.deserialize_map(Names)
    }
}
