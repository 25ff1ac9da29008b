//! Samples in tar files.
mod entries;
mod index;
mod names;
mod read;
mod sample;
mod scan;

pub(crate) use index::is_index;
pub use sample::TarSample;

use crate::{Error, ReadRange, Result};
use candle_ddp_base::debug_fields;
use index::Index;
use read::Shard;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Samples in plain tar files, with the names of [WebDataset](https://github.com/webdataset/webdataset): the files of a sample lie
/// next to each other and share their path up to the first dot of the file name. `0001.jpg` and `0001.cls` are the files `jpg`
/// and `cls` of the sample `0001`. `tar --sort=name -cf shard-000.tar FOLDER` makes such a shard.
///
/// In `candle_ddp::data`, it is a `Dataset` of [`TarSample`]s, read by their positions, so order, workers, and runs that resume in the
/// middle of an epoch are those of every `DataLoader`. `BlockShuffle` is an order that keeps reads nearly sequential. Memory: 16 bytes
/// for each sample; ranks on one host share what the system has cached of the shards.
///
/// **Indices.** The first opening reads the headers of all shards, on rayon's threads, and writes an index for each shard. Ranks
/// that open at once share the work; an index appears as a whole or not at all. An index identifies its shard, and holds the size
/// and the time of modification that the shard had, or its version elsewhere: a shard that has changed since is an error. An index
/// that is damaged or belongs to another shard is made again. A file that is not an index is an error, and stays.
///
/// **Whole samples.** An archive that is truncated, has blocks of zeros in place of headers, or more than zeros after its end, such
/// as another archive, is an error, since samples could lack files otherwise. So are sparse files.
///
/// **Names.** As in WebDataset, folders and links, and files without a dot in their name or with one at its beginning, are left out.
pub struct TarShards {
    shards: Vec<Shard>,
    /// The number of each shard's first sample, and of all samples.
    firsts: Vec<usize>,
    indices: Vec<Index>,
}

impl TarShards {
    /// The files of `folder` whose names end in `.tar`.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new); [`Error::InvalidArgument`] if the folder has compressed archives, such as `*.tar.gz`, whose samples
    /// would be left out; [`Error::Io`] if the folder cannot be listed.
    pub fn in_folder(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let listing = |error| Error::io(format!("listing {}", folder.display()), error);
        let entries = std::fs::read_dir(folder).map_err(listing)?;
        let paths = entries.map(|entry| Ok(entry.map_err(listing)?.path())).collect::<Result<Vec<_>>>()?;
        if let Some(path) = paths.iter().filter(|path| is_compressed(path)).min() {
            let reason = format!(
                "{} is compressed, and samples are read by their positions: unpack all such files first, for example by gunzip or unzstd, \
                 or give the shards to TarShards::new",
                path.display()
            );
            return Err(Error::invalid("folder", reason));
        }
        let shards: Vec<PathBuf> =
            paths.into_iter().filter(|path| path.extension().is_some_and(|extension| extension == "tar")).collect();
        if shards.is_empty() {
            let reason = format!("there is no file *.tar in {}", folder.display());
            return Err(Error::invalid("folder", reason));
        }
        Self::new(shards)
    }

    /// The shards `paths`, in the order of their paths, whatever the order in which they are given. Each has its index next to it, as
    /// `SHARD.index`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is no shard, one is there twice, or there is no sample in any of them;
    /// [`Error::DataFile`] if a shard cannot be read, is truncated or is no plain tar file, has changed since its index was
    /// made, or has the files of a sample in different places; it names the shard and the offset. [`Error::Io`] if an index
    /// cannot be written.
    pub fn new(paths: impl IntoIterator<Item = impl Into<PathBuf>>) -> Result<Self> {
        Self::open(paths.into_iter().map(Into::into).collect(), None, None)
    }

    /// Like [`new`](Self::new), with the indices in `index_folder`, which must exist.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new).
    pub fn with_index_folder(
        paths: impl IntoIterator<Item = impl Into<PathBuf>>,
        index_folder: impl AsRef<Path>,
    ) -> Result<Self> {
        Self::open(paths.into_iter().map(Into::into).collect(), None, Some(index_folder.as_ref()))
    }

    /// Shards that lie elsewhere, under the names `names`, with their indices in a folder here. Ranks on one host may share it.
    /// To make the indices, all headers are read once, which for small samples means all bytes: [`RangeCache`](crate::RangeCache)
    /// keeps what was read. Copy the indices to other hosts to read the headers once only.
    ///
    /// An index belongs to a [location](ReadRange::location) and a version, so that sources may share the folder. The version is
    /// compared when a shard is first read; without a [`RangeCache`](crate::RangeCache), which compares it after every block, a
    /// shard must not change after that. A sample whose headers are not what the index says is [read again](ReadRange::read_again)
    /// past the caches of the source.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new).
    pub fn remote(
        names: impl IntoIterator<Item = impl Into<String>>,
        source: impl ReadRange + 'static,
        index_folder: impl AsRef<Path>,
    ) -> Result<Self> {
        let names = names.into_iter().map(|name| PathBuf::from(name.into())).collect();
        Self::open(names, Some(Arc::new(source)), Some(index_folder.as_ref()))
    }

    fn open(mut paths: Vec<PathBuf>, remote: Option<Arc<dyn ReadRange>>, folder: Option<&Path>) -> Result<Self> {
        // Ranks may list a folder in different orders.
        paths.sort_unstable();
        if paths.is_empty() {
            return Err(Error::invalid("paths", "there must be at least one shard"));
        }
        if let Some(pair) = paths.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::invalid(
                "paths",
                format!("the shard {} must be there once, not twice", pair[0].display()),
            ));
        }
        let shards: Vec<Shard> = paths.into_iter().map(|path| Shard::new(path, remote.clone())).collect();
        let indices = index::of_all(&shards, folder)?;
        let mut firsts = vec![0];
        firsts.extend(indices.iter().scan(0, |sum, index| {
            *sum += index.len();
            Some(*sum)
        }));
        let opened = Self { shards, firsts, indices };
        if opened.num_samples() == 0 {
            let first = opened.shards[0].name();
            let reason = format!(
                "there must be at least one sample, but none of the {} shard(s) from {first} on has one: samples are files with \
                 names such as 0001.jpg",
                opened.shards.len()
            );
            return Err(Error::invalid("paths", reason));
        }
        Ok(opened)
    }

    /// The number of samples that all shards have together.
    pub fn num_samples(&self) -> usize {
        self.firsts.last().copied().unwrap_or(0)
    }

    /// The numbers of the samples of each shard, in the order of the shards' paths.
    pub fn samples_of_shards(&self) -> impl ExactSizeIterator<Item = std::ops::Range<usize>> + '_ {
        self.firsts.windows(2).map(|pair| pair[0]..pair[1])
    }

    /// The sample `index` of all shards, in the order of the shards' paths.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is no such sample; [`Error::DataFile`] if it cannot be read, or its shard has changed.
    pub fn sample(&self, index: usize) -> Result<TarSample> {
        let shard = self.firsts.partition_point(|first| *first <= index).saturating_sub(1);
        let place = self.indices.get(shard).and_then(|of_shard| of_shard.place(index - self.firsts[shard]));
        let Some((offset, len)) = place else {
            let reason = format!("it must be below {}, the number of samples, not {index}", self.num_samples());
            return Err(Error::invalid("index", reason));
        };
        let indexed = &self.indices[shard].indexed;
        let shard = &self.shards[shard];
        let fault = match TarSample::parse(shard.read(offset, len, indexed)?) {
            Ok(sample) => return Ok(sample),
            Err(fault) => fault,
        };
        let disagree = format!("but the index {} says otherwise", indexed.file.display());
        // The bytes that a source keeps may be wrong, or the source itself.
        let Some(again) = shard.read_again(offset, len) else {
            return Err(shard.fault(offset, fault.and(&format!("{disagree}: the shard has changed"))));
        };
        match TarSample::parse(again?) {
            Ok(sample) => {
                let error = shard.fault(offset, fault);
                log::warn!(
                    "{error}. Read again past the cache, it is right: the cache, or an answer of the source, was not"
                );
                Ok(sample)
            }
            Err(fault) => {
                let reason = format!("{disagree}, and the source says the same past the cache: the shard has changed");
                Err(shard.fault(offset, fault.and(&reason)))
            }
        }
    }
}

/// Whether this is the name of a compressed archive.
fn is_compressed(path: &Path) -> bool {
    const ENDS: [&str; 11] = [
        ".tar.gz",
        ".tgz",
        ".tar.zst",
        ".tzst",
        ".tar.xz",
        ".txz",
        ".tar.bz2",
        ".tbz2",
        ".tar.lz4",
        ".tar.z",
        ".tar.lzma",
    ];
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
    ENDS.iter().any(|end| name.ends_with(end))
}

debug_fields!(TarShards: |this| shards = this.shards.len(), samples = this.num_samples(),
    remote = this.shards.iter().any(Shard::is_remote));
