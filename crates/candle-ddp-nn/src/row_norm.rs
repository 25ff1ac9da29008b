//! Normalisation of rows (the last dimension), the common core of LayerNorm and RMSNorm: one pass over the rows
//! forward and one backward on the CPU, kernels on CUDA, candle's operations on other devices. f16 and bf16 are
//! computed in f32.
use super::add;
use super::autocast::{is_widened, wide};
use super::view::contiguous;
use candle_core::{D, Result, Shape, Storage, Tensor, WithDType};
use candle_ddp_tensor::borrow::with_slice;
use candle_ddp_tensor::function::{Earlier, Function, added, apply};
use candle_ddp_tensor::kernels::{self, AddedNorm, NormOperands, NormStatistics};
use candle_ddp_tensor::parallel::Each;
use candle_ddp_tensor::{Element, Error, Real, accumulator, dispatch};
use rayon::prelude::*;

/// Independent partial sums, so that the compiler can use vector instructions.
const LANES: usize = 16;
/// The approximate number of elements that a thread takes at a time.
const BLOCK_ELEMENTS: usize = 1 << 15;
/// The minimum number of rows that it takes, so that their sums for weight and bias are small in comparison.
const BLOCK_ROWS: usize = 16;

/// (x − mean) / √(variance + eps) × weight + bias over the last dimension; without `centred` the mean counts as zero.
pub(super) fn row_norm(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, eps: f64, centred: bool) -> Result<Tensor> {
    let x = &wide(x)?;
    let norm = Norm::new(x, weight, bias, eps, centred)?;
    let x = contiguous(x)?;
    if x.device().is_cuda() {
        let (y, statistics) = kernels::norm_forward(norm.of(&x))?;
        return norm.apply(&x, y, Statistics::OnGpu(statistics));
    }
    let (y, statistics) = norm.forward(&x)?;
    norm.apply(&x, (y, x.shape().clone()), Statistics::OnCpu(statistics))
}

/// x + residual, and its norm.
pub(super) fn add_norm(
    [x, residual]: [&Tensor; 2],
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f64,
    centred: bool,
) -> Result<(Tensor, Tensor)> {
    let is_alike = x.shape() == residual.shape() && x.dtype() == residual.dtype() && !is_widened(x)?;
    if is_alike && x.device().same_device(residual.device()) && kernels::take(x.device(), x.dtype()) {
        let norm = Norm::new(x, weight, bias, eps, centred)?;
        let (x, residual) = (contiguous(x)?, contiguous(residual)?);
        if let Some(AddedNorm { sum, normed, statistics }) = kernels::add_norm_forward(norm.of(&x), &residual)? {
            let sum = added(&x, &residual, sum)?;
            let normed = norm.apply(&sum, normed, Statistics::OnGpu(statistics))?;
            return Ok((sum, normed));
        }
    }
    let sum = add(x, residual)?;
    let normed = row_norm(&sum, weight, bias, eps, centred)?;
    Ok((sum, normed))
}

