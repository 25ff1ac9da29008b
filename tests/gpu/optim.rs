//! Optimizers, clipping and loss scaling on a GPU, compared with the CPU.
use super::common::{assert_close, buckets, floats, values};
use crate::common::assert_error;
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_ddp::amp::{GradScaler, GradScalerOptions};
use candle_ddp::checkpoint::StateDict;
use candle_ddp::optim::{
    AdamW, ClipOptions, FusedOptimizer, NormType, Optimizer, ParameterGroup, ParamsAdam, ParamsLamb, ParamsSgd,
    UpdateRule, ZeroRedundancyOptimizer, clip_grad_norm_with, clip_grad_value,
};
use candle_ddp::{DdpOptions, DistributedDataParallel, OnNonFinite, ProcessGroup, Result, Sharding};
use candle_nn::{Linear, ParamsAdamW, VarBuilder, VarMap, linear};

const STEPS: u64 = 100;
/// Below, at and above the chunk size of a block.
const SIZES: [usize; 6] = [1, 257, 4095, 4096, 4097, 100_003];

pub(crate) fn tensor(size: usize, seed: u64, dtype: DType, device: &Device) -> Tensor {
    let values = Tensor::from_vec(values(size, seed), size, &Device::Cpu).unwrap();
    values.to_dtype(dtype).unwrap().to_device(device).unwrap()
}

fn vars(dtype: DType, device: &Device) -> Vec<Var> {
    let var = |(number, size): (usize, &usize)| Var::from_tensor(&tensor(*size, number as u64, dtype, device)).unwrap();
    SIZES.iter().enumerate().map(var).collect()
}

/// Returns the same gradients of `vars` for a GPU and the CPU. In odd steps the second variable has none.
fn gradients(vars: &[Var], step: u64) -> GradStore {
    let mut store = Var::new(0f32, &Device::Cpu).unwrap().sqr().unwrap().backward().unwrap();
    for (number, var) in vars.iter().enumerate() {
        if number != 1 || step.is_multiple_of(2) {
            let seed = 1000 + 10 * step + number as u64;
            store.insert(var, tensor(var.elem_count(), seed, var.dtype(), var.device()));
        }
    }
    store
}

/// Returns two groups of parameters on `device` after a hundred steps, and the optimizer.
fn train<R: UpdateRule>(groups: &[R; 2], dtype: DType, device: &Device) -> (Vec<Var>, FusedOptimizer<R>) {
    let vars = vars(dtype, device);
    let group = |number: usize| ParameterGroup {
        parameters: (number..vars.len()).step_by(2).map(|number| (number.to_string(), vars[number].clone())).collect(),
        options: groups[number].clone(),
    };
    let mut optimizer = FusedOptimizer::from_groups(vec![group(0), group(1)]).unwrap();
    for step in 0..STEPS {
        optimizer.step(&gradients(&vars, step)).unwrap();
    }
    (vars, optimizer)
}

/// With `exact`, elements do not depend on sums and must be equal. The kernels are compiled without fused
/// multiply-adds.
pub(crate) fn trains_alike<R: UpdateRule>(gpu: &Device, groups: [R; 2], exact: bool) {
    let tolerances = [(DType::F32, 1e-5), (DType::F64, 1e-7), (DType::F16, 1e-2), (DType::BF16, 5e-2)];
    for (dtype, tolerance) in tolerances {
        let tolerance = if exact { 0. } else { tolerance };
        let (here, on_cpu) = train(&groups, dtype, &Device::Cpu);
        let (there, on_gpu) = train(&groups, dtype, gpu);
        for (number, (here, there)) in here.iter().zip(&there).enumerate() {
            let what = format!("{} {dtype:?} {groups:?}, parameter {number}", R::NAME);
            assert_close(&floats(there), &floats(here), tolerance, &what);
        }
        let (on_cpu, on_gpu) = (on_cpu.state_dict().unwrap(), on_gpu.state_dict().unwrap());
        assert_eq!(on_cpu.len(), on_gpu.len());
        for (key, state) in on_cpu {
            assert_close(&floats(&on_gpu[&key]), &floats(&state), tolerance, &format!("{} {dtype:?} {key}", R::NAME));
        }
    }
}

