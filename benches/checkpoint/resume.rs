//! The time in which the ranks of a sharded model load it, compared with the time in which they read the same files.
use candle_core::{Module, Tensor};
use candle_ddp::checkpoint::{self, Checkpointer, CheckpointerOptions, LoadOptions};
use candle_ddp::nn::{Linear, linear_no_bias};
use candle_ddp::optim::{ParamsAdamW, ZeroRedundancyOptimizer};
use candle_ddp::{Block, Context, DdpOptions, DistributedDataParallel, ProcessGroup, Result, Sharding, block};
use candle_nn::{VarBuilder, VarMap};
use rustix::fs::{Advice, fadvise};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::median::median;

const WIDTH: usize = 2048;

struct Net(#[allow(dead_code)] Vec<Block<Linear>>);

impl Net {
    fn new(blocks: usize, vb: VarBuilder) -> candle_core::Result<Self> {
        let one = |index: usize| block(vb.pp(index), |vb| linear_no_bias(WIDTH, WIDTH, vb));
        (0..blocks).map(one).collect::<candle_core::Result<_>>().map(Self)
    }
}

impl Module for Net {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        Ok(x.clone())
    }
}

fn model(pg: &ProcessGroup, varmap: &VarMap, bytes: usize) -> Result<DistributedDataParallel<Net>> {
    let blocks = bytes.div_ceil(WIDTH * WIDTH * 4);
    let options =
        DdpOptions { sharding: Sharding::Blocks { reshard_after_forward: true, ranks: None }, ..Default::default() };
    DistributedDataParallel::with_options(pg, varmap, |vb| Net::new(blocks, vb), options)
}

/// The files of a folder.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in folder.read_dir().context("listing files")? {
        let path = entry.context("listing files")?.path();
        if path.is_dir() { files.extend(self::files(&path)?) } else { files.push(path) }
    }
    Ok(files)
}

/// The number of bytes that are read at a time.
const PART: u64 = 1 << 20;

/// Reads this rank's part of each file, as it is: into one buffer, or into new memory for all of it.
fn read(pg: &ProcessGroup, files: &[PathBuf], is_kept: bool) -> Result<()> {
    let (mut buffer, mut kept) = (vec![0; PART as usize], Vec::new());
    for path in files {
        let file = File::open(path).context("reading")?;
        let length = file.metadata().context("reading")?.len();
        let at = |rank: usize| length * rank as u64 / pg.world_size() as u64;
        let (start, end) = (at(pg.rank()), at(pg.rank() + 1));
        let mut all = vec![0; if is_kept { (end - start) as usize } else { 0 }];
        for at in (start..end).step_by(PART as usize) {
            let size = (end - at).min(PART) as usize;
            let from = (at - start) as usize;
            let to = if is_kept { &mut all[from..from + size] } else { &mut buffer[..size] };
            file.read_exact_at(to, at).context("reading")?;
        }
        kept.push(all);
    }
    std::hint::black_box((&buffer, &kept));
    Ok(())
}

/// The seconds until all ranks have done `work`.
fn timed(pg: &ProcessGroup, cold: Option<&[PathBuf]>, work: impl FnOnce() -> Result<()>) -> Result<f64> {
    if let (0, Some(files)) = (pg.rank(), cold) {
        for path in files {
            fadvise(File::open(path).context("reading")?, 0, None, Advice::DontNeed)
                .map_err(std::io::Error::from)
                .context("fadvise")?;
        }
    }
    pg.barrier()?;
    let start = Instant::now();
    work()?;
    pg.barrier()?;
    Ok(start.elapsed().as_secs_f64())
}

/// A row of the table for each kind of files.
fn rows(
    pg: &ProcessGroup,
    name: &str,
    rounds: usize,
    folder: &Path,
    mut load: impl FnMut() -> Result<()>,
) -> Result<String> {
    let files = files(folder)?;
    let mut rows = String::new();
    for cold in [false, true] {
        let cold_files = cold.then_some(&files[..]);
        // Once before, for what is in the system's memory already.
        if !cold {
            read(pg, &files, false)?;
        }
        let (mut reads, mut kept, mut loads) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            reads.push(timed(pg, cold_files, || read(pg, &files, false))?);
            loads.push(timed(pg, cold_files, &mut load)?);
            kept.push(timed(pg, cold_files, || read(pg, &files, true))?);
        }
        let [ratio, ratio_kept] =
            [&reads, &kept].map(|reads| median(loads.iter().zip(reads).map(|(load, read)| load / read)));
        let from = if cold { "disk" } else { "memory" };
        let (first, [reads, kept, loads]) = (loads[0], [reads, kept, loads].map(median));
        rows += &format!(
            "| {name} | {from} | {} | {reads:.2} | {kept:.2} | {loads:.2} | **{ratio:.2}** | **{ratio_kept:.2}** | {first:.2} |\n",
            pg.world_size()
        );
    }
    Ok(rows)
}

fn rank(pg: &ProcessGroup, rounds: usize, bytes: usize, folder: &Path) -> Result<String> {
    let (run, whole) = (folder.join("run"), folder.join("whole"));
    let mut table = String::new();
    {
        let mut varmap = VarMap::new();
        // Values and two moments.
        let ddp = model(pg, &varmap, bytes / 3)?;
        let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, ParamsAdamW::default())?;
        let mut checkpointer = Checkpointer::new(pg, &run, CheckpointerOptions::default())?;
        checkpointer.save(1, (("model", &mut varmap), ("optimizer", &mut optimizer)))?.wait()?;
        table += &rows(pg, "pieces of model and optimizer", rounds, &run, || {
            checkpointer.load_latest((("model", &mut varmap), ("optimizer", &mut optimizer))).map(drop)
        })?;
    }
    if pg.rank() == 0 {
        std::fs::create_dir(&whole).context("making a folder")?;
    }
    let varmap = VarMap::new();
    let _ddp = model(pg, &varmap, bytes)?;
    let file = whole.join("model.safetensors");
    checkpoint::save_distributed(pg, &varmap, &file)?;
    table += &rows(pg, "one file of the model", rounds, &whole, || {
        checkpoint::load_distributed(pg, &varmap, &file, LoadOptions::default()).map(drop)
    })?;
    Ok(table)
}

pub(crate) fn bench(ranks: usize, rounds: usize, megabytes: usize, folder: &Path) -> Result<()> {
    let tables = candle_ddp::spawn(ranks, |pg| rank(&pg, rounds, megabytes * 1_000_000, folder))?;
    println!(
        "| {megabytes} MB | from | ranks | read, s | read into new memory, s | load, s | load / read | load / read into new memory | first load, s |"
    );
    print!("|---|---|---|---|---|---|---|---|---|\n{}", tables[0]);
    Ok(())
}
