//! Attention with queries, keys and values side by side in one tensor, as one linear layer produces them.
use super::cudnn;
use super::problem::{AttentionOptions, Problem};
use super::{backward, forward, scaled_dot_product_attention};
use crate::autocast::Casts;
use candle_core::{Result, Shape, Storage, Tensor, WithDType};
use candle_ddp_tensor::Error;
use candle_ddp_tensor::borrow::{slice_tensor, with_slice};
use candle_ddp_tensor::error::describe;
use candle_ddp_tensor::function::{Function, apply};
use candle_ddp_tensor::{Element, dispatch, vectorise};
use std::sync::{Arc, OnceLock};

/// [`scaled_dot_product_attention`] of the queries, keys and values of `heads` heads that one linear layer produces:
/// FlashAttention's `flash_attn_qkvpacked_func`.
///
/// `qkv` has the shape (B, T, 3 × H × D): for each token first the queries of all heads, then the keys, then the
/// values. The result has the shape (B, T, H × D), which the next linear layer takes. Dtypes, options and accuracy
/// are those of [`scaled_dot_product_attention`]. On the CPU this saves the passes over memory that splitting `qkv`
/// would need, forward and backward.
///
/// # Errors
/// As with [`scaled_dot_product_attention`], and for a `qkv` of another shape.
pub fn scaled_dot_product_attention_qkvpacked(qkv: &Tensor, heads: usize, options: AttentionOptions) -> Result<Tensor> {
    if let Some(casts) = Casts::of_product([qkv])? {
        let y = scaled_dot_product_attention_qkvpacked(&casts.of(qkv)?, heads, options)?;
        return casts.result(y, qkv);
    }
    let shape = match *qkv.dims() {
        [batch, tokens, width] if heads > 0 && width > 0 && width.is_multiple_of(3 * heads) => {
            (batch, tokens, 3, heads, width / (3 * heads))
        }
        _ => {
            let is = describe(qkv.dtype(), qkv.shape());
            let reason = format!("it must be (B, T, 3 × H × D) with H = {heads} heads, not {is}");
            return Err(Error::invalid("the packed queries, keys and values of attention", reason).into());
        }
    };
    let (batch, tokens, _, _, size) = shape;
    let parts = |qkv: &Tensor| {
        let parts = qkv.reshape(shape)?.permute((2, 0, 3, 1, 4))?.contiguous()?;
        Ok::<_, candle_core::Error>([parts.get(0)?, parts.get(1)?, parts.get(2)?])
    };
    let is_cuda = qkv.device().is_cuda();
    if is_cuda && batch * tokens > 0 && options.cu_seq.is_none() {
        return cudnn::packed(qkv, heads, &options);
    }
    if is_cuda || batch * tokens == 0 {
        let [q, k, v] = parts(qkv)?;
        let y = scaled_dot_product_attention(&q, &k, &v, options)?;
        return y.transpose(1, 2)?.reshape((batch, tokens, heads * size));
    }
    let parts = parts(&qkv.detach())?;
    let problem = Problem::new([&parts[0], &parts[1], &parts[2]], &options)?;
    let (y, normalisers) = forward(&problem, &parts)?;
    let y = dispatch!(qkv.dtype(), NAME, T => {
        Ok(T::to_cpu_storage_owned(swapped(y.as_slice::<T>()?, [heads, tokens, size])))
    })?;
    let result = Arc::default();
    let function = Packed { problem, parts, normalisers, result: Arc::clone(&result) };
    let y = apply(&[qkv], (Storage::Cpu(y), Shape::from((batch, tokens, heads * size))), function)?;
    let _ = result.set(y.detach());
    Ok(y)
}

const NAME: &str = "scaled_dot_product_attention_qkvpacked";

/// Values that the backward pass needs.
struct Packed {
    problem: Problem,
    /// Queries, keys and values, each of shape (B, H, T, D).
    parts: [Tensor; 3],
    normalisers: Tensor,
    result: Arc<OnceLock<Tensor>>,
}

impl Function for Packed {
    fn name(&self) -> &'static str {
        NAME
    }

    fn backward(&self, dy: &Tensor, _: &[bool]) -> Result<Vec<Option<Tensor>>> {
        let Self { problem, parts, normalisers, result } = self;
        let Some(y) = result.get() else {
            candle_core::bail!(
                "attention's backward pass runs before its result is \
                                                              stored"
            )
        };
        let Problem { batch, heads, queries: tokens, size, .. } = *problem;
        dispatch!(dy.dtype(), NAME, T => {
            let by_head = |t: &Tensor| with_slice::<T, _>(t, |t| Ok(swapped(t, [tokens, heads, size])));
            let (y, dy) = (by_head(y)?, by_head(dy)?);
            let gradients = backward::<T>(problem, parts, [&y, &dy], normalisers)?;
            let shape = Shape::from((batch, tokens, 3 * heads * size));
            Ok(vec![Some(slice_tensor(packed::<T>(&gradients, [batch, heads, tokens, size]), &shape))])
        })
    }
}

