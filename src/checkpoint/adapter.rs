//! The tensors that LoRA trains, in peft's files.
use super::distributed::Saving;
use super::{LoadOptions, LoadReport};
use crate::backend::Purpose;
use crate::nn::{LoraBias, LoraConfig};
use crate::panic::lock;
use crate::process_group::ProcessGroup;
use crate::state::file::{LONGEST_HEADER, PreparedFile, Progress};
use crate::{Error, Result};
use candle_ddp_state::weights::{Prepared, Source, unreadable};
use candle_nn::VarMap;
use serde_json::{Map, Value, json};
use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

static SAVE_ADAPTER: Purpose = Purpose::of("save_adapter");

const TENSORS: &str = "adapter_model.safetensors";
const CONFIG: &str = "adapter_config.json";
/// The prefix that peft puts before the model's own names.
const PREFIX: &str = "base_model.model.";
/// Options of peft that change what an adapter computes or where it is, and have no counterpart here.
const UNSUPPORTED: [&str; 16] = [
    "alora_invocation_tokens",
    "alpha_pattern",
    "arrow_config",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "layers_to_transform",
    "lora_bias",
    "megatron_config",
    "monteclora_config",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
];

/// Writes what `config` trains of the variables of `varmap` to a folder, as peft's `save_pretrained` does: `adapter_model.safetensors`
/// and `adapter_config.json`. peft loads it with `PeftModel.from_pretrained`.
///
/// Every rank calls it, and rank 0 writes, as in [`save_distributed`](super::save_distributed), also under [sharding](crate::Sharding).
///
/// # Errors
/// [`Error::InvalidArgument`] if `varmap` has no adapter, or a pattern of `modules_to_save` has a `*`, which peft does not know; the
/// errors of [`save_distributed`](super::save_distributed).
pub fn save_adapter(
    group: &ProcessGroup,
    config: &LoraConfig,
    varmap: &VarMap,
    folder: impl AsRef<Path>,
) -> Result<()> {
    let folder = folder.as_ref();
    SAVE_ADAPTER.during(|| {
        let is_first = group.rank() == 0;
        let made = named(config, varmap).and_then(|named| {
            let made = if is_first { fs::create_dir_all(folder) } else { Ok(()) };
            made.map(|()| named).map_err(|error| Error::io(format!("creating {}", folder.display()), error))
        });
        let (saving, text) = group.agree(made)?;
        let names = saving.0.keys().cloned().collect();
        saving.write(group, &[(folder.join(TENSORS), names)])?;
        let path = folder.join(CONFIG);
        group.agree_on_long_work(move |progress: &Progress| match is_first {
            true => Ok(PreparedFile::write(&path, progress, |file| file.write_all(text.as_bytes()))?.commit()?),
            false => Ok(()),
        })
    })
}

/// The variables that `config` trains, under peft's names, and the text of its options.
fn named(config: &LoraConfig, varmap: &VarMap) -> Result<(Saving, String)> {
    let vars = lock(varmap.data());
    let trained: HashMap<_, _> = vars.iter().filter(|(name, _)| config.is_trained(name)).collect();
    let mut modules: Vec<String> = trained.keys().filter_map(|name| adapted(name)).map(str::to_string).collect();
    modules.sort();
    if modules.is_empty() {
        return Err(Error::invalid("varmap", "it has no adapter: build the model with LoraConfig::build first"));
    }
    if config.modules_to_save.iter().any(|pattern| pattern.contains('*')) {
        return Err(Error::invalid(
            "modules_to_save",
            "a pattern with * must be written out to be saved, since peft does not know *",
        ));
    }
    let named = trained.into_iter().map(|(name, var)| {
        let name = match name.strip_suffix(".bias") {
            Some(module) if modules.iter().any(|adapted| adapted == module) => format!("{module}.base_layer.bias"),
            _ => name.clone(),
        };
        (format!("{PREFIX}{name}"), var.clone())
    });
    let named = named.collect();
    // Full names, where peft does not know the patterns.
    let is_plain = config.target_modules.iter().chain(&config.exclude_modules).all(|pattern| !pattern.contains('*'));
    let list = |names: &[String]| if names.is_empty() { Value::Null } else { json!(names) };
    let bias = match config.bias {
        LoraBias::None => "none",
        LoraBias::All => "all",
        LoraBias::LoraOnly => "lora_only",
    };
    let text = json!({
        "peft_type": "LORA",
        "base_model_name_or_path": config.base_model_name_or_path,
        "task_type": config.task_type,
        "inference_mode": true,
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "target_modules": if is_plain { &config.target_modules } else { &modules },
        "exclude_modules": if is_plain { list(&config.exclude_modules) } else { Value::Null },
        "modules_to_save": list(&config.modules_to_save),
        "bias": bias,
        "use_rslora": config.use_rslora,
        "fan_in_fan_out": false,
        "init_lora_weights": true,
    });
    Ok((Saving(named), format!("{text:#}\n")))
}

