//! Fine-tunes a language model like Qwen2 by LoRA, in bf16. The pretrained model is read from a folder with several safetensors files, which
//! the program makes with random weights if there is no such folder, or nothing in it. The size of a model that is there is `--size`, not its
//! `config.json`, and the tokens are the bytes of the text: a real fine-tuning needs the model's tokenizer.
//!
//! ```text
//! cargo run --release --bin ddprun -- --nproc-per-node 2 --example lora
//! cargo run --release --bin ddprun -- --nproc-per-node 2 --example lora -- --size 0.5b --folder qwen2 --steps 5
//! ```
//!
//! Each rank has the frozen weights once, without gradients, or with `--shard` its part of those of the layers. What is trained, sent and
//! saved are the adapters, in f32. With `nn::checkpoint` a layer keeps its input alone for the backward pass. With `--pack` the
//! samples are paragraphs, which share rows without padding.
//!
//! ci: --steps 4 --shard
//! ci: --steps 4 --pack
#[path = "../common/mod.rs"]
mod common;
mod llama_layer;
mod qwen2;

use candle_core::{DType, Tensor};
use candle_ddp::checkpoint::{Pretrained, save_adapter, save_tensors};
use candle_ddp::data::{DataLoader, LengthBatches, LoaderOptions, Packed, pack};
use candle_ddp::metrics::ThroughputOptions;
use candle_ddp::nn::{LoraConfig, embedding, rms_norm};
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW};
use candle_ddp::seed::var_builder;
use candle_ddp::{Context, DdpOptions, DistributedDataParallel, Error, ProcessGroup, ReduceOp, Result, Sharding};
use candle_nn::{VarBuilder, VarMap};
use clap::{Parser, ValueEnum};
use common::memory::peak_rss_bytes;
use common::summary::{Summary, parameters};
use common::text::read_text;
use llama_layer::Layer;
use qwen2::{Config, Qwen2};
use serde_json::{Map, json};
use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Fine-tune a language model by LoRA with DistributedDataParallel.
#[derive(Parser)]
struct Options {
    /// The size of the model.
    #[arg(long, value_enum, default_value = "tiny")]
    size: Size,
    /// The folder of the pretrained model, in which the trained adapter gets the folder `adapter`.
    #[arg(long, default_value = "target/lora")]
    folder: PathBuf,
    /// A text file, or a folder with .md files, whose bytes are the tokens. [default: the documentation of candle-ddp]
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/docs"), hide_default_value = true)]
    data: PathBuf,
    /// The number of steps of the optimizer.
    #[arg(long, default_value_t = 20)]
    steps: usize,
    /// The number of pieces of text per step and rank.
    #[arg(long, default_value_t = 2)]
    batch_size: usize,
    /// AdamW's learning rate.
    #[arg(long, default_value_t = 0.01)]
    lr: f64,
    /// The rank of the adapters.
    #[arg(long, default_value_t = 8)]
    r: usize,
    /// Train on paragraphs, of which several share a row, instead of on pieces of the text.
    #[arg(long)]
    pack: bool,
    /// Spread the layers over the ranks (ZeRO-3, FSDP), the frozen weights too.
    #[arg(long)]
    shard: bool,
    /// Show the model FLOPs utilization (MFU) for a device with this peak, in dense operations of bf16 per second.
    #[arg(long, value_name = "FLOPS")]
    peak_flops: Option<f64>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Size {
    Tiny,
    /// 102 million parameters, for measurements.
    #[value(name = "0.1b")]
    Tenth,
    /// Of Qwen2-0.5B.
    #[value(name = "0.5b")]
    Half,
}

impl Size {
    fn config(self) -> Config {
        match self {
            Self::Tiny => {
                Config { vocabulary: 256, width: 64, intermediate: 160, layers: 2, heads: 4, key_heads: 2, context: 32 }
            }
            Self::Tenth => Config {
                vocabulary: 256,
                width: 768,
                intermediate: 2560,
                layers: 14,
                heads: 12,
                key_heads: 2,
                context: 8,
            },
            Self::Half => Config {
                vocabulary: 151936,
                width: 896,
                intermediate: 4864,
                layers: 24,
                heads: 14,
                key_heads: 2,
                context: 256,
            },
        }
    }
}

/// Writes a model with random weights, a file for each layer, as Hugging Face divides large models.
fn make(config: Config, folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    let (mut weight_map, mut total_size, device) = (Map::new(), 0, candle_core::Device::Cpu);
    let mut write = |number: usize, tensors: HashMap<String, Tensor>| {
        let file = format!("model-{:05}-of-{:05}.safetensors", number + 1, config.layers + 1);
        total_size +=
            tensors.values().map(|tensor| tensor.elem_count() * tensor.dtype().size_in_bytes()).sum::<usize>();
        weight_map.extend(tensors.keys().map(|name| (name.clone(), json!(file))));
        save_tensors(&tensors, folder.join(file))
    };
    let tensors = |build: &dyn Fn(VarBuilder) -> candle_core::Result<()>| {
        let varmap = VarMap::new();
        build(var_builder(&varmap, 0, DType::BF16, &device).pp("model"))?;
        let tensors = varmap.data().lock().expect("nobody panics with it").clone().into_iter();
        Ok::<_, Error>(tensors.map(|(name, var)| (name, var.as_tensor().clone())).collect::<HashMap<_, _>>())
    };
    for index in 0..config.layers {
        write(index, tensors(&|vb| Layer::new(config.layer(), vb.pp("layers").pp(index)).map(|_| ()))?)?;
    }
    let mut rest = tensors(&|vb| {
        embedding(config.vocabulary, config.width, vb.pp("embed_tokens"))?;
        rms_norm(config.width, 1e-6, vb.pp("norm")).map(|_| ())
    })?;
    // The embedding is the head's weight as well.
    for (name, tensor) in &mut rest {
        if name.ends_with("embed_tokens.weight") {
            *tensor = (&*tensor * 0.02)?;
        }
    }
    write(config.layers, rest)?;
    let index = folder.join("model.safetensors.index.json");
    std::fs::write(&index, json!({ "metadata": { "total_size": total_size }, "weight_map": weight_map }).to_string())
        .with_context(|| format!("writing {}", index.display()))
}

/// Rows of as many tokens as a batch of pieces has. Paragraphs that are longer than `length` are cut.
fn paragraphs(
    pg: &ProcessGroup,
    text: &[u8],
    length: usize,
    pieces: usize,
) -> Result<DataLoader<Range<usize>, Packed>> {
    let text = String::from_utf8_lossy(text);
    let cut = |paragraph: &str| {
        let tokens: Vec<u32> = paragraph.bytes().map(u32::from).collect();
        tokens.chunks(length).map(<[u32]>::to_vec).collect::<Vec<_>>()
    };
    let documents: Vec<Vec<u32>> = text.split("\n\n").flat_map(cut).collect();
    let order = LengthBatches::packed(documents.iter().map(Vec::len), pieces * length, 32)?;
    let count = documents.len();
    let collate = move |row: Vec<usize>| pack(row.iter().map(|document| &documents[*document]));
    DataLoader::with_order(0..count, order, pg, LoaderOptions::default(), collate)
}

fn train(pg: &ProcessGroup, options: &Options) -> Result<()> {
    let (config, is_first) = (options.size.config(), pg.rank() == 0);
    // Whatever somebody keeps there stays as it is.
    if is_first && !std::fs::read_dir(&options.folder).is_ok_and(|mut entries| entries.next().is_some()) {
        make(config, &options.folder)?;
        println!("{} has a new model with random weights", options.folder.display());
    }
    pg.barrier()?;

    let targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
    let target_modules = targets.map(String::from).to_vec();
    let lora = LoraConfig {
        r: options.r,
        lora_alpha: 2. * options.r as f64,
        target_modules,
        base_model_name_or_path: Some(options.folder.display().to_string()),
        task_type: Some("CAUSAL_LM".to_string()),
        ..Default::default()
    };
    let base = Pretrained::open(&options.folder)?.var_builder(DType::BF16, pg.device());
    let varmap = VarMap::new();
    let build = |vb| lora.build(base, vb, |vb| Qwen2::new(config, options.shard, vb));
    let sharding = match options.shard {
        true => Sharding::Blocks { reshard_after_forward: true, ranks: None },
        false => Sharding::Off,
    };
    let ddp_options = DdpOptions { init_seed: Some(0), sharding, ..Default::default() };
    let ddp = DistributedDataParallel::with_options(pg, &varmap, build, ddp_options)?;
    let mut optimizer = AdamW::new(&ddp, ParamsAdamW { lr: options.lr, ..Default::default() })?;

    let text = read_text(&options.data)?.into_bytes();
    let (length, pieces) = (config.context, options.batch_size);
    let places = text.len().saturating_sub(length + 1);
    if places == 0 {
        let reason = format!("it must have more than {} bytes, not {}", length + 1, text.len());
        return Err(Error::InvalidArgument { argument: "--data", reason });
    }
    let paragraphs = if options.pack { Some(paragraphs(pg, &text, length, pieces)?) } else { None };
    let mut rows = paragraphs.iter().flat_map(|loader| std::iter::repeat_with(move || loader.iter()).flatten());
    let trained = parameters(&ddp)?;
    let flops = config.flops(trained);
    let throughput =
        ThroughputOptions { flops_per_unit: Some(flops), peak_flops: options.peak_flops, ..Default::default() };
    let mut summary = Summary::new(pg, "tokens", throughput)?;
    for step in 0..options.steps {
        let batch = |shift: usize| {
            let piece = |index: usize| {
                let start = ((step * pg.world_size() + pg.rank()) * pieces + index) * length % places + shift;
                text[start..start + length].iter().map(|byte| u32::from(*byte))
            };
            let tokens: Vec<u32> = (0..pieces).flat_map(piece).collect();
            Tensor::from_vec(tokens, (pieces, length), pg.device())
        };
        let row = rows.next().transpose()?;
        let (tokens, next) = match &row {
            Some(row) => (row.tokens.clone(), row.targets.clone()),
            None => (batch(0)?, batch(1)?),
        };
        let loss = ddp.call(|model| model.loss(&tokens, &next, row.as_ref()))?;
        optimizer.step(&ddp.backward(&loss)?)?;
        let [mean] = pg.all_reduce_scalars([f64::from(loss.to_scalar::<f32>()?)], ReduceOp::Avg)?;
        summary.step(tokens.elem_count());
        if is_first {
            println!("step {}: loss {mean:.4}, {}", step + 1, summary.speed());
        }
    }
    if is_first {
        let memory =
            peak_rss_bytes().map_or(String::new(), |bytes| format!(", at most {:.2} GB of memory", bytes as f64 / 1e9));
        println!("{trained} parameters trained{memory}");
    }
    save_adapter(pg, &lora, &varmap, options.folder.join("adapter"))
}

fn main() -> ExitCode {
    common::main(train)
}
