//! How often the host waits for a GPU in a step. A wait for work after which more has been launched costs the GPU nothing: it is busy
//! until the host has launched the next kernel.
use super::on_gpu;
use super::operations::{Model, gpt};
use crate::common::{floats, skip, tensor, tiny};
use candle_core::{DType, Device, Result, Tensor};
use candle_ddp::amp::{GradScaler, GradScalerOptions};
use candle_ddp::optim::{AdamW, Lamb, Optimizer, ParamsAdamW, ParamsLamb, ParamsSgd, Sgd};
use candle_ddp::{
    Backend, Buckets, DdpOptions, DistributedDataParallel, InitOptions, OnNonFinite, Precision, Unused,
    init_process_group,
};
use candle_ddp_testing::take_counts;
use candle_nn::{Linear, Module, VarBuilder, VarMap, linear};

fn model(gpu: &Device, options: DdpOptions) -> (DistributedDataParallel<Linear>, VarMap) {
    made(gpu, options, |vb| linear(16, 8, vb))
}

fn pair(vb: VarBuilder) -> Result<[Linear; 2]> {
    Ok([linear(16, 8, vb.pp("a"))?, linear(8, 8, vb.pp("b"))?])
}

/// The parameters are the same in each call.
fn made<M>(
    gpu: &Device,
    options: DdpOptions,
    build: fn(VarBuilder) -> Result<M>,
) -> (DistributedDataParallel<M>, VarMap) {
    let (device, varmap) = (Some(gpu.clone()), VarMap::new());
    let pg = init_process_group(InitOptions { backend: Backend::Single, device, ..Default::default() }).unwrap();
    let ddp = DistributedDataParallel::with_options(&pg, &varmap, build, options).unwrap();
    for (seed, var) in ddp.parameters().iter().enumerate() {
        var.set(&tensor(var.dims(), seed as u64).to_device(gpu).unwrap()).unwrap();
    }
    (ddp, varmap)
}

/// The parameters and the optimizer's state.
fn everything<M>(ddp: &DistributedDataParallel<M>, optimizer: &impl Optimizer) -> Vec<Vec<f32>> {
    let mut state: Vec<_> = optimizer.state_dict().unwrap().into_iter().collect();
    state.sort_by(|a, b| a.0.cmp(&b.0));
    let (vars, state) = (ddp.parameters(), state.into_iter().map(|(_, tensor)| tensor));
    vars.iter().map(|var| floats(var)).chain(state.map(|tensor| floats(&tensor))).collect()
}

/// For each of the host's waits in the fourth step, how many operations the GPU still had to do behind the one that the host waited for.
/// None on a real GPU.
fn waits(mut step: impl FnMut() -> candle_ddp::Result<()>) -> Option<Vec<usize>> {
    for _ in 0..3 {
        step().unwrap();
    }
    take_counts();
    step().unwrap();
    let waits = take_counts()?.into_iter().filter(|(name, _)| name.starts_with("wait for "));
    let behind = |name: &str| name.split(' ').find_map(|word| word.parse().ok()).unwrap_or(0);
    Some(waits.flat_map(|(name, count)| std::iter::repeat_n(behind(&name), count)).collect())
}

