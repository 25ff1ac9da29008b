//! DataParallel on several CPU devices, compared with the same model on one device.
use crate::common::{
    Between, assert_buffers_are_read_first, assert_close, assert_error, fill, floats, plain, tensor, var,
};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Module, ModuleT, Tensor, Var};
use candle_ddp::Error;
use candle_ddp::data_parallel::{self, DataParallel, gather, parallel_apply, replicate, scatter};
use candle_nn::{Func, FuncT, Optimizer, SGD, VarBuilder, VarMap, batch_norm, func, func_t, linear, loss};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const CPU: Device = Device::Cpu;

type Net = Func<'static>;

/// A model with tied weights, an unused parameter, and an operation between the layers.
fn net(vb: VarBuilder) -> candle_core::Result<Net> {
    linear(3, 3, vb.pp("unused"))?;
    let scale = vb.get_with_hints(6, "scale", candle_nn::Init::Const(1.0))?;
    let (first, tied) = (linear(6, 6, vb.pp("shared"))?, linear(6, 6, vb.pp("shared"))?);
    let last = linear(6, 4, vb.pp("last"))?;
    Ok(func(move |xs| {
        let xs = first.forward(xs)?.tanh()?.broadcast_mul(&scale)?;
        last.forward(&tied.forward(&xs)?.relu()?)
    }))
}

fn data_parallel(devices: usize, dtype: DType) -> (VarMap, DataParallel<Net>) {
    let varmap = VarMap::new();
    let dp = DataParallel::with_dtype(&vec![CPU; devices], &CPU, &varmap, dtype, net).unwrap();
    fill(&varmap, 1);
    (varmap, dp)
}

fn assert_same_gradients(ours: (&VarMap, &GradStore), plain: (&VarMap, &GradStore), tolerance: f32) {
    let names: Vec<String> = ours.0.data().lock().unwrap().keys().cloned().collect();
    for name in &names {
        let expected = plain.1.get(&var(plain.0, name));
        let actual = ours.1.get(&var(ours.0, name));
        assert_eq!(actual.is_some(), expected.is_some(), "{name}");
        if let (Some(actual), Some(expected)) = (actual, expected) {
            assert_eq!(actual.dtype(), expected.dtype(), "{name}");
            assert_close(&floats(actual), &floats(expected), tolerance, name);
        }
    }
}

#[test]
fn values_and_gradients_match_one_device() {
    for devices in 1..=4 {
        for rows in [8, 7, 5, 3, 2, 1] {
            let (varmap, dp) = data_parallel(devices, DType::F32);
            let (net, copy) = plain(net, DType::F32, 1);
            let (x, target) = (tensor(&[rows, 6], 2), tensor(&[rows, 4], 3));
            let (ours, expected) = (dp.forward(&x).unwrap(), net.forward(&x).unwrap());
            assert_close(&floats(&ours), &floats(&expected), 1e-5, "output");
            let ours = dp.backward(&dp.loss(&ours, &target, loss::mse).unwrap()).unwrap();
            let expected = loss::mse(&expected, &target).unwrap().backward().unwrap();
            assert_same_gradients((&varmap, &ours), (&copy, &expected), 1e-5);
            assert!(ours.get(&var(&varmap, "unused.weight")).is_none());
            assert_eq!(ours.get(&var(&varmap, "last.bias")).unwrap().dims(), [4]);
        }
    }
}

#[test]
fn other_dtypes_work() {
    for (dtype, tolerance) in [(DType::F64, 1e-6), (DType::BF16, 0.05), (DType::F16, 0.01)] {
        let (varmap, dp) = data_parallel(3, dtype);
        let (net, copy) = plain(net, dtype, 1);
        let x = tensor(&[7, 6], 2).to_dtype(dtype).unwrap();
        let loss = |output: Tensor| output.sqr().unwrap().mean_all().unwrap();
        let ours = dp.backward(&loss(dp.forward(&x).unwrap())).unwrap();
        let expected = loss(net.forward(&x).unwrap()).backward().unwrap();
        assert_eq!(ours.get(&var(&varmap, "scale")).unwrap().dtype(), dtype);
        assert_same_gradients((&varmap, &ours), (&copy, &expected), tolerance);
    }
}

