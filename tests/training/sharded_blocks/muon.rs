//! Muon for a sharded model, next to Muon in one process that has the whole batch.
use super::averages::{Values, assert_same, whole};
use crate::common::{going_on, ranks};
use candle_core::{DType, Device, Result, Tensor};
use candle_ddp::checkpoint::StateDict;
use candle_ddp::optim::{Muon, MuonGroup, Optimizer, ParameterGroup, ParamsAdamW, ParamsMuon};
use candle_ddp::{Block, DdpOptions, DistributedDataParallel, Error, Precision, ProcessGroup, Sharding, block};
use candle_nn::{VarBuilder, VarMap};
use std::ops::Range;
use std::path::Path;

/// No number of ranks divides the shapes.
const STEM: [usize; 2] = [5, 7];
const PARTS: [(&str, &[usize]); 4] =
    [("kernel", &[3, 2, 3, 3]), ("experts", &[3, 4, 7]), ("wide", &[3, 11]), ("bias", &[5])];

struct Net {
    stem: Tensor,
    parts: Block<Vec<Tensor>>,
    head: Tensor,
}

fn build(vb: VarBuilder<'static>) -> Result<Net> {
    let get = |vb: &VarBuilder, name: &str, shape: &[usize]| {
        vb.get_with_hints(shape, name, candle_nn::Init::Randn { mean: 0., stdev: 1. })
    };
    let part = |vb: VarBuilder| PARTS.iter().map(|(name, shape)| get(&vb, name, shape)).collect::<Result<Vec<_>>>();
    Ok(Net { stem: get(&vb, "stem", &STEM)?, parts: block(vb.pp("parts"), part)?, head: get(&vb, "head", &[2, 7])? })
}

type Ddp = DistributedDataParallel<Net>;

/// The gradient of a parameter, in which no sum is rounded, in whatever order it is computed.
fn gradient(shape: &[usize], samples: Range<usize>, step: u64) -> Result<Tensor> {
    let count = samples.len() as f64;
    let value = |index: usize| {
        let of = |sample: usize| ((index * 37 + sample * 5 + step as usize * 11) % 17) as f64 / 8. - 1.;
        samples.clone().map(of).sum::<f64>() / count
    };
    Tensor::from_vec((0..shape.iter().product()).map(value).collect::<Vec<f64>>(), shape, &Device::Cpu)
}

/// A step with this rank's part of eight samples, whose gradients have the norm that is returned.
fn step(ddp: &Ddp, optimizer: &mut dyn Optimizer, number: u64, max_norm: f64) -> candle_ddp::Result<f64> {
    let (rank, part) = (ddp.process_group().rank(), 8 / ddp.process_group().world_size());
    let gradient = |shape: &[usize]| gradient(shape, rank * part..(rank + 1) * part, number);
    let loss = ddp.call(|net| {
        let gradients = PARTS.iter().map(|(_, shape)| gradient(shape)).collect::<Result<Vec<_>>>()?;
        let parts = net.parts.call(&gradients.iter().collect::<Vec<_>>(), |parts, gradients| {
            let products = parts.iter().zip(gradients).map(|(part, gradient)| (part * gradient)?.sum_all());
            products.reduce(|sum, product| sum? + product?).unwrap()
        })?;
        (parts + (&net.stem * gradient(&STEM)?)?.sum_all()?)? + (&net.head * gradient(&[2, 7])?)?.sum_all()?
    })?;
    let mut grads = ddp.backward(&loss)?;
    let norm = optimizer.clip_grad_norm(&mut grads, max_norm)?.to_scalar::<f64>()?;
    optimizer.step(&grads)?;
    Ok(norm)
}

/// The whole model, next to the norm of its last gradients.
fn with_norm(pg: &ProcessGroup, varmap: &VarMap, norm: f64, folder: &Path) -> candle_ddp::Result<Values> {
    let mut values = whole(pg, varmap, &folder.join("model"))?;
    values.insert("norm".to_string(), vec![norm]);
    Ok(values)
}

/// Muon's matrices, and all other parameters.
fn groups(ddp: &Ddp) -> Vec<ParameterGroup<MuonGroup>> {
    let (muon, adamw) = (ParamsMuon { lr: 0.02, ..Default::default() }, ParamsAdamW { lr: 0.01, ..Default::default() });
    let (others, matrices) =
        ddp.named_parameters().into_iter().partition(|(name, _)| name.ends_with("bias") || name == "head");
    vec![
        ParameterGroup { parameters: matrices, options: MuonGroup::Muon(muon) },
        ParameterGroup { parameters: others, options: MuonGroup::AdamW(adamw) },
    ]
}

fn wrap(pg: &ProcessGroup, varmap: &VarMap, sharding: Sharding) -> candle_ddp::Result<Ddp> {
    let precision = Precision::Pure(DType::F64);
    let options = DdpOptions { init_seed: Some(5), precision, sharding, ..Default::default() };
    DistributedDataParallel::with_options(pg, varmap, build, options)
}

/// Muon on one rank, which loads nothing: the model after each second step.
fn unbroken(steps: u64) -> Vec<Values> {
    let folder = tempfile::tempdir().unwrap();
    let mut run = ranks(1, |pg| {
        let varmap = VarMap::new();
        let ddp = wrap(&pg, &varmap, Sharding::Off)?;
        let mut optimizer = Muon::from_groups(groups(&ddp))?;
        let mut found = Vec::new();
        for number in 0..steps {
            let norm = step(&ddp, &mut optimizer, number, 1e6)?;
            if number % 2 == 1 {
                found.push(with_norm(&pg, &varmap, norm, folder.path())?);
            }
        }
        Ok(found)
    });
    run.remove(0)
}