/// The same by candle's operations, for tests.
#[cfg(test)]
fn composite(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, eps: f64, centred: bool) -> Result<Tensor> {
    let wide = x.to_dtype(weight.dtype())?;
    let wide = if centred { wide.broadcast_sub(&wide.mean_keepdim(D::Minus1)?)? } else { wide };
    let deviation = (wide.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?;
    let y = wide.broadcast_div(&deviation)?.broadcast_mul(weight)?;
    let y = if let Some(bias) = bias { y.broadcast_add(bias)? } else { y };
    y.to_dtype(x.dtype())
}

/// A norm without its input. The parameters have the dtype `accumulator`; on GPUs they may have the dtype of the input.
struct Norm {
    weight: Tensor,
    bias: Option<Tensor>,
    eps: f64,
    centred: bool,
}

/// Mean and 1 / deviation of each row, which the forward pass keeps for the backward pass.
enum Statistics {
    OnCpu(Vec<[f64; 2]>),
    OnGpu(NormStatistics),
}

/// The gradients of x, weight and bias.
type Gradients = (Tensor, Tensor, Tensor);

impl Norm {
    fn new(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, eps: f64, centred: bool) -> Result<Self> {
        let size = weight.dims1()?;
        let is = candle_ddp_tensor::error::describe(x.dtype(), x.shape());
        if x.rank() == 0 || x.dim(D::Minus1)? != size || size == 0 {
            let reason =
                format!("its last dimension must be {size}, the size of the weight, and not 0, but it is {is}");
            return Err(Error::invalid("the input of a norm", reason).into());
        }
        // Kernels take parameters of x's dtype as they are, and the loops of the CPU those of the arithmetic's.
        let fits = |t: &Tensor| x.device().is_cuda() && t.dtype() == x.dtype();
        let of = if fits(weight) && bias.is_none_or(fits) { x.dtype() } else { accumulator(x.dtype()) };
        let parameter = |t: &Tensor| t.to_dtype(of)?.contiguous();
        Ok(Self { weight: parameter(weight)?, bias: bias.map(parameter).transpose()?, eps, centred })
    }

    fn of<'a>(&'a self, x: &'a Tensor) -> NormOperands<'a> {
        let Self { weight, bias, eps, centred } = self;
        NormOperands { x, weight, bias: bias.as_ref(), eps: *eps, centred: *centred }
    }

    /// The tensor of `y`, the norm of `x`.
    fn apply(self, x: &Tensor, y: (Storage, Shape), statistics: Statistics) -> Result<Tensor> {
        let detached = Self { weight: self.weight.detach(), bias: self.bias.as_ref().map(Tensor::detach), ..self };
        let function = RowNorm { x: x.detach(), norm: detached, statistics };
        match &self.bias {
            Some(bias) => apply(&[x, &self.weight, bias], y, function),
            None => apply(&[x, &self.weight], y, function),
        }
    }

    fn forward(&self, x: &Tensor) -> Result<(Storage, Vec<[f64; 2]>)> {
        let size = self.weight.dims1()?;
        dispatch!(x.dtype(), "a norm", T => {
            type Acc = <T as Element>::Real;
            let weight = self.weight.to_vec1::<Acc>()?;
            let bias = self.bias.as_ref().map(Tensor::to_vec1::<Acc>).transpose()?;
            let mut y = vec![T::from_f64(0.0); x.elem_count()];
            let mut statistics = vec![[0.0; 2]; x.elem_count() / size];
            let rows = block_rows(size);
            with_slice::<T, _>(x, |x| {
                let blocks = y.par_chunks_mut(rows * size).zip(x.par_chunks(rows * size));
                blocks.zip(statistics.par_chunks_mut(rows)).each(|((y, x), statistics)| {
                    let rows = y.chunks_exact_mut(size).zip(x.chunks_exact(size));
                    candle_ddp_tensor::vectorise!(|| {
                        for ((y, x), statistics) in rows.zip(statistics) {
                            let (mean, scale) = row_statistics(x, self.eps, self.centred);
                            normalise_row(y, x, &weight, bias.as_deref(), mean, scale);
                            *statistics = [mean.to_f64(), scale.to_f64()];
                        }
                    });
                });
                Ok(())
            })?;
            Ok((Storage::Cpu(T::to_cpu_storage_owned(y)), statistics))
        })
    }

    fn backward(&self, x: &Tensor, dy: &Tensor, statistics: &[[f64; 2]]) -> Result<Gradients> {
        let size = self.weight.dims1()?;
        dispatch!(x.dtype(), "a norm", T => {
            type Acc = <T as Element>::Real;
            let weight = self.weight.to_vec1::<Acc>()?;
            let mut dx = vec![T::from_f64(0.0); x.elem_count()];
            let rows = block_rows(size);
            let mut sums: Vec<(Vec<Acc>, Vec<Acc>)> = vec![Default::default(); dx.len().div_ceil(rows * size)];
            with_slice::<T, _>(x, |x| with_slice::<T, _>(dy, |dy| {
                let blocks = dx.par_chunks_mut(rows * size).zip(x.par_chunks(rows * size)).zip(dy.par_chunks(rows * size));
                blocks.zip(statistics.par_chunks(rows)).zip(&mut sums).each(|((((dx, x), dy), statistics), of_block)| {
                    let zeros = vec![Acc::from_f64(0.0); size];
                    let (mut d_weight, mut d_bias) = (zeros.clone(), zeros);
                    let rows = dx.chunks_exact_mut(size).zip(x.chunks_exact(size)).zip(dy.chunks_exact(size));
                    candle_ddp_tensor::vectorise!(|| {
                        for (((dx, x), dy), [mean, scale]) in rows.zip(statistics) {
                            let (mean, scale) = (Acc::from_f64(*mean), Acc::from_f64(*scale));
                            let sums = row_sums(x, dy, &weight, mean, scale, (&mut d_weight, &mut d_bias));
                            input_gradient_row(dx, x, dy, &weight, mean, scale, sums, self.centred);
                        }
                    });
                    *of_block = (d_weight, d_bias);
                });
                Ok(())
            }))?;
            // Block by block, so that the result does not depend on the number of threads.
            let mut totals = vec![[0.0; 2]; size];
            for (d_weight, d_bias) in &sums {
                for (total, parts) in totals.iter_mut().zip(d_weight.iter().zip(d_bias)) {
                    total[0] += parts.0.to_f64();
                    total[1] += parts.1.to_f64();
                }
            }
            let total = |index: usize| {
                let values: Vec<Acc> = totals.iter().map(|total| Acc::from_f64(total[index])).collect();
                Tensor::from_vec(values, size, x.device())
            };
            Ok((Tensor::from_vec(dx, x.shape(), x.device())?, total(0)?, total(1)?))
        })
    }
}

fn block_rows(size: usize) -> usize {
    (BLOCK_ELEMENTS / size).max(BLOCK_ROWS)
}

/// A row's mean and 1 / √(variance + eps).
#[inline(always)]
fn row_statistics<T: Element>(x: &[T], eps: f64, centred: bool) -> (T::Real, T::Real) {
    let count = T::Real::from_f64(x.len() as f64);
    let mean = if centred { sum(x, |x| x) / count } else { T::Real::from_f64(0.0) };
    let variance = sum(x, |x| (x - mean) * (x - mean)) / count;
    let one = T::Real::from_f64(1.0);
    (mean, one / (variance + T::Real::from_f64(eps)).sqrt())
}

/// The sum of `term` of each element.
#[inline(always)]
pub(super) fn sum<T: Element>(x: &[T], term: impl Fn(T::Real) -> T::Real) -> T::Real {
    let mut lanes = [T::Real::from_f64(0.0); LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        // All terms first: otherwise the compiler converts 16 bits one by one.
        let terms: [T::Real; LANES] = std::array::from_fn(|lane| term(chunk[lane].widen()));
        lanes.iter_mut().zip(terms).for_each(|(lane, term)| *lane += term);
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane += term(x.widen());
    }
    fold(lanes)
}

/// The sum of partial sums, in their order.
#[inline(always)]
pub(super) fn fold<A: Real, const LANES: usize>(lanes: [A; LANES]) -> A {
    lanes.into_iter().fold(A::from_f64(0.0), |sum, lane| sum + lane)
}

#[inline(always)]
fn normalise_row<T: Element>(
    y: &mut [T],
    x: &[T],
    weight: &[T::Real],
    bias: Option<&[T::Real]>,
    mean: T::Real,
    scale: T::Real,
) {
    let rows = y.iter_mut().zip(x).zip(weight);
    match bias {
        Some(bias) => {
            for (((y, x), weight), bias) in rows.zip(bias) {
                *y = T::narrow((x.widen() - mean) * scale * *weight + *bias);
            }
        }
        None => {
            for ((y, x), weight) in rows {
                *y = T::narrow((x.widen() - mean) * scale * *weight);
            }
        }
    }
}

/// With x̂ = (x − mean) × scale: adds dy·x̂ to the weight's gradient and dy to the bias's, and returns Σ dy·weight and
/// Σ dy·weight·x̂.
#[inline(always)]
fn row_sums<T: Element>(
    x: &[T],
    dy: &[T],
    weight: &[T::Real],
    mean: T::Real,
    scale: T::Real,
    (d_weight, d_bias): (&mut [T::Real], &mut [T::Real]),
) -> [T::Real; 2] {
    let zero = T::Real::from_f64(0.0);
    let (mut plain, mut weighted) = ([zero; LANES], [zero; LANES]);
    let mut element = |lane: usize, x: T, dy: T, weight: T::Real, d_weight: &mut T::Real, d_bias: &mut T::Real| {
        let (normal, dy) = ((x.widen() - mean) * scale, dy.widen());
        *d_weight += dy * normal;
        *d_bias += dy;
        let dy = dy * weight;
        plain[lane] += dy;
        weighted[lane] += dy * normal;
    };
    let (xs, x_rest) = x.as_chunks::<LANES>();
    let (dys, dy_rest) = dy.as_chunks::<LANES>();
    let (weights, weight_rest) = weight.as_chunks::<LANES>();
    let (d_weights, d_weight_rest) = d_weight.as_chunks_mut::<LANES>();
    let (d_biases, d_bias_rest) = d_bias.as_chunks_mut::<LANES>();
    for ((((x, dy), weight), d_weight), d_bias) in xs.iter().zip(dys).zip(weights).zip(d_weights).zip(d_biases) {
        for lane in 0..LANES {
            element(lane, x[lane], dy[lane], weight[lane], &mut d_weight[lane], &mut d_bias[lane]);
        }
    }
    for lane in 0..x_rest.len() {
        let (d_weight, d_bias) = (&mut d_weight_rest[lane], &mut d_bias_rest[lane]);
        element(lane, x_rest[lane], dy_rest[lane], weight_rest[lane], d_weight, d_bias);
    }
    [fold(plain), fold(weighted)]
}

#[inline(always)]
#[expect(clippy::too_many_arguments)] // three rows in, one out, and what is known of them
fn input_gradient_row<T: Element>(
    dx: &mut [T],
    x: &[T],
    dy: &[T],
    weight: &[T::Real],
    mean: T::Real,
    scale: T::Real,
    [plain, weighted]: [T::Real; 2],
    centred: bool,
) {
    let count = T::Real::from_f64(x.len() as f64);
    let a = if centred { plain / count } else { T::Real::from_f64(0.0) };
    let b = weighted / count * scale;
    for (((dx, x), dy), weight) in dx.iter_mut().zip(x).zip(dy).zip(weight) {
        *dx = T::narrow(scale * (dy.widen() * *weight - a - (x.widen() - mean) * b));
    }
}

/// The function of x, weight and, if there is one, bias.
struct RowNorm {
    x: Tensor,
    norm: Norm,
    statistics: Statistics,
}

impl Function for RowNorm {
    fn name(&self) -> &'static str {
        "row-norm"
    }

    fn backward(&self, dy: &Tensor, _: &[bool]) -> Result<Vec<Option<Tensor>>> {
        self.gradients(dy, None)
    }

    /// In a residual connection, no separate pass over memory adds the two gradients of x.
    fn backward_onto(&self, dy: &Tensor, _: &[bool], earlier: Earlier) -> Result<Vec<Option<Tensor>>> {
        let is_on_gpu = matches!(self.statistics, Statistics::OnGpu(_));
        let earlier = if is_on_gpu { earlier.take(0) } else { None };
        self.gradients(dy, earlier.map(|earlier| earlier.contiguous()).transpose()?.as_ref())
    }
}

