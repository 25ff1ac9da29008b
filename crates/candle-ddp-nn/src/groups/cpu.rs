//! The loops for CPUs. f16 and bf16 are computed in f32.
use super::extents::Extents;
use crate::channels::sums;
use crate::row_norm::sum;
use candle_core::{DType, Device, Result, Shape, Storage, Tensor, WithDType};
use candle_ddp_tensor::borrow::with_slice;
use candle_ddp_tensor::parallel::Each;
use candle_ddp_tensor::{Element, Real, dispatch, vectorise};
use rayon::prelude::*;

/// The approximate number of elements that a thread takes at a time.
const BLOCK_ELEMENTS: usize = 1 << 14;
/// The elements whose mean and spread are computed while they are in the first cache.
const RUN: usize = 1 << 12;

/// Mean and 1 / deviation of each group.
type Statistics = Vec<[f64; 2]>;

/// (x − mean) / √(variance + eps) × weight + bias, where weight and bias belong to channels, the others to groups.
pub(super) fn forward(
    x: &Tensor,
    extents: Extents,
    parameters: Option<[&Tensor; 2]>,
    eps: f64,
) -> Result<((Storage, Shape), Statistics)> {
    let Extents { samples, groups, in_group, spatial } = extents;
    let size = extents.size();
    dispatch!(x.dtype(), "group normalisation", T => {
        type Acc = <T as Element>::Real;
        let parameters = match parameters {
            Some([weight, bias]) => Some([numbers::<Acc>(weight)?, numbers::<Acc>(bias)?]),
            None => None,
        };
        let mut y = vec![T::from_f64(0.0); x.elem_count()];
        let mut statistics = vec![[0.0; 2]; samples * groups];
        let at_once = (BLOCK_ELEMENTS / size.max(1)).max(1);
        let block = (at_once * size).max(1);
        with_slice::<T, _>(x, |x| {
            let blocks = y.par_chunks_mut(block).zip(x.par_chunks(block)).zip(statistics.par_chunks_mut(at_once));
            blocks.enumerate().each(|(block, ((y, x), statistics))| {
                vectorise!(|| {
                    let of_groups = y.chunks_exact_mut(size).zip(x.chunks_exact(size)).zip(statistics);
                    for (index, ((y, x), statistics)) in of_groups.enumerate() {
                        let channel = (block * at_once + index) % groups * in_group;
                        let [mean, spread] = moments(x);
                        let inverse = 1.0 / (spread / size as f64 + eps).sqrt();
                        *statistics = [mean, inverse];
                        let (mean, inverse) = (Acc::from_f64(mean), Acc::from_f64(inverse));
                        let planes = y.chunks_exact_mut(spatial).zip(x.chunks_exact(spatial));
                        for (index, (y, x)) in planes.enumerate() {
                            let (scale, shift) = match &parameters {
                                Some([weight, bias]) => (weight[channel + index] * inverse, bias[channel + index]),
                                None => (inverse, Acc::default()),
                            };
                            for (y, x) in y.iter_mut().zip(x) {
                                *y = T::narrow((x.widen() - mean) * scale + shift);
                            }
                        }
                    }
                });
            });
            Ok(())
        })?;
        Ok(((Storage::Cpu(T::to_cpu_storage_owned(y)), x.shape().clone()), statistics))
    })
}

