//! Rules of users: Lion, compared with PyTorch's operations (see golden/optim.md), and rules that are refused.
use crate::common::{assert_close, floats, going_on, golden, ranks, sharding};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_ddp::checkpoint::StateDict;
use candle_ddp::optim::*;
use candle_ddp::{DdpOptions, DistributedDataParallel, Error, ProcessGroup, Result};
use candle_nn::{Init, VarBuilder, VarMap};
use std::collections::HashMap;

#[derive(Clone, Debug)]
struct Lion {
    lr: f64,
    betas: (f64, f64),
    weight_decay: f64,
}

impl UpdateRule for Lion {
    const NAME: &'static str = "Lion";
    const ELEMENTWISE: bool = true;

    fn states(&self) -> &'static [&'static str] {
        &["exp_avg"]
    }

    fn learning_rate(&self) -> f64 {
        self.lr
    }

    fn set_learning_rate(&mut self, learning_rate: f64) {
        self.lr = learning_rate;
    }

    fn update(&self, value: &Tensor, gradient: &Tensor, states: &mut [Tensor], _: u64) -> Result<Tensor> {
        let mix = |beta: f64| (&states[0] * beta)? + (gradient * (1. - beta))?;
        let (direction, exp_avg) = (mix(self.betas.0)?.sign()?, mix(self.betas.1)?);
        states[0] = exp_avg;
        Ok(((value * (1. - self.lr * self.weight_decay))? - (direction * self.lr)?)?)
    }
}

const LION: Lion = Lion { lr: 0.02, betas: (0.9, 0.99), weight_decay: 0.1 };

/// `w` [4, 3] and `b` [3] from a row of 15 numbers.
fn split(row: &Tensor) -> candle_core::Result<(Tensor, Tensor)> {
    Ok((row.narrow(0, 0, 12)?.reshape((4, 3))?, row.narrow(0, 12, 3)?))
}

type Net = (Tensor, Tensor);
type Ddp = DistributedDataParallel<Net>;

fn wrap(pg: &ProcessGroup, golden: &HashMap<String, Tensor>, zero: bool) -> Result<(Ddp, VarMap)> {
    let varmap = VarMap::new();
    let build = |vb: VarBuilder| -> candle_core::Result<Net> {
        let init = Init::Const(0.);
        Ok((vb.get_with_hints((4, 3), "w", init)?, vb.get_with_hints(3, "b", init)?))
    };
    let options = DdpOptions { sharding: sharding(zero), ..Default::default() };
    let ddp = DistributedDataParallel::with_options(pg, &varmap, build, options)?;
    let (w, b) = split(&golden["lion.start"])?;
    let vars = varmap.data().lock().unwrap();
    vars["w"].set(&w)?;
    vars["b"].set(&b)?;
    drop(vars);
    Ok((ddp, varmap))
}

/// The golden gradients of a step, on every rank.
fn backward(ddp: &Ddp, golden: &HashMap<String, Tensor>, step: usize) -> Result<GradStore> {
    let (gw, gb) = split(&golden["lion.gradients"].get(step)?)?;
    let loss = ddp.call(|(w, b)| (w * &gw)?.sum_all()? + (b * &gb)?.sum_all()?)?;
    ddp.backward(&loss)
}

fn weights(ddp: &Ddp) -> Vec<f32> {
    let named: HashMap<_, _> = ddp.named_parameters().into_iter().collect();
    [floats(&named["w"]), floats(&named["b"])].concat()
}