#[test]
fn candles_own_backward_pass_is_an_error() {
    for devices in [1, 2] {
        let (varmap, dp) = data_parallel(devices, DType::F32);
        let before = floats(&var(&varmap, "last.weight"));
        let loss = dp.forward(&tensor(&[4, 6], 1)).unwrap().mean_all().unwrap();
        assert_error(loss.backward(), &["dp.backward(&loss)"]);
        assert_error(SGD::new(dp.parameters(), 0.1).unwrap().backward_step(&loss), &["optimizer.backward_step(&loss)"]);
        assert_eq!(floats(&var(&varmap, "last.weight")), before);
        dp.backward(&loss).unwrap();
        // The permission ends with DataParallel's backward pass.
        loss.backward().unwrap_err();
    }
}

#[test]
fn several_forward_passes_may_come_before_one_backward_pass() {
    let (varmap, dp) = data_parallel(2, DType::F32);
    let (net, copy) = plain(net, DType::F32, 1);
    let (one, two) = (tensor(&[4, 6], 1), tensor(&[5, 6], 2));
    let loss = |one: Tensor, two: Tensor| {
        (one.sqr().unwrap().sum_all().unwrap() + two.exp().unwrap().sum_all().unwrap()).unwrap()
    };
    let ours = loss(dp.forward(&one).unwrap(), dp.forward(&two).unwrap());
    let expected = loss(net.forward(&one).unwrap(), net.forward(&two).unwrap()).backward().unwrap();
    for _ in 0..2 {
        // As in candle, a second backward pass gives the same gradients.
        assert_same_gradients((&varmap, &dp.backward(&ours).unwrap()), (&copy, &expected), 1e-5);
    }
}

#[test]
fn a_penalty_on_the_variables_adds_to_the_gradients() {
    let (varmap, dp) = data_parallel(2, DType::F32);
    let (net, copy) = plain(net, DType::F32, 1);
    let x = tensor(&[4, 6], 1);
    let loss = |varmap: &VarMap, output: Tensor| {
        let penalty = var(varmap, "last.weight").sqr().unwrap().sum_all().unwrap();
        (output.sqr().unwrap().sum_all().unwrap() + penalty).unwrap()
    };
    let ours = dp.backward(&loss(&varmap, dp.forward(&x).unwrap())).unwrap();
    let expected = loss(&copy, net.forward(&x).unwrap()).backward().unwrap();
    assert_same_gradients((&varmap, &ours), (&copy, &expected), 1e-5);
}

#[test]
fn gradients_reach_inputs_and_pass_through_chained_models() {
    let (varmap, dp) = data_parallel(3, DType::F32);
    let (net, copy) = plain(net, DType::F32, 1);
    let heads = VarMap::new();
    let head = DataParallel::new(&[CPU, CPU], &CPU, &heads, |vb| linear(4, 2, vb)).unwrap();
    fill(&heads, 5);
    let plain_head = linear(4, 2, VarBuilder::from_varmap(&heads, DType::F32, &CPU)).unwrap();
    let x = Var::from_tensor(&tensor(&[5, 6], 1)).unwrap();
    // The input is also used outside the models.
    let loss = |output: Tensor| (output.sqr().unwrap().sum_all().unwrap() + x.sum_all().unwrap()).unwrap();
    let doubled = (x.as_tensor() * 2.0).unwrap();
    let ours = loss(head.forward(&dp.forward(&doubled).unwrap()).unwrap());
    let expected = loss(plain_head.forward(&net.forward(&doubled).unwrap()).unwrap()).backward().unwrap();
    // All three ways to start the backward pass give the same gradients.
    for ours in [dp.backward(&ours), head.backward(&ours), data_parallel::backward(&ours)] {
        let ours = ours.unwrap();
        assert_same_gradients((&varmap, &ours), (&copy, &expected), 1e-5);
        assert_same_gradients((&heads, &ours), (&heads, &expected), 1e-5);
        assert_close(&floats(ours.get(&x).unwrap()), &floats(expected.get(&x).unwrap()), 1e-5, "x");
    }
}

