//! The program's options.
use crate::data::Cut;
use crate::model::Config;
use crate::parquet::Column;
use crate::tokens::Format;
use clap::{Parser, ValueEnum};
use std::num::NonZeroUsize;
use std::path::PathBuf;

/// Pretrain a GPT or a Llama from shards of tokens on all ranks that the launcher starts.
#[derive(Parser, Clone, Debug)]
pub struct Options {
    /// Files of tokens or Parquet files, in their order.
    #[arg(long, required = true, num_args = 1.., value_name = "FILE")]
    pub data: Vec<PathBuf>,
    /// Files for evaluation.
    #[arg(long, num_args = 1.., value_name = "FILE")]
    pub validation: Vec<PathBuf>,
    /// The layout of the files of tokens.
    #[arg(long, value_enum, default_value = "auto")]
    pub format: Format,
    /// The column of the Parquet files: texts, or lists of tokens.
    #[arg(long, default_value = "text")]
    pub column: String,
    /// The `tokenizer.json` for texts. Without one, each byte is a token, and --vocabulary is 257 for example, and --end-of-text 256.
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
    /// A folder on each host for the tokens of Parquet files, which are written there once.
    #[arg(long, value_name = "FOLDER")]
    pub cache: Option<PathBuf>,
    /// Train on documents, several of which share a row, instead of on windows.
    #[arg(long)]
    pub pack: bool,
    /// The token that ends each document.
    #[arg(long, default_value_t = 50256, value_name = "TOKEN")]
    pub end_of_text: u32,
    #[command(flatten)]
    pub config: Config,
    #[arg(long, value_enum, default_value = "adamw")]
    pub optimizer: Kind,
    /// The number of steps of the optimizer.
    #[arg(long, default_value_t = 1000)]
    pub steps: u64,
    /// The number of windows per batch and rank. A row of documents has as many tokens.
    #[arg(long, default_value = "8")]
    pub batch_size: NonZeroUsize,
    /// The number of batches whose gradients are added up for one step.
    #[arg(long, default_value = "1", value_name = "BATCHES")]
    pub accumulate: NonZeroUsize,
    /// The highest learning rate, of both optimizers.
    #[arg(long, default_value_t = 6e-4)]
    pub lr: f64,
    /// The number of steps until the learning rate is highest; then it falls along half a cosine to a tenth.
    #[arg(long, default_value_t = 100)]
    pub warmup: u64,
    /// The weight decay of matrices.
    #[arg(long, default_value_t = 0.1)]
    pub weight_decay: f64,
    /// The L2 norm to which the gradients are clipped.
    #[arg(long, default_value_t = 1.)]
    pub clip: f64,
    /// Spread the optimizer's state over the ranks (ZeRO-2), or the blocks of the model too (ZeRO-3, FSDP).
    #[arg(long, value_enum, default_value = "off")]
    pub shard: Shard,
    /// Compute in bf16 where it is safe; variables remain f32.
    #[arg(long)]
    pub autocast: bool,
    /// Evaluate whenever this many steps have been made, and at the end.
    #[arg(long, default_value = "250", value_name = "STEPS")]
    pub evaluate_every: NonZeroUsize,
    /// The most batches of an evaluation on each rank.
    #[arg(long, default_value_t = 50, value_name = "BATCHES")]
    pub evaluation_batches: usize,
    /// The number of tokens that the model draws after each evaluation.
    #[arg(long, default_value_t = 0, value_name = "TOKENS")]
    pub sample: usize,
    /// Print the drawn tokens as text, of which each is a byte. Unnecessary with --tokenizer.
    #[arg(long)]
    pub bytes: bool,
    /// Save checkpoints to this folder, and continue from the newest one there.
    #[arg(long, value_name = "FOLDER")]
    pub checkpoints: Option<PathBuf>,
    #[arg(long, default_value_t = 250, value_name = "STEPS")]
    pub checkpoint_every: u64,
    /// Write event files for TensorBoard to this folder.
    #[arg(long, value_name = "FOLDER")]
    pub log_dir: Option<PathBuf>,
    /// Read this many batches on each rank before the training, and compare the speed with that of the steps at the end.
    #[arg(long, value_name = "BATCHES")]
    pub measure_data: Option<NonZeroUsize>,
    /// Print the loss whenever this many steps have been made.
    #[arg(long, default_value = "10", value_name = "STEPS")]
    pub print_every: NonZeroUsize,
    /// The number of threads of each rank that read ahead.
    #[arg(long, default_value_t = 1)]
    pub workers: usize,
    /// The seed for the initial parameters and the order of the samples.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    #[value(name = "adamw")]
    AdamW,
    /// For the blocks' matrices, with AdamW for everything else.
    Muon,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Shard {
    Off,
    Optimizer,
    Blocks,
}

impl Options {
    pub(crate) fn cut(&self) -> Cut {
        let Config { vocabulary, context, .. } = self.config;
        Cut { vocabulary, context, end_of_text: self.pack.then_some(self.end_of_text) }
    }

    pub(crate) fn column(&self) -> Column {
        Column {
            name: self.column.clone(),
            tokenizer: self.tokenizer.clone(),
            vocabulary: self.config.vocabulary,
            end_of_text: self.end_of_text,
        }
    }
}