#[test]
fn no_step_waits_until_the_gpu_has_nothing_to_do() {
    const TEST: &str = "no_step_waits_until_the_gpu_has_nothing_to_do";
    on_gpu(TEST, |gpu| {
        let x = tensor(&[4, 16], 1).to_device(gpu).unwrap();
        let loss = |ddp: &DistributedDataParallel<Linear>| -> Result<Tensor> {
            let x = ddp.cast_forward_inputs(&x)?;
            ddp.forward(&x)?.to_dtype(DType::F32)?.sqr()?.mean_all()
        };
        let mut found = Vec::new();
        let (ddp, _) = model(gpu, DdpOptions::default());
        let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default()).unwrap();
        found.push(("plain", 0, waits(|| optimizer.step(&ddp.backward(&loss(&ddp)?)?))));
        let clipped = waits(|| {
            let mut grads = ddp.backward(&loss(&ddp)?)?;
            optimizer.clip_grad_norm(&mut grads, 1e-3)?;
            optimizer.step(&grads)
        });
        found.push(("clipped", 0, clipped));
        let mut grads = ddp.backward(&loss(&ddp).unwrap()).unwrap();
        let before: Vec<f32> = ddp.parameters().iter().flat_map(|var| floats(grads.get(var).unwrap())).collect();
        let norm = optimizer.clip_grad_norm(&mut grads, 1e-3).unwrap().to_scalar::<f64>().unwrap();
        let expected = before.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
        assert!((norm - expected).abs() < 1e-6 * expected, "{norm}, not {expected}");
        let precision = Precision::Half { param_dtype: DType::F16, buffer_dtype: None };
        let (ddp, _) = model(gpu, DdpOptions { precision, ..Default::default() });
        let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default()).unwrap();
        let mut scaler = GradScaler::new(ddp.process_group(), &ddp, GradScalerOptions::default()).unwrap();
        let scaled = waits(|| {
            let mut grads = ddp.backward(&scaler.scale(&loss(&ddp)?)?)?;
            optimizer.unscale(&mut scaler, &mut grads)?;
            optimizer.clip_grad_norm(&mut grads, 1e-3)?;
            scaler.step(&mut optimizer, &mut grads)?;
            scaler.update()
        });
        // The scale of a loss depends on the verdict on the step before, behind which the GPU has the clipping, the update (together less
        // than 30 operations) and the next forward pass to do.
        found.push(("scaled", 1, scaled));
        let on_non_finite = Some(OnNonFinite::Skip { at_most: 1 });
        let (ddp, _) = model(gpu, DdpOptions { on_non_finite, ..Default::default() });
        let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default()).unwrap();
        let skipping = waits(|| {
            let mut grads = ddp.backward(&loss(&ddp)?)?;
            optimizer.clip_grad_norm(&mut grads, 1e-3)?;
            optimizer.step(&grads)
        });
        // The backward pass counts the step before, behind which the GPU has as much to do.
        found.push(("skipping", 1, skipping));
        let Model { build, input, targets } = gpt::<16>(gpu);
        let precision = Precision::Half { param_dtype: DType::F16, buffer_dtype: None };
        let (ddp, _) = made(gpu, DdpOptions { precision, on_non_finite, ..Default::default() }, build);
        let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default()).unwrap();
        let mut scaler = GradScaler::new(ddp.process_group(), &ddp, GradScalerOptions::default()).unwrap();
        let all = waits(|| {
            let loss = ddp.call(|net| net(&input, &targets))?;
            let mut grads = ddp.backward(&scaler.scale(&loss)?)?;
            optimizer.unscale(&mut scaler, &mut grads)?;
            optimizer.clip_grad_norm(&mut grads, 1e-3)?;
            scaler.step(&mut optimizer, &mut grads)?;
            scaler.update()
        });
        found.push(("a GPT with all of it", 1, all));
        let options = DdpOptions { unused: Unused::Allow, replica_check: None, ..tiny() };
        let (ddp, _) = made(gpu, options, pair);
        let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default()).unwrap();
        // The second layer is not used: the next step waits for the verdict on each of its parameters.
        let unused = waits(|| {
            let loss = ddp.call(|layers| layers[0].forward(&x)?.sqr()?.mean_all())?;
            ddp.backward_and_step(&loss, &mut optimizer).map(drop)
        });
        found.push(("unused", 2, unused));
        // All flags of a bucket are read at once.
        let options = DdpOptions { unused: Unused::Allow, replica_check: None, ..Default::default() };
        let (ddp, _) = made(gpu, options, pair);
        let read = waits(|| {
            let loss = ddp.call(|layers| layers[0].forward(&x)?.sqr()?.mean_all())?;
            ddp.backward(&loss).map(drop)
        });
        assert!(read.is_none_or(|read| read == [0]));
        for (what, expected, found) in found {
            match found {
                Some(found) => {
                    assert!(found.len() <= expected && found.iter().all(|behind| *behind >= 30), "{what}: {found:?}");
                }
                None => return skip(TEST, "only an emulated GPU counts waits"),
            }
        }
    });
}

/// Kernels that know of an overflow before the host does change neither parameters nor states, and the step is not counted: the
/// training continues with the numbers of one that never had this step.
#[test]
fn an_overflow_that_the_gpu_knows_first_leaves_nothing_behind() {
    on_gpu("an_overflow_that_the_gpu_knows_first_leaves_nothing_behind", |gpu| {
        fn train<O: Optimizer>(
            gpu: &Device,
            overflows: bool,
            new: impl Fn(&DistributedDataParallel<Linear>) -> O,
        ) -> Vec<Vec<f32>> {
            let (ddp, _varmap) = model(gpu, DdpOptions::default());
            let mut optimizer = new(&ddp);
            let mut scaler = GradScaler::new(ddp.process_group(), &ddp, GradScalerOptions::default()).unwrap();
            for step in 0..4 {
                let factor = match (step, overflows) {
                    (2, false) => continue,
                    (2, true) => f32::INFINITY,
                    _ => 1.0,
                };
                let x = (tensor(&[4, 16], step).to_device(gpu).unwrap() * f64::from(factor)).unwrap();
                let loss = ddp.forward(&x).unwrap().sqr().unwrap().mean_all().unwrap();
                let mut grads = ddp.backward(&scaler.scale(&loss).unwrap()).unwrap();
                if step != 1 {
                    optimizer.unscale(&mut scaler, &mut grads).unwrap();
                    optimizer.clip_grad_norm(&mut grads, 1e-2).unwrap();
                }
                scaler.step(&mut optimizer, &mut grads).unwrap();
                scaler.update().unwrap();
            }
            assert_eq!(scaler.current_scale(), if overflows { 32768. } else { 65536. });
            everything(&ddp, &optimizer)
        }
        let adam = |ddp: &DistributedDataParallel<Linear>| AdamW::new(ddp, ParamsAdamW::default()).unwrap();
        assert_eq!(train(gpu, true, adam), train(gpu, false, adam));
        let options = ParamsSgd { momentum: 0.9, ..Default::default() };
        let sgd = |ddp: &DistributedDataParallel<Linear>| Sgd::new(ddp, options.clone()).unwrap();
        assert_eq!(train(gpu, true, sgd), train(gpu, false, sgd));
    });
}

