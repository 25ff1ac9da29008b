//! Int8Compress: integers of 8 bits, which are added up as floating-point numbers.
use crate::common::{assert_close, floats, ranks, tensor, tiny};
use crate::weights::{Model, SHAPES, backward, flat, small_buckets};
use candle_core::{Device, Tensor};
use candle_ddp::comm_hook::Int8Compress;
use candle_ddp::{DdpOptions, ProcessGroup, Result};

/// No multiple of a block's 64.
const ELEMENTS: usize = 253;

fn model(pg: &ProcessGroup, options: DdpOptions) -> Result<Model> {
    crate::weights::model(pg, Int8Compress::default(), options)
}

/// The gradients of a rank in a step, from a function of the number of the element.
fn gradients(value: impl Fn(usize) -> f64) -> Vec<Option<Tensor>> {
    let mut start = 0;
    let gradient = |(_, shape): &(&str, &[usize])| {
        let count: usize = shape.iter().product();
        let values: Vec<f32> = (start..start + count).map(|number| value(number) as f32).collect();
        start += count;
        Some(Tensor::from_vec(values, *shape, &Device::Cpu).unwrap())
    };
    SHAPES.iter().map(gradient).collect()
}

fn random(rank: usize, step: usize) -> Vec<Option<Tensor>> {
    let values = floats(&tensor(&[ELEMENTS], (1 + rank * 1000 + step * 10) as u64));
    gradients(|number| f64::from(values[number]))
}

fn mean(world: usize, step: usize) -> Vec<f32> {
    let all: Vec<_> = (0..world).map(|rank| flat(&random(rank, step))).collect();
    (0..ELEMENTS).map(|at| all.iter().map(|values| values[at]).sum::<f32>() / world as f32).collect()
}

/// Each block has an element of the largest magnitude, 127, wherever it begins.
#[test]
fn multiples_of_the_largest_magnitude_over_127_arrive_as_they_are() {
    let integer = |number: usize| if number.is_multiple_of(4) { 127. } else { (number * 37 % 255) as f64 - 127. };
    for (world, options) in [(2, tiny()), (3, small_buckets()), (4, DdpOptions::default())] {
        // Alone in a bucket, `bias` and `small` have such an element, too.
        let scaled = |factor: f64| gradients(|number| factor * integer(number));
        ranks(world, |pg| {
            let ddp = model(&pg, options.clone())?;
            for factor in [1., 0.125, 1024.] {
                assert_close(
                    &flat(&backward(&ddp, &scaled(factor))?),
                    &flat(&scaled(factor)),
                    1e-5,
                    "all are the same",
                );
            }
            Ok(())
        });
    }
}

#[test]
fn an_element_is_rounded_to_a_127th_of_the_largest_one() {
    let value =
        |number: usize| if number.is_multiple_of(4) { 1. } else { 0.703 * ((number * 37 % 255) as f64 / 127. - 1.) };
    let rounded = |number: usize| (127. * value(number)).round() / 127.;
    ranks(2, |pg| {
        let out = flat(&backward(&model(&pg, DdpOptions::default())?, &gradients(value))?);
        assert_close(&out, &flat(&gradients(rounded)), 1e-5, "rounded");
        assert!(out != flat(&gradients(value)));
        Ok(())
    });
}

#[test]
fn a_result_is_the_mean_within_both_roundings_and_has_the_same_bits_on_all_ranks() {
    for world in [1, 2, 3, 5] {
        for options in [DdpOptions::default(), small_buckets()] {
            let all = ranks(world, |pg| {
                let ddp = model(&pg, options.clone())?;
                (0..3).map(|step| Ok(flat(&backward(&ddp, &random(pg.rank(), step))?))).collect::<Result<Vec<_>>>()
            });
            assert!(all.iter().all(|of_rank| *of_rank == all[0]));
            for (step, result) in all[0].iter().enumerate() {
                let expected = mean(world, step);
                let largest = |values: &[f32]| values.iter().fold(0f32, |largest, value| largest.max(value.abs()));
                let of_ranks: f32 = (0..world).map(|rank| largest(&flat(&random(rank, step)))).sum();
                // The roundings of this pass, and those that the last one left.
                let bound = 1.05 * 2. * (of_ranks / world as f32 + largest(&expected)) / 254.;
                for (value, expected) in result.iter().zip(&expected) {
                    assert!((value - expected).abs() <= bound, "{world} ranks, step {step}: {value}, not {expected}");
                }
                assert_eq!(*result == expected, world == 1, "{world} ranks");
            }
        }
    }
}

#[test]
fn a_pass_sends_a_byte_for_each_element_and_a_scale_for_each_block_twice() {
    ranks(2, |pg| {
        let ddp = model(&pg, DdpOptions::default())?;
        backward(&ddp, &random(pg.rank(), 0))?;
        // Four blocks to all ranks, and two as the mean, with five bytes that say which parameters were used.
        assert_eq!(ddp.comm_hook_traffic(), Some((4 * 253, Some((4 + 2) * (64 + 4) + 5))));
        Ok(())
    });
}

/// A gradient that is much smaller than others in its block is sent when it has added up.
#[test]
fn what_is_rounded_away_comes_later() {
    // The ranks send it at different times, so the mean is rounded as well.
    let value = |rank: usize, number: usize| {
        if number.is_multiple_of(2) { 1. } else { 1e-4 * (1 + 2 * rank) as f64 }
    };
    let steps = 200;
    for world in [2, 3] {
        let sums = ranks(world, |pg| {
            let ddp = model(&pg, small_buckets())?;
            let mut sum = vec![0f32; ELEMENTS];
            for _ in 0..steps {
                let out = flat(&backward(&ddp, &gradients(|number| value(pg.rank(), number)))?);
                sum.iter_mut().zip(out).for_each(|(sum, value)| *sum += value);
            }
            Ok(sum)
        });
        for (number, sum) in sums[0].iter().enumerate() {
            // The pending part is less than one rounding of each stage.
            let mean = (0..world).map(|rank| value(rank, number)).sum::<f64>() / world as f64;
            let expected = f64::from(steps) * mean;
            assert!((f64::from(*sum) - expected).abs() < 2. / 127., "{world} ranks, {number}: {sum}, not {expected}");
        }
    }
}

#[test]
fn zeros_tiny_and_huge_gradients_are_no_trouble() {
    for value in [0., 1e-45, 3e-44, 1e-38, 3e38] {
        ranks(2, |pg| {
            let ddp = model(&pg, DdpOptions::default())?;
            let out = flat(&backward(&ddp, &gradients(|_| value))?);
            assert!(out.iter().all(|out| (f64::from(*out) - value).abs() <= 0.01 * value + 1e-42), "{value}: {out:?}");
            Ok(())
        });
    }
}
