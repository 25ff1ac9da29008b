//! Top-k sparsification: only the largest gradient elements are sent, the others later.
use super::{CommHook, GradBucket, HookWork, of_another_model};
use crate::process_group::ProcessGroup;
use crate::state::{self, Loader};
use crate::{Error, Result};
use candle_core::{DType, Tensor};
use std::collections::HashMap;

/// Options of [`TopK`]. All ranks must give the same.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TopKOptions {
    /// The share of a bucket's elements that each rank sends, above 0 and at most 1; each element costs 8 bytes.
    /// Default: 0.01.
    pub ratio: f64,
    /// Whether elements that were not sent are added to the next gradient. This needs a copy of the gradients; without
    /// it, most of them are lost for good. Default: true.
    pub use_error_feedback: bool,
}

impl Default for TopKOptions {
    fn default() -> Self {
        Self { ratio: 0.01, use_error_feedback: true }
    }
}

/// Sends the elements of each bucket that are largest on this rank, with their positions. `backward` returns the mean
/// over the ranks of what was sent, and zeros elsewhere. The other elements are kept and added to the next gradient, so
/// nothing is lost (top-k sparsification with error feedback: Stich et al., 2018).
///
/// Kept elements arrive late and in bursts. Optimizers like Adam, which divide by a mean of past squares, handle this
/// badly if too little is sent: watch the loss, and raise `ratio` if it jumps. When a [`GradScaler`](crate::amp::GradScaler)
/// changes its scale, elements kept from earlier passes keep the old scale.
///
/// Every rank receives the elements of all ranks, so this pays off if `ratio` × the number of ranks is well below one
/// half. Elements are selected on the host, in f32: gradients on a GPU are copied there and back.
#[derive(Debug)]
pub struct TopK {
    options: TopKOptions,
    /// Elements that were not sent, by parameter.
    left: HashMap<String, Vec<f32>>,
    bytes: u64,
}

impl TopK {
    /// Creates a hook without state.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for a ratio that is not above 0 and at most 1.
    pub fn new(options: TopKOptions) -> Result<Self> {
        let ratio = options.ratio;
        if !(ratio > 0.0 && ratio <= 1.0) {
            return Err(Error::invalid("ratio", format!("it must be above 0 and at most 1, not {ratio}")));
        }
        Ok(Self { options, left: HashMap::new(), bytes: 0 })
    }

    /// Adds the elements kept from earlier passes.
    fn add_left(&mut self, bucket: &GradBucket, values: &mut [f32]) -> Result<()> {
        let mut rest = values;
        for (gradient, name) in bucket.gradients().iter().zip(bucket.names()) {
            let (part, others) = rest.split_at_mut(gradient.elem_count());
            if let Some(left) = self.left.get(name) {
                if left.len() != part.len() {
                    return Err(of_another_model(name));
                }
                part.iter_mut().zip(left).for_each(|(value, left)| *value += left);
            }
            rest = others;
        }
        Ok(())
    }

    /// Keeps the elements that were not sent. Non-finite values are dropped, since they would stay non-finite.
    fn keep(&mut self, bucket: &GradBucket, values: &[f32]) {
        let mut rest = values;
        for (gradient, name) in bucket.gradients().iter().zip(bucket.names()) {
            let (part, others) = rest.split_at(gradient.elem_count());
            let finite = part.iter().map(|value| if value.is_finite() { *value } else { 0.0 });
            if let Some(left) = self.left.get_mut(name) {
                left.iter_mut().zip(finite).for_each(|(left, value)| *left = value);
            } else {
                self.left.insert(name.clone(), finite.collect());
            }
            rest = others;
        }
    }
}

impl CommHook for TopK {
    fn describe(&self) -> String {
        format!("top-k, {:?}", self.options)
    }

