//! Gradients as 8-bit integers.
use super::power_sgd::zero_where_nan;
use super::{CommHook, GradBucket, HookWork, of_another_model};
use crate::Result;
use crate::process_group::ProcessGroup;
use crate::state::{self, Loader};
use crate::tensor::accumulator;
use candle_core::{D, DType, Tensor};
use std::collections::HashMap;

/// Sends gradients as integers of 8 bits, in blocks of 64 elements with an f32 scale: 27 % of the bytes of f32. It is for links below about
/// 360 Mbit/s: above, [`Bf16Compress`](super::Bf16Compress) is faster, since it calculates less.
///
/// A block's integers are its elements divided by 1/127 of its largest magnitude, rounded. Each rank gets an equal part of the blocks of all
/// ranks by an all-to-all, adds them up in f32 (in f64 for gradients in f64), and sends the integers of the mean to all. So every rank gets
/// the same bits, and nothing is added up in integers. Each of the two roundings changes an element by at most 1/254 of the largest magnitude in
/// its block. What both leave is added to the gradients of the next pass, so that it is only late (error feedback). That needs a
/// copy of the gradients. A group of one rank keeps its gradients.
///
/// A block with an infinite element or NaN becomes NaN on all ranks, which a [`GradScaler`](crate::amp::GradScaler) or
/// [`DdpOptions::on_non_finite`](crate::DdpOptions::on_non_finite) detects, and does not enter the state. When the scaler changes its scale,
/// errors kept from earlier passes keep the old scale.
#[derive(Debug, Default)]
pub struct Int8Compress {
    /// The part of each parameter's gradient that this rank has not sent, flat, in the dtype of the calculation, as a part of the mean.
    errors: HashMap<String, Tensor>,
    bytes: u64,
}

/// The elements that share a scale.
const BLOCK: usize = 64;
/// The integer for 0: candle has no signed integers of 8 bits.
const ZERO: f64 = 128.;
const LARGEST: f64 = 127.;

/// Blocks as integers.
struct Quantized {
    /// u8[blocks, BLOCK].
    integers: Tensor,
    /// f32[blocks].
    scales: Tensor,
}

impl Quantized {
    /// Of [blocks, BLOCK] values. A block that is not finite has the scale NaN.
    fn of(values: &Tensor) -> Result<Self> {
        let largest = values.abs()?.max(D::Minus1)?;
        // The maximum may pass over a NaN; zero times infinity is NaN as well.
        let defect = (values * 0.)?.sum(D::Minus1)?;
        let scales = ((largest / LARGEST)? + defect)?.to_dtype(DType::F32)?;
        let divisors = scales.to_dtype(values.dtype())?;
        // Zeros are divided by one.
        let divisors = (&divisors + divisors.eq(0.)?.to_dtype(values.dtype())?)?;
        let integers = values.broadcast_div(&divisors.unsqueeze(1)?)?.round()?.clamp(-LARGEST, LARGEST)?;
        Ok(Self { integers: (integers + ZERO)?.to_dtype(DType::U8)?, scales })
    }

    /// [blocks, BLOCK] values.
    fn values(&self, dtype: DType) -> Result<Tensor> {
        let integers = (self.integers.to_dtype(dtype)? - ZERO)?;
        Ok(integers.broadcast_mul(&self.scales.to_dtype(dtype)?.unsqueeze(1)?)?)
    }

    fn empty_like(&self, blocks: usize) -> Result<Self> {
        let device = self.integers.device();
        let integers = Tensor::zeros((blocks, BLOCK), DType::U8, device)?;
        Ok(Self { integers, scales: Tensor::zeros(blocks, DType::F32, device)? })
    }

    fn bytes(&self) -> u64 {
        (self.integers.elem_count() + 4 * self.scales.elem_count()) as u64
    }
}

/// A bucket in flight.
struct InFlight {
    /// This rank's part of the mean, with the errors of the last pass: [blocks, BLOCK].
    local: Tensor,
    sent: Quantized,
    /// For all ranks alike.
    blocks_of_a_rank: usize,
}

