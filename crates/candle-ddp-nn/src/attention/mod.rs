//! Attention without the matrix of all weights: it is computed block by block, and the backward pass recomputes the
//! blocks, as in T. Dao, "FlashAttention-2", 2023.
#[cfg(test)]
use super::attach::attach;
use candle_core::{CpuStorage, Device, Result, Storage, Tensor, WithDType};
use candle_ddp_tensor::borrow::with_slice;
use candle_ddp_tensor::function::{Function, apply};
use candle_ddp_tensor::{Element, dispatch};
use std::sync::{Arc, OnceLock};

#[cfg(test)]
mod composite;
mod cpu;
mod cuda;
mod cudnn;
mod flash;
mod packed;
mod problem;

#[doc(no_inline)]
pub use candle_nn::attention::*;
pub use flash::flash_attn;
pub use packed::scaled_dot_product_attention_qkvpacked;
pub use problem::AttentionOptions;
use problem::Problem;

/// softmax(q kᵀ × scale + mask) v: `torch.nn.functional.scaled_dot_product_attention`, without its dropout.
///
/// `q` has the shape (B, H, Tq, D), `k` (B, H′, Tk, D) and `v` (B, H′, Tk, E); the result has the shape (B, H, Tq,
/// E). H is a multiple of H′: neighbouring heads of queries share keys and values, as with PyTorch's `enable_gqa`.
/// All three have the same dtype, f32, f64, f16 or bf16. Calculated in f32 (f64 for f64); on GPUs the weights are
/// rounded to the dtype before they are multiplied with the values. The result of a query that sees no key is zero,
/// and it has no gradient.
///
/// Only a block of the weights is in memory at a time, and one number per query is kept for the backward pass. The
/// block has 128 × 256 weights for each thread on the CPU. On CUDA, blocks need at most 64 MiB, or the memory of a
/// single query, and the backward pass in f16 and bf16 also needs the gradients of keys and values in f32. With the feature
/// `cudnn`, cuDNN does this where it can, without a mask in f16 and bf16; its backward pass needs two bytes for each weight.
///
/// # Errors
/// [`Error::InvalidArgument`](candle_ddp_tensor::Error::InvalidArgument), carried by candle's error, for shapes,
/// dtypes and devices that do not fit each other, a mask together with `is_causal`, and a mask that requires a
/// gradient; [`Error::UnsupportedDType`](candle_ddp_tensor::Error::UnsupportedDType).
pub fn scaled_dot_product_attention(q: &Tensor, k: &Tensor, v: &Tensor, options: AttentionOptions) -> Result<Tensor> {
    let problem = Problem::new([q, k, v], &options)?;
    if problem.is_empty() {
        return Tensor::zeros(problem.output_shape(), q.dtype(), q.device());
    }
    let [q, k, v] = [q.contiguous()?, k.contiguous()?, v.contiguous()?];
    if q.device().is_cuda() {
        return cudnn::attention([&q, &k, &v], problem);
    }
    let qkv = [&q, &k, &v].map(Tensor::detach);
    let (storage, normalisers) = forward(&problem, &qkv)?;
    let (shape, result) = (problem.output_shape(), Arc::default());
    let attention = Attention { problem, qkv, normalisers, result: Arc::clone(&result) };
    let y = apply(&[&q, &k, &v], (Storage::Cpu(storage), shape), attention)?;
    let _ = result.set(y.detach());
    Ok(y)
}

/// The same, by candle's operations.
#[cfg(test)]
fn by_candle(qkv: [&Tensor; 3], problem: Problem) -> Result<Tensor> {
    let detached = qkv.map(Tensor::detach);
    let (y, normalisers) = composite::forward(&problem, &detached)?;
    let result = y.clone();
    let backward =
        move |dy: &Tensor| composite::backward(&problem, &detached, &result, &normalisers, dy).map(Vec::from);
    attach(&qkv, &y, "scaled_dot_product_attention", backward)
}

/// On the CPU: the result, and the logarithm of the sum of each query's weights, in f32 or f64.
fn forward(problem: &Problem, [q, k, v]: &[Tensor; 3]) -> Result<(CpuStorage, Tensor)> {
    dispatch!(q.dtype(), "scaled_dot_product_attention", T => {
        with_slice::<T, _>(q, |q| with_slice::<T, _>(k, |k| with_slice::<T, _>(v, |v| {
            let (y, normalisers) = cpu::with_mask(problem, |mask| cpu::forward(problem, [q, k, v], mask))?;
            let shape = (problem.batch, problem.heads, problem.queries);
            Ok((T::to_cpu_storage_owned(y), Tensor::from_vec(normalisers, shape, &Device::Cpu)?))
        })))
    })
}