#[test]
fn a_replica_may_hold_a_data_parallel_model() {
    let (outside, inside) = (VarMap::new(), VarMap::new());
    // A model that itself splits its input over devices.
    let build = |vb: VarBuilder| {
        let inner = DataParallel::new(&[CPU, CPU], &CPU, &inside, |vb| linear(4, 2, vb))?;
        let linear = linear(6, 4, vb)?;
        Ok::<_, Error>(func_t(move |xs, train| linear.forward(xs)?.tanh()?.apply_t(&inner, train)))
    };
    let dp = DataParallel::new(&[CPU, CPU], &CPU, &outside, build).unwrap();
    fill(&outside, 1);
    fill(&inside, 2);
    let vb = |varmap: &VarMap| VarBuilder::from_varmap(varmap, DType::F32, &CPU);
    let (first, second) = (linear(6, 4, vb(&outside)).unwrap(), linear(4, 2, vb(&inside)).unwrap());
    let x = tensor(&[7, 6], 1);
    let loss = |output: Tensor| output.sqr().unwrap().mean_all().unwrap();
    let ours = dp.backward(&loss(dp.forward_t(&x, true).unwrap())).unwrap();
    let expected = loss(second.forward(&first.forward(&x).unwrap().tanh().unwrap()).unwrap()).backward().unwrap();
    assert_same_gradients((&outside, &ours), (&outside, &expected), 1e-5);
    assert_same_gradients((&inside, &ours), (&inside, &expected), 1e-5);
}

#[test]
fn models_may_take_and_return_several_tensors() {
    let (varmap, dp) = data_parallel(3, DType::F32);
    let (net, copy) = plain(net, DType::F32, 1);
    let (x, index) = (tensor(&[7, 6], 1), Tensor::arange(0u32, 7, &CPU).unwrap());
    let y = Var::from_tensor(&tensor(&[7, 4], 2)).unwrap();
    let unused = Var::from_tensor(&tensor(&[7], 3)).unwrap();
    // A variable that does not belong to the model.
    let extra = Var::from_tensor(&tensor(&[4], 4)).unwrap();
    let f = |net: &Net, inputs: &[Tensor]| {
        let (x, index, y) = (&inputs[0], &inputs[1], &inputs[2]);
        let output = net.forward(x)?.broadcast_add(&extra)?;
        let product = (&output * y)?;
        Ok(vec![output, product.clone(), (index + 1.0)?, product.sum_all()?, product.sqr()?.sum_all()?])
    };
    let inputs = [&x, &index, y.as_tensor(), unused.as_tensor()];
    let ours = dp.call(&inputs, f).unwrap();
    let expected = f(&net, &inputs.map(Tensor::clone)).unwrap();
    for number in [0, 1, 2] {
        assert_eq!(ours[number].dtype(), expected[number].dtype());
        assert_close(&floats(&ours[number]), &floats(&expected[number]), 1e-5, "output");
    }
    assert_eq!(ours[2].to_vec1::<u32>().unwrap(), (1..=7).collect::<Vec<_>>());
    for number in [3, 4] {
        assert_eq!(ours[number].dims(), [3], "one for each replica");
        let sum = ours[number].sum_all().unwrap();
        assert_close(&floats(&sum), &floats(&expected[number]), 1e-5, "scalar");
    }
    // The loss does not use output 4.
    let loss = |outputs: &[Tensor]| {
        let sum = |number: usize| outputs[number].sqr().unwrap().sum_all().unwrap();
        ((sum(0) + sum(1)).unwrap() + outputs[3].sum_all().unwrap()).unwrap()
    };
    let ours = dp.backward(&loss(&ours)).unwrap();
    let expected = loss(&expected).backward().unwrap();
    assert_same_gradients((&varmap, &ours), (&copy, &expected), 1e-5);
    // The outputs do not depend on `unused`, so its gradient is zero.
    assert_eq!(floats(ours.get(&unused).unwrap()), [0.0; 7]);
    for var in [&y, &extra] {
        assert_close(&floats(ours.get(var).unwrap()), &floats(expected.get(var).unwrap()), 1e-5, "variable");
    }
}

fn with_norm(vb: VarBuilder) -> candle_core::Result<FuncT<'static>> {
    let (linear, norm) = (linear(6, 4, vb.pp("linear"))?, batch_norm(4, 1e-5, vb.pp("norm"))?);
    Ok(func_t(move |xs, train| norm.forward_t(&linear.forward(xs)?, train)))
}