impl Int8Compress {
    /// The part that was not sent of a bucket's gradients in the last pass, flat. None if nothing is known of any.
    fn error(&self, bucket: &GradBucket, dtype: DType) -> Result<Option<Tensor>> {
        let mut parts = Vec::new();
        for (gradient, name) in bucket.gradients().iter().zip(bucket.names()) {
            let (count, device) = (gradient.elem_count(), gradient.device());
            parts.push(match self.errors.get(name) {
                Some(error) if error.dims() != [count] || error.dtype() != dtype => return Err(of_another_model(name)),
                Some(error) => error.to_device(device)?,
                None => Tensor::zeros(count, dtype, device)?,
            });
        }
        let is_known = bucket.names().iter().any(|name| self.errors.contains_key(name));
        Ok(if is_known { Some(Tensor::cat(&parts, 0)?) } else { None })
    }

    /// Adds up this rank's blocks of all ranks, and sends the mean to all.
    fn second_stage(&mut self, group: &ProcessGroup, flight: InFlight, received: &Quantized) -> Result<HookWork<Self>> {
        let InFlight { blocks_of_a_rank: own, .. } = flight;
        let parts = received.values(flight.local.dtype())?.reshape((group.world_size(), own, BLOCK))?;
        let mean = parts.sum(0)?;
        let sent = Quantized::of(&mean)?;
        let all = sent.empty_like(own * group.world_size())?;
        self.bytes += sent.bytes();
        let works = [
            group.all_gather_async(&all.integers, &sent.integers)?,
            group.all_gather_async(&all.scales, &sent.scales)?,
        ];
        Ok(HookWork::then(works, move |hook: &mut Self, bucket, group| {
            let dtype = mean.dtype();
            let mut rest = (&flight.local - flight.sent.values(dtype)?)?;
            // The second rounding's is kept by the rank that has rounded.
            let start = group.rank() * own;
            let own_rest = (rest.narrow(0, start, own)? + (&mean - sent.values(dtype)?)?)?;
            rest.slice_set(&own_rest, 0, start)?;
            rest = zero_where_nan(&rest)?.flatten_all()?;
            bucket.set_buffer(&all.values(dtype)?.flatten_all()?.narrow(0, 0, bucket.buffer().elem_count())?)?;
            let mut start = 0;
            for (gradient, name) in bucket.gradients().iter().zip(bucket.names()) {
                let count = gradient.elem_count();
                hook.errors.insert(name.clone(), rest.narrow(0, start, count)?.copy()?);
                start += count;
            }
            Ok(HookWork::done())
        }))
    }
}

impl CommHook for Int8Compress {
    fn describe(&self) -> String {
        "int8 compression".to_string()
    }

    fn run(&mut self, bucket: &GradBucket, group: &ProcessGroup) -> Result<HookWork<Self>> {
        let (count, ranks) = (bucket.buffer().elem_count(), group.world_size());
        if ranks == 1 || count == 0 {
            return Ok(HookWork::done());
        }
        let dtype = accumulator(bucket.buffer().dtype());
        let mut local = (bucket.buffer().to_dtype(dtype)? / ranks as f64)?;
        if let Some(error) = self.error(bucket, dtype)? {
            local = (local + error)?;
        }
        let blocks_of_a_rank = count.div_ceil(BLOCK * ranks);
        let blocks = blocks_of_a_rank * ranks;
        let local = local.pad_with_zeros(0, 0, blocks * BLOCK - count)?.reshape((blocks, BLOCK))?;
        let sent = Quantized::of(&local)?;
        let received = sent.empty_like(blocks)?;
        self.bytes += sent.bytes();
        let works = [
            group.all_to_all_async(&received.integers, &sent.integers)?,
            group.all_to_all_async(&received.scales, &sent.scales)?,
        ];
        let flight = InFlight { local, sent, blocks_of_a_rank };
        Ok(HookWork::then(works, move |hook: &mut Self, _, group| hook.second_stage(group, flight, &received)))
    }

    fn bytes_sent(&self) -> Option<u64> {
        Some(self.bytes)
    }

    /// Contains `{parameter}.error` for each parameter.
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        let mut dict = state::begin(KIND)?;
        dict.extend(self.errors.iter().map(|(name, error)| (format!("{name}{ERROR}"), error.clone())));
        Ok(dict)
    }

    fn load_state_dict(&mut self, dict: &HashMap<String, Tensor>) -> Result<()> {
        let mut loader = Loader::new(dict, KIND)?;
        let names = dict.keys().filter_map(|key| Some((key, key.strip_suffix(ERROR)?)));
        let errors = names.map(|(key, name)| Ok((name.to_string(), loader.tensor(key)?.copy()?)));
        let errors = errors.collect::<Result<_>>()?;
        loader.finish()?;
        self.errors = errors;
        Ok(())
    }
}

const KIND: &str = "Int8Compress";
const ERROR: &str = ".error";
