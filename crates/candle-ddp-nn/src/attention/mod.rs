//! Attention without the matrix of all weights: it is computed block by block, and the backward pass recomputes the
//! blocks, as in T. Dao, "FlashAttention-2", 2023.
use super::autocast::Casts;
use super::view::contiguous;
use candle_core::{CpuStorage, Device, Result, Storage, Tensor, WithDType};
use candle_ddp_tensor::borrow::with_slice;
use candle_ddp_tensor::function::{Function, apply};
use candle_ddp_tensor::{Element, dispatch};
use std::sync::{Arc, OnceLock};

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

/// softmax(q kᵀ × scale + mask) v: `torch.nn.functional.scaled_dot_product_attention`, without its dropout, and with
/// [`cu_seq`](AttentionOptions::cu_seq) `torch.nn.attention.varlen.varlen_attn`, for documents that share rows.
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
/// `cudnn`, cuDNN does this where it can, without a mask or documents in f16 and bf16; its backward pass needs two bytes for each weight.
///
/// ```
/// # use candle_core::{Device, Result, Tensor};
/// # fn main() -> Result<()> {
/// use candle_ddp_nn::{AttentionOptions, scaled_dot_product_attention};
/// // The query is orthogonal to both keys, so it sees the mean of the values.
/// let q = Tensor::new(&[[[[0f32, 1.]]]], &Device::Cpu)?;
/// let k = Tensor::new(&[[[[1f32, 0.], [-1., 0.]]]], &Device::Cpu)?;
/// let v = Tensor::new(&[[[[2f32], [4.]]]], &Device::Cpu)?;
/// let y = scaled_dot_product_attention(&q, &k, &v, AttentionOptions::default())?;
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [3.]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`InvalidArgument`](candle_ddp_tensor::Error::Base), carried by candle's error, for shapes,
/// dtypes and devices that do not fit each other, a mask together with `is_causal` or `cu_seq`, a mask that requires a
/// gradient, and a `cu_seq` of another dtype, with negative lengths, or that does not fit the rows; [`Error::UnsupportedDType`](candle_ddp_tensor::Error::UnsupportedDType).
pub fn scaled_dot_product_attention(q: &Tensor, k: &Tensor, v: &Tensor, options: AttentionOptions) -> Result<Tensor> {
    if let Some(casts) = Casts::of_product([q, k, v])? {
        let y = scaled_dot_product_attention(&casts.of(q)?, &casts.of(k)?, &casts.of(v)?, options)?;
        return casts.result(y, q);
    }
    let problem = Problem::new([q, k, v], &options)?;
    if problem.is_empty() {
        return Tensor::zeros(problem.output_shape(), q.dtype(), q.device());
    }
    let [q, k, v] = [contiguous(q)?, contiguous(k)?, contiguous(v)?];
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

    /// `t` with its dimension `dim` in reverse, unless it is broadcast.
    fn reversed(t: &Tensor, dim: usize) -> Tensor {
        match t.dim(dim).unwrap() {
            1 => t.clone(),
            length => t.index_select(&Tensor::from_iter((0..length as u32).rev(), t.device()).unwrap(), dim).unwrap(),
        }
    }

    /// Neither the block of queries nor the block of keys that something is in changes a result: fifty queries at a time, with the
    /// keys in reverse order, give the results and gradients of all together.
    #[test]
    fn results_do_not_depend_on_blocks() {
        for (queries, keys, heads, group) in
            [(3, 5, 1, 2), (65, 257, 2, 2), (130, 40, 2, 1), (600, 20, 1, 1), (20, 600, 1, 1)]
        {
            for (dtype, tolerance) in [(DType::F64, 1e-11), (DType::F32, 1e-5), (DType::BF16, 5e-2)] {
                let values = |shape: [usize; 4], step: f64| {
                    let values: Vec<f64> =
                        (0..shape.iter().product()).map(|i: usize| (i as f64 * step).sin()).collect();
                    Tensor::from_vec(values, &shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
                };
                let var = |shape, step| Var::from_tensor(&values(shape, step)).unwrap();
                let (q, k) = (var([2, heads * group, queries, 3], 1.7), var([2, heads, keys, 3], 0.9));
                let (v, dy) = (var([2, heads, keys, 5], 0.3), values([2, heads * group, queries, 5], 0.4));
                let seen = |is_seen: &dyn Fn(usize, usize) -> bool| {
                    let seen = (0..queries * keys).map(|i| u8::from(is_seen(i / keys, i % keys))).collect();
                    Tensor::from_vec(seen, (1, 1, queries, keys), &Device::Cpu).unwrap()
                };
                let causal = seen(&|query, key| key <= query);
                let some = seen(&|query, key| (query + key) % 3 != 0 && query % 7 != 2);
                let of_keys = values([2, 1, 1, keys], 1.1);
                let of_queries = values([1, heads * group, queries, 1], 1.3);
                let run = |y: Tensor| {
                    let grads = (&y * &dy).unwrap().sum_all().unwrap().backward().unwrap();
                    let all = [Some(&y), grads.get(&q), grads.get(&k), grads.get(&v)];
                    all.map(|t| {
                        t.unwrap().to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap()
                    })
                };
                for (name, mask) in [
                    ("all keys", None),
                    ("causal", Some(causal)),
                    ("some keys", Some(some)),
                    ("a mask of keys", Some(of_keys)),
                    ("a mask of queries", Some(of_queries)),
                ] {
                    let is_causal = name == "causal";
                    let options =
                        AttentionOptions { mask: mask.clone().filter(|_| !is_causal), is_causal, ..Default::default() };
                    let together = scaled_dot_product_attention(&q, &k, &v, options).unwrap();
                    let [reversed_k, reversed_v] = [&k, &v].map(|t| reversed(t, 2));
                    let part = |start: usize| {
                        let count = 50.min(queries - start);
                        let mask = mask.as_ref().map(|mask| match mask.dim(2).unwrap() {
                            1 => reversed(mask, 3),
                            _ => reversed(&mask.narrow(2, start, count).unwrap(), 3),
                        });
                        let q = q.narrow(2, start, count).unwrap();
                        let options = AttentionOptions { mask, ..Default::default() };
                        scaled_dot_product_attention(&q, &reversed_k, &reversed_v, options).unwrap()
                    };
                    let parts: Vec<Tensor> = (0..queries).step_by(50).map(part).collect();
                    let parts = Tensor::cat(&parts, 2).unwrap();
                    for (index, (a, b)) in run(together).iter().zip(&run(parts)).enumerate() {
                        let largest = b.iter().fold(1f64, |largest, value| largest.max(value.abs()));
                        for (a, b) in a.iter().zip(b) {
                            let case = format!("{index} of {queries} × {keys}, {heads} × {group}, {dtype:?}, {name}");
                            assert!((a - b).abs() <= tolerance * largest, "{a} and {b}, {case}");
                        }
                    }
                }
            }
        }
    }
}