#[test]
fn buffers_follow_the_first_device() {
    let varmap = VarMap::new();
    let dp = DataParallel::new(&[CPU, CPU], &CPU, &varmap, with_norm).unwrap();
    let (net, alone) = plain(with_norm, DType::F32, 1);
    fill(&varmap, 1);
    for varmap in [&varmap, &alone] {
        for name in ["norm.running_var", "norm.running_mean"] {
            var(varmap, name).set(&Tensor::ones(4, DType::F32, &CPU).unwrap()).unwrap();
        }
    }
    for step in 0..3 {
        let x = tensor(&[5, 6], step);
        // Each batch norm sees its device's rows; all start from the first device's running means.
        let ours = dp.forward_t(&x, true).unwrap();
        let first = net.forward_t(&x.narrow(0, 0, 3).unwrap(), true).unwrap();
        assert_close(&floats(&ours.narrow(0, 0, 3).unwrap()), &floats(&first), 1e-5, "output");
        for name in ["norm.running_mean", "norm.running_var"] {
            assert_close(&floats(&var(&varmap, name)), &floats(&var(&alone, name)), 1e-5, name);
        }
        // In evaluation mode all replicas use the first device's buffers, so splitting the batch makes no difference.
        let eval = net.forward_t(&x, false).unwrap();
        assert_close(&floats(&dp.forward_t(&x, false).unwrap()), &floats(&eval), 1e-5, "evaluation");
        assert_close(&floats(&x.apply_t(&dp, false).unwrap()), &floats(&eval), 1e-5, "as a ModuleT");
        assert_close(&floats(&dp.module().forward_t(&x, false).unwrap()), &floats(&eval), 1e-5, "one device");
    }
    let names = |named: Vec<(String, Var)>| named.into_iter().map(|(name, _)| name).collect::<Vec<_>>();
    assert_eq!(names(dp.named_buffers()), ["norm.running_mean", "norm.running_var"]);
    assert_eq!(names(dp.named_parameters()), ["linear.weight", "linear.bias", "norm.weight", "norm.bias"]);
}

#[test]
fn no_replica_computes_before_all_have_read_the_buffers() {
    for devices in [2, 3] {
        assert_buffers_are_read_first(&vec![CPU; devices], 10);
    }
}

#[test]
fn the_varmap_has_the_models_own_names() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let (varmap, dp) = data_parallel(2, DType::F32);
    let x = tensor(&[4, 6], 1);
    let expected = floats(&dp.forward(&x).unwrap());
    varmap.save(&file).unwrap();
    let mut names: Vec<String> = varmap.data().lock().unwrap().keys().cloned().collect();
    names.sort();
    let own = ["last.bias", "last.weight", "scale", "shared.bias", "shared.weight", "unused.bias", "unused.weight"];
    assert_eq!(names, own);
    let mut varmap = varmap;
    fill(&varmap, 9);
    assert_ne!(floats(&dp.forward(&x).unwrap()), expected);
    varmap.load(&file).unwrap();
    assert_eq!(floats(&dp.forward(&x).unwrap()), expected, "all replicas have the loaded values");
}

/// Counts its live clones, one for each graph that holds it.
#[derive(Clone)]
struct Marker(Arc<AtomicUsize>);

impl Marker {
    fn new(alive: &Arc<AtomicUsize>) -> Self {
        alive.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(alive))
    }
}

