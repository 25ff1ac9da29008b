//! Reads shards from an object store once, in a shuffled order, as a training run would:
//!
//! ```text
//! cargo build --release --manifest-path examples/object_store/Cargo.toml
//! ddprun --nproc-per-node 2 examples/object_store/target/release/object_store_shards \
//!     s3://my-data/train {0000..0999}.tar --cache /local/cache
//! ```
use candle_ddp::data::{BlockShuffle, DataLoader, LoaderOptions, RangeCache, RangeCacheOptions, TarSample, TarShards};
use candle_ddp::{Context, ProcessGroup, Result};
use clap::Parser;
use object_store_shards::Bucket;
use std::path::PathBuf;
use std::time::Instant;

#[derive(Parser, Clone)]
#[command(about = "Read tar shards from S3, Google Cloud Storage, Azure or HTTP, on all ranks.")]
struct Options {
    /// The folder of the shards, such as s3://BUCKET/FOLDER or https://HOST/FOLDER.
    url: String,
    /// The shards' names in it.
    #[arg(required = true)]
    shards: Vec<String>,
    /// A folder on a local disk, which the ranks of a host share, for what was read and for the shards' indices.
    #[arg(long)]
    cache: PathBuf,
    /// How many GiB it may hold.
    #[arg(long, default_value_t = 16)]
    cache_gib: u64,
    #[arg(long, default_value_t = 64)]
    batch_size: usize,
    /// The threads of each rank that read.
    #[arg(long, default_value_t = 4)]
    workers: usize,
}

fn read(pg: &ProcessGroup, options: &Options) -> Result<()> {
    let bucket = Bucket::open(&options.url).with_context(|| format!("opening {}", options.url))?;
    let limit = RangeCacheOptions { max_bytes: options.cache_gib << 30, ..Default::default() };
    let source = RangeCache::new(bucket, options.cache.join("blocks"), limit)?;
    let shards = TarShards::remote(options.shards.clone(), source, &options.cache)?;
    let order = BlockShuffle::new(shards.num_samples(), Default::default())?;
    let of_loader =
        LoaderOptions { batch_size: options.batch_size, num_workers: options.workers, ..Default::default() };
    // Decoding goes here.
    let sizes = |samples: Vec<TarSample>| {
        Ok(samples.iter().map(|sample| sample.files().map(|(_, bytes)| bytes.len()).sum()).collect())
    };
    let loader = DataLoader::with_order(shards, order, pg, of_loader, sizes)?;
    let (start, mut samples, mut bytes) = (Instant::now(), 0, 0);
    for batch in &loader {
        let sizes: Vec<usize> = batch?;
        samples += sizes.len();
        bytes += sizes.iter().sum::<usize>();
    }
    let seconds = start.elapsed().as_secs_f64();
    println!("rank {} read {samples} samples, {bytes} bytes, in {seconds:.2} s", pg.rank());
    Ok(())
}

fn main() -> Result<()> {
    let options = Options::parse();
    candle_ddp::run(|pg| read(pg, &options))
}
