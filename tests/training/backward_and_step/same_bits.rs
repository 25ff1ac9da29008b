//! The same bits as two calls, with every optimizer.
use super::{Counting, Ddp, adamw, loss, tiny, wrap};
use crate::common::{self, filled, ranks, tensor};
use candle_core::{DType, Module, Var};
use candle_ddp::comm_hook::AllReduce;
use candle_ddp::optim::*;
use candle_ddp::{
    Buckets, DdpOptions, JoinOptions, OnNonFinite, Precision, ProcessGroup, ReplicaCheck, Result, Role, Sharding,
};
use candle_ddp_testing::Random;
use candle_nn::{VarBuilder, VarMap, linear, linear_no_bias};
use std::collections::BTreeMap;
use std::sync::Arc;

const STEPS: usize = 6;

type Bits = BTreeMap<String, Vec<u32>>;
/// Makes an optimizer.
type New<'a> = dyn Fn(&Ddp) -> Result<Box<dyn Optimizer>> + Sync + 'a;

/// All variables of the model, and the state of the optimizer.
fn bits(varmap: &VarMap, optimizer: &dyn Optimizer) -> Result<Bits> {
    let vars = varmap.data().lock().unwrap().clone();
    let model = vars.iter().map(|(name, var)| (name.clone(), common::bits(var)));
    Ok(model
        .chain(optimizer.state_dict()?.iter().map(|(key, state)| (format!("state of {key}"), common::bits(state))))
        .collect())
}

/// Trains with two calls, or with one on the ranks for which `in_one` says so. Returns the bits, and what the calls were.
fn train(
    pg: &ProcessGroup,
    options: DdpOptions,
    new: impl Fn(&Ddp) -> Result<Box<dyn Optimizer>>,
    in_one: bool,
) -> Result<(Bits, [usize; 3])> {
    let (ddp, varmap) = wrap(pg, options)?;
    let (mut optimizer, mut in_parts) = (Counting::new(new(&ddp)?), 0);
    for step in 0..STEPS {
        let loss = loss(&ddp, step)?;
        match in_one {
            true => in_parts += usize::from(ddp.backward_and_step(&loss, &mut optimizer)?),
            false => optimizer.step(&ddp.backward(&loss)?)?,
        }
    }
    let calls = optimizer.take();
    assert_eq!(in_parts, calls[2], "the steps that are said to be in parts, of {calls:?}");
    Ok((bits(&varmap, &optimizer)?, calls))
}

/// Compares one call with two, on one rank and on three. Returns the calls of the optimizer with one, on each rank.
#[track_caller]
fn assert_same(
    options: impl Fn() -> DdpOptions + Sync,
    new: impl Fn(&Ddp) -> Result<Box<dyn Optimizer>> + Sync,
) -> Vec<[usize; 3]> {
    let mut calls = Vec::new();
    for world_size in [1, 3] {
        let trained = ranks(world_size, |pg| {
            let (expected, _) = train(&pg, options(), &new, false)?;
            let (found, calls) = train(&pg, options(), &new, true)?;
            // Ranks need not all do the same.
            let (mixed, _) = train(&pg, options(), &new, pg.rank() % 2 == 0)?;
            Ok((expected, found, mixed, calls))
        });
        for (expected, found, mixed, of_rank) in trained {
            assert!(expected.len() > 10);
            assert_eq!(found, expected, "{world_size} ranks");
            assert_eq!(mixed, expected, "{world_size} ranks, of which some make two calls");
            calls.push(of_rank);
        }
    }
    calls
}

/// A part for each of 11 buckets, and the last one, in all passes but the first.
const IN_PARTS: [usize; 3] = [1, 11 * (STEPS - 1), STEPS - 1];
const WHOLE: [usize; 3] = [STEPS, 0, 0];

fn groups<R: Clone>(ddp: &Ddp, options: [R; 2]) -> Vec<ParameterGroup<R>> {
    let (biases, weights) =
        ddp.named_parameters().into_iter().partition::<Vec<_>, _>(|(name, _)| name.ends_with("bias"));
    let [first, second] = options;
    vec![ParameterGroup { parameters: weights, options: first }, ParameterGroup { parameters: biases, options: second }]
}

