//! Sums and maps over the channels (dimension 1) of a batch, the two halves of batch normalisation: fused loops on
//! the CPU, kernels on CUDA. f16 and bf16 are computed in f32. A batch may be empty.
pub(super) mod cuda;
mod extents;
mod fused;
#[cfg(test)]
mod tests;

use candle_ddp_tensor::parallel::Each;
pub(super) use fused::{After, Gate, Passed};

use super::row_norm::fold;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Layout, Result, Shape, Storage, Tensor, WithDType};
use candle_ddp_tensor::borrow::{slice, with_slice};
use candle_ddp_tensor::{Element, MemoryFormat, Real, dispatch};
use extents::Extents;
use rayon::prelude::*;
use std::ops::Range;

/// The number of channels that are summed together: neighbours share cache lines if a channel is a single number.
const BLOCK: usize = 16;
/// Independent partial sums, so that the compiler can use vector instructions.
const LANES: usize = 16;
/// The minimum number of neighbouring numbers in a channel for computing their mean and spread in one pass.
const MIN_RUN: usize = 32;

/// A batch as the functions here take it, contiguous: in channels last, every pixel is a sample (N × H × W, C).
pub(super) fn batch_of(format: MemoryFormat, x: &Tensor) -> Result<Tensor> {
    let stored = format.stored(&x.detach())?;
    match format {
        MemoryFormat::Contiguous => Ok(stored),
        MemoryFormat::ChannelsLast => stored.reshape(((), x.dim(1)?)),
    }
}

/// The tensor of shape `shape` whose [`batch_of`] is `batch`.
pub(super) fn tensor_of(format: MemoryFormat, batch: &Tensor, shape: &Shape) -> Result<Tensor> {
    format.view(&batch.reshape(format.stored_shape(shape))?)
}

/// Each channel's mean (zero unless `centred`) and mean squared distance from it, as a tensor of shape (2, channels).
/// Without samples, both are zero.
/// On the CPU; [`cuda::statistics`] computes more at once.
pub(super) fn moments(x: &Tensor, centred: bool) -> Result<Tensor> {
    let extents = Extents::of(x.dims());
    dispatch!(x.dtype(), "batch normalisation", T => with_slice::<T, _>(x, |x| {
        type Acc = <T as Element>::Real;
        let count = (extents.samples * extents.spatial).max(1) as f64;
        if centred && extents.spatial >= MIN_RUN {
            return rows::<Acc>(moments_of_runs::<T>(extents, x), extents.channels);
        }
        let mut moments = if centred {
            channel_sums(extents, #[inline(always)] |_, range| sums(&x[range.clone()], &x[range], |x: Acc, _| [x]))
        } else {
            vec![0.0; extents.channels]
        };
        moments.iter_mut().for_each(|sum| *sum /= count);
        let squares = channel_sums(extents, #[inline(always)] |channel, range| {
            let mean = Acc::from_f64(moments[channel]);
            sums(&x[range.clone()], &x[range], |x: Acc, _| [(x - mean) * (x - mean)])
        });
        moments.extend(squares.into_iter().map(|sum| sum / count));
        rows::<Acc>(moments, extents.channels)
    }))
}

/// The means and the mean squared distances from them, in one pass over memory: each run's mean and spread are
/// computed while it is in the cache, and combined by the method of Chan, Golub and LeVeque (1979).
fn moments_of_runs<T: Element>(extents: Extents, x: &[T]) -> Vec<f64> {
    let Extents { samples, channels, spatial } = extents;
    let length = T::Real::from_f64(spatial as f64);
    let mut moments = vec![[0.0; 2]; channels];
    moments.par_chunks_mut(BLOCK).enumerate().each(|(block, moments)| {
        for sample in 0..samples {
            for (index, [mean, spread]) in moments.iter_mut().enumerate() {
                let start = (sample * channels + block * BLOCK + index) * spatial;
                let run = &x[start..start + spatial];
                let (run_mean, run_spread) = candle_ddp_tensor::vectorise!(|| {
                    let [sum] = sums(run, run, |x, _| [x]);
                    let mean = sum / length;
                    let [spread] = sums(run, run, |x, _| [(x - mean) * (x - mean)]);
                    (mean.to_f64(), spread.to_f64())
                });
                let (before, share) = (sample as f64, 1.0 / (sample + 1) as f64);
                let distance = run_mean - *mean;
                *mean += distance * share;
                *spread += run_spread + distance * distance * before * share * spatial as f64;
            }
        }
    });
    let count = (samples * spatial).max(1) as f64;
    moments.iter().map(|[mean, _]| *mean).chain(moments.iter().map(|[_, spread]| spread / count)).collect()
}