/// Transposes consecutive matrices of `rows` rows and `columns` columns, whose elements are slices of `size`.
fn swapped<T: Copy>(x: &[T], [rows, columns, size]: [usize; 3]) -> Vec<T> {
    let mut result = Vec::with_capacity(x.len());
    for matrix in x.chunks_exact(rows * columns * size) {
        for column in 0..columns {
            for row in 0..rows {
                result.extend_from_slice(&matrix[(row * columns + column) * size..][..size]);
            }
        }
    }
    result
}

/// The gradients of queries, keys and values, each of shape (B, H, T, D), in the shape (B, T, 3 × H × D).
fn packed<T: Element>(gradients: &[Vec<T::Real>; 3], [batch, heads, tokens, size]: [usize; 4]) -> Vec<T> {
    let mut result = Vec::with_capacity(3 * batch * heads * tokens * size);
    vectorise!(|| {
        for (sample, token) in (0..batch).flat_map(|sample| (0..tokens).map(move |token| (sample, token))) {
            for (gradient, head) in gradients.iter().flat_map(|gradient| (0..heads).map(move |head| (gradient, head))) {
                let row = &gradient[((sample * heads + head) * tokens + token) * size..][..size];
                result.extend(row.iter().map(|value| T::narrow(*value)));
            }
        }
    });
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device, Var};

    /// Results and gradients equal those of queries, keys and values that candle's operations split.
    #[test]
    fn packed_is_the_same_as_apart() {
        let (batch, tokens, heads, size) = (2, 5, 3, 4);
        let seen = Tensor::from_vec((0..25).map(|i| u8::from(i % 3 != 1)).collect(), (5, 5), &Device::Cpu).unwrap();
        let cu_seq = Tensor::new(&[0u32, 1, 1, 5, 10], &Device::Cpu).unwrap();
        let options = [
            (None, true, None, None),
            (None, false, Some(0.7), None),
            (Some(seen), false, None, None),
            (None, true, None, Some(cu_seq)),
        ];
        for (dtype, (mask, is_causal, scale, cu_seq)) in
            [DType::F64, DType::F32, DType::BF16].into_iter().flat_map(|dtype| options.clone().map(|o| (dtype, o)))
        {
            let options = AttentionOptions { mask, is_causal, scale, cu_seq };
            let values = |width: usize, step: f64| {
                let values: Vec<f64> = (0..batch * tokens * width).map(|i| (i as f64 * step).sin()).collect();
                Tensor::from_vec(values, (batch, tokens, width), &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
            };
            let qkv = Var::from_tensor(&values(3 * heads * size, 1.7)).unwrap();
            let dy = values(heads * size, 0.4);
            let run = |y: Tensor| {
                let grads = (&y * &dy).unwrap().sum_all().unwrap().backward().unwrap();
                [&y, grads.get(&qkv).unwrap()].map(|t| t.to_dtype(DType::F64).unwrap().to_vec3::<f64>().unwrap())
            };
            let apart = qkv.reshape((batch, tokens, 3, heads, size)).unwrap().permute((2, 0, 3, 1, 4)).unwrap();
            let [q, k, v] = [0, 1, 2].map(|i| apart.get(i).unwrap());
            let y = scaled_dot_product_attention(&q, &k, &v, options.clone()).unwrap();
            let apart = run(y.transpose(1, 2).unwrap().reshape((batch, tokens, heads * size)).unwrap());
            assert_eq!(
                run(scaled_dot_product_attention_qkvpacked(&qkv, heads, options.clone()).unwrap()),
                apart,
                "{options:?}"
            );
        }
    }

    #[test]
    fn other_shapes_are_refused() {
        let attend = |shape: &[usize], heads| {
            let qkv = Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
            scaled_dot_product_attention_qkvpacked(&qkv, heads, Default::default())
        };
        assert_eq!(attend(&[0, 2, 12], 2).unwrap().dims(), [0, 2, 4]);
        for (shape, heads) in [(&[2, 2, 12][..], 0), (&[2, 2, 14], 2), (&[2, 2, 0], 2), (&[2, 12], 2)] {
            let error = attend(shape, heads).unwrap_err().to_string();
            assert!(error.contains(&format!("H = {heads} heads")), "{error}");
        }
    }
}