/// Sharded or not, from a checkpoint of another number of ranks on.
#[test]
fn lion_matches_pytorch() {
    let (golden, folder) = (golden("optim.safetensors"), tempfile::tempdir().unwrap());
    let runs = [(1, false), (2, true), (3, true), (2, false), (3, true)];
    for (run, (world_size, zero)) in runs.into_iter().enumerate() {
        ranks(world_size, |pg| {
            let (ddp, mut varmap) = wrap(&pg, &golden, zero)?;
            let mut optimizer = FusedOptimizer::new(&ddp, LION)?;
            let mut checkpointer = going_on(&pg, folder.path())?;
            checkpointer.load_latest((("model", &mut varmap), ("optimizer", &mut optimizer)))?;
            for step in 2 * run..2 * run + 2 {
                optimizer.step(&backward(&ddp, &golden, step)?)?;
                let expected = floats(&golden["lion.weights"].get(step)?);
                let what = format!("{world_size} ranks, sharded: {zero}, step {step}");
                assert_close(&weights(&ddp), &expected, 1e-6, &what);
            }
            checkpointer.save(run as u64, (("model", &mut varmap), ("optimizer", &mut optimizer)))?.wait()?;
            if run + 1 == runs.len() {
                let state = optimizer.state_dict()?;
                let found = [floats(&state["state.w.exp_avg"]), floats(&state["state.b.exp_avg"])].concat();
                assert_close(&found, &floats(&golden["lion.exp_avg"]), 1e-6, "state");
            }
            Ok(())
        });
    }
}

#[test]
fn the_state_of_another_rule_is_refused() {
    let var = || vec![("w".to_string(), Var::ones(3, DType::F32, &Device::Cpu).unwrap())];
    let momentum = ParamsSgd { momentum: 0.9, ..Default::default() };
    let (mut lion, mut sgd) = (FusedOptimizer::new(var(), LION).unwrap(), Sgd::new(var(), momentum).unwrap());
    let (of_lion, of_sgd) = (lion.state_dict().unwrap(), sgd.state_dict().unwrap());
    for (error, kind) in
        [(lion.load_state_dict(&of_sgd).unwrap_err(), "Sgd"), (sgd.load_state_dict(&of_lion).unwrap_err(), "Lion")]
    {
        assert!(
            matches!(&error, Error::Parameter { parameter, reason } if parameter == "kind" && reason.contains(kind))
        );
    }
    lion.load_state_dict(&of_lion).unwrap();
}

/// A rule whose behaviour the test chooses.
#[derive(Clone)]
struct Custom {
    names: &'static [&'static str],
    work: fn(&Tensor, &Tensor, &mut [Tensor], u64) -> Result<Tensor>,
}

impl std::fmt::Debug for Custom {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Custom")
    }
}

impl UpdateRule for Custom {
    const NAME: &'static str = "Custom";

    fn states(&self) -> &'static [&'static str] {
        self.names
    }

    fn learning_rate(&self) -> f64 {
        0.1
    }

    fn set_learning_rate(&mut self, _: f64) {}

    fn update(&self, value: &Tensor, gradient: &Tensor, states: &mut [Tensor], step: u64) -> Result<Tensor> {
        (self.work)(value, gradient, states, step)
    }
}

/// A matrix with gradient 1 at every element, and its optimizer.
fn matrix<R: UpdateRule>(dtype: DType, rule: R) -> Result<(Var, FusedOptimizer<R>, GradStore)> {
    let var = Var::ones((2, 3), dtype, &Device::Cpu)?;
    let grads = var.sum_all()?.backward()?;
    Ok((var.clone(), FusedOptimizer::new(vec![("w".to_string(), var)], rule)?, grads))
}

#[test]
fn a_rule_that_needs_whole_parameters_gets_their_shape() {
    let transposed =
        Custom { names: &[], work: |_, gradient, _, _| Ok(gradient.t()?.matmul(gradient)?.narrow(0, 0, 2)?) };
    let (var, mut optimizer, grads) = matrix(DType::BF16, transposed).unwrap();
    optimizer.step(&grads).unwrap();
    assert_eq!(floats(&var), [2.; 6]);
    // Also with ZeRO, where one rank updates it.
    let by_norm = Custom {
        names: &["mean"],
        work: |value, gradient, states, step| {
            let expected: &[usize] = if value.elem_count() == 12 { &[4, 3] } else { &[3] };
            assert_eq!((value.dims(), gradient.dims(), states[0].dims()), (expected, expected, expected));
            states[0] = ((&states[0] * 0.5)? + gradient.broadcast_div(&gradient.sqr()?.sum_all()?.sqrt()?)?)?;
            Ok((value - (&states[0] * (0.1 / step as f64))?)?)
        },
    };
    let golden = golden("optim.safetensors");
    let trained = |zero: bool| {
        ranks(3, |pg| {
            let (ddp, _) = wrap(&pg, &golden, zero)?;
            let mut optimizer = FusedOptimizer::new(&ddp, by_norm.clone())?;
            for step in 0..4 {
                optimizer.step(&backward(&ddp, &golden, step)?)?;
            }
            Ok(weights(&ddp))
        })
    };
    assert_eq!(trained(true), trained(false));
}

