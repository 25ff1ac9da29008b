//! PowerSGD: sends gradients as products of thin matrices.
use super::compress::all_reduce;
use super::orthonormal::orthonormal;
use super::{CommHook, GradBucket, HookWork, of_another_model};
use crate::process_group::ProcessGroup;
use crate::state::{self, Loader};
use crate::tensor::copy;
use crate::{Error, ReduceOp, Result};
use candle_core::{D, DType, Device, Tensor};
use candle_ddp_base::hash::fnv1a_64;
use std::collections::HashMap;

/// Options of [`PowerSgd`], with the defaults of PyTorch's `PowerSGDState`. All ranks must give the same.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PowerSgdOptions {
    /// The rank of the approximation of a gradient. A higher rank sends more bytes and keeps more of the gradient.
    /// Default: 1.
    pub matrix_approximation_rank: usize,
    /// The number of synchronised backward passes with a plain all-reduce before compression begins, since the first
    /// gradients of a training run have little structure (PyTorch's `start_powerSGD_iter`). Default: 1000.
    pub start_iter: u64,
    /// A matrix is compressed only if that makes it smaller by more than this factor. Default: 2.
    pub min_compression_rate: f64,
    /// Whether the approximation error is added to the next gradient. This needs a copy of the gradients; without it,
    /// much of them is lost for good. Default: true.
    pub use_error_feedback: bool,
    /// Whether each approximation starts from the last one's factor instead of a random one, which improves it from
    /// pass to pass. Default: true.
    pub warm_start: bool,
    /// Added to the lengths of vectors when they are normalised. PyTorch needs it if gradients may be zero; this
    /// implementation handles zeros without it. Default: 0.
    pub orthogonalization_epsilon: f64,
    /// The seed of the random initial factors. Default: 0.
    pub seed: u64,
}

impl Default for PowerSgdOptions {
    fn default() -> Self {
        Self {
            matrix_approximation_rank: 1,
            start_iter: 1000,
            min_compression_rate: 2.0,
            use_error_feedback: true,
            warm_start: true,
            orthogonalization_epsilon: 0.0,
            seed: 0,
        }
    }
}

/// Approximates each gradient matrix, over all ranks, by a product of two thin matrices, and sends these: PyTorch's
/// `powerSGD_hook`, after [PowerSGD] (Vogels et al., 2019).
///
/// A gradient with more than one dimension is treated as a matrix M with one row per element of its first dimension.
/// P = M·Q is all-reduced and its columns are made orthonormal, Q = Mᵀ·P is all-reduced, and `backward` returns P·Qᵀ.
/// Vectors, and matrices that would not become much smaller, are sent uncompressed together with P. The calculation is
/// in f32, or in f64 for gradients in f64.
///
/// Differences from PyTorch: the state is kept by parameter, so it survives the rebuilding of the buckets and
/// compression may begin with the first pass. A gradient that is zero (such as an unused parameter's) or of lower
/// rank than the approximation gives zeros, where PyTorch gives NaN or noise. An infinite or NaN gradient, which a
/// [`GradScaler`](crate::amp::GradScaler) detects in the result, does not enter the state. When the scaler changes its
/// scale, errors kept from earlier passes keep the old scale.
///
/// Every rank calculates P·Qᵀ itself, so ranks on different kinds of processors may differ in the last bits.
///
/// [PowerSGD]: https://arxiv.org/abs/1905.13727
#[derive(Debug)]
pub struct PowerSgd {
    options: PowerSgdOptions,
    iteration: u64,
    matrices: HashMap<String, MatrixState>,
    bytes: u64,
}

/// State kept for each N×M matrix between passes.
#[derive(Debug)]
struct MatrixState {
    /// The random initial factor, rank × M; it replaces rows that the last approximation left zero or non-finite.
    start: Tensor,
    /// The factor from which the next approximation starts, rank × M.
    q: Tensor,
    /// The error of the last approximation on this rank, N × M.
    error: Option<Tensor>,
}

impl MatrixState {
    fn fits(&self, (rows, columns, rank): (usize, usize, usize), dtype: DType) -> bool {
        let is = |tensor: &Tensor, shape: [usize; 2]| tensor.dims() == shape && tensor.dtype() == dtype;
        let factors = [&self.start, &self.q].into_iter().all(|factor| is(factor, [rank, columns]));
        factors && self.error.as_ref().is_none_or(|error| is(error, [rows, columns]))
    }

