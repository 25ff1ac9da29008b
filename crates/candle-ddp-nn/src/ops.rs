//! Functions with the names and signatures of [`candle_nn::ops`].
pub use crate::activation::{mish, silu};
pub use crate::dropout::Dropout;
pub use crate::softmax::{log_softmax, softmax, softmax_last_dim};
#[doc(no_inline)]
pub use candle_nn::ops::*;

use crate::attention::{AttentionOptions, scaled_dot_product_attention};
use crate::row_norm::row_norm;
use candle_core::{Result, Tensor};
use candle_ddp_tensor::Error;
use candle_ddp_tensor::function::argument;

/// Calls [`dropout`](crate::dropout()) with the process's generator.
///
/// # Errors
/// As [`dropout`](crate::dropout()).
pub fn dropout(x: &Tensor, drop_p: f32) -> Result<Tensor> {
    Dropout::new(drop_p).forward(x, true)
}

/// `gamma` × elu(x): like candle's, but for every floating-point dtype, and with gradients for large x.
///
/// # Errors
/// Returns candle's errors.
pub fn selu(x: &Tensor, alpha: f32, gamma: f32) -> Result<Tensor> {
    argument(x).elu(f64::from(alpha))? * f64::from(gamma)
}

/// silu(a) × b of the two halves of the last dimension.
///
/// # Errors
/// Returns an error for an odd last dimension, and the errors of [`silu`].
pub fn swiglu(x: &Tensor) -> Result<Tensor> {
    let halves = argument(x).chunk(2, candle_core::D::Minus1)?;
    match halves.as_slice() {
        [a, b] => silu(a)? * b,
        _ => Err(Error::invalid("the input of swiglu", "its last dimension must be even").into()),
    }
}

/// [`LayerNorm`](crate::LayerNorm) as a function. `alpha` and `beta` have the shape of the last dimension.
///
/// # Errors
/// As the layer.
pub fn layer_norm(x: &Tensor, alpha: &Tensor, beta: &Tensor, eps: f32) -> Result<Tensor> {
    row_norm(x, alpha, Some(beta), f64::from(eps), true)
}

/// [`RmsNorm`](crate::RmsNorm) as a function. `alpha` has the shape of the last dimension.
///
/// # Errors
/// As the layer.
pub fn rms_norm(x: &Tensor, alpha: &Tensor, eps: f32) -> Result<Tensor> {
    row_norm(x, alpha, None, f64::from(eps), false)
}

/// softmax(q kᵀ × scale + mask) v, by [`scaled_dot_product_attention`], on every device. `softcapping` must be 1 (none).
///
/// # Errors
/// As with [`scaled_dot_product_attention`], and for another `softcapping`.
pub fn sdpa(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: Option<&Tensor>,
    do_causal: bool,
    scale: f32,
    softcapping: f32,
) -> Result<Tensor> {
    if softcapping != 1.0 {
        return Err(Error::invalid(
            "softcapping",
            format!(
                "it must be 1 (no soft cap), not {softcapping}: soft caps are not \
                                                   supported"
            ),
        )
        .into());
    }
    // candle's function needs no mask with `do_causal`.
    let mask = mask.filter(|_| !do_causal).cloned();
    let options = AttentionOptions { mask, is_causal: do_causal, scale: Some(f64::from(scale)), cu_seq: None };
    scaled_dot_product_attention(q, k, v, options)
}
