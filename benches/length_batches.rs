//! Real tokens per second in training with batches of similar length, compared with batches of a fixed size in a random order.
//!
//! ```text
//! cargo bench --bench length_batches [-- --ranks 2 --samples 4000 --median 48 --sigma 0.8 --max-tokens 2048 --rounds 3]
//! ```
//!
//! A small GPT is trained on sequences whose lengths are of a log-normal distribution, padded to the longest of their batch. The
//! ranks are threads with one processor each. The batches of fixed size have as many samples as the others have on average, so both
//! have about as many steps and real tokens in a step. Each line is a JSON object, for one epoch: `tokens_per_second` counts real
//! tokens of all ranks, `padding` is the share of the tokens that are not real, and `waiting` the share of the ranks' computing
//! for which the others wait at the end of the steps: 1 minus the mean over ranks of padded tokens over that of the rank with the most.
//!
//! Without `--bench` (as under `cargo test`), it trains on a few short sequences as a smoke test.
#[path = "../examples/char_gpt/block.rs"]
mod block;

use block::Block;
use candle_core::{DType, Device, Module, Tensor};
use candle_ddp::data::{DataLoader, LengthBatches, LoaderOptions};
use candle_ddp::nn::{CrossEntropyOptions, Reduction, cross_entropy_with, embedding, layer_norm, linear};
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW};
use candle_ddp::seed::Generator;
use candle_ddp::{Backward, DistributedDataParallel, ProcessGroup, Result, backward_with};
use candle_nn::{Func, VarBuilder, VarMap, func};
use clap::Parser;
use std::time::Instant;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const VOCABULARY: u64 = 256;
const PADDING: u32 = 0;

#[derive(Parser, Clone)]
struct Options {
    /// Set by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    #[arg(long, default_value_t = 4000)]
    samples: usize,
    /// The median of the lengths.
    #[arg(long, default_value_t = 48.)]
    median: f64,
    /// The standard deviation of their logarithm.
    #[arg(long, default_value_t = 0.8)]
    sigma: f64,
    /// Longer sequences are cut.
    #[arg(long, default_value_t = 512)]
    longest: usize,
    #[arg(long, default_value_t = 2048)]
    max_tokens: usize,
    #[arg(long, default_value_t = 128)]
    width: usize,
    /// How many epochs of each kind, in turn.
    #[arg(long, default_value_t = 3)]
    rounds: u64,
}

fn main() -> Result<()> {
    // Other arguments are for cargo test's own harness.
    let measure = std::env::args().any(|argument| argument == "--bench");
    let smoke =
        ["length_batches", "--samples", "40", "--median", "5", "--max-tokens", "64", "--width", "16", "--rounds", "1"];
    let options = if measure { Options::parse() } else { Options::parse_from(smoke) };
    candle_ddp::spawn(options.ranks, |pg| {
        // A rank computes on its own thread.
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().map_err(candle_core::Error::wrap)?;
        pool.install(|| rank(&pg, &options))
    })?;
    Ok(())
}