/// Each channel's Σ dy and Σ dy·(x − mean), as a tensor of shape (2, channels); with a `gate`, only of the dy that
/// pass it.
/// On the CPU; [`cuda::gradient_totals`] computes more at once.
pub(super) fn gradient_sums(x: &Tensor, dy: &Tensor, mean: &Tensor, gate: Option<Gate>) -> Result<Tensor> {
    let extents = Extents::of(x.dims());
    dispatch!(x.dtype(), "batch normalisation", T => {
        type Acc = <T as Element>::Real;
        let (mean, gate) = (mean.to_vec1::<Acc>()?, gate.map(|gate| gate.values::<Acc>()).transpose()?);
        with_slice::<T, _>(x, |x| with_slice::<T, _>(dy, |dy| {
            let sums = channel_sums(extents, #[inline(always)] |channel, range| {
                let mean = mean[channel];
                let (x, dy) = (&x[range.clone()], &dy[range]);
                match &gate {
                    None => sums(x, dy, |x: Acc, dy| [dy, dy * (x - mean)]),
                    Some([scale, shift]) => {
                        let (scale, shift) = (scale[channel], shift[channel]);
                        sums(x, dy, |x: Acc, dy| {
                            let dy = gated((x - mean) * scale + shift, dy);
                            [dy, dy * (x - mean)]
                        })
                    }
                }
            });
            rows::<Acc>(sums, extents.channels)
        }))
    })
}

/// The gradient that passes a ReLU.
#[inline(always)]
fn gated<A: Real>(value: A, gradient: A) -> A {
    if value > A::default() { gradient } else { A::default() }
}

/// Each channel's sum, as a tensor of shape (channels) and the dtype of `x`, which is contiguous.
pub(super) fn totals(x: &Tensor) -> Result<Tensor> {
    let extents = Extents::of(x.dims());
    if x.device().is_cuda() {
        return cuda::totals(x);
    }
    dispatch!(x.dtype(), "the sums of channels", T => with_slice::<T, _>(x, |x| {
        type Acc = <T as Element>::Real;
        let sums = channel_sums(extents, #[inline(always)] |_, range| sums(&x[range.clone()], &x[range], |x: Acc, _| [x]));
        let sums: Vec<T> = sums.into_iter().map(T::from_f64).collect();
        Tensor::from_vec(sums, extents.channels, &candle_core::Device::Cpu)
    }))
}

/// (x − mean) × scale + shift with each channel's own numbers, followed by the operation `after`; the storage of a
/// tensor like `x`, and what a backward pass needs, if there `may_be` one.
pub(super) fn normalise(
    x: &Tensor,
    channels: [&Tensor; 3],
    after: After,
    may_be: bool,
) -> Result<((Storage, Shape), Passed)> {
    let (storage, layout) = x.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => {
            let result = normalise_on_cpu(storage, layout, channels, &after)?;
            let passed = match after {
                After::Nothing => Passed::Nothing,
                After::Relu => Passed::Relu,
                After::AddRelu(z) => Passed::AddRelu(z),
            };
            Ok((result, passed))
        }
        Storage::Cuda(_) => {
            let (result, passed) = cuda::normalise(x, channels, &after, may_be)?;
            Ok((result.into_result(), passed))
        }
        Storage::Metal(_) => candle_core::bail!("batch normalisation: Metal is not supported"),
    }
}