    /// Moves the state to the gradient's device, since a loaded state is on the CPU.
    fn to_device(&self, device: &Device) -> candle_core::Result<Self> {
        let error = self.error.as_ref().map(|error| error.to_device(device)).transpose()?;
        Ok(Self { start: self.start.to_device(device)?, q: self.q.to_device(device)?, error })
    }
}

/// A matrix in flight. Both factors are stored with their long side along the rows.
struct Matrix {
    /// Its index in the bucket.
    slot: usize,
    rank: usize,
    /// This rank's gradient, N × M, plus the error of the last approximation.
    local: Tensor,
    start: Tensor,
}

impl PowerSgd {
    /// Creates a hook without state.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for a matrix rank of 0, a compression rate that is not above 0, or a negative
    /// epsilon.
    pub fn new(options: PowerSgdOptions) -> Result<Self> {
        let PowerSgdOptions { min_compression_rate: rate, orthogonalization_epsilon: epsilon, .. } = options;
        if options.matrix_approximation_rank == 0 {
            return Err(Error::invalid(
                "matrix_approximation_rank",
                "it must be at least 1: 0 would discard every \
                                                                    gradient",
            ));
        }
        if rate.is_nan() || rate <= 0.0 {
            return Err(Error::invalid("min_compression_rate", format!("it must be above 0, not {rate}")));
        }
        if !(epsilon >= 0.0 && epsilon.is_finite()) {
            let reason = format!("it must be at least 0, not {epsilon}");
            return Err(Error::invalid("orthogonalization_epsilon", reason));
        }
        Ok(Self { options, iteration: 0, matrices: HashMap::new(), bytes: 0 })
    }

    /// The rows and columns of a gradient that is worth compressing, and the rank of its approximation.
    fn plan(&self, gradient: &Tensor) -> Option<(usize, usize, usize)> {
        let [rows, _, ..] = *gradient.dims() else { return None };
        let columns = gradient.elem_count().checked_div(rows)?;
        let rank = self.options.matrix_approximation_rank.min(rows).min(columns);
        let compressed = ((rows + columns) * rank) as f64;
        let worth = columns > 1 && compressed * self.options.min_compression_rate < gradient.elem_count() as f64;
        worth.then_some((rows, columns, rank))
    }

    /// Computes P of all matrices in the bucket, and all-reduces it together with the uncompressed gradients.
    fn first_stage(&mut self, bucket: &GradBucket, group: &ProcessGroup) -> Result<HookWork<Self>> {
        let dtype = crate::tensor::accumulator(bucket.buffer().dtype());
        let (mut matrices, mut others, mut parts) = (Vec::new(), Vec::new(), Vec::new());
        for (slot, (gradient, name)) in bucket.gradients().iter().zip(bucket.names()).enumerate() {
            let Some((rows, columns, rank)) = self.plan(gradient) else {
                others.push(slot);
                continue;
            };
            let mut local = gradient.reshape((rows, columns))?.to_dtype(dtype)?;
            // The old state stays until there is a new one, so that a failed backward pass does not change it.
            let memory = self.matrices.get(name);
            if memory.is_some_and(|memory| !memory.fits((rows, columns, rank), dtype)) {
                return Err(of_another_model(name));
            }
            let memory = memory.map(|memory| memory.to_device(gradient.device())).transpose()?;
            if let Some(error) = memory.as_ref().and_then(|memory| memory.error.as_ref()) {
                local = (local + error)?;
            }
            let (start, q) = match memory {
                Some(MatrixState { start, q, .. }) if self.options.warm_start => (start, q),
                _ => {
                    let start = self.random(name, (rank, columns), dtype, gradient.device())?;
                    (start.clone(), start)
                }
            };
            let q = orthonormal(&q, self.options.orthogonalization_epsilon)?;
            parts.push(q.matmul(&local.t()?)?.flatten_all()?);
            matrices.push(Matrix { slot, rank, local, start });
        }
        if matrices.is_empty() {
            self.bytes += bucket.bytes() as u64;
            return all_reduce(bucket, group);
        }
        for &slot in &others {
            let gradient = bucket.gradients()[slot].flatten_all()?.to_dtype(dtype)?;
            parts.push((gradient / group.world_size() as f64)?);
        }
        let flat = Tensor::cat(&parts, 0)?;
        self.count(&flat);
        let work = group.all_reduce_async(&flat, ReduceOp::Sum)?;
        Ok(HookWork::then([work], move |hook: &mut Self, bucket, group| {
            hook.second_stage(bucket, group, matrices, &others, &flat)
        }))
    }

