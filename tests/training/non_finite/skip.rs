//! A step that is left out leaves nothing behind.
use super::{Bad, Ddp, loss, model, skip, small, state};
use crate::common::{assert_error, ranks, try_ranks};
use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor};
use candle_ddp::comm_hook::{
    AllReduce, CommHook, Fp16Compress, GradBucket, HookWork, Int8Compress, PowerSgd, PowerSgdOptions,
};
use candle_ddp::optim::{
    AdamW, ClipOptions, Lamb, Optimizer, ParamsAdamW, ParamsLamb, ParamsSgd, Sgd, ZeroRedundancyOptimizer,
    clip_grad_norm_with, clip_grad_value,
};
use candle_ddp::{Buckets, DdpOptions, Error, OnNonFinite, Precision, ProcessGroup, ReduceOp, Result, Sharding};
use candle_nn::Optimizer as _;
use std::collections::HashMap;

const STEPS: u64 = 6;
const BAD: u64 = 3;

type Make = fn(&Ddp) -> Result<Box<dyn Optimizer>>;

fn adam(ddp: &Ddp) -> Result<Box<dyn Optimizer>> {
    Ok(Box::new(AdamW::new(ddp, ParamsAdamW { lr: 0.01, ..Default::default() })?))
}

/// The state of all ranks after steps of which one is `bad` on the last rank, or None: all ranks leave it out themselves.
fn run(world_size: usize, options: &DdpOptions, make: Make, bad: Option<Bad>) -> Vec<Vec<f32>> {
    ranks(world_size, |pg| {
        let ddp = model(&pg, options.clone())?;
        let mut optimizer = make(&ddp)?;
        for step in 0..STEPS {
            let is_bad = step == BAD && pg.rank() + 1 == world_size;
            if step == BAD && bad.is_none() {
                continue;
            }
            let mut grads = ddp.backward(&loss(&ddp, step, if is_bad { bad.unwrap() } else { Bad::Nothing })?)?;
            let norm = optimizer.clip_grad_norm(&mut grads, 0.1)?.to_scalar::<f64>()?;
            assert_eq!(norm.is_nan(), step == BAD, "step {step}: {norm}");
            optimizer.step(&grads)?;
        }
        assert_eq!(ddp.skipped_steps(), u64::from(bad.is_some()), "{bad:?}");
        Ok(state(&ddp))
    })
}

fn assert_left_out(options: &DdpOptions, make: Make) {
    for world_size in [1, 2, 3] {
        let expected = run(world_size, options, make, None);
        for bad in [Bad::Inputs(f64::INFINITY), Bad::First(f64::NAN), Bad::Last(f64::INFINITY)] {
            let left_out = run(world_size, options, make, Some(bad));
            assert!(left_out == expected, "{world_size} ranks, {bad:?}");
            assert!(
                left_out.iter().flatten().all(|value| value.is_finite())
                    && left_out.iter().all(|of| of == &left_out[0])
            );
        }
    }
}

#[test]
fn a_run_continues_as_if_the_step_had_not_been() {
    assert_left_out(&skip(2), adam);
    assert_left_out(&small(skip(2)), |ddp| {
        Ok(Box::new(Sgd::new(ddp, ParamsSgd { lr: 0.1, momentum: 0.9, ..Default::default() })?))
    });
    // Its update needs norms, also of no gradients.
    assert_left_out(&skip(1), |ddp| Ok(Box::new(Lamb::new(ddp, ParamsLamb::default())?)));
}

#[test]
fn shards_leave_it_out_together() {
    let zero: Make =
        |ddp| Ok(Box::new(ZeroRedundancyOptimizer::new(ddp, ParamsAdamW { lr: 0.01, ..Default::default() })?));
    let sharded = || DdpOptions { sharding: Sharding::Optimizer { ranks: None }, ..skip(2) };
    assert_left_out(&sharded(), zero);
    assert_left_out(&small(sharded()), zero);
}

#[test]
fn narrow_dtypes_and_hooks_leave_it_out() {
    let precision = Precision::Half { param_dtype: DType::BF16, buffer_dtype: None };
    assert_left_out(
        &DdpOptions { precision, buckets: Buckets { reduce_dtype: Some(DType::F32), ..skip(2).buckets }, ..skip(2) },
        adam,
    );
    assert_left_out(&skip(2), |ddp| {
        ddp.register_comm_hook(AllReduce::default())?;
        adam(ddp)
    });
    assert_left_out(&small(skip(2)), |ddp| {
        ddp.register_comm_hook(Fp16Compress::default())?;
        adam(ddp)
    });
}

/// Adds a part of the last pass's gradients to those of each pass.
struct Feedback(HashMap<String, Tensor>);