pub(crate) fn all_train_alike(gpu: &Device) {
    let adamw = ParamsAdamW { lr: 0.01, ..Default::default() };
    trains_alike(gpu, [adamw.clone(), ParamsAdamW { weight_decay: 0.3, beta1: 0.7, ..adamw }], true);
    let adam = ParamsAdam { lr: 0.01, ..Default::default() };
    trains_alike(gpu, [adam.clone(), ParamsAdam { weight_decay: 0.3, ..adam }], true);
    let plain = ParamsSgd { lr: 0.01, weight_decay: 0.1, ..Default::default() };
    let momentum = ParamsSgd { momentum: 0.9, dampening: 0.4, ..plain.clone() };
    let nesterov = ParamsSgd { momentum: 0.9, nesterov: true, ..plain.clone() };
    trains_alike(gpu, [plain, momentum.clone()], true);
    trains_alike(gpu, [momentum, nesterov], true);
    let lamb = ParamsLamb { lr: 0.01, ..Default::default() };
    let other = ParamsLamb { adam_w_mode: false, max_grad_norm: None, use_nvlamb: true, ..lamb.clone() };
    trains_alike(gpu, [lamb, other], false);
}

/// A dtype without a kernel is refused with the parameter's name, a state can move from the CPU to the GPU, and an
/// optimizer accepts variables on both.
pub(crate) fn devices_mix(gpu: &Device) {
    let mixed = |number: usize| if number == 0 { Device::Cpu } else { gpu.clone() };
    let parameters: Vec<(String, Var)> = (0..2)
        .map(|number| (number.to_string(), Var::from_tensor(&tensor(10, 1, DType::F32, &mixed(number))).unwrap()))
        .collect();
    let vars: Vec<Var> = parameters.iter().map(|(_, var)| var.clone()).collect();
    let mut optimizer = AdamW::new(parameters, ParamsAdamW::default()).unwrap();
    let mut grads = Var::new(0f32, &Device::Cpu).unwrap().sqr().unwrap().backward().unwrap();
    for var in &vars {
        grads.insert(var, tensor(10, 2, DType::F32, var.device()));
    }
    for _ in 0..3 {
        optimizer.step(&grads).unwrap();
    }
    assert_eq!(floats(&vars[0]), floats(&vars[1]));
    // A gradient on the wrong device.
    grads.insert(&vars[1], tensor(10, 2, DType::F32, &Device::Cpu));
    assert_error(optimizer.step(&grads), &["parameter 1", "must be"]);

    let on = |device: &Device| {
        let var = Var::from_tensor(&tensor(10, 1, DType::F32, device)).unwrap();
        AdamW::new(vec![("w".into(), var)], ParamsAdamW::default()).unwrap()
    };
    let (cpu, mut there) = (on(&Device::Cpu), on(gpu));
    there.load_state_dict(&cpu.state_dict().unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    there.save(folder.path().join("state")).unwrap();
    there.load(folder.path().join("state")).unwrap();
}

pub(crate) fn clips_alike(gpu: &Device) {
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        // The GPU decides by itself, unless the program asks for an error, or a gradient is not contiguous.
        let norms = [(NormType::L2, 2.), (NormType::Inf, 0.25), (NormType::L2, 1e9)];
        for ((norm_type, max_norm), by_host) in norms.into_iter().flat_map(|norm| [(norm, false), (norm, true)]) {
            let clip = |device: &Device| {
                let vars = vars(dtype, device);
                let mut grads = gradients(&vars, 1);
                let transposed = tensor(SIZES[2], 7, dtype, device).reshape((45, 91)).unwrap().t().unwrap();
                let transposed = if by_host { transposed } else { transposed.contiguous().unwrap() };
                let odd = Var::zeros((91, 45), dtype, device).unwrap();
                grads.insert(&odd, transposed);
                let vars = [vars, vec![odd]].concat();
                let options = ClipOptions { norm_type, error_if_nonfinite: by_host };
                let norm = clip_grad_norm_with(&mut grads, vars.clone(), max_norm, options).unwrap();
                let norm = norm.to_scalar::<f64>().unwrap();
                clip_grad_value(&mut grads, vars.clone(), 0.2).unwrap();
                let gradients = vars.iter().filter_map(|var| grads.get(var)).flat_map(floats).collect::<Vec<_>>();
                (norm, gradients)
            };
            let ((norm, here), (norm_there, there)) = (clip(&Device::Cpu), clip(gpu));
            assert!((norm - norm_there).abs() <= 1e-5 * norm, "{dtype:?} {norm_type:?}: {norm_there}, not {norm}");
            assert_close(&there, &here, if dtype == DType::BF16 { 1e-2 } else { 2e-3 }, "clipped gradients");
        }
    }
    // A non-finite number in the last element of the last gradient.
    for bad in [f32::NAN, f32::INFINITY] {
        let var = Var::zeros(5000, DType::F32, gpu).unwrap();
        let mut values = vec![1f32; 5000];
        values[4999] = bad;
        let mut grads = Var::new(0f32, &Device::Cpu).unwrap().sqr().unwrap().backward().unwrap();
        grads.insert(&var, Tensor::from_vec(values, 5000, gpu).unwrap());
        let options = ClipOptions { error_if_nonfinite: true, ..Default::default() };
        assert!(clip_grad_norm_with(&mut grads, vec![var], 1., options).is_err(), "{bad}");
    }
}

