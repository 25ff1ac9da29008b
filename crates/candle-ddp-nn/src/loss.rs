//! Losses with the names and signatures of [`candle_nn::loss`].
pub use crate::cross_entropy::cross_entropy;
pub use candle_nn::loss::*;
