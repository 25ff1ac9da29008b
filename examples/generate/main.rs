//! Draws text from a model that the example `char_gpt` has trained, in one process, without candle-ddp: of the two
//! crates, this program uses candle alone.
//!
//! ```text
//! cargo run --release --bin ddprun -- --nproc-per-node 4 --example char_gpt -- --export target/char_gpt
//! cargo run --release --example generate -- target/char_gpt
//! ```
//!
//! CI runs it after `char_gpt`, on the exported model:
//!
//! ci: target/char_gpt --length 20
mod files;
#[path = "../common/hash.rs"]
mod hash;
mod plain;
mod sample;
mod vocabulary;

use candle_core::{DType, Device, Result};
use candle_nn::VarBuilder;
use clap::Parser;
use hash::Hash;
use plain::Gpt;
use sample::Sampling;
use std::path::PathBuf;

/// Draw text from a model of the example char_gpt.
#[derive(Parser)]
struct Options {
    /// The folder that char_gpt has written with --export.
    folder: PathBuf,
    /// The beginning of the text.
    #[arg(long, default_value = "\n")]
    prompt: String,
    /// The number of characters to draw.
    #[arg(long, default_value_t = 300)]
    length: usize,
    /// The divisor of the logits.
    #[arg(long, default_value_t = 0.8)]
    temperature: f64,
    /// The seed of the drawing.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

fn main() -> Result<()> {
    let Options { folder, prompt, length, temperature, seed } = Options::parse();
    let (config, vocabulary, weights) = files::read(&folder)?;
    let parameters = Hash::of_variables(weights.clone())?;
    let gpt = Gpt::new(config, VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu))?;
    let (text, logits) = Sampling { length, temperature, seed }.run(&gpt, &vocabulary, &prompt, &Device::Cpu)?;
    println!("{text}");
    println!("parameters {parameters}, logits {logits}");
    Ok(())
}
