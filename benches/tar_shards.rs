//! Samples per second from tar shards, and how long it takes to open them and to resume in the middle of an epoch.
//!
//! ```text
//! cargo bench --bench tar_shards -- --folder FOLDER [--shards 1000 --samples 1000 --bytes 500 --read 200000]
//! ```
//!
//! An empty FOLDER gets shards of samples of two files, a class and `--bytes` bytes. Each line of the output is a JSON object:
//! `index_seconds`, the first opening, which makes the indices; `open_seconds`, every other one; `resume_seconds`, from a state in the
//! middle of an epoch to the loader being there, and
//! `first_batch_seconds`, from then to the first batch; and for a number of workers `samples_per_second`, with the samples of
//! `BlockShuffle` in batches of 64. With `--cached`, the shards are read through a `RangeCache` in FOLDER/blocks, which the first
//! round fills.
//!
//! Without `--bench` (as under `cargo test`), it reads a few samples as a smoke test.
mod start;

use candle_ddp::data::{
    BlockShuffle, DataLoader, Dataset, FileVersion, LoaderOptions, LoaderState, RangeCache, RangeCacheOptions,
    ReadRange, TarSample, TarShards,
};
use candle_ddp::{Error, ProcessGroup, Result};
use clap::Parser;
use std::fs::File;
use std::io::{self, BufWriter};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Parser, Clone)]
struct Options {
    /// Where the shards are, or are made.
    #[arg(long)]
    folder: Option<PathBuf>,
    #[arg(long, default_value_t = 1000)]
    shards: usize,
    /// How many samples each shard has.
    #[arg(long, default_value_t = 1000)]
    samples: usize,
    /// The size of a sample's larger file.
    #[arg(long, default_value_t = 500)]
    bytes: usize,
    /// How many samples are read to measure the speed.
    #[arg(long, default_value_t = 200_000)]
    read: usize,
    /// Read through a `RangeCache`.
    #[arg(long)]
    cached: bool,
}

/// A folder as a source of remote shards.
struct Local(PathBuf);

impl ReadRange for Local {
    fn location(&self, file: &str) -> String {
        self.0.join(file).display().to_string()
    }

    fn version(&self, file: &str) -> io::Result<FileVersion> {
        let metadata = self.0.join(file).metadata()?;
        Ok(FileVersion { len: metadata.len(), tag: format!("{:?}", metadata.modified()?) })
    }

    fn read_range(&self, file: &str, range: Range<u64>) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        File::open(self.0.join(file))?.read_exact_at(&mut bytes, range.start)?;
        Ok(bytes)
    }
}

/// The shards of the folder.
fn open(folder: &Path, options: &Options) -> Result<TarShards> {
    if !options.cached {
        return Ok(TarShards::in_folder(folder)?);
    }
    let cache = RangeCache::new(Local(folder.into()), folder.join("blocks"), RangeCacheOptions::default())?;
    let names = (0..options.shards).map(|shard| format!("{shard:05}.tar"));
    Ok(TarShards::remote(names, cache, folder)?)
}

fn main() -> Result<()> {
    let options: Options = start::options_or(&["--shards", "3", "--samples", "50", "--read", "100"]);
    let made = tempfile::tempdir().map_err(|error| Error::Io { context: "a folder for shards".into(), error })?;
    let folder = options.folder.clone().unwrap_or_else(|| made.path().to_path_buf());
    if !folder.join("00000.tar").exists() {
        let context = format!("making shards in {}", folder.display());
        make(&folder, &options).map_err(|error| Error::Io { context, error })?;
    }
    candle_ddp::spawn(1, |pg| measured(&pg, &folder, &options))?;
    Ok(())
}

fn make(folder: &Path, options: &Options) -> std::io::Result<()> {
    let content = vec![7; options.bytes];
    for shard in 0..options.shards {
        let mut tar = tar::Builder::new(BufWriter::new(File::create(folder.join(format!("{shard:05}.tar")))?));
        for sample in 0..options.samples {
            for (name, content) in [("bin", &content[..]), ("cls", b"3")] {
                let mut header = tar::Header::new_ustar();
                header.set_mode(0o644);
                header.set_size(content.len() as u64);
                tar.append_data(&mut header, format!("{shard:05}-{sample:05}.{name}"), content)?;
            }
        }
        tar.finish()?;
    }
    Ok(())
}

fn seconds<T>(work: impl FnOnce() -> Result<T>) -> Result<(T, f64)> {
    let start = Instant::now();
    let made = work()?;
    Ok((made, start.elapsed().as_secs_f64()))
}

fn measured(pg: &ProcessGroup, folder: &Path, options: &Options) -> Result<()> {
    let (_, first) = seconds(|| open(folder, options))?;
    let (shards, later) = seconds(|| open(folder, options))?;
    let samples = shards.len();
    println!("{}", serde_json::json!({ "samples": samples, "index_seconds": first, "open_seconds": later }));
    let loader = |shards, num_workers| -> Result<DataLoader<TarShards, usize>> {
        let order = BlockShuffle::new(samples, Default::default())?;
        let collate = |samples: Vec<TarSample>| {
            Ok(samples.iter().map(|sample| sample.files().map(|(_, content)| content.len()).sum::<usize>()).sum())
        };
        let options = LoaderOptions { batch_size: 64, num_workers, ..Default::default() };
        DataLoader::with_order(shards, order, pg, options, collate)
    };
    let mut resumed = loader(shards, 0)?;
    let state = LoaderState { epoch: 1, consumed: samples / 2, dataset_len: samples, ..Default::default() };
    let ((), resume) = seconds(|| resumed.resume(state))?;
    let (_, batch) = seconds(|| resumed.iter().next().transpose())?;
    println!("{}", serde_json::json!({ "resume_seconds": resume, "first_batch_seconds": batch }));
    for num_workers in [0, 1, 2] {
        // The second round finds the shards in the system's cache, as those of webdataset are.
        for round in 0..2 {
            let batches = loader(open(folder, options)?, num_workers)?.epoch(0).take(options.read / 64 + 1);
            let (count, seconds) = seconds(|| batches.map(|batch| batch.map(|_| 64)).sum::<Result<usize>>())?;
            let row = serde_json::json!({ "workers": num_workers, "round": round, "samples_per_second": count as f64 / seconds });
            println!("{row}");
        }
    }
    Ok(())
}