/// Reads the options of an adapter that [`save_adapter`] or peft has written to a folder.
///
/// # Errors
/// [`Error::CheckpointFile`] for a file that is no `adapter_config.json` of LoRA, and for options that have no counterpart here, such as
/// DoRA, ranks that differ between layers, and a regular expression as `target_modules`; for adapters of another rank in
/// `adapter_model.safetensors`; [`Error::Io`].
pub fn read_adapter_config(folder: impl AsRef<Path>) -> Result<LoraConfig> {
    let path = folder.as_ref().join(CONFIG);
    let mut text = Vec::new();
    let read = File::open(&path).and_then(|file| file.take(LONGEST_HEADER).read_to_end(&mut text));
    read.map_err(|error| Error::io(format!("reading {}", path.display()), error))?;
    let config = parse(&text).map_err(|reason| unreadable(&path, reason))?;
    check_rank(config.r, &folder.as_ref().join(TENSORS)).map(|()| config)
}

/// Refuses adapters of another rank: a model that is built with it would need memory for what the file does not have.
fn check_rank(r: usize, path: &Path) -> Result<()> {
    let file = Source::open(path, None)?;
    let mut matrices: Vec<_> = file.names().into_iter().filter(|name| adapted(name).is_some()).collect();
    matrices.sort();
    if matrices.is_empty() {
        return Err(unreadable(path, "it has no adapter"));
    }
    for name in matrices {
        let (_, shape) = file.entry(&name).map_err(|reason| unreadable(path, format!("{name}: {reason}")))?;
        if shape.dims().first() != Some(&r) || shape.elem_count() == 0 {
            let reason = format!(
                "{name} is {:?}, and the rank in {CONFIG} is {r}: it must be its first dimension",
                shape.dims()
            );
            return Err(unreadable(path, reason));
        }
    }
    Ok(())
}

/// The layer, if this is the name of a matrix A.
fn adapted(name: &str) -> Option<&str> {
    name.strip_suffix(".lora_A.weight").or(name.strip_suffix(".lora_embedding_A"))
}