#[test]
fn with_optimizers_that_take_parts() {
    let adamw = ParamsAdamW { lr: 0.05, ..Default::default() };
    let other = ParamsAdamW { weight_decay: 0., beta1: 0.7, ..adamw.clone() };
    let adam = ParamsAdam { lr: 0.05, weight_decay: 0.1, ..Default::default() };
    let sgd = ParamsSgd { lr: 0.1, momentum: 0.9, dampening: 0.3, ..Default::default() };
    let lamb = ParamsLamb { lr: 0.05, max_grad_norm: None, ..Default::default() };
    let new: [&New; 6] = [
        &|ddp| Ok(Box::new(AdamW::from_groups(groups(ddp, [adamw.clone(), other.clone()]))?)),
        &|ddp| Ok(Box::new(Adam::new(ddp, adam.clone())?)),
        &|ddp| Ok(Box::new(Sgd::new(ddp, sgd.clone())?)),
        &|ddp| Ok(Box::new(Sgd::new(ddp, ParamsSgd { momentum: 0., dampening: 0., ..sgd.clone() })?)),
        &|ddp| Ok(Box::new(Lamb::new(ddp, lamb.clone())?)),
        &|ddp| {
            let muon = ParamsMuon { lr: 0.05, ..Default::default() };
            Ok(Box::new(Muon::with_adamw(ddp, muon, adamw.clone(), |name| name.contains("embedding"))?))
        },
    ];
    for new in new {
        assert!(assert_same(tiny, new).iter().all(|calls| *calls == IN_PARTS));
    }
}

#[test]
fn with_optimizers_that_need_all_gradients() {
    let lamb = |ddp: &Ddp| Ok(Box::new(Lamb::new(ddp, ParamsLamb { lr: 0.05, ..Default::default() })?) as Box<_>);
    assert!(assert_same(tiny, lamb).iter().all(|calls| *calls == WHOLE));
    let zero = |ddp: &Ddp| Ok(Box::new(ZeroRedundancyOptimizer::new(ddp, ParamsAdamW::default())?) as Box<_>);
    assert!(
        assert_same(|| DdpOptions { sharding: Sharding::Optimizer { ranks: None }, ..tiny() }, zero)
            .iter()
            .all(|calls| *calls == WHOLE)
    );
}

fn any(ddp: &Ddp) -> Result<Box<dyn Optimizer>> {
    Ok(Box::new(adamw(ddp)?))
}

#[test]
fn in_mixed_precision() {
    let dtypes = [None, Some(DType::F32), Some(DType::BF16)];
    for param_dtype in [DType::BF16, DType::F16] {
        for (reduce_dtype, keep_low_precision_grads) in
            dtypes.into_iter().flat_map(|dtype| [(dtype, false), (dtype, true)])
        {
            let precision = Precision::Half { param_dtype, buffer_dtype: None };
            let options = || DdpOptions {
                precision,
                buckets: Buckets { reduce_dtype, keep_low_precision_grads, ..tiny().buckets },
                ..tiny()
            };
            let found = assert_same(options, any);
            assert!(
                found.iter().all(|calls| *calls == IN_PARTS),
                "{param_dtype:?} {reduce_dtype:?} {keep_low_precision_grads}"
            );
        }
    }
}

/// One bucket, and one for some parameters.
#[test]
fn in_larger_buckets() {
    let calls = |bucket_cap_mb, first_bucket_mb| {
        assert_same(
            || DdpOptions { buckets: Buckets { bucket_cap_mb, first_bucket_mb, ..tiny().buckets }, ..tiny() },
            any,
        )
    };
    assert!(calls(1., 1.).iter().all(|calls| *calls == [1, STEPS - 1, STEPS - 1]));
    assert!(calls(0.00007, 0.00003).iter().all(|calls| (10..50).contains(&calls[1])));
}

/// An optimizer has other variables as well, and not all parameters; another has the rest.
#[test]
fn with_other_parameters_than_the_models() {
    let some = |ddp: &Ddp| {
        let some: Vec<_> = ddp.named_parameters().into_iter().filter(|(name, _)| !name.starts_with("hidden")).collect();
        let other = Var::ones(3, DType::F32, ddp.process_group().device())?;
        let mut optimizer = AdamW::new(some, ParamsAdamW { lr: 0.05, ..Default::default() })?;
        let group = ParameterGroup { parameters: vec![("other".to_string(), other)], options: ParamsAdamW::default() };
        optimizer.add_param_group(group)?;
        Ok(Box::new(optimizer) as Box<_>)
    };
    assert!(assert_same(tiny, some).iter().all(|calls| *calls == IN_PARTS));
}

/// What the ranks decide at the end of a pass comes before the step.
#[test]
fn in_passes_that_decide_at_their_end() {
    let compared = ReplicaCheck { every: 4, ..Default::default() };
    let compared = assert_same(|| DdpOptions { replica_check: Some(compared), ..tiny() }, any);
    // In the first, second and fourth pass, if there is another rank.
    assert_eq!(compared[0], IN_PARTS);
    assert!(compared[1..].iter().all(|calls| *calls == [3, 11 * (STEPS - 3), STEPS - 3]), "{compared:?}");
    for policy in [OnNonFinite::Skip { at_most: 1 }, OnNonFinite::Stop] {
        assert!(
            assert_same(|| DdpOptions { on_non_finite: Some(policy), ..tiny() }, any)
                .iter()
                .all(|calls| *calls == WHOLE)
        );
    }
    let hooked = |ddp: &Ddp| {
        ddp.register_comm_hook(AllReduce::default())?;
        any(ddp)
    };
    assert!(assert_same(tiny, hooked).iter().all(|calls| *calls == WHOLE));
}