impl Drop for Marker {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[test]
fn graphs_live_as_long_as_their_outputs() {
    let (_, dp) = data_parallel(2, DType::F32);
    let alive = Arc::new(AtomicUsize::new(0));
    let forward = || {
        let f = |net: &Net, inputs: &[Tensor]| {
            let marker = Marker::new(&alive);
            let marked = Between(move || {
                let _ = &marker;
                Ok(())
            });
            Ok(vec![net.forward(&inputs[0])?.contiguous()?.apply_op1(marked)?])
        };
        dp.call(&[&tensor(&[4, 6], 1)], f).unwrap().remove(0)
    };
    drop(forward());
    assert_eq!(alive.load(Ordering::SeqCst), 0, "evaluation must leave no graph");
    let output = forward();
    assert_eq!(alive.load(Ordering::SeqCst), 2);
    let grads = dp.backward(&output.sum_all().unwrap()).unwrap();
    drop(output);
    assert_eq!(alive.load(Ordering::SeqCst), 0, "gradients must hold no graph");
    drop(grads);
}

#[track_caller]
fn assert_replica_failed<T>(result: Result<T, Error>, number: usize, words: &str) {
    match result.err() {
        Some(error @ Error::Replica { .. }) => {
            let text = error.to_string();
            assert!(text.starts_with(&format!("replica {number} on device cpu failed: ")), "{text}");
            assert!(text.contains(words), "{text}");
        }
        other => panic!("{other:?}"),
    }
}

fn spring(panics: bool) -> candle_core::Result<()> {
    assert!(!panics, "the trap has shut");
    candle_core::bail!("the trap has shut")
}

/// A model that fails with an error or a panic if the batch contains the row.
fn trap(panics: bool, backward: bool, vb: VarBuilder) -> candle_core::Result<Net> {
    let linear = linear(3, 2, vb)?;
    Ok(func(move |xs| {
        let bad = xs.max_all()?.to_scalar::<f32>()? > 1.5;
        if bad && !backward {
            spring(panics)?;
        }
        let ys = linear.forward(xs)?;
        if bad { ys.apply_op1(Between(move || spring(panics))) } else { Ok(ys) }
    }))
}

#[test]
fn a_replica_that_fails_is_named_and_the_next_call_works() {
    let good = tensor(&[6, 3], 1);
    let rows = |bad: usize| {
        let mut rows = vec![0f32; 18];
        rows[3 * bad] = 2.0;
        Tensor::from_vec(rows, (6, 3), &CPU).unwrap()
    };
    for panics in [false, true] {
        for backward in [false, true] {
            for (devices, bad, number) in [(3, 4, 2), (3, 0, 0), (1, 4, 0)] {
                let varmap = VarMap::new();
                let build = |vb: VarBuilder| trap(panics, backward, vb);
                let dp = DataParallel::new(&vec![CPU; devices], &CPU, &varmap, build).unwrap();
                let step = |x: &Tensor| dp.backward(&dp.forward(x)?.sum_all()?);
                let expected = floats(step(&good).unwrap().get(&var(&varmap, "weight")).unwrap());
                assert_replica_failed(step(&rows(bad)), number, "the trap has shut");
                let again = step(&good).unwrap();
                assert_eq!(floats(again.get(&var(&varmap, "weight")).unwrap()), expected);
            }
        }
    }
}

#[test]
fn deep_graphs_fit_the_replicas_stacks() {
    let (varmap, dp) = data_parallel(2, DType::F32);
    let deep = |net: &Net, inputs: &[Tensor]| {
        let mut output = net.forward(&inputs[0])?;
        for _ in 0..30_000 {
            output = (output + 0.0001)?;
        }
        Ok(vec![output])
    };
    let output = dp.call(&[&tensor(&[2, 6], 1)], deep).unwrap().remove(0);
    let grads = dp.backward(&output.sum_all().unwrap()).unwrap();
    assert_eq!(floats(grads.get(&var(&varmap, "last.bias")).unwrap()), [2.0; 4]);
    // Dropping a graph recurses too, on whichever thread drops it.
    std::thread::Builder::new().stack_size(64 << 20).spawn(move || drop(output)).unwrap().join().unwrap();
}

#[test]
fn invalid_arguments_are_refused() {
    let argument = |result: Result<(), Error>, name: &str, words: &str| match result {
        Err(Error::InvalidArgument { argument, reason }) => {
            assert_eq!(argument, name);
            assert!(reason.contains(words), "{reason}");
        }
        other => panic!("{other:?}"),
    };
    let empty = DataParallel::new(&[], &CPU, &VarMap::new(), net).map(|_| ());
    argument(empty, "devices", "at least one device");
    let (_, dp) = data_parallel(2, DType::F32);
    argument(dp.forward(&Tensor::new(1f32, &CPU).unwrap()).map(|_| ()), "tensor", "dimension 0");
    let (x, y) = (tensor(&[4, 6], 1), tensor(&[3, 6], 1));
    argument(dp.call(&[&x, &y], |_, _| Ok(vec![])).map(|_| ()), "inputs", "[3, 6]");
    argument(dp.call(&[], |_, _| Ok(vec![])).map(|_| ()), "inputs", "at least one tensor");
    let uneven = |_: &Net, inputs: &[Tensor]| Ok(vec![inputs[0].clone(); inputs[0].dim(0)?]);
    argument(dp.call(&[&tensor(&[5, 6], 1)], uneven).map(|_| ()), "outputs", "replica 1 returned 2");
    let shapes = |_: &Net, inputs: &[Tensor]| Ok(vec![inputs[0].t()?]);
    argument(dp.call(&[&tensor(&[5, 6], 1)], shapes).map(|_| ()), "tensors", "f32[6, 2]");
    // A wrong shape is reported as candle's error, with the replica where it happened.
    assert_replica_failed(dp.forward(&tensor(&[4, 5], 1)), 0, "shape mismatch");
}

#[test]
fn models_that_differ_between_devices_are_refused() {
    let builds = AtomicUsize::new(0);
    let build = |vb: VarBuilder<'static>| {
        if builds.fetch_add(1, Ordering::SeqCst) == 1 {
            linear(2, 2, vb.pp("second"))?;
        }
        linear(2, 2, vb.pp("both"))
    };
    match DataParallel::new(&[CPU, CPU], &CPU, &VarMap::new(), build).map(|_| ()) {
        Err(Error::Parameter { parameter, .. }) => assert_eq!(parameter, "second.weight"),
        other => panic!("{other:?}"),
    }
    let late = std::sync::Mutex::new(None);
    let keep = |vb: VarBuilder<'static>| {
        *late.lock().unwrap() = Some(vb.clone());
        linear(2, 2, vb)
    };
    DataParallel::new(&[CPU, CPU], &CPU, &VarMap::new(), keep).unwrap();
    let vb = late.into_inner().unwrap().unwrap();
    assert!(vb.get((2, 2), "weight").is_ok());
    assert_error(vb.get(3, "more"), &["more was requested after DataParallel was built"]);
    assert_error(vb.get((3, 2), "weight"), &["one shape"]);
}

