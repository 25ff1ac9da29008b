//! PowerSGD, a hook that drops parts of a gradient and adds them later, and what all hooks that compress have in common.
use crate::common::{
    assert_close, assert_error, buckets, failing, fill, filled, floats, going_on, golden, ranks, tensor, tiny,
    try_ranks,
};
use crate::weights::{Model, SHAPES, Shapes, backward, flat, full, model, small_buckets, wrap};
use candle_core::{DType, Device, Module, Tensor};
use candle_ddp::checkpoint::{Checkpointer, CheckpointerOptions, StateDict};
use candle_ddp::comm_hook::{AllReduce, CommHook, Fp16Compress, Int8Compress, PowerSgd, PowerSgdOptions};
use candle_ddp::optim::{ParamsReduceLrOnPlateau, ReduceLrOnPlateau};
use candle_ddp::{Buckets, DdpOptions, DistributedDataParallel, Error, Precision, Result};
use candle_nn::{Optimizer, SGD, VarBuilder, VarMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

fn power_sgd(rank: usize) -> PowerSgd {
    // These options also compress small matrices.
    let options = PowerSgdOptions { start_iter: 0, min_compression_rate: 1.01, ..Default::default() };
    PowerSgd::new(PowerSgdOptions { matrix_approximation_rank: rank, ..options }).unwrap()
}

/// Gradients whose matrices have rank 1.
fn thin(rank: usize, step: usize) -> Vec<Option<Tensor>> {
    let gradient = |(index, (_, shape)): (usize, &(&str, &[usize]))| {
        let seed = (1 + rank * 1000 + step * 10 + index) as u64;
        let columns: usize = shape[1..].iter().product();
        let product = tensor(&[shape[0], 1], seed).matmul(&tensor(&[1, columns], seed + 500)).unwrap();
        Some(product.reshape(*shape).unwrap())
    };
    SHAPES.iter().enumerate().map(gradient).collect()
}

fn zeros() -> Vec<Option<Tensor>> {
    SHAPES.iter().map(|(_, shape)| Some(Tensor::zeros(*shape, DType::F32, &Device::Cpu).unwrap())).collect()
}

/// The mean over the ranks of the gradients that `of_rank` returns.
fn mean(world: usize, of_rank: impl Fn(usize) -> Vec<Option<Tensor>>) -> Vec<f32> {
    let mut mean = vec![0.0; flat(&of_rank(0)).len()];
    for rank in 0..world {
        add(&mut mean, &flat(&of_rank(rank)), 1.0 / world as f32);
    }
    mean
}

fn add(sum: &mut [f32], values: &[f32], factor: f32) {
    sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += factor * value);
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    let length = |values: &mut dyn Iterator<Item = f32>| values.map(|value| value * value).sum::<f32>().sqrt();
    length(&mut a.iter().zip(b).map(|(a, b)| a - b)) / length(&mut b.iter().copied())
}

#[test]
fn power_sgd_matches_pytorch() {
    const SHAPES: Shapes =
        &[("wide", &[6, 40]), ("bias", &[6]), ("conv", &[16, 3, 3, 3]), ("small", &[3, 4]), ("tall", &[50, 7])];
    let golden = golden("comm_hook.safetensors");
    let defaults = PowerSgdOptions { start_iter: 0, seed: 3, ..Default::default() };
    let rank_2 = PowerSgdOptions { matrix_approximation_rank: 2, ..defaults };
    let cases = [
        ("rank_1", defaults),
        ("rank_2", PowerSgdOptions { min_compression_rate: 1.2, ..rank_2 }),
        ("no_feedback", PowerSgdOptions { use_error_feedback: false, ..defaults }),
        ("cold_start", PowerSgdOptions { warm_start: false, ..rank_2 }),
        ("epsilon", PowerSgdOptions { orthogonalization_epsilon: 0.5, ..defaults }),
    ];
    for (case, options) in cases {
        ranks(2, |pg| {
            let ddp = wrap(&pg, SHAPES, small_buckets())?;
            ddp.register_comm_hook(PowerSgd::new(options)?)?;
            for step in 0..4 {
                let gradient = |(name, _): &(&str, _)| golden.get(&format!("gradient.{}.{step}.{name}", pg.rank()));
                let gradients: Vec<_> = SHAPES.iter().map(|shape| gradient(shape).cloned()).collect();
                for (got, (name, _)) in backward(&ddp, &gradients)?.iter().zip(SHAPES) {
                    let expected = floats(&golden[&format!("{case}.{step}.{name}")]);
                    let what = format!("{case}, step {step}, {name}");
                    assert_close(&floats(got.as_ref().unwrap()), &expected, 1e-4, &what);
                }
            }
            Ok(())
        });
    }
}

