//! Samples that are drawn as often as their weights say.
use super::order::generator;
use super::{EpochOrder, Order};
use candle_ddp_base::debug_fields;
use candle_ddp_state::{Error, Result};
use rayon::prelude::*;
use std::sync::Arc;

/// Draws samples at random, each as often as its weight says, anew in each epoch: the distribution of PyTorch's
/// `WeightedRandomSampler`, for any number of ranks. All ranks' draws are one sequence in which the ranks take turns, so
/// without replacement no sample goes to two ranks. The numbers are the same in every run with the seed
/// ([`SamplerOptions::seed`](super::SamplerOptions::seed)), and are not PyTorch's.
///
/// ```
/// use candle_ddp::data::{DataLoader, LoaderOptions, WeightedSampler};
///
/// // Two classes, of which the second is rare: with these weights, an epoch has about as many samples of each.
/// let labels = [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0];
/// let count = |class| labels.iter().filter(|label| **label == class).count() as f64;
/// let weights = labels.map(|label| 1. / count(label));
/// let sampler = WeightedSampler::with_replacement(weights, labels.len())?;
/// # candle_ddp::spawn(2, |pg| {
/// # let sampler = sampler.clone();
/// let loader = DataLoader::with_order(0..12, sampler, &pg, LoaderOptions { batch_size: 3, ..Default::default() }, Ok)?;
/// assert_eq!(loader.num_batches(), 2);
/// # Ok(())
/// # })?;
/// # Ok::<(), candle_ddp::Error>(())
/// ```
#[derive(Clone)]
pub struct WeightedSampler {
    draw: Draw,
    num_samples: usize,
    dataset_len: usize,
}

#[derive(Clone)]
enum Draw {
    /// The sums of the weights of each sample and those before it.
    WithReplacement(Arc<[f64]>),
    /// The weights.
    Without(Arc<[f64]>),
}

impl WeightedSampler {
    /// Draws `num_samples` samples in each epoch, for all ranks together, each independently of the others. Sample `i` of the dataset
    /// is drawn with probability `weights[i]` over their sum.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a weight is negative, NaN or infinite, if their sum is infinite or none is above 0, and if
    /// `num_samples` is 0.
    pub fn with_replacement(weights: impl Into<Vec<f64>>, num_samples: usize) -> Result<Self> {
        let mut weights = weights.into();
        let dataset_len = weights.len();
        check(&weights, num_samples)?;
        let mut sum = 0.;
        for weight in &mut weights {
            sum += *weight;
            *weight = sum;
        }
        if sum.is_infinite() {
            return Err(Error::invalid("weights", "their sum overflows f64: divide them by the largest one"));
        }
        Ok(Self { draw: Draw::WithReplacement(weights.into()), num_samples, dataset_len })
    }

    /// Draws `num_samples` different samples in each epoch, for all ranks together: each of those that are left with a probability
    /// that is proportional to its weight. Those with large weights tend to come first, so an epoch of all samples is a matter of
    /// order alone.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a weight is negative, NaN or infinite, if fewer than `num_samples` are above 0, and if
    /// `num_samples` is 0.
    pub fn without_replacement(weights: impl Into<Vec<f64>>, num_samples: usize) -> Result<Self> {
        let weights = weights.into();
        let dataset_len = weights.len();
        check(&weights, num_samples)?;
        let above = weights.iter().filter(|weight| **weight > 0.).count();
        if above < num_samples {
            let reason = format!(
                "{num_samples} different samples cannot be drawn, since only {above} of {dataset_len} weights are above 0: draw \
                 fewer, or with replacement"
            );
            return Err(Error::invalid("num_samples", reason));
        }
        Ok(Self { draw: Draw::Without(weights.into()), num_samples, dataset_len })
    }
}

fn check(weights: &[f64], num_samples: usize) -> Result<()> {
    if num_samples == 0 {
        return Err(Error::invalid("num_samples", "it must be at least 1, not 0"));
    }
    if let Some((index, weight)) =
        weights.iter().enumerate().find(|(_, weight)| !(weight.is_finite() && **weight >= 0.))
    {
        let reason =
            format!("each must be a finite number that is not negative, but that of sample {index} is {weight}");
        return Err(Error::invalid("weights", reason));
    }
    if !weights.iter().any(|weight| *weight > 0.) {
        let reason = format!("at least one must be above 0, but all {} are 0", weights.len());
        return Err(Error::invalid("weights", reason));
    }
    Ok(())
}

impl Order for WeightedSampler {
    fn dataset_len(&self) -> usize {
        self.dataset_len
    }

    fn epoch_order(&self, seed: u64, epoch: u64) -> Result<EpochOrder> {
        let uniform = uniform(seed, epoch);
        Ok(match &self.draw {
            Draw::WithReplacement(sums) => {
                let total = sums.last().copied().unwrap_or(0.);
                let draw = |place: usize| {
                    let point = (uniform)(place) * total;
                    // The first sum above the point is never that of a sample of weight 0.
                    sums.partition_point(|sum| *sum <= point)
                };
                (0..self.num_samples).into_par_iter().map(draw).collect::<Vec<_>>().into_iter().collect()
            }
            Draw::Without(weights) => {
                // Exponential clocks: of those that have not rung, the next one to ring is sample i with a probability
                // proportional to its rate, weights[i]. PyTorch's multinomial draws so as well.
                let ring = |(index, weight): (usize, &f64)| {
                    (*weight > 0.).then(|| (-(1. - (uniform)(index)).ln() / weight, index))
                };
                let mut rings: Vec<(f64, usize)> = weights.par_iter().enumerate().filter_map(ring).collect();
                let earlier = |a: &(f64, usize), b: &(f64, usize)| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1));
                if self.num_samples < rings.len() {
                    rings.select_nth_unstable_by(self.num_samples, earlier);
                    rings.truncate(self.num_samples);
                }
                rings.par_sort_unstable_by(earlier);
                rings.into_iter().map(|(_, index)| index).collect()
            }
        })
    }
}

/// Numbers in `0 <= x < 1`, by their places in the epoch.
fn uniform(seed: u64, epoch: u64) -> impl Fn(usize) -> f64 + Sync {
    let draw = generator(*b"weighted", seed, epoch).draw(0);
    move |place| draw.unit(place as u64)
}

debug_fields!(WeightedSampler: |this| dataset_len = this.dataset_len, num_samples = this.num_samples,
    replacement = matches!(this.draw, Draw::WithReplacement(_)));
