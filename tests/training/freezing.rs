//! Frozen parameters and buffers.
use crate::common::{assert_close, assert_error, fill, floats, plain, ranks, tensor, var, with_role};
use candle_core::{DType, Device, IndexOp, ModuleT, Tensor, Var};
use candle_ddp::checkpoint::StateDict;
use candle_ddp::optim::{self, AdamW, ParameterGroup, ParamsAdamW};
use candle_ddp::{DdpOptions, DistributedDataParallel, Error, Precision, ProcessGroup, Result, Role};
use candle_nn::{BatchNorm, BatchNormConfig, Linear, Module, Optimizer, SGD, VarBuilder, VarMap, batch_norm, linear};

/// A feature extractor with a batch norm, and a head.
struct Net {
    features: Linear,
    norm: BatchNorm,
    head: Linear,
}

impl Net {
    fn new(vb: VarBuilder) -> candle_core::Result<Self> {
        Ok(Self {
            features: linear(4, 6, vb.pp("features"))?,
            norm: batch_norm(6, BatchNormConfig::default(), vb.pp("features.norm"))?,
            head: linear(6, 2, vb.pp("head"))?,
        })
    }

    fn features(&self, x: &Tensor, train: bool) -> candle_core::Result<Tensor> {
        self.norm.forward_t(&self.features.forward(x)?, train)?.tanh()
    }
}

impl ModuleT for Net {
    fn forward_t(&self, x: &Tensor, train: bool) -> candle_core::Result<Tensor> {
        self.head.forward(&self.features(x, train)?)
    }
}

type Ddp = DistributedDataParallel<Net>;

fn frozen() -> DdpOptions {
    with_role(|name| if name.starts_with("features.") { Role::Frozen } else { Role::Parameter })
}

fn filled() -> VarMap {
    let (_, varmap) = plain(|vb| Net::new(vb), DType::F32, 5);
    let variance = var(&varmap, "features.norm.running_var");
    variance.set(&variance.ones_like().unwrap()).unwrap();
    varmap
}

fn wrap(pg: &ProcessGroup, varmap: &VarMap, options: DdpOptions) -> Result<Ddp> {
    DistributedDataParallel::with_options(pg, varmap, |vb| Net::new(vb), options)
}

fn names(of: Vec<(String, Var)>) -> Vec<String> {
    of.into_iter().map(|(name, _)| name).collect()
}

const FROZEN: [&str; 4] = ["features.weight", "features.bias", "features.norm.weight", "features.norm.bias"];
const HEAD: [&str; 2] = ["head.weight", "head.bias"];
const STATISTICS: [&str; 2] = ["features.norm.running_mean", "features.norm.running_var"];
const X: (&[usize], u64) = (&[10, 4], 8);

/// Trains on this rank's half of the batch in evaluation mode, where a batch norm does not depend on the other rows.
fn train(pg: &ProcessGroup, ddp: &Ddp, steps: usize) -> Result<()> {
    let x = tensor(X.0, X.1).i(pg.rank() * 5..(pg.rank() + 1) * 5)?;
    let mut optimizer = SGD::new(ddp.parameters(), 0.5)?;
    for _ in 0..steps {
        let grads = ddp.backward(&ddp.forward_t(&x, false)?.sqr()?.mean_all()?)?;
        optimizer.step(&grads)?;
    }
    Ok(())
}

fn train_plain(varmap: &VarMap, names: &[&str], steps: usize) {
    let net = Net::new(VarBuilder::from_varmap(varmap, DType::F32, &Device::Cpu)).unwrap();
    let mut optimizer = SGD::new(names.iter().map(|name| var(varmap, name)).collect(), 0.5).unwrap();
    for _ in 0..steps {
        let output = net.forward_t(&tensor(X.0, X.1), false).unwrap();
        optimizer.backward_step(&output.sqr().unwrap().mean_all().unwrap()).unwrap();
    }
}

fn all(varmap: &VarMap) -> Vec<f32> {
    [&FROZEN[..], &HEAD, &STATISTICS].concat().iter().flat_map(|name| floats(&var(varmap, name))).collect()
}