/// An overflow on the last rank counts for all ranks; otherwise gradients are divided.
pub(crate) fn scales(pg: &ProcessGroup) -> Result<()> {
    let vars = vars(DType::F32, pg.device());
    let named: Vec<_> = vars.iter().enumerate().map(|(number, var)| (number.to_string(), var.clone())).collect();
    let mut scaler = GradScaler::new(pg, named, GradScalerOptions { init_scale: 4., ..Default::default() })?;
    for (step, overflow) in [(0, false), (1, true), (2, false)] {
        let mut grads = gradients(&vars, step);
        scaler.scale(&Tensor::zeros((), DType::F32, pg.device())?)?; // as before a backward pass
        if overflow && pg.rank() + 1 == pg.world_size() {
            let last = &vars[SIZES.len() - 1];
            let mut values = floats(grads.get(last).expect("it has one"));
            values[100_002] = f32::INFINITY;
            grads.insert(last, Tensor::from_vec(values, 100_003, pg.device())?);
        }
        let before = floats(grads.get(&vars[4]).expect("it has one"));
        let scale = scaler.current_scale() as f32;
        scaler.unscale(&mut grads)?;
        let expected: Vec<f32> = before.iter().map(|value| value / scale).collect();
        assert_eq!(floats(grads.get(&vars[4]).expect("it has one")), expected);
        assert_eq!(scaler.step_if_finite(&mut grads, |_| Ok(()))?, !overflow);
        scaler.update()?;
    }
    assert_eq!(scaler.current_scale(), 2.);
    Ok(())
}