fn parse(text: &[u8]) -> std::result::Result<LoraConfig, String> {
    let options: Map<String, Value> =
        serde_json::from_slice(text).map_err(|error| format!("it is not a JSON object: {error}"))?;
    let get = |key: &str| options.get(key).filter(|value| !value.is_null());
    if get("peft_type").and_then(Value::as_str) != Some("LORA") {
        return Err("its peft_type must be LORA".to_string());
    }
    let is_set = |value: &Value| match value {
        Value::Bool(value) => *value,
        Value::Array(list) => !list.is_empty(),
        Value::Object(map) => !map.is_empty(),
        _ => true,
    };
    if let Some(key) = UNSUPPORTED.iter().find(|key| get(key).is_some_and(is_set)) {
        return Err(format!(
            "its option {key} has no counterpart here: merge the adapter with peft, and load the merged model"
        ));
    }
    let wrong = |key: &str, needed: &str| format!("its option {key} must be {needed}");
    let number = |key: &str, default: f64| match get(key) {
        None => Ok(default),
        Some(value) => value.as_f64().ok_or_else(|| wrong(key, "a number")),
    };
    let names = |key: &str| match get(key) {
        None => Ok(Vec::new()),
        Some(value) => {
            let list =
                value.as_array().and_then(|list| list.iter().map(|name| name.as_str().map(str::to_string)).collect());
            list.ok_or_else(|| wrong(key, "a list of names, and not a regular expression"))
        }
    };
    let text = |key: &str| match get(key) {
        None => Ok(None),
        Some(value) => value.as_str().map(|text| Some(text.to_string())).ok_or_else(|| wrong(key, "a text")),
    };
    let default = LoraConfig::default();
    Ok(LoraConfig {
        r: match get("r") {
            None => default.r,
            Some(r) => r.as_u64().and_then(|r| usize::try_from(r).ok()).ok_or_else(|| wrong("r", "a whole number"))?,
        },
        lora_alpha: number("lora_alpha", default.lora_alpha)?,
        lora_dropout: number("lora_dropout", 0.0)? as f32,
        target_modules: names("target_modules")?,
        exclude_modules: names("exclude_modules")?,
        modules_to_save: names("modules_to_save")?,
        bias: match get("bias").map(Value::as_str) {
            None | Some(Some("none")) => LoraBias::None,
            Some(Some("all")) => LoraBias::All,
            Some(Some("lora_only")) => LoraBias::LoraOnly,
            _ => return Err(wrong("bias", "none, all or lora_only")),
        },
        use_rslora: match get("use_rslora") {
            None => false,
            Some(value) => value.as_bool().ok_or_else(|| wrong("use_rslora", "true or false"))?,
        },
        base_model_name_or_path: text("base_model_name_or_path")?,
        task_type: text("task_type")?,
    })
}

/// Reads an adapter that [`save_adapter`] or peft has written to a folder into the variables of `varmap` that `config` trains. The model
/// has been built with `config`. Under DistributedDataParallel every rank calls it, with the same folder.
///
/// peft also writes the frozen weights of adapted embeddings. Variables of `varmap` get them, too; frozen weights that are not in `varmap`
/// stay as they are, with a warning.
///
/// # Errors
/// [`Error::CheckpointFile`] if the saved rank or scaling differs from `config`'s, or the file has something that `config` does not train;
/// otherwise those of [`load`](super::load). After every error the variables have their previous values.
pub fn load_adapter(config: &LoraConfig, varmap: &VarMap, folder: impl AsRef<Path>) -> Result<()> {
    let folder = folder.as_ref();
    let saved = read_adapter_config(folder)?;
    if (saved.r, saved.scaling()) != (config.r, config.scaling()) {
        let reason = format!(
            "its rank is {} and its scaling {}, but the model is built with {} and {}: build it with read_adapter_config",
            saved.r,
            saved.scaling(),
            config.r,
            config.scaling()
        );
        return Err(unreadable(&folder.join(CONFIG), reason));
    }
    let path = folder.join(TENSORS);
    let own = |name: &str| name.strip_prefix(PREFIX).unwrap_or(name).replace(".base_layer.", ".");
    let file = Source::open(&path, None)?;
    let names: BTreeSet<String> = file.names().iter().map(|name| own(name)).collect();
    let bases = names.iter().filter_map(|name| adapted(name)).map(|module| format!("{module}.weight"));
    let bases: BTreeSet<String> = bases.filter(|name| names.contains(name) && !config.is_trained(name)).collect();
    if let Some(name) = names.iter().find(|name| !config.is_trained(name) && !bases.contains(*name)) {
        return Err(unreadable(&path, format!("it has {name}, which the model's LoraConfig does not train")));
    }
    let (trained, skipped, ignored) = (config.clone(), bases.clone(), bases);
    let options = LoadOptions {
        rename: Some(Arc::new(own)),
        skip: Arc::new(move |name| !trained.is_trained(name) && !skipped.contains(name)),
        ignored: Arc::new(move |name| ignored.contains(name)),
        ..Default::default()
    };
    let LoadReport { ignored, .. } = Prepared::of(varmap, &path, file, &options)?.apply()?;
    if let [first, ..] = &ignored[..] {
        log::warn!(
            "{} has the frozen weights of {} layers, such as {first}, which are not in the VarMap: the model keeps those that it was \
             built with, which must be the same",
            path.display(),
            ignored.len()
        );
    }
    Ok(())
}