    /// Computes and all-reduces Q of all matrices, and writes back the uncompressed gradients.
    fn second_stage(
        &mut self,
        bucket: &GradBucket,
        group: &ProcessGroup,
        matrices: Vec<Matrix>,
        others: &[usize],
        flat: &Tensor,
    ) -> Result<HookWork<Self>> {
        let mut offset = 0;
        let (mut ps, mut parts) = (Vec::with_capacity(matrices.len()), Vec::with_capacity(matrices.len()));
        for matrix in &matrices {
            let p = take(flat, &mut offset, (matrix.rank, matrix.local.dim(0)?))?;
            let p = orthonormal(&p, self.options.orthogonalization_epsilon)?;
            parts.push((p.matmul(&matrix.local)?.flatten_all()? / group.world_size() as f64)?);
            ps.push(p);
        }
        for &slot in others {
            let gradient = &bucket.gradients()[slot];
            let mean = take(flat, &mut offset, (gradient.elem_count(), 1))?;
            copy::copy(gradient, &mean.reshape(gradient.shape())?)?;
        }
        let flat = Tensor::cat(&parts, 0)?;
        self.count(&flat);
        let work = group.all_reduce_async(&flat, ReduceOp::Sum)?;
        Ok(HookWork::then([work], move |hook: &mut Self, bucket, _| {
            hook.last_stage(bucket, matrices, &ps, &flat)?;
            Ok(HookWork::done())
        }))
    }

    /// Writes the approximations and keeps their errors.
    fn last_stage(&mut self, bucket: &GradBucket, matrices: Vec<Matrix>, ps: &[Tensor], flat: &Tensor) -> Result<()> {
        let mut offset = 0;
        for (Matrix { slot, rank, local, start }, p) in matrices.into_iter().zip(ps) {
            let q = take(flat, &mut offset, (rank, local.dim(1)?))?;
            let approximation = p.t()?.matmul(&q)?;
            let error = match self.options.use_error_feedback {
                true => Some(zero_where_nan(&(local - &approximation)?)?),
                false => None,
            };
            let gradient = &bucket.gradients()[slot];
            copy::copy(gradient, &approximation.reshape(gradient.shape())?)?;
            let q = usable_rows(&q, &start)?;
            self.matrices.insert(bucket.names()[slot].clone(), MatrixState { start, q, error });
        }
        Ok(())
    }

    fn count(&mut self, sent: &Tensor) {
        self.bytes += (sent.elem_count() * sent.dtype().size_in_bytes()) as u64;
    }

    /// Normally distributed numbers that depend only on the seed, the parameter's name and the iteration, so they are
    /// the same on every rank.
    fn random(&self, name: &str, shape: (usize, usize), dtype: DType, device: &Device) -> Result<Tensor> {
        // The name's hash seeds a SplitMix64.
        let mut state = fnv1a_64(name.as_bytes()).wrapping_add(self.options.seed).wrapping_add(self.iteration << 32);
        let mut uniform = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut word = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((word ^ (word >> 31)) >> 11) as f64 / (1u64 << 53) as f64
        };
        // The Box-Muller method; 1 - u is never 0.
        let mut normal = || (-2.0 * (1.0 - uniform()).ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos();
        let values: Vec<f64> = (0..shape.0 * shape.1).map(|_| normal()).collect();
        Ok(Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?)
    }
}

impl CommHook for PowerSgd {
    fn describe(&self) -> String {
        format!("PowerSGD, {:?}", self.options)
    }

    fn run(&mut self, bucket: &GradBucket, group: &ProcessGroup) -> Result<HookWork<Self>> {
        let work = if self.iteration < self.options.start_iter {
            self.bytes += bucket.bytes() as u64;
            all_reduce(bucket, group)
        } else {
            self.first_stage(bucket, group)
        };
        self.iteration += u64::from(bucket.is_last());
        work
    }

    fn bytes_sent(&self) -> Option<u64> {
        Some(self.bytes)
    }

    /// Contains `iteration`, and for each matrix `{parameter}.start`, `{parameter}.q` and, with error feedback,
    /// `{parameter}.error`.
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        let mut dict = state::begin(KIND)?;
        dict.insert("iteration".to_string(), state::count(self.iteration)?);
        for (name, MatrixState { start, q, error }) in &self.matrices {
            let parts = [(START, Some(start)), (Q, Some(q)), (ERROR, error.as_ref())];
            dict.extend(
                parts.into_iter().filter_map(|(part, tensor)| Some((format!("{name}{part}"), tensor?.clone()))),
            );
        }
        Ok(dict)
    }

    fn load_state_dict(&mut self, dict: &HashMap<String, Tensor>) -> Result<()> {
        let mut loader = Loader::new(dict, KIND)?;
        let iteration = loader.count("iteration")?;
        let mut matrices = HashMap::new();
        for name in dict.keys().filter_map(|key| key.strip_suffix(START)) {
            let mut part = |part: &str| Ok::<_, Error>(loader.tensor(&format!("{name}{part}"))?.copy()?);
            let error = if self.options.use_error_feedback { Some(part(ERROR)?) } else { None };
            matrices.insert(name.to_string(), MatrixState { start: part(START)?, q: part(Q)?, error });
        }
        loader.finish()?;
        (self.iteration, self.matrices) = (iteration, matrices);
        Ok(())
    }
}