/// ZeRO-2 gives the same results as the unsharded optimizer.
pub(crate) fn shards(pg: &ProcessGroup) -> Result<()> {
    fn net(vb: VarBuilder) -> candle_core::Result<[Linear; 2]> {
        Ok([linear(30, 100, vb.pp("a"))?, linear(100, 3, vb.pp("b"))?])
    }
    fn compare<R: UpdateRule>(pg: &ProcessGroup, options: R) -> Result<()> {
        let small = |sharding| DdpOptions { sharding, buckets: buckets(0.001, 0.0005), ..Default::default() };
        let maps = [VarMap::new(), VarMap::new()];
        let [whole, sharded] =
            [(0, Sharding::Off), (1, Sharding::Optimizer { ranks: None })].map(|(number, sharding)| {
                let ddp = DistributedDataParallel::with_options(pg, &maps[number], net, small(sharding));
                super::common::fill(&maps[number], 3);
                ddp
            });
        let (whole, sharded) = (whole?, sharded?);
        let mut reference = FusedOptimizer::new(whole.named_parameters(), options.clone())?;
        let mut optimizer = ZeroRedundancyOptimizer::new(&sharded, options)?;
        for step in 0..20 {
            let x = tensor(8 * 30, 50 + step + 100 * pg.rank() as u64, DType::F32, pg.device()).reshape((8, 30))?;
            let loss = |[a, b]: &[Linear; 2]| {
                use candle_core::Module;
                b.forward(&a.forward(&x)?.tanh()?)?.sqr()?.mean_all()
            };
            let grads = whole.backward(&whole.call(loss)?)?;
            reference.step(&grads)?;
            let mut grads = sharded.backward(&sharded.call(loss)?)?;
            optimizer.clip_grad_norm(&mut grads, 1e9)?;
            optimizer.step(&grads)?;
        }
        for (reference, var) in whole.parameters().iter().zip(sharded.parameters()) {
            assert_close(&floats(&var), &floats(reference), 1e-4, R::NAME);
        }
        Ok(())
    }
    compare(pg, ParamsAdamW::default())?;
    compare(pg, ParamsSgd { lr: 0.1, momentum: 0.9, ..Default::default() })?;
    compare(pg, ParamsLamb { lr: 0.01, ..Default::default() })
}

/// A step that is not finite on the last rank alone is left out on all of them, which the GPUs know before the host does.
pub(crate) fn skips(pg: &ProcessGroup) -> Result<()> {
    let train = |is_scaled: bool, is_left_out: bool| -> Result<Vec<Vec<f32>>> {
        let on_non_finite = Some(OnNonFinite::Skip { at_most: 1 });
        let options = DdpOptions { on_non_finite, ..Default::default() };
        let ddp = DistributedDataParallel::with_options(pg, &VarMap::new(), |vb| linear(30, 5, vb), options)?;
        let vars = ddp.parameters();
        for (seed, var) in vars.iter().enumerate() {
            var.set(&tensor(var.elem_count(), seed as u64, DType::F32, pg.device()).reshape(var.shape())?)?;
        }
        let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
        let options = GradScalerOptions { enabled: is_scaled, ..Default::default() };
        let mut scaler = GradScaler::new(pg, &ddp, options)?;
        for step in (0..8).filter(|step| is_left_out || *step != 5) {
            let is_bad = step == 5 && pg.rank() + 1 == pg.world_size();
            let x = tensor(120, step + 10 * pg.rank() as u64, DType::F32, pg.device()).reshape((4, 30))?;
            let x = (x * if is_bad { f64::INFINITY } else { 1. })?;
            let mut grads = ddp.backward(&scaler.scale(&ddp.forward(&x)?.sqr()?.mean_all()?)?)?;
            optimizer.unscale(&mut scaler, &mut grads)?;
            optimizer.clip_grad_norm(&mut grads, 1e-2)?;
            scaler.step(&mut optimizer, &mut grads)?;
            scaler.update()?;
        }
        assert_eq!(ddp.skipped_steps(), u64::from(is_left_out && !is_scaled));
        let mut state: Vec<_> = optimizer.state_dict()?.into_iter().collect();
        state.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(vars.iter().map(|var| floats(var)).chain(state.iter().map(|(_, tensor)| floats(tensor))).collect())
    };
    for is_scaled in [false, true] {
        assert_eq!(train(is_scaled, true)?, train(is_scaled, false)?, "scaled: {is_scaled}");
    }
    Ok(())
}