/// With OnNonFinite::Skip, too. The host learns of such a step in the next pass, or when it is asked.
#[test]
fn a_step_that_only_the_gpu_knows_to_be_bad_is_left_out() {
    on_gpu("a_step_that_only_the_gpu_knows_to_be_bad_is_left_out", |gpu| {
        let train = |bad: &[u64], is_left_out: bool, is_asked: bool| {
            let on_non_finite = Some(OnNonFinite::Skip { at_most: 1 });
            let (ddp, _varmap) = model(gpu, DdpOptions { on_non_finite, ..Default::default() });
            let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default()).unwrap();
            let mut skipped = 0;
            for step in 0..9 {
                let is_bad = bad.contains(&step);
                if is_bad && !is_left_out {
                    continue;
                }
                let x = (tensor(&[4, 16], step).to_device(gpu).unwrap() * if is_bad { f64::NAN } else { 1. }).unwrap();
                let mut grads = ddp.backward(&ddp.forward(&x).unwrap().sqr().unwrap().mean_all().unwrap()).unwrap();
                optimizer.clip_grad_norm(&mut grads, 1e-2).unwrap();
                optimizer.step(&grads).unwrap();
                skipped += u64::from(is_bad);
                if is_asked {
                    assert_eq!(ddp.skipped_steps(), skipped, "step {step}");
                }
            }
            assert_eq!(ddp.skipped_steps(), skipped);
            everything(&ddp, &optimizer)
        };
        for bad in [&[0, 3][..], &[4], &[5, 7], &[8]] {
            let expected = train(bad, false, false);
            for is_asked in [false, true] {
                assert_eq!(train(bad, true, is_asked), expected, "{bad:?}, asked: {is_asked}");
            }
        }
        // Two in a row are one too many, and the error names the gradient.
        let result = std::panic::catch_unwind(|| train(&[4, 5], true, false)).unwrap_err();
        let message = result.downcast_ref::<String>().unwrap();
        assert!(message.contains("NonFinite") && message.contains("bias on rank 0 contains a NaN"), "{message}");
    });
}

/// A parameter that no rank uses in a step in parts is left alone, and one that another step uses is not.
#[test]
fn a_parameter_that_only_the_gpu_knows_to_be_unused_is_left_alone() {
    on_gpu("a_parameter_that_only_the_gpu_knows_to_be_unused_is_left_alone", |gpu| {
        fn train<O: Optimizer>(
            gpu: &Device,
            buckets: Buckets,
            in_parts: bool,
            new: impl Fn(&DistributedDataParallel<[Linear; 2]>) -> O,
        ) -> Vec<Vec<f32>> {
            let options = DdpOptions { unused: Unused::Allow, replica_check: None, buckets, ..Default::default() };
            let (ddp, _varmap) = made(gpu, options, pair);
            let mut optimizer = new(&ddp);
            for step in 0..8 {
                let x = tensor(&[4, 16], step).to_device(gpu).unwrap();
                let loss = ddp.call(|[a, b]| {
                    let y = match step % 3 {
                        0 => b.forward(&a.forward(&x)?)?,
                        1 => a.forward(&x)?,
                        _ => b.forward(&x.narrow(1, 0, 8)?.contiguous()?)?,
                    };
                    y.sqr()?.mean_all()
                });
                if in_parts {
                    assert_eq!(ddp.backward_and_step(&loss.unwrap(), &mut optimizer).unwrap(), step > 0);
                } else {
                    optimizer.step(&ddp.backward(&loss.unwrap()).unwrap()).unwrap();
                }
            }
            everything(&ddp, &optimizer)
        }
        let adam = |ddp: &DistributedDataParallel<_>| AdamW::new(ddp, ParamsAdamW::default()).unwrap();
        let options = ParamsLamb { max_grad_norm: None, ..Default::default() };
        let lamb = |ddp: &DistributedDataParallel<_>| Lamb::new(ddp, options.clone()).unwrap();
        // With one parameter in a bucket, and with all.
        for buckets in [tiny().buckets, Buckets::default()] {
            assert_eq!(train(gpu, buckets, true, adam), train(gpu, buckets, false, adam));
            assert_eq!(train(gpu, buckets, true, lamb), train(gpu, buckets, false, lamb));
        }
    });
}
