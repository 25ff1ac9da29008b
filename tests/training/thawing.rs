//! A head that is trained first, then everything: the optimizer keeps its state, and the losses are PyTorch's.
use crate::common::{Mlp, assert_error, golden_json, ranks, sharding, sine, tensor};
use candle_core::{DType, Device, IndexOp, Tensor, Var};
use candle_ddp::checkpoint::{self, Checkpointer, CheckpointerOptions, StateDict};
use candle_ddp::optim::{
    Adam, Ema, FusedOptimizer, Optimizer, ParameterGroup, ParamsAdam, ParamsSgd, ParamsStepLr, Sgd, StepLr, UpdateRule,
    ZeroRedundancyOptimizer,
};
use candle_ddp::{DdpOptions, DistributedDataParallel, Error, Precision, ProcessGroup, Result, Role};
use candle_nn::{VarBuilder, VarMap};
use std::sync::Arc;

const THAWED: usize = 10;

/// The model of `scripts/golden_freezing.py`.
fn net(vb: VarBuilder) -> candle_core::Result<Mlp> {
    Mlp::new([4, 8, 3], ["backbone", "head"], vb)
}

type Ddp = DistributedDataParallel<Mlp>;

fn losses_of_pytorch() -> Vec<f64> {
    golden_json("freezing.json")["losses"].as_array().unwrap().iter().map(|loss| loss.as_f64().unwrap()).collect()
}

fn wrap(pg: &ProcessGroup, varmap: &VarMap, frozen: bool, zero: bool) -> Result<Ddp> {
    let role = move |name: &str| if frozen && name.starts_with("backbone.") { Role::Frozen } else { Role::Parameter };
    let precision = Precision::Pure(DType::F64);
    let options = DdpOptions { precision, role: Arc::new(role), sharding: sharding(zero), ..Default::default() };
    DistributedDataParallel::with_options(pg, varmap, net, options)
}

fn filled() -> VarMap {
    let varmap = VarMap::new();
    net(VarBuilder::from_varmap(&varmap, DType::F64, &Device::Cpu)).unwrap();
    for (seed, name) in ["backbone.weight", "backbone.bias", "head.weight", "head.bias"].iter().enumerate() {
        let var = crate::common::var(&varmap, name);
        var.set(&sine(var.dims(), seed)).unwrap();
    }
    varmap
}

fn params(lr: f64) -> ParamsAdam {
    ParamsAdam { lr, ..Default::default() }
}

fn backbone<R>(ddp: &Ddp, options: R) -> ParameterGroup<R> {
    let parameters = ddp.named_parameters().into_iter().filter(|(name, _)| name.starts_with("backbone.")).collect();
    ParameterGroup { parameters, options }
}

/// Trains both ranks, each on its half, and returns the losses over all. `thaw` gets the thawed model and the optimizer
/// of the head, and returns the one that goes on.
fn train<O: Optimizer>(
    zero: bool,
    first: impl Fn(&Ddp) -> Result<O> + Sync,
    thaw: impl Fn(&Ddp, O) -> Result<O> + Sync,
) -> Vec<f64> {
    let mut losses = ranks(2, |pg| {
        let half = pg.rank() * 12..(pg.rank() + 1) * 12;
        let x = sine(&[24, 4], 9).i(half.clone())?;
        let targets = Tensor::from_iter(half.map(|row| row as u32 % 3), &Device::Cpu)?;
        let varmap = filled();
        let mut ddp = wrap(&pg, &varmap, true, zero)?;
        let mut optimizer = first(&ddp)?;
        let mut losses = Vec::new();
        for epoch in 0..losses_of_pytorch().len() {
            if epoch == THAWED {
                let thawed = wrap(&pg, &varmap, false, zero)?;
                optimizer = thaw(&thawed, optimizer)?;
                ddp = thawed;
            }
            let loss = candle_ddp::nn::cross_entropy(&ddp.forward(&x)?, &targets)?;
            optimizer.step(&ddp.backward(&loss)?)?;
            let [loss] = pg.all_reduce_scalars([loss.to_scalar::<f64>()?], candle_ddp::ReduceOp::Avg)?;
            losses.push(loss);
        }
        Ok(losses)
    });
    losses.remove(0)
}

#[track_caller]
fn assert_pytorchs(losses: &[f64]) {
    for (epoch, (own, pytorchs)) in losses.iter().zip(losses_of_pytorch()).enumerate() {
        assert!((own - pytorchs).abs() < 1e-6, "epoch {epoch}: {own}, but PyTorch's loss is {pytorchs}");
    }
}

