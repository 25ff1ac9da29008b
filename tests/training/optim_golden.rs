//! Optimizers, schedules, clipping and averages, compared with PyTorch's results: see golden/optim.md.
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_ddp::checkpoint::StateDict;
use candle_ddp::optim::*;
use std::collections::HashMap;

const STEPS: usize = 100;

type Golden = HashMap<String, Tensor>;

fn golden() -> Golden {
    crate::common::golden("optim.safetensors")
}

fn rows(golden: &Golden, name: &str) -> Vec<Vec<f64>> {
    golden[name].to_vec2().unwrap()
}

struct Problem {
    x: Tensor,
    y: Tensor,
    w: Var,
    b: Var,
}

impl Problem {
    fn new(golden: &Golden, dtype: DType) -> Result<Self> {
        let get = |name| golden[name].to_dtype(dtype);
        Ok(Self { x: get("x")?, y: get("y")?, w: Var::from_tensor(&get("w")?)?, b: Var::from_tensor(&get("b")?)? })
    }

    fn gradients(&self) -> Result<GradStore> {
        let outputs = self.x.matmul(&self.w)?.broadcast_add(&self.b)?.tanh()?;
        (outputs - &self.y)?.sqr()?.mean_all()?.backward()
    }

    fn named(&self) -> Vec<(String, Var)> {
        vec![("w".to_string(), self.w.clone()), ("b".to_string(), self.b.clone())]
    }

    fn weights(&self) -> Vec<f64> {
        let flat = |var: &Var| var.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
        [flat(&self.w), flat(&self.b)].concat()
    }
}

#[track_caller]
fn assert_near(actual: &[f64], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    for (index, (a, e)) in actual.iter().zip(expected).enumerate() {
        assert!((a - e).abs() <= tolerance, "{what}: element {index} is {a}, PyTorch has {e}");
    }
}

/// Trains as PyTorch did: f64 must match almost exactly, and f32 must follow the trajectory of f64.
fn run<R: UpdateRule>(name: &str, sparse: bool, groups: impl Fn(&Problem) -> Vec<ParameterGroup<R>>) {
    let golden = golden();
    let expected = rows(&golden, &format!("run.{name}"));
    for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-5)] {
        let problem = Problem::new(&golden, dtype).unwrap();
        let mut optimizer = FusedOptimizer::from_groups(groups(&problem)).unwrap();
        for step in 0..STEPS {
            let mut grads = problem.gradients().unwrap();
            if sparse && step % 3 == 0 {
                grads.remove(&problem.b);
            }
            optimizer.step(&grads).unwrap();
            if (step + 1) % 5 == 0 {
                assert_near(
                    &problem.weights(),
                    &expected[step / 5],
                    tolerance,
                    &format!("{name}, {dtype:?}, step {step}"),
                );
            }
        }
    }
}

fn run_one<R: UpdateRule>(name: &str, options: R) {
    run(name, false, |problem| vec![ParameterGroup { parameters: problem.named(), options: options.clone() }]);
}

fn run_sparse<R: UpdateRule>(name: &str, options: R) {
    run(name, true, |problem| vec![ParameterGroup { parameters: problem.named(), options: options.clone() }]);
}

#[test]
fn adamw_follows_pytorch() {
    run_one("adamw.default", ParamsAdamW::default());
    run_one("adamw.strong", ParamsAdamW { lr: 0.02, beta1: 0.8, beta2: 0.95, eps: 1e-3, weight_decay: 0.3 });
}

#[test]
fn groups_have_their_own_options() {
    run("adamw.groups", false, |problem| {
        let options = ParamsAdamW { lr: 0.01, weight_decay: 0.1, ..Default::default() };
        let group = |name: &str, var: &Var, options| ParameterGroup {
            parameters: vec![(name.to_string(), var.clone())],
            options,
        };
        let bias = ParamsAdamW { lr: 0.02, weight_decay: 0., ..options.clone() };
        vec![group("w", &problem.w, options), group("b", &problem.b, bias)]
    });
}

#[test]
fn parameters_without_a_gradient_are_left_alone() {
    run_sparse("adamw.sparse", ParamsAdamW { lr: 0.01, ..Default::default() });
}