#[test]
fn frozen_parameters_stay_until_they_are_thawed() {
    let plain = filled();
    train_plain(&plain, &HEAD, 3);
    let head_trained = all(&plain);
    train_plain(&plain, &[&FROZEN[..], &HEAD].concat(), 3);
    let all_trained = all(&plain);
    ranks(2, |pg| {
        let varmap = filled();
        if pg.rank() == 1 {
            fill(&varmap, 99);
        }
        let ddp = wrap(&pg, &varmap, frozen())?;
        assert_eq!(all(&varmap), all(&filled()), "frozen variables must have rank 0's values too");
        assert_eq!(names(ddp.named_parameters()), HEAD);
        assert_eq!(names(ddp.named_frozen()), FROZEN);
        assert_eq!(names(ddp.named_buffers()), STATISTICS, "buffers stay buffers");
        assert_eq!(ddp.buckets().concat(), ["head.bias", "head.weight"], "nothing else is sent");
        train(&pg, &ddp, 3)?;
        assert_close(&all(&varmap), &head_trained, 1e-5, "the head");
        // Thaws the features.
        let ddp = wrap(&pg, &varmap, DdpOptions::default())?;
        assert_eq!(names(ddp.named_parameters()), [&FROZEN[..], &HEAD].concat());
        train(&pg, &ddp, 3)?;
        assert_close(&all(&varmap), &all_trained, 1e-5, "everything");
        Ok(())
    });
}

const PARAMS: ParamsAdamW = ParamsAdamW { lr: 0.05, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.1 };

/// As PyTorch does it: one optimizer over all parameters, of which the frozen ones have no gradient at first.
fn train_plain_with_moments() -> Vec<f32> {
    let varmap = filled();
    let named = [&FROZEN[..], &HEAD].concat().into_iter().map(|name| (name.to_string(), var(&varmap, name)));
    let mut optimizer = AdamW::new(named.collect::<Vec<_>>(), PARAMS).unwrap();
    let net = Net::new(VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu)).unwrap();
    for step in 0..8 {
        let loss = net.forward_t(&tensor(X.0, X.1), false).unwrap().sqr().unwrap().mean_all().unwrap();
        let mut grads = loss.backward().unwrap();
        if step < 4 {
            FROZEN.iter().for_each(|name| drop(grads.remove(&var(&varmap, name))));
        }
        optim::Optimizer::step(&mut optimizer, &grads).unwrap();
    }
    all(&varmap)
}

#[test]
fn moments_stay_when_parameters_are_thawed() {
    let expected = train_plain_with_moments();
    let steps = |pg: &ProcessGroup, ddp: &Ddp, optimizer: &mut dyn optim::Optimizer| -> Result<()> {
        let x = tensor(X.0, X.1).i(pg.rank() * 5..(pg.rank() + 1) * 5)?;
        (0..4).try_for_each(|_| optimizer.step(&ddp.backward(&ddp.forward_t(&x, false)?.sqr()?.mean_all()?)?))
    };
    ranks(2, |pg| {
        // One optimizer over all variables, also the statistics.
        let varmap = filled();
        let ddp = wrap(&pg, &varmap, frozen())?;
        let mut optimizer = AdamW::new(&varmap, PARAMS)?;
        steps(&pg, &ddp, &mut optimizer)?;
        steps(&pg, &wrap(&pg, &varmap, DdpOptions::default())?, &mut optimizer)?;
        assert_close(&all(&varmap), &expected, 1e-5, "one optimizer");
        Ok(())
    });
}

#[test]
fn a_state_of_fewer_parameters_is_refused_with_what_to_do() {
    let varmap = filled();
    let of = |names: &[&str]| names.iter().map(|name| (name.to_string(), var(&varmap, name))).collect::<Vec<_>>();
    let groups = |groups: &[&[&str]]| {
        let groups = groups.iter().map(|names| ParameterGroup { parameters: of(names), options: PARAMS }).collect();
        AdamW::from_groups(groups).unwrap()
    };
    let head = groups(&[&HEAD]).state_dict().unwrap();
    let more_groups = groups(&[&FROZEN, &HEAD]).load_state_dict(&head);
    assert_error(more_groups, &["1 parameter group(s), and this one has 2", "thaw"]);
    let more_parameters = groups(&[&[&FROZEN[..], &HEAD].concat()]).load_state_dict(&head);
    assert_error(more_parameters, &["features.", "fewer trained parameters"]);
}