impl RowNorm {
    fn gradients(&self, dy: &Tensor, earlier: Option<&Tensor>) -> Result<Vec<Option<Tensor>>> {
        let Self { x, norm, statistics } = self;
        let (dx, d_weight, d_bias) = match statistics {
            Statistics::OnCpu(statistics) => norm.backward(x, dy, statistics)?,
            Statistics::OnGpu(statistics) => kernels::norm_backward(norm.of(x), dy, statistics, earlier)?,
        };
        Ok([dx, d_weight, d_bias].into_iter().take(2 + usize::from(norm.bias.is_some())).map(Some).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device, Var};

    fn values(shape: &[usize], seed: f64) -> Tensor {
        let count: usize = shape.iter().product();
        let values: Vec<f64> = (0..count).map(|i| ((i as f64 + seed) * 1.7).sin() + seed).collect();
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
    }

    fn flat(t: &Tensor) -> Vec<f64> {
        t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }

    /// The loops of the CPU agree with candle's operations, for every dtype, and for sizes around the number of lanes and
    /// blocks of rows, which PyTorch's results do not reach.
    #[test]
    fn loops_agree_with_composites() {
        let shapes: [&[usize]; 4] = [&[1, 1], &[37, 17], &[2, 3, 48], &[5000, 15]];
        let dtypes = [(DType::F64, 1e-10), (DType::F32, 1e-4), (DType::F16, 2e-2), (DType::BF16, 1e-1)];
        for ((dtype, tolerance), shape) in dtypes.into_iter().flat_map(|dtype| shapes.map(|shape| (dtype, shape))) {
            let var = |shape: &[usize], seed| Var::from_tensor(&values(shape, seed).to_dtype(dtype).unwrap()).unwrap();
            let size = *shape.last().unwrap();
            let (x, weight, bias) = (var(shape, 0.5), var(&[size], 1.0), var(&[size], 2.0));
            let dy = values(shape, 0.1).to_dtype(dtype).unwrap();
            for (centred, with_bias) in [(true, true), (true, false), (false, true), (false, false)] {
                let bias = with_bias.then_some(bias.as_tensor());
                let run = |fused: bool| {
                    let wide = |t: &Tensor| t.to_dtype(accumulator(dtype)).unwrap();
                    let y = if fused {
                        row_norm(&x, &weight, bias, 1e-3, centred).unwrap()
                    } else {
                        composite(&x, &wide(&weight), bias.map(wide).as_ref(), 1e-3, centred).unwrap()
                    };
                    let grads = (&y * &dy).unwrap().backward().unwrap();
                    let vars = [Some(x.as_tensor()), Some(weight.as_tensor()), bias];
                    let grads = vars.into_iter().flatten().map(|var| flat(grads.get(var).unwrap()));
                    std::iter::once(flat(&y)).chain(grads).collect::<Vec<_>>()
                };
                for (index, (fused, composite)) in run(true).iter().zip(run(false)).enumerate() {
                    let largest = composite.iter().fold(1.0f64, |largest, value| largest.max(value.abs()));
                    for (fused, composite) in fused.iter().zip(&composite) {
                        let what = format!("{index} of {dtype:?} {shape:?}, centred {centred}, bias {with_bias}");
                        assert!((fused - composite).abs() <= tolerance * largest, "{fused} and {composite}, {what}");
                    }
                }
            }
        }
    }
}