/// On the CPU: the gradients of q, k and v.
fn backward<T: Element>(
    problem: &Problem,
    [q, k, v]: &[Tensor; 3],
    [y, dy]: [&[T]; 2],
    normalisers: &Tensor,
) -> Result<[Vec<T::Real>; 3]> {
    with_slice::<T, _>(q, |q| {
        with_slice::<T, _>(k, |k| {
            with_slice::<T, _>(v, |v| {
                with_slice::<T::Real, _>(normalisers, |normalisers| {
                    cpu::with_mask(problem, |mask| cpu::backward(problem, [q, k, v], [y, dy], normalisers, mask))
                })
            })
        })
    })
}

/// Values that the backward pass needs.
struct Attention {
    problem: Problem,
    qkv: [Tensor; 3],
    normalisers: Tensor,
    result: Arc<OnceLock<Tensor>>,
}

impl Function for Attention {
    fn name(&self) -> &'static str {
        "scaled_dot_product_attention"
    }

    fn backward(&self, dy: &Tensor, _: &[bool]) -> Result<Vec<Option<Tensor>>> {
        let Self { problem, qkv, normalisers, result } = self;
        let Some(y) = result.get() else {
            candle_core::bail!(
                "attention's backward pass runs before its result is \
                                                              stored"
            )
        };
        dispatch!(dy.dtype(), self.name(), T => {
            type Acc = <T as Element>::Real;
            let gradients = with_slice::<T, _>(y, |y| with_slice::<T, _>(dy, |dy| {
                backward::<T>(problem, qkv, [y, dy], normalisers)
            }))?;
            // No copy is made if the dtype is the same.
            let finish = |(values, like): (Vec<Acc>, &Tensor)| {
                Tensor::from_vec(values, like.shape(), like.device())?.to_dtype(like.dtype()).map(Some)
            };
            gradients.into_iter().zip(qkv).map(finish).collect()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Var};

    /// The loops of the CPU agree with candle's operations, which other devices use, for sizes around those of blocks.
    #[test]
    fn loops_agree_with_composites() {
        let cases = [(1, 1, 1, 1), (3, 5, 1, 2), (65, 257, 2, 2), (130, 40, 2, 1), (600, 20, 1, 1), (20, 600, 1, 1)];
        let dtypes = [(DType::F64, 1e-11), (DType::F32, 1e-5), (DType::F16, 2e-2), (DType::BF16, 1e-1)];
        for ((queries, keys, heads, group), (dtype, tolerance)) in
            cases.into_iter().flat_map(|case| dtypes.map(|dtype| (case, dtype)))
        {
            let values = |shape: [usize; 4], step: f64| {
                let values: Vec<f64> = (0..shape.iter().product()).map(|i: usize| (i as f64 * step).sin()).collect();
                Tensor::from_vec(values, &shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
            };
            let var = |shape, step| Var::from_tensor(&values(shape, step)).unwrap();
            let (q, k) = (var([2, heads * group, queries, 3], 1.7), var([2, heads, keys, 3], 0.9));
            let (v, dy) = (var([2, heads, keys, 5], 0.3), values([2, heads * group, queries, 5], 0.4));
            let seen = |i: usize| u8::from(!i.is_multiple_of(3) && i / keys % 7 != 2);
            let seen =
                Tensor::from_vec((0..queries * keys).map(seen).collect(), (queries, keys), &Device::Cpu).unwrap();
            for (mask, is_causal) in [
                (None, false),
                (None, true),
                (Some(seen), false),
                (Some(values([2, 1, 1, keys], 1.1)), false),
                (Some(values([1, heads * group, queries, 1], 1.3)), false),
            ] {
                let options = AttentionOptions { mask, is_causal, scale: None };
                let run = |y: Tensor| {
                    let grads = (&y * &dy).unwrap().sum_all().unwrap().backward().unwrap();
                    let all = [Some(&y), grads.get(&q), grads.get(&k), grads.get(&v)];
                    let flat =
                        |t: &Tensor| t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
                    all.map(|t| flat(t.unwrap()))
                };
                let loops = run(scaled_dot_product_attention(&q, &k, &v, options.clone()).unwrap());
                let problem = Problem::new([&q, &k, &v], &options).unwrap();
                let composite = run(by_candle([&q, &k, &v], problem).unwrap());
                for (index, (a, b)) in loops.iter().zip(&composite).enumerate() {
                    let largest = b.iter().fold(1f64, |largest, value| largest.max(value.abs()));
                    for (a, b) in a.iter().zip(b) {
                        let case = format!("{index} of {queries} × {keys}, {heads} × {group}, {dtype:?}, {options:?}");
                        assert!((a - b).abs() <= tolerance * largest, "{a} and {b}, {case}");
                    }
                }
            }
        }
    }
}