#[test]
fn adam_follows_pytorch() {
    run_one("adam.default", ParamsAdam::default());
    run_one("adam.l2", ParamsAdam { lr: 0.02, beta1: 0.8, beta2: 0.98, eps: 1e-3, weight_decay: 0.05 });
}

#[test]
fn sgd_follows_pytorch() {
    let plain = ParamsSgd { lr: 0.1, ..Default::default() };
    run_one("sgd.plain", plain.clone());
    run_one("sgd.decay", ParamsSgd { weight_decay: 0.05, ..plain });
    let momentum = ParamsSgd { lr: 0.05, momentum: 0.9, ..Default::default() };
    run_one("sgd.momentum", ParamsSgd { weight_decay: 0.01, ..momentum.clone() });
    run_sparse("sgd.dampening", ParamsSgd { dampening: 0.5, ..momentum.clone() });
    run_one("sgd.nesterov", ParamsSgd { momentum: 0.8, nesterov: true, weight_decay: 0.01, ..momentum });
}

#[test]
fn lamb_follows_its_formulas() {
    let options = ParamsLamb { lr: 0.02, ..Default::default() };
    run_one("lamb.default", options.clone());
    let l2 = ParamsLamb { adam_w_mode: false, grad_averaging: false, weight_decay: 0.1, ..options.clone() };
    run_one("lamb.l2", ParamsLamb { max_grad_norm: Some(0.01), ..l2 });
    // Without the trust ratio, the scale of the moments matters.
    run_one("lamb.plain", ParamsLamb { lr: 0.002, weight_decay: 0., grad_averaging: false, ..options.clone() });
    let nv = ParamsLamb { weight_decay: 0., use_nvlamb: true, ..options };
    run_one("lamb.nv", ParamsLamb { max_grad_norm: None, bias_correction: false, ..nv });
}

/// Two groups whose learning rates are 0.1 and 0.02.
fn two_rates() -> Sgd {
    let group = |name: &str, lr| ParameterGroup {
        parameters: vec![(name.to_string(), Var::zeros(1, DType::F32, &Device::Cpu).unwrap())],
        options: ParamsSgd { lr, ..Default::default() },
    };
    Sgd::from_groups(vec![group("a", 0.1), group("b", 0.02)]).unwrap()
}

/// Runs a schedule; halfway it is saved, and a new one loads it.
fn schedule<S: Schedule + Clone>(name: &str, options: S) {
    let expected = rows(&golden(), &format!("schedule.{name}"));
    let mut optimizer = two_rates();
    let mut scheduler = LrScheduler::new(&mut optimizer, options.clone()).unwrap();
    for (step, expected) in expected.iter().enumerate() {
        assert_near(&optimizer.learning_rates(), expected, 1e-15, &format!("{name}, step {step}"));
        if step == expected.len() / 2 {
            let state = scheduler.state_dict().unwrap();
            let mut other = two_rates();
            other.set_learning_rates(&[1., 1.]).unwrap();
            scheduler = LrScheduler::new(&mut other, options.clone()).unwrap();
            scheduler.load_state_dict(&state).unwrap();
        }
        scheduler.step(&mut optimizer).unwrap();
    }
}

#[test]
fn schedules_follow_pytorch() {
    schedule("step", ParamsStepLr { step_size: 7, gamma: 0.3 });
    schedule("multi_step", ParamsMultiStepLr { milestones: vec![30, 4, 11, 11], gamma: 0.5 });
    schedule("cosine", ParamsCosineAnnealingLr { t_max: 25, eta_min: 0.001 });
    let warmup = ParamsWarmupCosine { warmup_steps: 10, total_steps: 60, start_factor: 0.1, eta_min: 0.001 };
    schedule("warmup_cosine", warmup);
    schedule("one_cycle", ParamsOneCycleLr { total_steps: 60, ..Default::default() });
    let three =
        ParamsOneCycleLr { total_steps: 60, pct_start: 0.37, anneal_strategy: Anneal::Linear, ..Default::default() };
    schedule(
        "one_cycle_three",
        ParamsOneCycleLr { div_factor: 10., final_div_factor: 100., three_phase: true, ..three },
    );
}