#[test]
fn no_gradient_is_computed_for_frozen_parts() {
    let after = ranks(2, |pg| {
        let varmap = filled();
        let ddp = wrap(&pg, &varmap, frozen())?;
        let x = tensor(&[5, 4], pg.rank() as u64);
        let features = ddp.call(|net| net.features(&x, true))?;
        assert!(!features.track_op(), "the features must not be part of candle's graph");
        let statistics = floats(&var(&varmap, STATISTICS[0]));
        let grads = ddp.backward(&ddp.forward_t(&x, true)?.sqr()?.mean_all()?)?;
        assert!(FROZEN.iter().all(|name| grads.get(&var(&varmap, name)).is_none()));
        let after = floats(&var(&varmap, STATISTICS[0]));
        assert_ne!(after, statistics, "batch norms follow their batches");
        Ok(after)
    });
    assert_eq!(after[0], after[1], "and all ranks have rank 0's statistics");
}

#[test]
fn frozen_parameters_follow_their_variables_in_any_dtype() {
    let half = Precision::Half { param_dtype: DType::BF16, buffer_dtype: None };
    for (precision, dtype) in [(Precision::default(), DType::F32), (half, DType::BF16)] {
        ranks(1, |pg| {
            let varmap = VarMap::new();
            let both = |vb: VarBuilder| {
                Ok::<_, candle_core::Error>((linear(4, 2, vb.pp("features"))?, linear(4, 2, vb.pp("own"))?))
            };
            let options = DdpOptions { precision, ..frozen() };
            let ddp = DistributedDataParallel::with_options(&pg, &varmap, both, options)?;
            let weight = var(&varmap, "features.weight");
            weight.set(&Tensor::full(0.5f32, (2, 4), &Device::Cpu)?)?;
            let held = ddp.call(|(features, _)| Ok::<_, Error>(features.weight().clone()))?;
            assert_eq!(held.dtype(), dtype);
            assert_eq!(floats(&held), [0.5; 8]);
            assert_eq!(weight.dtype(), DType::F32);
            Ok(())
        });
    }
}

#[test]
fn frozen_variables_of_a_model_without_a_builder_get_no_gradients() {
    ranks(2, |pg| {
        let varmap = filled();
        let net = Net::new(VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?;
        let ddp = DistributedDataParallel::from_vars(&pg, net, &varmap, frozen())?;
        assert_eq!(names(ddp.named_parameters()), ["head.bias", "head.weight"]);
        let grads = ddp.backward(&ddp.forward_t(&tensor(&[5, 4], 1), false)?.sqr()?.mean_all()?)?;
        assert!(FROZEN.iter().all(|name| grads.get(&var(&varmap, name)).is_none()));
        assert!(HEAD.iter().all(|name| grads.get(&var(&varmap, name)).is_some()));
        Ok(())
    });
}

#[test]
fn ranks_must_freeze_the_same_and_not_everything() {
    let errors = ranks(2, |pg| {
        let other = if pg.rank() == 0 { frozen() } else { DdpOptions::default() };
        let error = wrap(&pg, &filled(), other).err();
        let nothing = with_role(|_| Role::Frozen);
        Ok([error, wrap(&pg, &filled(), nothing).err()].map(|error| error.expect("an error")))
    });
    for [other, nothing] in errors {
        assert!(matches!(other, Error::Mismatch { rank: 1, .. }), "{other}");
        assert!(nothing.to_string().contains("DdpOptions.role"), "{nothing}");
    }
    let errors = ranks(2, |pg| {
        let build = |vb: VarBuilder| {
            linear(4, 5 + pg.rank(), vb.pp("features"))?;
            linear(4, 2, vb.pp("head"))
        };
        let error = DistributedDataParallel::with_options(&pg, &VarMap::new(), build, frozen()).err();
        Ok(error.expect("an error").to_string())
    });
    assert!(errors.iter().all(|text| text.contains("frozen 0: features.weight f32[6, 4] on rank 1")), "{errors:?}");
}

/// The statistics of batch norms are buffers, whatever role the program gives them, unless DDP ignores them.
#[test]
fn batch_norm_statistics_are_buffers_unless_they_are_ignored() {
    ranks(1, |pg| {
        for role in [Role::Parameter, Role::Frozen, Role::Buffer] {
            let options = with_role(move |name| match name {
                "head.bias" => Role::Buffer,
                name if name.contains("running") => role,
                _ => Role::Parameter,
            });
            let buffers = names(wrap(&pg, &filled(), options)?.named_buffers());
            assert_eq!(buffers, [&STATISTICS[..], &["head.bias"]].concat());
        }
        let options = with_role(|name| if name.contains("running") { Role::Ignored } else { Role::Parameter });
        assert!(wrap(&pg, &filled(), options)?.named_buffers().is_empty());
        Ok(())
    });
}
