//! Attention without the matrix of all weights: block by block forward, and backward from what the blocks are computed
//! from again, as in T. Dao, "FlashAttention-2", 2023.
use super::attach::attach;
use super::channels::accumulator;
use crate::Error;
use crate::error::describe;
use crate::tensor::borrow::with_slice;
use crate::tensor::function::{Function, apply};
use crate::tensor::{Element, dispatch};
use candle_core::{CpuStorage, DType, Device, Result, Shape, Storage, Tensor, WithDType};
use std::sync::{Arc, OnceLock};

mod composite;
mod cpu;

/// Options of [`scaled_dot_product_attention`]. The default is PyTorch's.
#[derive(Clone, Debug, Default)]
pub struct AttentionOptions {
    /// Which keys a query sees, in a shape that can be broadcast to (B, H, Tq, Tk): of the dtype u8, not 0 where it
    /// does; or of a floating-point dtype, to be added to the scores. It gets no gradient. `None`, the default, is all.
    pub mask: Option<Tensor>,
    /// Whether query i sees the keys up to i only; not together with a mask.
    pub is_causal: bool,
    /// What products of queries and keys are multiplied by; 1 / √D by default.
    pub scale: Option<f64>,
}

/// softmax(q kᵀ × scale + mask) v: `torch.nn.functional.scaled_dot_product_attention`, without its dropout.
///
/// `q` has the shape (B, H, Tq, D), `k` (B, H′, Tk, D) and `v` (B, H′, Tk, E); the result has the shape (B, H, Tq, E).
/// H is a multiple of H′: neighbouring queries' heads share keys and values (PyTorch's `enable_gqa`). The dtype is f32,
/// f64, f16 or bf16, that of all three; on the CPU everything is calculated in f32 (f64 for f64), on other devices
/// products of matrices in the dtype itself. A query that sees no key has the result zero, and no gradient.
///
/// Of the weights only a block is in memory at a time: 128 × 256 for each thread on the CPU, and (B, H, 512, Tk) on
/// other devices. For the backward pass one number per query is kept.
///
/// # Errors
/// [`Error::InvalidArgument`], carried by candle's error, for shapes and dtypes that do not fit each other, a mask
/// together with `is_causal`, and a mask that wants a gradient; [`Error::UnsupportedDType`].
pub fn scaled_dot_product_attention(q: &Tensor, k: &Tensor, v: &Tensor, options: &AttentionOptions) -> Result<Tensor> {
    let problem = Problem::new([q, k, v], options)?;
    if problem.is_empty() {
        return Tensor::zeros(problem.output_shape(), q.dtype(), q.device());
    }
    if !q.device().is_cpu() {
        return on_gpu([q, k, v], problem);
    }
    let [q, k, v] = [q.contiguous()?, k.contiguous()?, v.contiguous()?];
    let qkv = [&q, &k, &v].map(Tensor::detach);
    let (storage, normalisers) = forward(&problem, &qkv)?;
    let (shape, result) = (problem.output_shape(), Arc::default());
    let attention = Attention { problem, qkv, normalisers, result: Arc::clone(&result) };
    let y = apply(&[&q, &k, &v], (Storage::Cpu(storage), shape), attention)?;
    let _ = result.set(y.detach());
    Ok(y)
}

fn on_gpu(qkv: [&Tensor; 3], problem: Problem) -> Result<Tensor> {
    let detached = qkv.map(Tensor::detach);
    let (y, normalisers) = composite::forward(&problem, &detached)?;
    let result = y.clone();
    let backward =
        move |dy: &Tensor| composite::backward(&problem, &detached, &result, &normalisers, dy).map(Vec::from);
    attach(&qkv, &y, "scaled_dot_product_attention", backward)
}

/// Sizes, and which keys queries see.
#[derive(Debug)]
struct Problem {
    batch: usize,
    /// Of queries.
    heads: usize,
    /// How many heads of queries share keys and values.
    group: usize,
    queries: usize,
    keys: usize,
    /// How long queries and keys are.
    size: usize,
    /// How long values are.
    value_size: usize,
    scale: f64,
    is_causal: bool,
    /// What is added to scores, of rank 4 and dtype [`accumulator`], contiguous.
    mask: Option<Tensor>,
}

