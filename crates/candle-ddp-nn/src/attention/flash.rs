//! Attention with candle's signature.
use super::{AttentionOptions, AttnMask, scaled_dot_product_attention};
use candle_core::{Device, Result, Tensor, WithDType};
use candle_ddp_tensor::Error;
use candle_ddp_tensor::function::{argument, is_tracked};
use num_traits::Float;

/// [`scaled_dot_product_attention`] with the signature of [`candle_nn::attention::flash_attn`], on every device: `q` has the shape
/// (B, Tq, H, D), `k` and `v` (B, Tk, H′, D), and the result (B, H, Tq, D) and the dtype of `q`.
///
/// Attention with ALiBi (`max_bias`) or a soft limit of the scores (`softcap`) is candle's, which has no backward pass.
///
/// # Errors
/// As with [`scaled_dot_product_attention`]; [`InvalidArgument`](Error::Base), carried by candle's error, for `max_bias` or
/// `softcap` if an input requires a gradient.
pub fn flash_attn<T: WithDType + Float>(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    attn_mask: AttnMask,
    max_bias: Option<f32>,
    softcap: Option<f32>,
) -> Result<Tensor> {
    let options = [("max_bias", max_bias), ("softcap", softcap)];
    if let Some((name, value)) = options.into_iter().find(|(_, value)| value.is_some_and(|value| value != 0.0)) {
        if [q, k, v].into_iter().any(is_tracked) {
            let reason = format!(
                "it must be None if an input requires a gradient, not {value:?}: candle's attention has no \
                         backward pass"
            );
            return Err(Error::invalid(name, reason).into());
        }
        let [q, k, v] = [q, k, v].map(argument);
        return candle_nn::attention::flash_attn::<T>(&q, &k, &v, softmax_scale, attn_mask, max_bias, softcap);
    }
    let (queries, keys) = (q.dim(1)?, k.dim(1)?);
    let (mask, is_causal) = match attn_mask {
        AttnMask::None => (None, false),
        AttnMask::Causal { kv_offset: 0 } => (None, true),
        AttnMask::Causal { kv_offset } => (Some(causal(queries, keys, kv_offset, q.device())?), false),
        AttnMask::Mask(mask) => (Some(mask), false),
    };
    let [q, k, v] = [q.transpose(1, 2)?, k.transpose(1, 2)?, v.transpose(1, 2)?];
    let options = AttentionOptions { mask, is_causal, scale: Some(f64::from(softmax_scale)), cu_seq: None };
    scaled_dot_product_attention(&q, &k, &v, options)
}

/// Query i sees the keys up to i + `offset`.
fn causal(queries: usize, keys: usize, offset: usize, device: &Device) -> Result<Tensor> {
    let sees: Vec<u8> = (0..queries).flat_map(|i| (0..keys).map(move |j| u8::from(j <= i + offset))).collect();
    Tensor::from_vec(sees, (queries, keys), device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_candles() {
        let values = |tokens, heads| Tensor::randn(0f32, 1.0, (1, tokens, heads, 8), &Device::Cpu).unwrap();
        let (q, k, v) = (values(5, 4), values(7, 2), values(7, 2));
        let added = Tensor::randn(0f32, 1.0, (5, 7), &Device::Cpu).unwrap();
        for mask in [AttnMask::None, AttnMask::causal(), AttnMask::causal_with_offset(2), AttnMask::Mask(added)] {
            let ours = flash_attn::<f32>(&q, &k, &v, 0.3, mask.clone(), None, None).unwrap();
            let candles = candle_nn::attention::flash_attn::<f32>(&q, &k, &v, 0.3, mask, None, None).unwrap();
            assert_eq!(ours.dims(), candles.dims());
            let error = (ours - candles).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
            assert!(error < 1e-5, "{error}");
        }
        let q = candle_core::Var::from_tensor(&q).unwrap();
        let error = flash_attn::<f32>(&q, &k, &v, 0.3, AttnMask::None, None, Some(30.0)).unwrap_err().to_string();
        assert!(error.contains("softcap"), "{error}");
    }
}