impl CommHook for Feedback {
    fn run(&mut self, bucket: &GradBucket, group: &ProcessGroup) -> Result<HookWork<Self>> {
        let name = &bucket.names()[0];
        let sum = match self.0.get(name) {
            Some(kept) => (bucket.buffer() + kept)?,
            None => bucket.buffer().copy()?,
        };
        self.0.insert(name.clone(), (&sum * 0.5)?);
        bucket.set_buffer(&(sum / group.world_size() as f64)?)?;
        Ok(HookWork::wait([group.all_reduce_async(bucket.buffer(), ReduceOp::Sum)?]))
    }
}

/// What it keeps of the other ranks' gradients stays there, but nothing that is not finite.
#[test]
fn a_hook_with_memory_is_not_poisoned() {
    let power: Make = |ddp| {
        let options = PowerSgdOptions { start_iter: 2, min_compression_rate: 1., ..Default::default() };
        ddp.register_comm_hook(PowerSgd::new(options)?)?;
        adam(ddp)
    };
    let int8: Make = |ddp| {
        ddp.register_comm_hook(Int8Compress::default())?;
        adam(ddp)
    };
    let feedback: Make = |ddp| {
        ddp.register_comm_hook(Feedback(HashMap::new()))?;
        adam(ddp)
    };
    for (hook, bad) in [
        (power, Bad::Inputs(f64::NAN)),
        (int8, Bad::Last(f64::NAN)),
        (feedback, Bad::Inputs(f64::NAN)),
        (feedback, Bad::First(f64::INFINITY)),
    ] {
        let states = run(2, &small(skip(2)), hook, Some(bad));
        assert!(states[0] == states[1] && states[0].iter().all(|value| value.is_finite()), "{bad:?}");
    }
}

/// Gradients that are finite, but not in the dtype of the hook.
#[test]
fn what_overflows_on_its_way_is_left_out_as_well() {
    let options = small(skip(2));
    let fp16: Make = |ddp| {
        ddp.register_comm_hook(Fp16Compress::default())?;
        adam(ddp)
    };
    assert!(run(2, &options, fp16, Some(Bad::Last(1e6))) == run(2, &options, fp16, None));
}

#[test]
fn the_store_of_a_left_out_step_is_one_that_all_take() {
    ranks(2, |pg| {
        let ddp = model(&pg, skip(3))?;
        let before = state(&ddp);
        let mut grads: GradStore = ddp.backward(&loss(&ddp, 0, Bad::Last(f64::NAN))?)?;
        let vars = ddp.parameters();
        assert!(vars.iter().all(|var| grads.get(var).is_none()));
        clip_grad_value(&mut grads, vars.clone(), 1.)?;
        let strict = ClipOptions { error_if_nonfinite: true, ..Default::default() };
        assert_error(clip_grad_norm_with(&mut grads, vars.clone(), 1., strict), &["the norm of the gradients is NaN"]);
        // Optimizers that know nothing of it.
        candle_nn::SGD::new(vars.clone(), 0.1)?.step(&grads)?;
        candle_nn::AdamW::new(vars, candle_nn::ParamsAdamW::default())?.step(&grads)?;
        assert_eq!(state(&ddp), before);
        // As in a loop that begins with it.
        assert_eq!(ddp.skipped_steps(), 1);
        drop(ddp.backward(&loss(&ddp, 0, Bad::Nothing)?)?);
        assert_eq!(ddp.skipped_steps(), 1);
        Ok(())
    });
}

#[test]
fn options_must_make_sense_and_be_the_same() {
    let error = try_ranks(1, |pg| model(&pg, skip(0)).map(drop)).unwrap_err().to_string();
    assert!(error.contains("on_non_finite: `at_most` must be at least 1"), "{error}");
    let errors = ranks(2, |pg| {
        let options = if pg.rank() == 0 { skip(1) } else { skip(2) };
        Ok(model(&pg, options).map(drop).unwrap_err())
    });
    for error in errors {
        assert!(
            matches!(&error, Error::Mismatch { what: "model", .. }) && error.to_string().contains("on_non_finite"),
            "{error}"
        );
    }
}

#[test]
fn by_default_nobody_looks() {
    ranks(2, |pg| {
        let ddp = model(&pg, DdpOptions { on_non_finite: Some(OnNonFinite::Ignore), ..Default::default() })?;
        let grads = ddp.backward(&loss(&ddp, 0, Bad::Last(f64::NAN))?)?;
        assert!(ddp.parameters().iter().any(|var| grads.get(var).is_some()));
        assert_eq!(ddp.skipped_steps(), 0);
        Ok(())
    });
}