fn normalise_on_cpu(
    x: &CpuStorage,
    layout: &Layout,
    [mean, scale, shift]: [&Tensor; 3],
    after: &After,
) -> Result<(Storage, Shape)> {
    let extents = Extents::of(layout.dims());
    let storage = dispatch!(x.dtype(), "batch normalisation", T => {
        type Acc = <T as Element>::Real;
        let x = slice::<T>(x, layout)?;
        let (mean, scale, shift) = (mean.to_vec1::<Acc>()?, scale.to_vec1::<Acc>()?, shift.to_vec1::<Acc>()?);
        let zero = Acc::default();
        let of = |channel: usize| (mean[channel], scale[channel], shift[channel]);
        let y = match after {
            After::Nothing => channel_map::<T>(extents, #[inline(always)] |channel, range, y| {
                let (mean, scale, shift) = of(channel);
                y.iter_mut().zip(&x[range]).for_each(|(y, x)| *y = T::narrow((x.widen() - mean) * scale + shift));
            }),
            After::Relu => channel_map::<T>(extents, #[inline(always)] |channel, range, y| {
                let (mean, scale, shift) = of(channel);
                y.iter_mut().zip(&x[range]).for_each(|(y, x)| {
                    *y = T::narrow(relu((x.widen() - mean) * scale + shift, zero));
                });
            }),
            After::AddRelu(z) => with_slice::<T, _>(z, |z| Ok(channel_map::<T>(extents, #[inline(always)] |channel, range, y| {
                let (mean, scale, shift) = of(channel);
                let inputs = x[range.clone()].iter().zip(&z[range]);
                y.iter_mut().zip(inputs).for_each(|(y, (x, z))| {
                    *y = T::narrow(relu((x.widen() - mean) * scale + shift + z.widen(), zero));
                });
            })))?,
        };
        Ok(T::to_cpu_storage_owned(y))
    })?;
    Ok((Storage::Cpu(storage), layout.shape().clone()))
}

/// NaN stays NaN, as in PyTorch.
#[inline(always)]
fn relu<A: Real>(value: A, zero: A) -> A {
    if value < zero { zero } else { value }
}

/// The part of `dy` that passes the ReLU of a [`Passed::AddRelu`].
/// On the CPU; [`cuda::gradient_totals`] computes more at once.
pub(super) fn add_relu_gradient(
    x: &Tensor,
    z: &Tensor,
    dy: &Tensor,
    [mean, scale, shift]: [&Tensor; 3],
) -> Result<Tensor> {
    let extents = Extents::of(x.dims());
    dispatch!(x.dtype(), "batch normalisation", T => {
        type Acc = <T as Element>::Real;
        let (mean, scale, shift) = (mean.to_vec1::<Acc>()?, scale.to_vec1::<Acc>()?, shift.to_vec1::<Acc>()?);
        let gradient = with_slice::<T, _>(x, |x| with_slice::<T, _>(z, |z| with_slice::<T, _>(dy, |dy| {
            Ok(channel_map::<T>(extents, #[inline(always)] |channel, range, gradient| {
                let (mean, scale, shift) = (mean[channel], scale[channel], shift[channel]);
                let inputs = x[range.clone()].iter().zip(&z[range.clone()]).zip(&dy[range]);
                gradient.iter_mut().zip(inputs).for_each(|(gradient, ((x, z), dy))| {
                    let value = (x.widen() - mean) * scale + shift + z.widen();
                    *gradient = T::narrow(gated(value, dy.widen()));
                });
            }))
        })))?;
        Tensor::from_vec(gradient, x.shape(), x.device())
    })
}

/// scale × dy − a − (x − mean) × b with each channel's own numbers: the gradient of `x`. With a `gate`, dy counts
/// as zero where it does not pass.
pub(super) fn input_gradient(
    x: &Tensor,
    dy: &Tensor,
    [mean, scale, a, b]: [&Tensor; 4],
    gate: Option<Gate>,
) -> Result<Tensor> {
    let extents = Extents::of(x.dims());
    if x.device().is_cuda() {
        return cuda::input_gradient(x, dy, [mean, scale, a, b], gate);
    }
    dispatch!(x.dtype(), "batch normalisation", T => {
        type Acc = <T as Element>::Real;
        let (mean, scale) = (mean.to_vec1::<Acc>()?, scale.to_vec1::<Acc>()?);
        let (a, b) = (a.to_vec1::<Acc>()?, b.to_vec1::<Acc>()?);
        let gate = gate.map(|gate| gate.values::<Acc>()).transpose()?;
        let dx = with_slice::<T, _>(x, |x| with_slice::<T, _>(dy, |dy| {
            Ok(channel_map::<T>(extents, #[inline(always)] |channel, range, dx| {
                let (mean, scale, a, b) = (mean[channel], scale[channel], a[channel], b[channel]);
                let inputs = dx.iter_mut().zip(x[range.clone()].iter().zip(&dy[range]));
                match &gate {
                    None => inputs.for_each(|(dx, (x, dy))| {
                        *dx = T::narrow(scale * dy.widen() - a - (x.widen() - mean) * b);
                    }),
                    Some([gate_scale, shift]) => {
                        let (gate_scale, shift) = (gate_scale[channel], shift[channel]);
                        inputs.for_each(|(dx, (x, dy))| {
                            let distance = x.widen() - mean;
                            let dy = gated(distance * gate_scale + shift, dy.widen());
                            *dx = T::narrow(scale * dy - a - distance * b);
                        });
                    }
                }
            }))
        }))?;
        Tensor::from_vec(dx, x.shape(), x.device())
    })
}