#[test]
fn replicate_scatter_parallel_apply_and_gather_work_on_their_own() {
    let varmap = VarMap::new();
    let devices = [CPU, CPU, CPU];
    let replicas = replicate(&devices, &varmap, DType::F32, |vb| linear(6, 2, vb)).unwrap();
    fill(&varmap, 1);
    let x = Var::from_tensor(&tensor(&[7, 6], 1)).unwrap();
    let parts = scatter(&x, &devices).unwrap();
    let threads = std::sync::Mutex::new(std::collections::HashSet::new());
    let outputs = parallel_apply(&replicas, parts, |net, x| {
        threads.lock().unwrap().insert(std::thread::current().id());
        net.forward(&x)
    });
    assert_eq!(threads.into_inner().unwrap().len(), 3, "each replica runs on its own thread");
    let output = gather(&outputs.unwrap(), &CPU).unwrap();
    let plain = linear(6, 2, VarBuilder::from_varmap(&varmap, DType::F32, &CPU)).unwrap();
    let expected = plain.forward(&x).unwrap();
    assert_close(&floats(&output), &floats(&expected), 1e-6, "output");
    // One replica runs on the calling thread.
    let here = std::thread::current().id();
    let ran_here = parallel_apply(&replicas, vec![()], |_, ()| Ok(std::thread::current().id() == here));
    assert_eq!(ran_here.unwrap(), [true]);
    // Gradients flow back through scatter and gather.
    let grad = |output: Tensor| floats(output.sqr().unwrap().sum_all().unwrap().backward().unwrap().get(&x).unwrap());
    assert_close(&grad(output), &grad(expected), 1e-5, "x");
    // Replicas have their own storage, even if the devices are the same.
    let weights: Vec<&Tensor> = replicas.iter().map(|replica| replica.module().weight()).collect();
    assert_eq!(weights[0].id(), var(&varmap, "weight").id());
    fill(&varmap, 2);
    assert_eq!(floats(weights[0]), floats(&var(&varmap, "weight")));
    assert_ne!(floats(weights[1]), floats(&var(&varmap, "weight")));
    let four = vec![(); 4];
    assert!(parallel_apply(&replicas, four, |_, ()| Ok(())).is_err());
}