#[test]
fn states_may_be_swapped_kept_or_taken_from_the_gradient() {
    let work = |value: &Tensor, gradient: &Tensor, states: &mut [Tensor], step| {
        match step {
            1 => (states[0], states[1]) = (gradient.clone(), (gradient * 2.)?),
            2 => states.swap(0, 1),
            _ => {}
        }
        Ok(value.clone())
    };
    let (var, mut optimizer, grads) = matrix(DType::F32, Custom { names: &["a", "b"], work }).unwrap();
    for expected in [[1., 2.], [2., 1.], [2., 1.]] {
        optimizer.step(&grads).unwrap();
        let state = optimizer.state_dict().unwrap();
        assert_eq!(floats(&state["state.w.a"]), [expected[0]; 6]);
        assert_eq!(floats(&state["state.w.b"]), [expected[1]; 6]);
    }
    assert_eq!(floats(&var), [1.; 6]);
}

#[test]
fn results_that_do_not_fit_are_refused_by_name_and_change_nothing() {
    let value = Custom {
        names: &["a"],
        work: |value, gradient, states, _| {
            states[0] = gradient.clone();
            Ok(value.t()?)
        },
    };
    let state = Custom {
        names: &["a"],
        work: |value, gradient, states, _| {
            states[0] = gradient.to_dtype(DType::F64)?;
            Ok((value * 2.)?)
        },
    };
    for (rule, words) in [(value, "the new value is f32[3, 2]"), (state, "a is f64[2, 3]")] {
        let (var, mut optimizer, grads) = matrix(DType::F32, rule).unwrap();
        let error = optimizer.step(&grads).unwrap_err();
        assert!(
            matches!(&error, Error::Parameter { parameter, reason } if parameter == "w" && reason.contains(words)),
            "{error}"
        );
        assert_eq!(floats(&var), [1.; 6]);
        assert_eq!(floats(&optimizer.state_dict().unwrap()["state.w.a"]), [0.; 6]);
    }
}

#[test]
fn names_of_states_that_could_not_be_saved_are_refused() {
    for names in [&["step"][..], &["a", "a"], &[""], &["a.b"], &["a@1"]] {
        let rule = Custom { names, work: |value, _, _, _| Ok(value.clone()) };
        let error = FusedOptimizer::new(Vec::<Var>::new(), rule).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { argument: "states", .. }), "{error}");
    }
}

/// A rule made of another trains like it, bit for bit.
#[test]
fn rules_of_this_crate_can_be_called() {
    let names = &["exp_avg", "exp_avg_sq"];
    let work = |value: &Tensor, gradient: &Tensor, states: &mut [Tensor], step| {
        ParamsAdamW::default().update(value, gradient, states, step)
    };
    let (own, mut one, own_grads) = matrix(DType::F32, Custom { names, work }).unwrap();
    let (fused, mut two, fused_grads) = matrix(DType::F32, ParamsAdamW::default()).unwrap();
    for _ in 0..3 {
        one.step(&own_grads).unwrap();
        two.step(&fused_grads).unwrap();
        assert_eq!(floats(&own), floats(&fused));
    }
    let (value, none) = (Tensor::ones(3, DType::F32, &Device::Cpu).unwrap(), &mut []);
    let error = ParamsAdamW::default().update(&value, &value, none, 1).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { argument: "states", .. }), "{error}");
}