/// A tensor of shape (2, channels).
fn rows<A: WithDType>(values: Vec<f64>, channels: usize) -> Result<Tensor> {
    let values: Vec<A> = values.into_iter().map(A::from_f64).collect();
    Tensor::from_vec(values, (2, channels), &candle_core::Device::Cpu)
}

/// Adds up, in a fixed order, what `part` returns for each run of neighbouring numbers of a channel; `K` rows of
/// `channels` sums.
fn channel_sums<A: WithDType, const K: usize>(
    extents: Extents,
    part: impl Fn(usize, Range<usize>) -> [A; K] + Sync,
) -> Vec<f64> {
    let Extents { samples, channels, spatial } = extents;
    let mut totals = vec![[0.0; K]; channels];
    totals.par_chunks_mut(BLOCK).enumerate().each(|(block, totals)| {
        candle_ddp_tensor::vectorise!(|| {
            for sample in 0..samples {
                for (index, total) in totals.iter_mut().enumerate() {
                    let channel = block * BLOCK + index;
                    let start = (sample * channels + channel) * spatial;
                    let part = part(channel, start..start + spatial);
                    total.iter_mut().zip(part).for_each(|(total, part)| *total += part.to_f64());
                }
            }
        });
    });
    (0..K).flat_map(|row| totals.iter().map(move |total| total[row])).collect()
}

/// The sums of `terms` over pairs of elements.
#[inline(always)]
pub(super) fn sums<T: Element, const K: usize>(
    a: &[T],
    b: &[T],
    terms: impl Fn(T::Real, T::Real) -> [T::Real; K],
) -> [T::Real; K] {
    let zero = T::Real::from_f64(0.0);
    let mut lanes = [[zero; LANES]; K];
    let (a, b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = a.remainder().iter().zip(b.remainder());
    for (a, b) in a.zip(b) {
        for (lane, (a, b)) in a.iter().zip(b).enumerate() {
            let terms = terms(a.widen(), b.widen());
            lanes.iter_mut().zip(terms).for_each(|(lanes, term)| lanes[lane] += term);
        }
    }
    let mut sums = [zero; K];
    for (sum, lanes) in sums.iter_mut().zip(lanes) {
        *sum = fold(lanes);
    }
    for (a, b) in rest {
        let terms = terms(a.widen(), b.widen());
        sums.iter_mut().zip(terms).for_each(|(sum, term)| *sum += term);
    }
    sums
}

/// A batch filled by `fill`, which gets each run of neighbouring numbers of a channel.
fn channel_map<T: Element>(extents: Extents, fill: impl Fn(usize, Range<usize>, &mut [T]) + Sync) -> Vec<T> {
    let Extents { samples, channels, spatial } = extents;
    let sample_len = channels * spatial;
    let mut values = vec![T::from_f64(0.0); samples * sample_len];
    if values.is_empty() {
        return values;
    }
    values.par_chunks_mut(sample_len).enumerate().each(|(sample, values)| {
        candle_ddp_tensor::vectorise!(|| {
            for (channel, values) in values.chunks_mut(spatial).enumerate() {
                let start = sample * sample_len + channel * spatial;
                fill(channel, start..start + spatial, values);
            }
        });
    });
    values
}