#[test]
fn plateaus_are_found_where_pytorch_finds_them() {
    let golden = golden();
    let metrics: Vec<f64> = golden["metrics"].to_vec1().unwrap();
    let min = ParamsReduceLrOnPlateau { factor: 0.5, patience: 3, cooldown: 2, min_lr: 0.001, ..Default::default() };
    let max = ParamsReduceLrOnPlateau {
        mode: PlateauMode::Max,
        factor: 0.2,
        patience: 2,
        threshold: Threshold::Absolute(0.01),
        eps: 0.0005,
        ..Default::default()
    };
    for (name, options, sign) in [("plateau", min, 1.), ("plateau_max", max, -1.)] {
        let mut optimizer = two_rates();
        let mut scheduler = ReduceLrOnPlateau::new(options.clone()).unwrap();
        for (step, expected) in rows(&golden, &format!("schedule.{name}")).iter().enumerate() {
            assert_near(&optimizer.learning_rates(), expected, 1e-15, &format!("{name}, step {step}"));
            let state = scheduler.state_dict().unwrap();
            scheduler = ReduceLrOnPlateau::new(options.clone()).unwrap();
            scheduler.load_state_dict(&state).unwrap();
            scheduler.step(&mut optimizer, sign * metrics[step]).unwrap();
        }
        assert_ne!(optimizer.learning_rates(), two_rates().learning_rates(), "{name} never reduced anything");
    }
}

#[test]
fn clipping_follows_pytorch() {
    let golden = golden();
    let x = golden["x"].narrow(0, 0, 3).unwrap();
    for transposed in [false, true] {
        let x = if transposed { x.t().unwrap().contiguous().unwrap().t().unwrap() } else { x.copy().unwrap() };
        let (v, w) =
            (Var::zeros((3, 4), DType::F64, &Device::Cpu).unwrap(), Var::zeros(3, DType::F64, &Device::Cpu).unwrap());
        let unused = Var::zeros(3, DType::F64, &Device::Cpu).unwrap();
        let vars = [v.clone(), unused, w.clone()];
        let grads = || {
            // A GradStore can only be obtained from a backward pass.
            let mut grads = v.sum_all().unwrap().backward().unwrap();
            grads.insert(&v, x.copy().unwrap());
            grads.insert(&w, golden["b"].copy().unwrap());
            grads
        };
        let check = |name: &str, norm: f64, grads: &GradStore| {
            let flat = |var| grads.get(var).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
            let expected: Vec<f64> = golden[&format!("clip.{name}")].to_vec1().unwrap();
            assert_near(&[vec![norm], flat(&v), flat(&w)].concat(), &expected, 1e-12, name);
        };
        let mut store = grads();
        let norm = clip_grad_norm(&mut store, vars.to_vec(), 1.5).unwrap();
        check("l2", norm.to_scalar().unwrap(), &store);
        store = grads();
        let norm = clip_grad_norm(&mut store, vars.to_vec(), 1e3).unwrap();
        check("none", norm.to_scalar().unwrap(), &store);
        store = grads();
        let inf = ClipOptions { norm_type: NormType::Inf, ..Default::default() };
        let norm = clip_grad_norm_with(&mut store, vars.to_vec(), 0.5, inf).unwrap();
        check("inf", norm.to_scalar().unwrap(), &store);
        store = grads();
        clip_grad_value(&mut store, vars.to_vec(), 0.4).unwrap();
        check("value", 0., &store);
    }
}

#[test]
fn moving_averages_follow_pytorch() {
    let golden = golden();
    for (dtype, tolerance) in [(DType::F64, 1e-14), (DType::F32, 1e-6)] {
        let var = Var::zeros((2, 4), dtype, &Device::Cpu).unwrap();
        let mut ema = Ema::new(vec![("layer".to_string(), var.clone())], 0.9).unwrap();
        let weights = rows(&golden, "ema.weights").into_iter().zip(rows(&golden, "ema.averages"));
        for (step, (weights, expected)) in weights.enumerate() {
            let weights = Tensor::from_vec(weights, (2, 4), &Device::Cpu).unwrap();
            var.set(&weights.to_dtype(dtype).unwrap()).unwrap();
            ema.update().unwrap();
            let (name, average) = ema.averages().unwrap().remove(0);
            assert_eq!(name, "layer");
            let average = average.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
            assert_near(&average, &expected, tolerance, &format!("{dtype:?}, update {step}"));
        }
    }
}