#[test]
fn with_uneven_inputs() {
    let train = |pg: &ProcessGroup, in_one: bool| -> Result<(Bits, [usize; 3])> {
        // A comparison would be due in each pass, but not in a join.
        let check = ReplicaCheck { every: 1, ..Default::default() };
        let (ddp, varmap) = wrap(pg, DdpOptions { replica_check: Some(check), ..tiny() })?;
        let mut optimizer = Counting::new(adamw(&ddp)?);
        let joined = ddp.join(JoinOptions::default(), || {
            for step in 0..3 + pg.rank() {
                let loss = loss(&ddp, step)?;
                match in_one {
                    true => ddp.backward_and_step(&loss, &mut optimizer).map(drop)?,
                    false => optimizer.step(&ddp.backward(&loss)?)?,
                }
            }
            Ok(())
        })?;
        joined.sync(&mut optimizer.optimizer)?;
        Ok((bits(&varmap, &optimizer)?, optimizer.take()))
    };
    let trained = ranks(3, |pg| Ok([train(&pg, false)?, train(&pg, true)?]));
    for (rank, [(expected, _), (found, calls)]) in trained.into_iter().enumerate() {
        assert_eq!(found, expected);
        assert_eq!(calls, [1, 11 * (2 + rank), 2 + rank]);
    }
}

/// Models of random layers, in random buckets, of which each rank uses a random part in each pass. Some accumulate.
#[test]
fn at_random() {
    const SEEDS: u64 = 12;
    for seed in 0..SEEDS {
        let layers = 1 + Random(seed).below(20);
        let train = |pg: &ProcessGroup, in_one: bool| -> Result<Bits> {
            let mut random = Random(1000 + seed);
            let [first_bucket_mb, bucket_cap_mb] = [0; 2].map(|_| random.below(20) as f64 * 1e-5);
            let build = |vb: VarBuilder| {
                let layer = |layer: u64| match layer % 3 {
                    0 => linear_no_bias(3, 3, vb.pp(layer)),
                    _ => linear(3, 3, vb.pp(layer)),
                };
                (0..layers).map(layer).collect::<Result<Vec<_>, _>>()
            };
            let dtype = [DType::F32, DType::F64, DType::BF16][random.below(3) as usize];
            let precision = Precision::Pure(dtype);
            let role = Arc::new(|_: &str| Role::Parameter);
            let options = DdpOptions {
                precision,
                role,
                buckets: Buckets { first_bucket_mb, bucket_cap_mb, ..tiny().buckets },
                ..tiny()
            };
            let (ddp, varmap) = filled(pg, build, options, seed)?;
            let mut optimizer: Box<dyn Optimizer> = match random.below(3) {
                0 => Box::new(AdamW::new(&ddp, ParamsAdamW { lr: 0.05, ..Default::default() })?),
                1 => Box::new(Sgd::new(&ddp, ParamsSgd { lr: 0.1, momentum: 0.9, ..Default::default() })?),
                _ => Box::new(Lamb::new(&ddp, ParamsLamb { max_grad_norm: None, ..Default::default() })?),
            };
            let accumulates = random.below(2) == 0;
            for step in 0..STEPS {
                for is_last in [false, true].into_iter().filter(|is_last| *is_last || accumulates) {
                    let mut of_rank =
                        Random(seed << 32 | (step as u64) << 16 | (pg.rank() as u64) << 8 | u64::from(is_last));
                    let x = tensor(&[2, 3], of_rank.below(1 << 20)).to_dtype(dtype)?;
                    let loss = ddp.call(|layers| {
                        let mut used = layers.iter().filter(|_| of_rank.below(3) > 0);
                        used.try_fold(x.clone(), |x, layer| layer.forward(&x))?.sqr()?.mean_all()
                    })?;
                    let _guard = ddp.sync_if(is_last);
                    match (is_last, in_one) {
                        (true, true) => ddp.backward_and_step(&loss, &mut optimizer).map(drop)?,
                        (true, false) => optimizer.step(&ddp.backward(&loss)?)?,
                        (false, _) => drop(ddp.backward(&loss)?),
                    }
                }
            }
            bits(&varmap, &*optimizer)
        };
        for world_size in [1, 2 + seed as usize % 2] {
            for [expected, found] in ranks(world_size, |pg| Ok([train(&pg, false)?, train(&pg, true)?])) {
                assert_eq!(found, expected, "seed {seed}, {world_size} ranks");
            }
        }
    }
}