#[test]
fn power_sgd_of_sufficient_rank_gives_the_mean() {
    // The mean over `world` ranks has matrix rank `world`; with rank 4, the surplus rows must not add noise.
    for (world, rank) in [(1, 1), (2, 2), (3, 3), (2, 4)] {
        let out = ranks(world, |pg| {
            let options = PowerSgdOptions {
                matrix_approximation_rank: rank,
                start_iter: 0,
                min_compression_rate: 1.01,
                use_error_feedback: false,
                ..Default::default()
            };
            let ddp = model(&pg, PowerSgd::new(options)?, small_buckets())?;
            (0..4).map(|step| Ok(flat(&backward(&ddp, &thin(pg.rank(), step))?))).collect::<Result<Vec<_>>>()
        });
        for step in 0..4 {
            let expected = mean(world, |rank| thin(rank, step));
            assert_close(&out[0][step], &expected, 1e-5, &format!("{world} ranks, rank {rank}, step {step}"));
            assert!(out.iter().all(|rank| rank[step] == out[0][step]), "ranks must agree bit for bit");
        }
    }
}

#[test]
fn power_sgd_starts_after_the_given_number_of_passes() {
    ranks(2, |pg| {
        let options = PowerSgdOptions { start_iter: 2, ..Default::default() };
        let ddp = model(&pg, PowerSgd::new(options)?, small_buckets())?;
        let plain = model(&pg, AllReduce::default(), small_buckets())?;
        for step in 0..4 {
            let gradients = full(SHAPES, pg.rank(), step);
            let (got, expected) = (flat(&backward(&ddp, &gradients)?), flat(&backward(&plain, &gradients)?));
            assert_eq!(got == expected, step < 2, "step {step}");
        }
        // Two passes of 253 elements; then `a` and `conv` as 12 + 10 and 8 + 15 elements, and the 13 others
        // uncompressed.
        let (gradient_bytes, bytes_sent) = ddp.comm_hook_traffic().unwrap();
        assert_eq!(gradient_bytes, 4 * 253 * 4);
        assert_eq!(bytes_sent, Some(2 * 253 * 4 + 2 * (12 + 10 + 8 + 15 + 13) * 4 + 4 * 5));
        Ok(())
    });
}

/// The summed results of `steps` passes with gradients, and of these followed by as many passes with zeros.
fn sums(world: usize, hook: impl Fn() -> Box<dyn Fn(&Model) -> Result<()>> + Sync, steps: usize) -> [Vec<f32>; 2] {
    let out = ranks(world, |pg| {
        let ddp = wrap(&pg, SHAPES, small_buckets())?;
        hook()(&ddp)?;
        let first = ddp.buckets();
        let mut sum = vec![0.0; 253];
        let mut early = Vec::new();
        for step in 0..2 * steps {
            let gradients = if step < steps { full(SHAPES, pg.rank(), step) } else { zeros() };
            add(&mut sum, &flat(&backward(&ddp, &gradients)?), 1.0);
            if step + 1 == steps {
                early = sum.clone();
            }
        }
        assert_ne!(ddp.buckets(), first, "the state must survive the rebuilding of the buckets");
        Ok([early, sum])
    });
    assert!(out.iter().all(|sums| *sums == out[0]), "ranks must agree bit for bit");
    out.into_iter().next().unwrap()
}

/// The summed results without compression.
fn plain_sum(world: usize, steps: usize) -> Vec<f32> {
    let mut sum = vec![0.0; 253];
    (0..steps).for_each(|step| add(&mut sum, &mean(world, |rank| full(SHAPES, rank, step)), 1.0));
    sum
}

#[test]
fn power_sgd_with_error_feedback_loses_nothing() {
    for world in [2, 3] {
        let [early, late] = sums(world, || Box::new(|ddp| ddp.register_comm_hook(power_sgd(1))), 30);
        let expected = plain_sum(world, 30);
        assert!(distance(&early, &expected) > 0.05, "some of the gradients must still be pending");
        assert!(distance(&late, &expected) < 1e-3, "{}", distance(&late, &expected));
    }
    let without = PowerSgdOptions { start_iter: 0, use_error_feedback: false, ..Default::default() };
    let [_, late] = sums(2, || Box::new(move |ddp| ddp.register_comm_hook(PowerSgd::new(without)?)), 30);
    assert!(distance(&late, &plain_sum(2, 30)) > 0.3, "lost");
}