/// The gradients of x and, if there are any, of weight and bias.
pub(super) fn backward(
    x: &Tensor,
    dy: &Tensor,
    extents: Extents,
    statistics: &[[f64; 2]],
    (weight, dtypes): (Option<&Tensor>, Option<[DType; 2]>),
) -> Result<(Tensor, Vec<Tensor>)> {
    let Extents { samples, groups, in_group, spatial } = extents;
    let size = extents.size();
    let channels = groups * in_group;
    // Of each plane: Σ dy·x̂ and Σ dy, where x̂ is normalised.
    let mut planes = vec![[0.0; 2]; samples * channels];
    let dx = dispatch!(x.dtype(), "group normalisation", T => {
        type Acc = <T as Element>::Real;
        let weight = weight.map(numbers::<Acc>).transpose()?;
        let mut dx = vec![T::from_f64(0.0); x.elem_count()];
        let at_once = (BLOCK_ELEMENTS / size.max(1)).max(1);
        let block = (at_once * size).max(1);
        with_slice::<T, _>(x, |x| with_slice::<T, _>(dy, |dy| {
            let blocks = dx.par_chunks_mut(block).zip(x.par_chunks(block)).zip(dy.par_chunks(block));
            let blocks = blocks.zip(statistics.par_chunks(at_once)).zip(planes.par_chunks_mut((at_once * in_group).max(1)));
            blocks.enumerate().each(|(block, ((((dx, x), dy), statistics), planes))| {
                vectorise!(|| {
                    let of_groups = dx.chunks_exact_mut(size).zip(x.chunks_exact(size)).zip(dy.chunks_exact(size));
                    let of_groups = of_groups.zip(statistics).zip(planes.chunks_exact_mut(in_group));
                    for (index, ((((dx, x), dy), [mean, inverse]), planes)) in of_groups.enumerate() {
                        let first = (block * at_once + index) % groups * in_group;
                        let weight = |channel: usize| match &weight {
                            Some(weight) => weight[first + channel],
                            None => Acc::from_f64(1.0),
                        };
                        let (mean, deviation) = (Acc::from_f64(*mean), *inverse);
                        let (mut plain, mut weighted) = (0.0, 0.0);
                        let inputs = || x.chunks_exact(spatial).zip(dy.chunks_exact(spatial)).enumerate();
                        for ((channel, (x, dy)), plane) in inputs().zip(planes) {
                            let [dy_x, dy] = sums(x, dy, |x: Acc, dy| [dy * (x - mean), dy]);
                            *plane = [dy_x.to_f64() * deviation, dy.to_f64()];
                            weighted += plane[0] * weight(channel).to_f64();
                            plain += plane[1] * weight(channel).to_f64();
                        }
                        let a = Acc::from_f64(plain / size as f64 * deviation);
                        let b = Acc::from_f64(weighted / size as f64 * deviation * deviation);
                        let inverse = Acc::from_f64(deviation);
                        for ((channel, (x, dy)), dx) in inputs().zip(dx.chunks_exact_mut(spatial)) {
                            let scale = weight(channel) * inverse;
                            for (dx, (x, dy)) in dx.iter_mut().zip(x.iter().zip(dy)) {
                                *dx = T::narrow(dy.widen() * scale - a - (x.widen() - mean) * b);
                            }
                        }
                    }
                });
            });
            Ok(())
        }))?;
        Tensor::from_vec(dx, x.shape(), &Device::Cpu)
    })?;
    let mut totals = [vec![0.0; channels], vec![0.0; channels]];
    for sample in planes.chunks_exact(channels.max(1)) {
        for (channel, plane) in sample.iter().enumerate() {
            totals.iter_mut().zip(plane).for_each(|(total, value)| total[channel] += value);
        }
    }
    let gradients = totals.into_iter().zip(dtypes.into_iter().flatten());
    let gradients = gradients.map(|(total, dtype)| Tensor::from_vec(total, channels, &Device::Cpu)?.to_dtype(dtype));
    Ok((dx, gradients.collect::<Result<_>>()?))
}

/// The values of a parameter.
fn numbers<A: Real>(parameter: &Tensor) -> Result<Vec<A>> {
    parameter.detach().to_dtype(A::DTYPE)?.to_vec1()
}

/// The mean, and the sum of the squared distances from it: of each run in one pass over memory, combined by the method of Chan, Golub
/// and LeVeque (1979).
#[inline(always)]
fn moments<T: Element>(x: &[T]) -> [f64; 2] {
    let (mut count, mut mean, mut spread) = (0.0, 0.0, 0.0);
    for run in x.chunks(RUN) {
        let length = run.len() as f64;
        let of_run = sum(run, |x| x) / T::Real::from_f64(length);
        let squares = sum(run, |x| (x - of_run) * (x - of_run));
        let (distance, share) = (of_run.to_f64() - mean, length / (count + length));
        mean += distance * share;
        spread += squares.to_f64() + distance * distance * count * share;
        count += length;
    }
    [mean, spread]
}
