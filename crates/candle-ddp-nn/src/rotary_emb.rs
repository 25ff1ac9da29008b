//! Rotary embeddings with the names and signatures of [`candle_nn::rotary_emb`].
pub use crate::rope::{rope, rope_i, rope_thd};
#[doc(no_inline)]
pub use candle_nn::rotary_emb::*;
