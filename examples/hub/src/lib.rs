//! A model of the Hugging Face Hub, of which each host downloads one copy.
use candle_ddp::checkpoint::Pretrained;
use candle_ddp::{Context, Error, ProcessGroup, Result};
use hf_hub::api::sync::{ApiBuilder, ApiError};
use hf_hub::{Cache, Repo, RepoType};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
/// An index of a hundred thousand tensors has a tenth of it.
const LONGEST_INDEX: u64 = 100_000_000;

/// Where a model comes from, and where it goes.
#[derive(Clone, Debug)]
pub struct Hub {
    /// The address of the hub.
    pub endpoint: String,
    /// The hub's folder on each host. hf-hub's `Cache::from_env` is that of Python's `huggingface_hub`.
    pub cache: Cache,
    /// Whether all hosts see the same folder: then one rank of all downloads.
    pub is_shared: bool,
}

impl Hub {
    /// Returns the folder of a model, such as `Qwen/Qwen2-0.5B`, in this revision, such as `main`. If a host has not all of it, its
    /// first rank downloads what is missing, while the others wait. Every rank of the group of all ranks calls this.
    ///
    /// # Errors
    /// If one rank cannot download, it returns [`Error::Io`], and all others [`Error::RankFailed`]. Ranks wait no longer than the time-out
    /// of the group, which must be longer than a download takes: then they return its error.
    pub fn folder(&self, pg: &ProcessGroup, model: &str, revision: &str) -> Result<PathBuf> {
        let leads = if self.is_shared { pg.rank() == 0 } else { pg.local_rank() == 0 };
        let repo = Repo::with_revision(model.to_string(), RepoType::Model, revision.to_string());
        let place = || format!("downloading {model} ({revision}) from {}", self.endpoint);
        let done = match leads && self.complete(&repo).is_none() {
            true => self.download(&repo, model).map_err(io::Error::other).with_context(place),
            false => Ok(()),
        };
        all_or_none(pg, done)?;
        let lost = || format!("{} has no complete {model} ({revision})", self.cache.path().display());
        let found = self.complete(&repo).ok_or_else(|| io::Error::other("does this rank see its host's folder?"));
        all_or_none(pg, found.with_context(lost))
    }

    /// The folder of a model in the cache, if all of it is there.
    fn complete(&self, repo: &Repo) -> Option<PathBuf> {
        let cached = self.cache.repo(repo.clone());
        let folder = [INDEX, SINGLE].into_iter().find_map(|name| cached.get(name))?.parent()?.to_path_buf();
        Pretrained::open(&folder).ok().map(|_| folder)
    }

    fn download(&self, repo: &Repo, model: &str) -> std::result::Result<(), String> {
        let text = |error: ApiError| error.to_string();
        let builder = ApiBuilder::from_cache(self.cache.clone()).with_endpoint(self.endpoint.clone());
        let api = builder.with_progress(false).with_retries(3).build().map_err(text)?;
        let info = api.repo(repo.clone()).info().map_err(text)?;
        // It becomes part of a path.
        if info.sha.len() != 40 || !info.sha.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(format!("its commit must be 40 hexadecimal digits, not {:?}", info.sha));
        }
        let has = |name: &str| info.siblings.iter().any(|file| file.rfilename == name);
        // A branch may move during the download.
        let commit = api.repo(Repo::with_revision(model.to_string(), RepoType::Model, info.sha.clone()));
        let get = |name: &str| commit.get(name).map_err(|error| format!("{name}: {error}"));
        match (has(INDEX), has(SINGLE)) {
            (true, _) => shards(&get(INDEX)?)?.iter().try_for_each(|name| get(name).map(drop))?,
            (false, true) => drop(get(SINGLE)?),
            (false, false) => return Err(format!("it has neither {INDEX} nor {SINGLE}")),
        }
        if has("config.json") {
            get("config.json")?;
        }
        // The others look for the name of the revision.
        self.cache.repo(repo.clone()).create_ref(&info.sha).map_err(|error| error.to_string())
    }
}

/// The files that an index lists. It may come from anyone, so none of them may be elsewhere.
fn shards(index: &Path) -> std::result::Result<BTreeSet<String>, String> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let wrong = |error: &dyn std::fmt::Display| format!("{INDEX}: {error}");
    let mut text = Vec::new();
    let read = File::open(index).and_then(|file| file.take(LONGEST_INDEX + 1).read_to_end(&mut text));
    if read.map_err(|error| wrong(&error))? as u64 > LONGEST_INDEX {
        return Err(wrong(&format_args!("it must have at most {LONGEST_INDEX} bytes")));
    }
    let index: Index = serde_json::from_slice(&text).map_err(|error| wrong(&error))?;
    let files: BTreeSet<String> = index.weight_map.into_values().collect();
    let is_here = |file: &&String| Path::new(file).components().eq([Component::Normal(file.as_ref())]);
    match files.iter().find(|file| !is_here(file)) {
        Some(file) => Err(wrong(&format!("{file:?} must be in the folder of the index"))),
        None => Ok(files),
    }
}

/// Returns `own` if no rank has an error, or else this rank's error, or that of another one.
fn all_or_none<T>(pg: &ProcessGroup, own: Result<T>) -> Result<T> {
    let told = pg.all_gather_object(&own.as_ref().err().map(ToString::to_string));
    let own = own?;
    match told?.into_iter().enumerate().find_map(|(rank, reason)| Some((rank, reason?))) {
        Some((rank, reason)) => Err(Error::RankFailed { rank, reason }),
        None => Ok(own),
    }
}