/// Continues a run in these steps, and saves it.
fn continued(ranks: usize, sharding: Sharding, steps: Range<u64>, folder: &Path) -> Values {
    let mut run = crate::common::ranks(ranks, |pg| {
        let mut varmap = VarMap::new();
        let ddp = wrap(&pg, &varmap, sharding)?;
        let mut optimizer = Muon::from_groups(groups(&ddp))?;
        let mut checkpointer = going_on(&pg, folder.join("run"))?;
        checkpointer.load_latest((("model", &mut varmap), ("optimizer", &mut optimizer)))?;
        let norm = steps.clone().try_fold(0., |_, number| step(&ddp, &mut optimizer, number, 1e6))?;
        checkpointer.save(steps.end - 1, (("model", &mut varmap), ("optimizer", &mut optimizer)))?.wait()?;
        with_norm(&pg, &varmap, norm, folder)
    });
    run.remove(0)
}

#[test]
fn muon_trains_a_sharded_model_as_one_process_and_is_resumed_by_any_number_of_ranks() {
    let blocks = Sharding::Blocks { reshard_after_forward: true, ranks: None };
    let kept = Sharding::Blocks { reshard_after_forward: false, ranks: None };
    let hybrid = Sharding::Blocks { reshard_after_forward: true, ranks: Some(2) };
    let runs = [
        (2, blocks),
        (4, blocks),
        (1, Sharding::Off),
        (1, kept),
        (4, hybrid),
        (2, Sharding::Optimizer { ranks: None }),
        (4, Sharding::Optimizer { ranks: Some(2) }),
        (8, blocks),
        (2, Sharding::Off),
        (4, hybrid),
    ];
    let (folder, expected) = (tempfile::tempdir().unwrap(), unbroken(2 * runs.len() as u64));
    for (number, (ranks, sharding)) in runs.into_iter().enumerate() {
        let steps = 2 * number as u64..2 * number as u64 + 2;
        let found = continued(ranks, sharding, steps, folder.path());
        assert_same(&found, &expected[number], &format!("{ranks} ranks, {sharding:?}"));
    }
}

/// Three ranks round sums, but not their values: those with one model have the same bits.
#[test]
fn each_matrix_has_one_owner_that_has_its_state() {
    let blocks = |ranks| Sharding::Blocks { reshard_after_forward: true, ranks };
    let zero = |ranks| Sharding::Optimizer { ranks };
    // By size: experts 84, kernel 54, stem 35, wide 33.
    const HALVES: &[&[&str]] = &[&["parts.experts", "parts.wide"], &["parts.kernel", "stem"]];
    const THIRDS: &[&[&str]] = &[&["parts.experts"], &["parts.kernel"], &["parts.wide", "stem"]];
    const QUARTERS: &[&[&str]] = &[&["parts.experts"], &["parts.kernel"], &["stem"], &["parts.wide"]];
    for (ranks, sharding, owners) in [
        (3, blocks(None), THIRDS),
        (4, blocks(Some(2)), HALVES),
        (1, zero(None), &[&["parts.experts", "parts.kernel", "parts.wide", "stem"][..]][..]),
        (3, zero(None), THIRDS),
        (4, zero(None), QUARTERS),
        (4, zero(Some(2)), HALVES),
    ] {
        let found = crate::common::ranks(ranks, |pg| {
            let ddp = wrap(&pg, &VarMap::new(), sharding)?;
            let refused = Muon::new(&ddp, MuonGroup::Muon(Default::default())).map(drop).unwrap_err();
            assert!(matches!(refused, Error::Parameter { .. }) && refused.to_string().contains("bias"), "{refused}");
            let mut optimizer = Muon::from_groups(groups(&ddp))?;
            assert!(step(&ddp, &mut optimizer, 0, 0.02)? > 0.02, "the test clips");
            let state = optimizer.share()?.dict;
            let own = state.keys().filter_map(|key| key.strip_suffix(".momentum_buffer@0")?.strip_prefix("state."));
            let mut own: Vec<_> = own.map(str::to_string).collect();
            own.sort();
            let saved = state.iter().filter(|(key, _)| key.contains("momentum_buffer@0") || key.contains("exp_avg"));
            let saved: usize = saved.map(|(_, state)| 8 * state.elem_count()).sum();
            Ok((own, format!("{optimizer:?}"), optimizer.state_bytes(), saved))
        });
        let owned: Vec<_> = found.iter().map(|(own, ..)| own.iter().map(String::as_str).collect::<Vec<_>>()).collect();
        assert_eq!(owned[..owners.len()], *owners, "{ranks} ranks, {sharding:?}");
        // The others have a copy, which is not saved.
        assert!(owned[owners.len()..].iter().all(Vec::is_empty), "{owned:?}");
        for (rank, (.., held, _)) in found.iter().enumerate() {
            let (.., of_owner, saved) = &found[rank % owners.len()];
            assert!(held == of_owner && (held == saved || matches!(sharding, Sharding::Blocks { .. })), "{found:?}");
        }
        let debug = &found[0].1;
        let at = |text: &str| debug.find(text).unwrap_or_else(|| panic!("{text} is not in {debug}"));
        assert!(at("ParamsMuon") < at("parts.kernel") && at("parts.wide") < at("ParamsAdamW"), "{debug}");
        assert!(at("ParamsAdamW") < at("parts.bias") && at("ParamsAdamW") < at("head"), "{debug}");
    }
}
