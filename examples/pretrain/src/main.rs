//! Pretrains a language model from shards of tokens, on all ranks that the launcher starts:
//!
//! ```text
//! cargo build --release --manifest-path examples/pretrain/Cargo.toml
//! ddprun --nproc-per-node 2 examples/pretrain/target/release/pretrain --data fineweb_train_*.bin --validation fineweb_val_*.bin \
//!     --model llama --optimizer muon --autocast --checkpoints checkpoints --log-dir runs/first
//! ```
//!
//! Kill it, then start it again with the same options, on as many ranks as you like: it continues after the last checkpoint. SIGTERM
//! has it save first.
use candle_ddp::{InitOptions, Result, StopSignals, init_process_group};
use clap::Parser;
use pretrain::{Options, train};

fn main() -> Result<()> {
    let options = Options::parse();
    let stop_signals = StopSignals { sigterm: true, ..Default::default() };
    let pg = init_process_group(InitOptions { stop_signals, ..Default::default() })?;
    pg.abort_on_error(|| train(&pg, &options, |_, _| Ok(())).map(drop))
}