fn rank(pg: &ProcessGroup, options: &Options) -> Result<()> {
    let sequences = sequences(options)?;
    let order = LengthBatches::new(sequences.iter().map(Vec::len), options.max_tokens)?;
    let collate = |indices: &[usize]| pad(indices.iter().map(|index| sequences[*index].as_slice()));
    let indices = |order: Option<LengthBatches>, batch_size| {
        let options = LoaderOptions { batch_size, ..Default::default() };
        match order {
            Some(order) => DataLoader::with_order(0..sequences.len(), order, pg, options, Ok),
            None => DataLoader::with_collate(0..sequences.len(), pg, options, Ok),
        }
    };
    let similar: DataLoader<_, Vec<usize>> = indices(Some(order), 1)?;
    let fixed = indices(None, sequences.len().div_ceil(pg.world_size() * similar.num_batches()))?;
    let ddp = DistributedDataParallel::new(pg, &VarMap::new(), |vb| gpt(vb, options))?;
    let mut optimizer = AdamW::new(&ddp, ParamsAdamW { lr: 1e-4, ..Default::default() })?;
    for round in 0..options.rounds {
        for (name, loader) in [("similar lengths", &similar), ("fixed size", &fixed)] {
            let batches = loader.epoch(round).collect::<Result<Vec<_>>>()?;
            pg.barrier()?;
            let (start, mut counts) = (Instant::now(), [0., 0., 0.]);
            for batch in &batches {
                let (ids, real) = collate(batch)?;
                let [rows, longest] = *ids.dims() else { unreachable!("two dimensions") };
                let inputs = ids.narrow(1, 0, longest - 1)?;
                let targets = ids.narrow(1, 1, longest - 1)?.flatten_all()?;
                let sums = CrossEntropyOptions {
                    reduction: Reduction::Sum,
                    ignore_index: PADDING.into(),
                    ..Default::default()
                };
                let loss = cross_entropy_with(&ddp.forward(&inputs)?.flatten(0, 1)?, &targets, sums)?;
                optimizer.step(&backward_with(
                    &loss,
                    &[&ddp],
                    Backward { count: Some((real - rows) as f64), ..Default::default() },
                )?)?;
                let most = pg.all_gather_object(&ids.elem_count())?.into_iter().max().unwrap_or(0);
                counts = [counts[0] + real as f64, counts[1] + ids.elem_count() as f64, counts[2] + most as f64];
            }
            pg.barrier()?;
            let seconds = start.elapsed().as_secs_f64();
            let [real, padded, most] = pg.all_reduce_scalars(counts, candle_ddp::ReduceOp::Sum)?;
            if pg.rank() == 0 {
                let row = serde_json::json!({
                    "batches": name, "steps": batches.len(), "seconds": seconds, "tokens_per_second": real / seconds,
                    "padding": 1. - real / padded, "waiting": 1. - padded / most,
                });
                println!("{row}");
            }
        }
    }
    Ok(())
}

/// Token ids of random lengths, from 1 on: 0 is padding.
fn sequences(options: &Options) -> Result<Vec<Vec<u32>>> {
    let mut random = Generator::new(1);
    let normal = random.randn(0., 1., options.samples, DType::F64, &Device::Cpu)?.to_vec1::<f64>()?;
    let length = |normal: f64| ((options.median * (options.sigma * normal).exp()) as usize).clamp(2, options.longest);
    Ok(normal
        .into_iter()
        .map(|normal| (0..length(normal)).map(|_| 1 + random.below(VOCABULARY - 1) as u32).collect())
        .collect())
}

/// u32[samples, longest], and the number of real tokens.
fn pad<'a>(sequences: impl Iterator<Item = &'a [u32]> + Clone) -> Result<(Tensor, usize)> {
    let longest = sequences.clone().map(<[u32]>::len).max().unwrap_or(0);
    let (rows, real) = (sequences.clone().count(), sequences.clone().map(<[u32]>::len).sum());
    let ids = sequences.flat_map(|ids| ids.iter().copied().chain(std::iter::repeat_n(PADDING, longest - ids.len())));
    Ok((Tensor::from_iter(ids, &Device::Cpu)?.reshape((rows, longest))?, real))
}

/// Two blocks; positions do not matter here.
fn gpt(vb: VarBuilder, options: &Options) -> candle_core::Result<Func<'static>> {
    let width = options.width;
    let tokens = embedding(VOCABULARY as usize, width, vb.pp("tokens"))?;
    let blocks = [0, 1].map(|layer| Block::new(width, width / 16, vb.pp(format!("blocks.{layer}"))));
    let [first, second] = blocks;
    let (first, second) = (first?, second?);
    let norm = layer_norm(width, 1e-5, vb.pp("norm"))?;
    let head = linear(width, VOCABULARY as usize, vb.pp("head"))?;
    Ok(func(move |ids| head.forward(&norm.forward(&second.forward(&first.forward(&tokens.forward(ids)?)?)?)?)))
}
