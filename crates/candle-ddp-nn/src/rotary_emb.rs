//! Rotary embeddings with the names and signatures of [`candle_nn::rotary_emb`].
pub use crate::rope::{rope, rope_i, rope_thd};
pub use candle_nn::rotary_emb::*;