    fn run(&mut self, bucket: &GradBucket, group: &ProcessGroup) -> Result<HookWork<Self>> {
        let (count, device) = (bucket.buffer().elem_count(), bucket.buffer().device());
        if u32::try_from(count).is_err() {
            let reason = format!("a bucket of {count} elements is too large for TopK: choose a smaller bucket_cap_mb");
            return Err(Error::invalid("comm_hook", reason));
        }
        let mut values: Vec<f32> = bucket.buffer().to_dtype(DType::F32)?.to_vec1()?;
        self.add_left(bucket, &mut values)?;
        let k = ((count as f64 * self.options.ratio).ceil() as usize).clamp(count.min(1), count);
        let places = largest(&values, k);
        let chosen: Vec<f32> = places.iter().map(|place| values[*place as usize]).collect();
        places.iter().for_each(|place| values[*place as usize] = 0.0);
        self.bytes += (k * (size_of::<f32>() + size_of::<u32>())) as u64;
        let (places, chosen) = (Tensor::from_vec(places, k, device)?, Tensor::from_vec(chosen, k, device)?);
        let world_size = group.world_size();
        let all_places = Tensor::zeros(world_size * k, DType::U32, device)?;
        let all_chosen = Tensor::zeros(world_size * k, DType::F32, device)?;
        let works = [group.all_gather_async(&all_places, &places)?, group.all_gather_async(&all_chosen, &chosen)?];
        Ok(HookWork::then(works, move |hook: &mut Self, bucket, _| {
            // Kept only now, so that a failed backward pass does not change the state.
            if hook.options.use_error_feedback {
                hook.keep(bucket, &values);
            }
            let mut sums = vec![0f32; count];
            // In rank order, so that all ranks round alike.
            for (place, value) in all_places.to_vec1::<u32>()?.into_iter().zip(all_chosen.to_vec1::<f32>()?) {
                if let Some(sum) = sums.get_mut(place as usize) {
                    *sum += value / world_size as f32;
                }
            }
            bucket.set_buffer(&Tensor::from_vec(sums, count, bucket.buffer().device())?)?;
            Ok(HookWork::done())
        }))
    }

    fn bytes_sent(&self) -> Option<u64> {
        Some(self.bytes)
    }

    /// For each parameter, a one-dimensional tensor of the elements that were not sent.
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        let mut dict = state::begin(KIND)?;
        for (name, left) in &self.left {
            dict.insert(format!("{LEFT}{name}"), state::list(left)?);
        }
        Ok(dict)
    }

    fn load_state_dict(&mut self, dict: &HashMap<String, Tensor>) -> Result<()> {
        let mut loader = Loader::new(dict, KIND)?;
        let mut left = HashMap::new();
        for (key, name) in dict.keys().filter_map(|key| Some((key, key.strip_prefix(LEFT)?))) {
            left.insert(name.to_string(), loader.values::<f32>(key)?);
        }
        loader.finish()?;
        self.left = left;
        Ok(())
    }
}

const KIND: &str = "top-k";
const LEFT: &str = "left.";

/// The positions of the `k` values farthest from zero, ascending; among equal ones, the first. NaN counts as farthest.
fn largest(values: &[f32], k: usize) -> Vec<u32> {
    let mut places: Vec<u32> = (0..values.len() as u32).collect();
    if k < places.len() {
        let size = |place: &u32| values[*place as usize].abs();
        places.select_nth_unstable_by(k, |a, b| size(b).total_cmp(&size(a)).then(a.cmp(b)));
        places.truncate(k);
        places.sort_unstable();
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_are_found() {
        let values = [1.0, -3.0, 2.0, 3.0, 0.0, -2.0];
        assert_eq!(largest(&values, 1), [1]);
        assert_eq!(largest(&values, 3), [1, 2, 3]);
        assert_eq!(largest(&values, 6), [0, 1, 2, 3, 4, 5]);
        assert_eq!(largest(&[f32::INFINITY, -f32::NAN, 5.0], 1), [1]);
    }

    #[test]
    fn ratios_are_checked() {
        for ratio in [0.0, -0.1, 1.1, f64::NAN] {
            assert!(TopK::new(TopKOptions { ratio, ..Default::default() }).is_err(), "{ratio}");
        }
    }
}
