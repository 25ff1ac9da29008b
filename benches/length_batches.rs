//! Real tokens per second in training with sequences that share rows and with batches of similar length, compared with batches of a fixed
//! size in a random order.
//!
//! ```text
//! cargo bench --bench length_batches [-- --ranks 2 --samples 4000 --median 48 --sigma 0.8 --max-tokens 2048 --rounds 3]
//! ```
//!
//! A small GPT is trained on sequences whose lengths are of a log-normal distribution, padded to the longest of their batch, or packed
//! into one row. The
//! ranks are threads with one processor each. The batches of fixed size have as many samples as the others have on average, so both
//! have about as many steps and real tokens in a step. Each line is a JSON object, for one epoch: `tokens_per_second` counts real
//! tokens of all ranks, `padding` is the share of the tokens that are not real, and `waiting` the share of the ranks' computing
//! for which the others wait at the end of the steps: 1 minus the mean over ranks of padded tokens over that of the rank with the most.
//!
//! Without `--bench` (as under `cargo test`), it trains on a few short sequences as a smoke test.
#[path = "../examples/char_gpt/block.rs"]
mod block;
mod start;

use block::Block;
use candle_core::{DType, Device, Module, Tensor};
use candle_ddp::data::{DataLoader, LengthBatches, LoaderOptions, Packed, pack};
use candle_ddp::nn::{
    CrossEntropyOptions, Embedding, LayerNorm, Linear, Reduction, cross_entropy_with, embedding, layer_norm, linear,
};
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW};
use candle_ddp::seed::Generator;
use candle_ddp::{Backward, DistributedDataParallel, ProcessGroup, Result, backward_with};
use candle_nn::{VarBuilder, VarMap};
use clap::Parser;
use std::time::Instant;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const VOCABULARY: u64 = 256;
const PADDING: u32 = 0;
/// Not a target of a token.
const IGNORED: i64 = -100;

#[derive(Parser, Clone)]
struct Options {
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
    let smoke = ["--samples", "40", "--median", "5", "--max-tokens", "64", "--width", "16", "--rounds", "1"];
    let options: Options = start::options_or(&smoke);
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
    let rows = LengthBatches::packed(sequences.iter().map(Vec::len), options.max_tokens, 32)?;
    let indices = |order: Option<LengthBatches>, batch_size| {
        let options = LoaderOptions { batch_size, ..Default::default() };
        match order {
            Some(order) => DataLoader::with_order(0..sequences.len(), order, pg, options, Ok),
            None => DataLoader::with_collate(0..sequences.len(), pg, options, Ok),
        }
    };
    let similar: DataLoader<_, Vec<usize>> = indices(Some(order), 1)?;
    let fixed = indices(None, sequences.len().div_ceil(pg.world_size() * similar.num_batches()))?;
    let packed = indices(Some(rows), 1)?;
    let ddp = DistributedDataParallel::new(pg, &VarMap::new(), |vb| Gpt::new(vb, options.width))?;
    let mut optimizer = AdamW::new(&ddp, ParamsAdamW { lr: 1e-4, ..Default::default() })?;
    for round in 0..options.rounds {
        for (name, loader) in [("packed", &packed), ("similar lengths", &similar), ("fixed size", &fixed)] {
            let batches = loader.epoch(round).collect::<Result<Vec<_>>>()?;
            pg.barrier()?;
            let (start, mut counts) = (Instant::now(), [0., 0., 0.]);
            for batch in &batches {
                let sequences = batch.iter().map(|index| sequences[*index].as_slice());
                let (real, rows) = (sequences.clone().map(<[u32]>::len).sum::<usize>(), batch.len());
                let is_packed = name == "packed";
                let Packed { tokens: ids, targets, cu_seq, .. } =
                    if is_packed { pack(sequences)? } else { pad(sequences)? };
                let sums = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
                let logits = ddp.call(|gpt| gpt.forward(&ids, is_packed.then_some(&cu_seq)))?;
                let loss = cross_entropy_with(&logits.flatten(0, 1)?, &targets.flatten_all()?, sums)?;
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

/// A row for each sequence, as long as the longest without its last token, which has no target.
fn pad<'a>(sequences: impl Iterator<Item = &'a [u32]> + Clone) -> Result<Packed> {
    let longest = sequences.clone().map(<[u32]>::len).max().unwrap_or(0) - 1;
    let rows = sequences.clone().count();
    let row =
        |ids: &'a [u32]| (0..longest).map(move |place| ids[..ids.len() - 1].get(place).copied().unwrap_or(PADDING));
    let next = |ids: &'a [u32]| (1..=longest).map(move |place| ids.get(place).map_or(IGNORED, |id| i64::from(*id)));
    let tokens = Tensor::from_iter(sequences.clone().flat_map(row), &Device::Cpu)?.reshape((rows, longest))?;
    let targets = Tensor::from_iter(sequences.flat_map(next), &Device::Cpu)?.reshape((rows, longest))?;
    let none = Tensor::zeros(0, DType::U32, &Device::Cpu)?;
    Ok(Packed { tokens, targets, positions: none.clone(), cu_seq: none })
}

/// Two blocks; positions do not matter here.
struct Gpt {
    tokens: Embedding,
    blocks: [Block; 2],
    norm: LayerNorm,
    head: Linear,
}

impl Gpt {
    fn new(vb: VarBuilder, width: usize) -> candle_core::Result<Self> {
        let block = |layer| Block::new(width, width / 16, vb.pp(format!("blocks.{layer}")));
        Ok(Self {
            tokens: embedding(VOCABULARY as usize, width, vb.pp("tokens"))?,
            blocks: [block(0)?, block(1)?],
            norm: layer_norm(width, 1e-5, vb.pp("norm"))?,
            head: linear(width, VOCABULARY as usize, vb.pp("head"))?,
        })
    }

    fn forward(&self, ids: &Tensor, cu_seq: Option<&Tensor>) -> candle_core::Result<Tensor> {
        let x = self.tokens.forward(ids)?;
        let x = self.blocks.iter().try_fold(x, |x, block| block.forward_documents(&x, cu_seq))?;
        self.head.forward(&self.norm.forward(&x)?)
    }
}
