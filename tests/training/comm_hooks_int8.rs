//! Int8Compress: integers of 8 bits, which are added up as floating-point numbers.
use crate::common::{assert_close, assert_error, floats, ranks, tensor, tiny};
use crate::weights::{Model, SHAPES, backward, flat, small_buckets, wrap};
use candle_core::{DType, Device, Tensor};
use candle_ddp::checkpoint::StateDict;
use candle_ddp::comm_hook::Int8Compress;
use candle_ddp::{Buckets, DdpOptions, OnNonFinite, Precision, ProcessGroup, Result};

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
fn what_is_not_finite_reaches_all_ranks_and_does_not_persist() {
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        for spoilt in [0, 77, ELEMENTS - 1] {
            ranks(3, |pg| {
                let ddp = model(&pg, small_buckets())?;
                for step in 0..4 {
                    let own = flat(&random(pg.rank(), step));
                    let is_bad = |number| step == 1 && pg.rank() == 2 && number == spoilt;
                    let value = |number: usize| if is_bad(number) { bad } else { f64::from(own[number]) };
                    let out = flat(&backward(&ddp, &gradients(value))?);
                    match step {
                        1 => assert!(!out[spoilt].is_finite(), "{bad} did not reach rank {}", pg.rank()),
                        _ => assert_close(&out, &mean(3, step), 0.05, &format!("step {step}")),
                    }
                }
                Ok(())
            });
        }
    }
}

#[test]
fn a_step_that_is_not_finite_is_left_out_on_all_ranks() {
    ranks(2, |pg| {
        let on_non_finite = Some(OnNonFinite::Skip { at_most: 2 });
        let ddp = model(&pg, DdpOptions { on_non_finite, ..small_buckets() })?;
        for step in 0..3 {
            let own = flat(&random(pg.rank(), step));
            let value =
                |number: usize| if step == 1 && pg.rank() == 1 && number == 3 { f64::NAN } else { own[number].into() };
            backward(&ddp, &gradients(value))?;
            assert_eq!(ddp.skipped_steps(), u64::from(step >= 1), "step {step}");
        }
        Ok(())
    });
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

#[test]
fn other_dtypes_work() {
    let half = |param_dtype| Precision::Half { param_dtype, buffer_dtype: None };
    let cases = [
        (DType::F64, Precision::Pure(DType::F64), None),
        (DType::BF16, Precision::Pure(DType::BF16), None),
        (DType::F32, half(DType::F16), None),
        (DType::F32, half(DType::BF16), Some(DType::F32)),
    ];
    for (dtype, precision, reduce_dtype) in cases {
        ranks(2, |pg| {
            let buckets = Buckets { reduce_dtype, ..small_buckets().buckets };
            let ddp = model(&pg, DdpOptions { precision, buckets, ..small_buckets() })?;
            for step in 0..2 {
                let out = backward(&ddp, &random(pg.rank(), step))?;
                assert!(out.iter().flatten().all(|gradient| gradient.dtype() == dtype));
                assert_close(&flat(&out), &mean(2, step), 0.05, &format!("{precision:?}, {reduce_dtype:?}"));
            }
            Ok(())
        });
    }
}

#[test]
fn accumulated_gradients_are_sent_as_their_sum() {
    ranks(2, |pg| {
        let ddp = model(&pg, small_buckets())?;
        let guard = ddp.no_sync();
        backward(&ddp, &random(pg.rank(), 0))?;
        drop(guard);
        assert_eq!(ddp.comm_hook_traffic().unwrap().1, Some(0));
        let out = flat(&backward(&ddp, &random(pg.rank(), 1))?);
        let expected: Vec<f32> = mean(2, 0).iter().zip(mean(2, 1)).map(|(a, b)| a + b).collect();
        assert_close(&out, &expected, 0.05, "two micro-batches");
        Ok(())
    });
}

#[test]
fn ranks_may_use_different_parameters() {
    ranks(3, |pg| {
        let ddp = model(&pg, small_buckets())?;
        for step in 0..4 {
            let mut own = random(pg.rank(), step);
            if pg.rank() == step % 3 {
                own[2] = None;
            }
            let out = backward(&ddp, &own)?;
            let of_conv = |rank: usize| floats(random(rank, step)[2].as_ref().unwrap());
            let mut expected = vec![0f32; 120];
            for rank in (0..3).filter(|rank| *rank != step % 3) {
                expected.iter_mut().zip(of_conv(rank)).for_each(|(sum, value)| *sum += value / 3.);
            }
            assert_close(&floats(out[2].as_ref().unwrap()), &expected, 0.05, &format!("step {step}"));
        }
        Ok(())
    });
}

#[test]
fn the_state_of_another_model_is_refused() {
    ranks(2, |pg| {
        let ddp = model(&pg, DdpOptions::default())?;
        backward(&ddp, &random(pg.rank(), 0))?;
        let state = ddp.comm_hook_state().expect("a hook").state_dict()?;
        assert_eq!(state["a.error"].dims(), [120]);
        let other = wrap(&pg, &[("a", &[10])], DdpOptions::default())?;
        other.register_comm_hook(Int8Compress::default())?;
        other.comm_hook_state().expect("a hook").load_state_dict(&state)?;
        assert_error(backward(&other, &[Some(tensor(&[10], 1))]), &["has another shape or dtype"]);
        Ok(())
    });
}