#[test]
fn a_group_that_is_added_trains_as_in_pytorch() {
    let losses = train(
        false,
        |ddp| Adam::new(ddp, params(0.05)),
        |ddp, mut optimizer| {
            optimizer.add_param_group(backbone(ddp, params(0.02)))?;
            Ok(optimizer)
        },
    );
    assert_pytorchs(&losses);
}

#[test]
fn a_new_optimizer_loads_what_is_known() {
    let thaw = |ddp: &Ddp, old: Adam, keeps: bool| {
        let head = ddp.named_parameters().into_iter().filter(|(name, _)| name.starts_with("head."));
        let head = ParameterGroup { parameters: head.collect(), options: params(0.05) };
        let mut optimizer = Adam::from_groups(vec![head, backbone(ddp, params(0.02))])?;
        if keeps {
            let report = optimizer.load_known(&old.state_dict()?)?;
            assert_eq!(report.loaded, ["head.bias", "head.weight"]);
            assert_eq!(report.missing, ["backbone.bias", "backbone.weight"]);
            assert!(report.unexpected.is_empty());
        }
        Ok(optimizer)
    };
    let first = |ddp: &Ddp| Adam::new(ddp, params(0.05));
    assert_pytorchs(&train(false, first, |ddp, old| thaw(ddp, old, true)));
    let lost = train(false, first, |ddp, old| thaw(ddp, old, false));
    assert!((lost[THAWED + 1] - losses_of_pytorch()[THAWED + 1]).abs() > 1e-4, "lost moments must show: {lost:?}");
}

/// From the files of a checkpoint, one of each rank.
#[test]
fn a_new_sharded_optimizer_loads_what_is_known() {
    let losses = train(
        true,
        |ddp| ZeroRedundancyOptimizer::new(ddp, params(0.05)),
        |ddp, mut old| {
            let group = ddp.process_group();
            let own = (group.rank() == 0).then(|| tempfile::tempdir().unwrap());
            let folder = group.broadcast_object(own.as_ref().map(|own| own.path().to_path_buf()).as_ref(), 0)?;
            Checkpointer::new(group, &folder, CheckpointerOptions::default())?
                .save(1, ("optimizer", &mut old))?
                .wait()?;
            drop(old);
            let file = |rank: usize| folder.join(format!("step-00000001/optimizer-{rank:05}-of-00002.safetensors"));
            let head = ddp.named_parameters().into_iter().filter(|(name, _)| name.starts_with("head."));
            let head = ParameterGroup { parameters: head.collect(), options: params(0.05) };
            let groups = vec![head, backbone(ddp, params(0.02))];
            let mut optimizer = ZeroRedundancyOptimizer::from_groups(groups)?;
            let mut state = checkpoint::read(file(0))?;
            assert_error(optimizer.load_known(&state), &["its parts in the shards do not add up to the"]);
            state.extend(checkpoint::read(file(1))?);
            let report = optimizer.load_known(&state)?;
            assert_eq!((report.loaded.len(), report.missing.len(), report.unexpected.len()), (2, 2, 0), "{report:?}");
            group.barrier()?;
            drop(own);
            Ok(optimizer)
        },
    );
    assert_pytorchs(&losses);
}

fn named(names: &[&str]) -> Vec<(String, Var)> {
    let var = |name: &&str| (name.to_string(), Var::from_tensor(&tensor(&[2, 3], name.len() as u64)).unwrap());
    names.iter().map(var).collect()
}

fn step<R: UpdateRule>(optimizer: &mut FusedOptimizer<R>, vars: &[(String, Var)]) {
    let losses = vars.iter().map(|(_, var)| var.sqr().unwrap().sum_all().unwrap());
    let loss = losses.reduce(|sum, loss| (sum + loss).unwrap()).unwrap();
    Optimizer::step(optimizer, &loss.backward().unwrap()).unwrap();
}