/// A hook for gradients whose matrices have rank 1, and how exact its means are, in f32 and in 16 bits.
type Hook = (&'static str, fn(&Model) -> Result<()>, [f32; 2]);

const HOOKS: [Hook; 3] = [
    ("PowerSgd", |ddp| ddp.register_comm_hook(power_sgd(3)), [1e-4, 2e-2]),
    ("Int8Compress", |ddp| ddp.register_comm_hook(Int8Compress::default()), [0.05, 0.05]),
    ("Fp16Compress", |ddp| ddp.register_comm_hook(Fp16Compress::default()), [2e-3, 2e-2]),
];

#[test]
fn ranks_may_use_different_parameters_and_resume_unused_ones() {
    for (name, register, [tolerance, _]) in HOOKS {
        ranks(3, |pg| {
            let ddp = wrap(&pg, SHAPES, small_buckets())?;
            register(&ddp)?;
            for step in 0..6 {
                // No rank uses `a` for three steps, then only rank 1; two ranks at a time use `conv`.
                let gradients = |rank: usize| {
                    let mut gradients = thin(rank, step);
                    if step < 3 || rank != 1 {
                        gradients[0] = None;
                    }
                    if rank == step % 3 {
                        gradients[2] = None;
                    }
                    gradients
                };
                let out = backward(&ddp, &gradients(pg.rank()))?;
                assert_eq!(out[0].is_some(), step >= 3, "{name}, step {step}");
                // Next to the largest of all, since parameters share a block of Int8Compress.
                let used = || (0..4).filter(move |index| *index > 0 || step >= 3);
                let expected = mean(3, |rank| {
                    let zeros = |index: usize| Tensor::zeros(SHAPES[index].1, DType::F32, &Device::Cpu).unwrap();
                    used().map(|index| Some(gradients(rank)[index].clone().unwrap_or_else(|| zeros(index)))).collect()
                });
                let found: Vec<_> = used().map(|index| out[index].clone()).collect();
                assert_close(&flat(&found), &expected, tolerance, &format!("{name}, step {step}"));
            }
            Ok(())
        });
    }
}

#[test]
fn non_finite_gradients_reach_all_ranks_and_do_not_persist() {
    // Also in a block's last element, which is filled up.
    for (bad, [row, column]) in [(f32::INFINITY, [3, 5]), (f32::NAN, [0, 0]), (f32::NEG_INFINITY, [11, 9])] {
        for (name, register, [tolerance, _]) in HOOKS {
            ranks(3, |pg| {
                let ddp = wrap(&pg, SHAPES, small_buckets())?;
                register(&ddp)?;
                for step in 0..4 {
                    let mut gradients = thin(pg.rank(), step);
                    if step == 1 && pg.rank() == 2 {
                        let ranges = [row..row + 1, column..column + 1];
                        let spoilt = Tensor::full(bad, (1, 1), &Device::Cpu)?;
                        gradients[0] = Some(gradients[0].as_ref().unwrap().slice_assign(&ranges, &spoilt)?);
                    }
                    let out = backward(&ddp, &gradients)?;
                    if step == 1 {
                        let finite = floats(out[0].as_ref().unwrap()).iter().all(|value| value.is_finite());
                        assert!(!finite, "{name}: {bad} on rank 2 did not reach rank {}", pg.rank());
                    } else {
                        let what = format!("{name}, {bad}, step {step}");
                        assert_close(&flat(&out), &mean(3, |rank| thin(rank, step)), tolerance, &what);
                    }
                }
                Ok(())
            });
        }
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
        (DType::F32, Precision::default(), Some(DType::BF16)),
    ];
    for (dtype, precision, reduce_dtype) in cases {
        for (name, register, [exact, rounded]) in HOOKS {
            let tolerance = if precision == Precision::Pure(DType::F64) { exact } else { rounded };
            ranks(2, |pg| {
                let buckets = Buckets { reduce_dtype, ..small_buckets().buckets };
                let ddp = wrap(&pg, SHAPES, DdpOptions { precision, buckets, ..small_buckets() })?;
                register(&ddp)?;
                for step in 0..2 {
                    let out = backward(&ddp, &thin(pg.rank(), step))?;
                    assert!(out.iter().flatten().all(|gradient| gradient.dtype() == dtype), "the variables'");
                    let what = format!("{name}, {precision:?}, {reduce_dtype:?}");
                    assert_close(&flat(&out), &mean(2, |rank| thin(rank, step)), tolerance, &what);
                }
                let sent = ddp.comm_hook_traffic().unwrap().1;
                assert!(name != "Fp16Compress" || sent == Some(2 * (253 * 2 + 5)), "{name}: {sent:?} bytes");
                Ok(())
            });
        }
    }
}

#[test]
fn the_state_of_another_hook_or_model_is_refused() {
    ranks(1, |pg| {
        let low_rank = || model(&pg, power_sgd(1), DdpOptions::default());
        assert!(wrap(&pg, SHAPES, DdpOptions::default())?.comm_hook_state().is_none());
        let none = model(&pg, AllReduce::default(), DdpOptions::default())?;
        let state = |ddp: &Model| ddp.comm_hook_state().expect("a hook").state_dict();
        let ddp = low_rank()?;
        backward(&ddp, &full(SHAPES, 0, 0))?;
        let of_a_schedule = ReduceLrOnPlateau::new(ParamsReduceLrOnPlateau::default())?.state_dict()?;
        for (other, state) in [(none, &state(&ddp)?), (low_rank()?, &of_a_schedule)] {
            let error = other.comm_hook_state().expect("a hook").load_state_dict(state).unwrap_err();
            assert!(matches!(error, Error::Parameter { .. }), "{error}");
        }
        Ok(())
    });
    // The state of a model whose parameters have other shapes.
    let shapes: Shapes = &[("a", &[10, 12]), ("bias", &[3])];
    for (name, register, _) in &HOOKS[..2] {
        ranks(2, |pg| {
            let [ddp, other] = [wrap(&pg, SHAPES, DdpOptions::default())?, wrap(&pg, shapes, DdpOptions::default())?];
            register(&ddp)?;
            register(&other)?;
            backward(&ddp, &full(SHAPES, pg.rank(), 0))?;
            let state = ddp.comm_hook_state().expect("a hook").state_dict()?;
            assert!(*name == "PowerSgd" || state["a.error"].dims() == [120], "{name}");
            other.comm_hook_state().expect("a hook").load_state_dict(&state)?;
            let gradients = shapes.iter().map(|(_, shape)| Some(tensor(shape, 1))).collect::<Vec<_>>();
            assert_error(backward(&other, &gradients), &["has another shape or dtype"]);
            Ok(())
        });
    }
}

/// The losses before and after `steps` steps of a regression with 24 × 16 weights; each rank has its own data.
fn regression<H: CommHook>(hook: impl Fn() -> H + Sync, steps: usize) -> (f32, f32) {
    let target = tensor(&[16, 24], 77);
    let losses = ranks(2, |pg| {
        let build = |vb| candle_nn::linear_no_bias(24, 16, vb);
        let (ddp, _) = filled(&pg, build, DdpOptions::default(), 5)?;
        ddp.register_comm_hook(hook())?;
        let mut optimizer = SGD::new(ddp.parameters(), 1.0)?;
        let x = tensor(&[64, 24], 500 + pg.rank() as u64);
        let y = x.matmul(&target.t()?)?;
        let mut losses = Vec::new();
        for _ in 0..steps {
            let loss = (ddp.call(|net| net.forward(&x))? - &y)?.sqr()?.mean_all()?;
            losses.push(loss.to_scalar::<f32>()?);
            optimizer.step(&ddp.backward(&loss)?)?;
        }
        Ok(losses)
    });
    let mean = |step: usize| losses.iter().map(|losses| losses[step]).sum::<f32>() / 2.0;
    (mean(0), mean(steps - 1))
}

#[test]
fn a_regression_converges() {
    let (first, plain) = regression(AllReduce::default, 150);
    assert!(plain < first * 1e-3, "{first}, {plain}");
    let (_, last) = regression(|| power_sgd(2), 150);
    assert!(last < first * 1e-2, "from {first} to {last}, and {plain} without");
    let (_, last) = regression(Int8Compress::default, 150);
    assert!(last < first * 2e-3, "from {first} to {last}, and {plain} without");
}

/// The gradients of a second pass, which follows one that failed while the last parameter's bucket was in flight if
/// `fails` is set.
fn after_a_failure<H: CommHook>(hook: impl Fn() -> H + Sync, fails: bool) -> Vec<Vec<f32>> {
    ranks(1, |pg| {
        let build = |vb: VarBuilder| -> candle_core::Result<[Tensor; 2]> {
            let init = candle_nn::Init::Const(1.);
            Ok([vb.get_with_hints((8, 8), "first", init)?, vb.get_with_hints((8, 8), "last", init)?])
        };
        let (varmap, fails_now) = (VarMap::new(), Arc::new(AtomicBool::new(false)));
        let ddp = DistributedDataParallel::with_options(&pg, &varmap, build, tiny())?;
        ddp.register_comm_hook(hook())?;
        fill(&varmap, 3);
        let pass = |scale: f64| {
            let loss = ddp.call(|[first, last]| {
                let hidden = first.matmul(&tensor(&[8, 8], 3))?.apply_op1(failing(&fails_now))?;
                (hidden.matmul(last)?.mul(&tensor(&[8, 8], 9))? * scale)?.sum_all()
            })?;
            ddp.backward(&loss)
        };
        pass(1.)?;
        if fails {
            fails_now.store(true, Ordering::Relaxed);
            assert!(pass(1000.).is_err());
            fails_now.store(false, Ordering::Relaxed);
        }
        let grads = pass(1.)?;
        Ok(ddp.parameters().iter().map(|var| floats(grads.get(var).unwrap())).collect::<Vec<_>>())
    })
    .remove(0)
}

#[test]
fn a_backward_pass_that_fails_leaves_no_trace() {
    assert_eq!(after_a_failure(|| power_sgd(1), true), after_a_failure(|| power_sgd(1), false));
}

/// Tests them alone in a bucket and together with others.
#[test]
fn parameters_may_have_no_elements() {
    for caps in [0., 25.] {
        ranks(2, |pg| {
            let shapes: Shapes = &[("a", &[0, 3]), ("b", &[2, 0]), ("c", &[3, 0, 2]), ("d", &[0]), ("e", &[4])];
            let options = DdpOptions { buckets: buckets(caps, caps), ..Default::default() };
            for hook in 0..3 {
                let ddp = wrap(&pg, shapes, options.clone())?;
                match hook {
                    1 => ddp.register_comm_hook(power_sgd(1))?,
                    2 => ddp.register_comm_hook(Int8Compress::default())?,
                    _ => (),
                }
                for _ in 0..3 {
                    let gradients = shapes.iter().map(|(_, shape)| Some(tensor(shape, 1))).collect::<Vec<_>>();
                    let found = backward(&ddp, &gradients)?;
                    assert_eq!(found.len(), shapes.len());
                }
            }
            Ok(())
        });
    }
}

/// Saves on each rank after three passes and loads into new hooks: training must continue unchanged.
fn resume<H: CommHook>(hook: impl Fn() -> H + Sync) {
    for with_checkpointer in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        ranks(2, |pg| {
            let file = folder.path().join(format!("hook-{}", pg.rank()));
            let mut checkpointer = Checkpointer::new(&pg, folder.path(), CheckpointerOptions::default())?;
            let straight = model(&pg, hook(), DdpOptions::default())?;
            let mut broken = model(&pg, hook(), DdpOptions::default())?;
            for step in 0..6 {
                if step == 3 {
                    let mut state = broken.comm_hook_state().expect("a hook");
                    match with_checkpointer {
                        true => drop(checkpointer.save(3, ("hook", &mut state))?),
                        false => state.save(&file)?,
                    }
                    drop(state);
                    broken = model(&pg, hook(), DdpOptions::default())?;
                    // Buckets get the order of gradients in the first pass.
                    backward(&broken, &zeros())?;
                    let mut state = broken.comm_hook_state().expect("a hook");
                    match with_checkpointer {
                        true => assert_eq!(checkpointer.load_latest(("hook", &mut state))?, Some(3)),
                        false => state.load(&file)?,
                    }
                }
                let gradients = full(SHAPES, pg.rank(), step);
                let (expected, found) = (backward(&straight, &gradients)?, backward(&broken, &gradients)?);
                assert!(flat(&found) == flat(&expected), "step {step}");
            }
            Ok(())
        });
        if with_checkpointer {
            let error = try_ranks(1, |pg| {
                let ddp = model(&pg, hook(), DdpOptions::default())?;
                let mut state = ddp.comm_hook_state().expect("a hook");
                going_on(&pg, folder.path())?.load_latest(("hook", &mut state))
            });
            assert_error(error, &["each of 2 ranks has saved its own state"]);
        }
    }
}

#[test]
fn hook_state_is_saved_and_loaded() {
    resume(|| power_sgd(2));
    resume(Int8Compress::default);
    let options = PowerSgdOptions { start_iter: 4, min_compression_rate: 1.01, ..Default::default() };
    resume(|| PowerSgd::new(options).unwrap());
}
