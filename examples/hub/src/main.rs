//! Downloads a model from the Hugging Face Hub once per host, and reads it on all ranks, tensor by tensor:
//!
//! ```text
//! cargo build --release --manifest-path examples/hub/Cargo.toml
//! ddprun --nproc-per-node 2 examples/hub/target/release/hub_model Qwen/Qwen2-0.5B
//! ```
use candle_core::{DType, Device};
use candle_ddp::checkpoint::Pretrained;
use candle_ddp::{InitOptions, ProcessGroup, Result, init_process_group};
use clap::Parser;
use hf_hub::Cache;
use hub_model::Hub;
use std::path::PathBuf;
use std::time::Duration;

#[derive(Parser)]
#[command(about = "Download a model from the Hugging Face Hub once per host, and read it on all ranks.")]
struct Options {
    /// The model's name, such as Qwen/Qwen2-0.5B.
    #[arg(required_unless_present = "folder")]
    model: Option<String>,
    /// A branch, a tag or a commit.
    #[arg(long, default_value = "main")]
    revision: String,
    /// A folder with the model instead.
    #[arg(long, conflicts_with = "model")]
    folder: Option<PathBuf>,
    /// All hosts see the same cache (HF_HOME), so that one rank downloads for all.
    #[arg(long)]
    shared: bool,
    /// How many minutes a download may take.
    #[arg(long, default_value_t = 60)]
    minutes: u64,
}

fn read(pg: &ProcessGroup, options: &Options) -> Result<()> {
    let folder = match (&options.folder, &options.model) {
        (Some(folder), _) => folder.clone(),
        (None, model) => {
            let endpoint = std::env::var("HF_ENDPOINT").unwrap_or_else(|_| "https://huggingface.co".to_string());
            let hub = Hub { endpoint, cache: Cache::from_env(), is_shared: options.shared };
            hub.folder(pg, model.as_deref().unwrap_or_default(), &options.revision)?
        }
    };
    let pretrained = Pretrained::open(&folder)?;
    let (mut tensors, mut parameters, mut longest) = (0, 0, 0);
    // A model's `VarBuilder` reads in the same way: `pretrained.var_builder(DType::BF16, pg.device())`.
    for name in pretrained.names() {
        let tensor = pretrained.read(name)?.to_dtype(DType::BF16)?.to_device(&Device::Cpu)?;
        let count = tensor.elem_count();
        (tensors, parameters, longest) = (tensors + 1, parameters + count, longest.max(count));
    }
    println!(
        "rank {} read {tensors} tensors with {parameters} parameters, at most {longest} at a time, from {}",
        pg.rank(),
        folder.display()
    );
    Ok(())
}

fn main() -> Result<()> {
    let options = Options::parse();
    let pg = init_process_group(InitOptions {
        timeout: Duration::from_secs(60 * options.minutes.max(1)),
        ..InitOptions::default()
    })?;
    read(&pg, &options)
}