#[test]
fn what_is_gone_is_reported_and_what_is_of_another_kind_is_refused() {
    let vars = named(&["a", "b.c"]);
    let momentum = ParamsSgd { lr: 0.1, momentum: 0.9, ..Default::default() };
    let mut both = Sgd::new(vars.clone(), momentum.clone()).unwrap();
    step(&mut both, &vars);
    let state = both.state_dict().unwrap();

    // Frozen again: only one is left.
    let mut one = Sgd::new(vec![vars[1].clone()], ParamsSgd { lr: 0.3, ..momentum.clone() }).unwrap();
    let report = one.load_known(&state).unwrap();
    assert_eq!(
        (report.loaded, report.missing, report.unexpected),
        (vec!["b.c".to_string()], vec![], vec!["a".to_string()])
    );
    let loaded = one.state_dict().unwrap();
    let values = |tensor: &Tensor| crate::common::floats(tensor);
    assert_eq!(values(&loaded["state.b.c.momentum_buffer"]), values(&state["state.b.c.momentum_buffer"]));
    assert_eq!(loaded["state.b.c.step"].to_vec1::<i64>().unwrap(), [1]);
    assert_eq!(one.learning_rate(), 0.3, "learning rates stay");
    assert!(one.load_state_dict(&state).is_err(), "all or nothing, as before");

    // Another optimizer, other options, another shape.
    let refused = Adam::new(vars.clone(), params(0.1)).unwrap().load_known(&state);
    assert_error(refused, &["must be the state of Adam, not of Sgd"]);
    let without = ParamsSgd { momentum: 0., ..momentum.clone() };
    assert_error(Sgd::new(vars.clone(), without).unwrap().load_known(&state), &["momentum_buffer"]);
    let other = vec![("a".to_string(), Var::from_tensor(&tensor(&[7], 1)).unwrap())];
    let mut other = Sgd::new(other, momentum).unwrap();
    let before = other.state_dict().unwrap();
    assert!(other.load_known(&state).is_err());
    assert_eq!(
        values(&other.state_dict().unwrap()["state.a.momentum_buffer"]),
        values(&before["state.a.momentum_buffer"])
    );
}

#[test]
fn a_group_with_a_known_parameter_is_refused_and_schedules_take_up_new_groups() {
    let vars = named(&["a", "b", "c"]);
    let group =
        |range: std::ops::Range<usize>, lr| ParameterGroup { parameters: vars[range].to_vec(), options: params(lr) };
    let mut optimizer = Adam::from_groups(vec![group(0..1, 0.4)]).unwrap();
    let mut schedule = StepLr::new(&mut optimizer, ParamsStepLr { step_size: 1, gamma: 0.5 }).unwrap();
    schedule.step(&mut optimizer).unwrap();
    assert!(
        matches!(optimizer.add_param_group(group(0..2, 0.1)), Err(Error::Parameter { parameter, .. }) if parameter == "a")
    );
    assert!(optimizer.add_param_group(group(1..2, f64::NAN)).is_err());
    assert!(format!("{optimizer:?}").contains("[\"a\"])]"), "a refused group changes nothing: {optimizer:?}");
    optimizer.add_param_group(group(1..3, 0.1)).unwrap();
    assert!(format!("{optimizer:?}").contains("[\"b\", \"c\"])]"), "{optimizer:?}");
    assert_eq!(optimizer.learning_rates(), [0.2, 0.1]);
    schedule.step(&mut optimizer).unwrap();
    assert_eq!(optimizer.learning_rates(), [0.1, 0.025], "the new group falls from its own rate on");
}

#[test]
fn averages_of_weights_may_have_the_frozen_ones() {
    ranks(1, |pg| {
        let varmap = filled();
        let ddp = wrap(&pg, &varmap, true, false)?;
        let weights = [ddp.named_parameters(), ddp.named_frozen()].concat();
        let names: Vec<&str> = weights.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["head.weight", "head.bias", "backbone.weight", "backbone.bias"]);
        let mut ema = Ema::new(weights, 0.5)?;
        ema.update()?;
        let thawed = wrap(&pg, &varmap, false, false)?;
        let loss = thawed.forward(&sine(&[24, 4], 9))?.sqr()?.mean_all()?;
        let mut optimizer = Adam::new(&thawed, params(0.1))?;
        optimizer.step(&thawed.backward(&loss)?)?;
        ema.update()?;
        let weight = crate::common::var(&varmap, "backbone.weight").copy()?;
        ema.apply()?;
        let average = crate::common::var(&varmap, "backbone.weight");
        let expected = ((sine(&[8, 4], 0) + weight)? * 0.5)?;
        let difference = (average.as_tensor() - expected)?.abs()?.max_all()?.to_scalar::<f64>()?;
        assert!(difference < 1e-12, "{difference}");
        Ok(())
    });
}
