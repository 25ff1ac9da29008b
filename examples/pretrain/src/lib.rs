//! Pretraining of a language model: files of tokens, a GPT or a Llama, and a loop that continues where it was killed.
mod data;
#[path = "../../char_gpt/block.rs"]
mod gpt;
#[path = "../../lora/llama_layer.rs"]
mod llama;
mod measure;
mod model;
mod options;
mod parquet;
mod sample;
mod tokens;
mod train;

pub use data::{Cut, Loading, TokenBatch, Tokens};
pub use model::{Architecture, Config, Model};
pub use options::{Kind, Options, Shard};
pub use parquet::Column;
pub use sample::draw;
pub use tokens::{Format, TokenFile};
pub use train::train;