impl Problem {
    fn new([q, k, v]: [&Tensor; 3], options: &AttentionOptions) -> Result<Self> {
        let invalid = |argument, reason: String| Err(Error::invalid(argument, reason).into());
        let (&[batch, heads, queries, size], &[kb, key_heads, keys, key_size], &[vb, value_heads, values, value_size]) =
            (q.dims(), k.dims(), v.dims())
        else {
            return invalid("the inputs of attention", refusal([q, k, v]));
        };
        let fits = [kb, vb] == [batch; 2] && key_heads == value_heads && keys == values && size == key_size;
        let groups = key_heads > 0 && heads.is_multiple_of(key_heads);
        if !fits || !groups || size == 0 || value_size == 0 || [k.dtype(), v.dtype()] != [q.dtype(); 2] {
            return invalid("the inputs of attention", refusal([q, k, v]));
        }
        let mask = match &options.mask {
            None => None,
            Some(_) if options.is_causal => {
                return invalid("the mask of attention", "there is one, and is_causal as well".to_string());
            }
            Some(mask) => Some(additive(mask, [batch, heads, queries, keys], accumulator(q.dtype()))?),
        };
        let scale = options.scale.unwrap_or(1.0 / (size as f64).sqrt());
        let (group, is_causal) = (heads / key_heads, options.is_causal);
        Ok(Self { batch, heads, group, queries, keys, size, value_size, scale, is_causal, mask })
    }

    fn is_empty(&self) -> bool {
        self.batch * self.heads * self.queries == 0
    }

    fn output_shape(&self) -> Shape {
        Shape::from((self.batch, self.heads, self.queries, self.value_size))
    }
}

fn refusal(qkv: [&Tensor; 3]) -> String {
    let [q, k, v] = qkv.map(|t| describe(t.dtype(), t.shape()));
    format!(
        "they are {q}, {k} and {v}, where (B, H, Tq, D), (B, H′, Tk, D) and (B, H′, Tk, E) of one dtype are expected, \
         H is a multiple of H′, and none of H′, D and E is 0"
    )
}

/// What is to be added to scores.
fn additive(mask: &Tensor, [batch, heads, queries, keys]: [usize; 4], dtype: DType) -> Result<Tensor> {
    let is = describe(mask.dtype(), mask.shape());
    let expected = [batch, heads, queries, keys];
    let given = mask.dims();
    let fits = given.len() <= 4
        && given.iter().rev().zip(expected.iter().rev()).all(|(given, expected)| *given == 1 || given == expected);
    if !fits || !(mask.dtype() == DType::U8 || mask.dtype().is_float()) {
        let reason = format!(
            "it is {is}, where u8 or floating-point numbers that can be broadcast to {expected:?} are expected"
        );
        return Err(Error::invalid("the mask of attention", reason).into());
    }
    if mask.track_op() {
        let reason = format!("it is {is} and wants a gradient, which is not computed: `detach` it");
        return Err(Error::invalid("the mask of attention", reason).into());
    }
    let mask = mask.reshape([&[1, 1, 1, 1][given.len()..], given].concat())?;
    let mask = if mask.dtype() == DType::U8 {
        let (seen, unseen) = (Tensor::new(0f32, mask.device())?, Tensor::new(f32::NEG_INFINITY, mask.device())?);
        mask.where_cond(&seen.broadcast_as(mask.shape())?, &unseen.broadcast_as(mask.shape())?)?
    } else {
        mask
    };
    mask.to_dtype(dtype)?.contiguous()
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

/// What the backward pass needs.
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
        let Some(y) = result.get() else { candle_core::bail!("the result of attention is not there yet") };
        let [q, k, v] = qkv;
        dispatch!(q.dtype(), self.name(), T => {
            type Acc = <T as Element>::Real;
            let gradients = with_slice::<T, _>(q, |q| with_slice::<T, _>(k, |k| with_slice::<T, _>(v, |v| {
                with_slice::<T, _>(y, |y| with_slice::<T, _>(dy, |dy| with_slice::<Acc, _>(normalisers, |normalisers| {
                    cpu::with_mask(problem, |mask| cpu::backward(problem, [q, k, v], [y, dy], normalisers, mask))
                })))
            })))?;
            // Without a copy where the dtype is the same.
            let finish = |(values, like): (Vec<Acc>, &Tensor)| {
                Tensor::from_vec(values, like.shape(), like.device())?.to_dtype(like.dtype()).map(Some)
            };
            gradients.into_iter().zip(qkv).map(finish).collect()
        })
    }
}