const KIND: &str = "PowerSGD";
const START: &str = ".start";
const Q: &str = ".q";
const ERROR: &str = ".error";

/// Takes the next elements of `flat` as a matrix.
fn take(flat: &Tensor, offset: &mut usize, shape: (usize, usize)) -> Result<Tensor> {
    let count = shape.0 * shape.1;
    let part = flat.narrow(0, *offset, count)?.reshape(shape)?;
    *offset += count;
    Ok(part)
}

/// Keeps the rows of `rows` that are finite and not zero, and takes the others from `spare`.
fn usable_rows(rows: &Tensor, spare: &Tensor) -> Result<Tensor> {
    let sums = rows.abs()?.sum_keepdim(D::Minus1)?;
    // Comparisons with NaN are false.
    let usable = (sums.gt(0.0)? * sums.le(f64::from(f32::MAX))?)?;
    Ok(usable.broadcast_as(rows.shape())?.contiguous()?.where_cond(rows, spare)?)
}

pub(super) fn zero_where_nan(tensor: &Tensor) -> Result<Tensor> {
    Ok(tensor.eq(tensor)?.where_cond(tensor, &tensor.zeros_like()?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(tensor: &Tensor) -> Vec<Vec<f32>> {
        tensor.to_vec2().unwrap()
    }

    #[test]
    fn what_is_not_finite_stays_visible_and_is_not_kept() {
        for bad in [f32::NAN, f32::INFINITY] {
            let rows = Tensor::new(&[[1f32, 2.], [bad, 1.], [0., 0.]], &Device::Cpu).unwrap();
            let basis = values(&orthonormal(&rows, 0.0).unwrap());
            assert!(basis[1].iter().any(|value| value.is_nan()), "{basis:?}");
            let spare = Tensor::new(&[[7f32, 7.], [8., 8.], [9., 9.]], &Device::Cpu).unwrap();
            assert_eq!(values(&usable_rows(&rows, &spare).unwrap()), [[1., 2.], [8., 8.], [9., 9.]]);
        }
        let error = Tensor::new(&[[1f32, f32::NAN]], &Device::Cpu).unwrap();
        assert_eq!(values(&zero_where_nan(&error).unwrap()), [[1., 0.]]);
    }

    #[test]
    fn random_factors_are_normal_and_follow_from_seed_name_and_iteration() {
        let hook = |seed| PowerSgd::new(PowerSgdOptions { seed, ..Default::default() }).unwrap();
        let draw = |hook: &PowerSgd, name| {
            hook.random(name, (1, 10_000), DType::F32, &Device::Cpu).unwrap().flatten_all().unwrap().to_vec1::<f32>()
        };
        let first = draw(&hook(1), "a").unwrap();
        assert_eq!(first, draw(&hook(1), "a").unwrap());
        let mut later = hook(1);
        later.iteration = 1;
        for other in [draw(&hook(2), "a"), draw(&hook(1), "b"), draw(&later, "a")] {
            let other = other.unwrap();
            let correlation = first.iter().zip(&other).map(|(a, b)| a * b).sum::<f32>() / 10_000.0;
            assert!(correlation.abs() < 0.05, "{correlation}");
        }
        let mean = first.iter().sum::<f32>() / 10_000.0;
        let variance = first.iter().map(|value| value * value).sum::<f32>() / 10_000.0;
        assert!(mean.abs() < 0.05 && (variance - 1.0).abs() < 0.05, "{mean}, {variance}");
    }

    #[test]
    fn options_are_checked() {
        let bad = [
            PowerSgdOptions { matrix_approximation_rank: 0, ..Default::default() },
            PowerSgdOptions { min_compression_rate: f64::NAN, ..Default::default() },
            PowerSgdOptions { min_compression_rate: 0.0, ..Default::default() },
            PowerSgdOptions { orthogonalization_epsilon: -1.0, ..Default::default() },
        ];
        bad.iter().for_each(|options| assert!(PowerSgd::new(*options).is_err(), "{options:?}"));
    }
}
