//! DataParallel on several GPUs, or on one GPU and the CPU:
//!
//! ```text
//! cargo test --release --features cuda --test gpu_data_parallel
//! ```
//!
//! Without a GPU every test reports that it is skipped, or fails if CANDLE_DDP_REQUIRE_GPU is set.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used)] // a failed test may panic
#![allow(unsafe_code)] // the pool of memory is asked through the driver's functions
mod common;

use candle_core::{DType, Device, Tensor};
use candle_ddp::data_parallel::{DataParallel, parallel_apply, replicate};
use candle_ddp::{Backend, Error};
use candle_nn::{Linear, Module, Optimizer, SGD, VarBuilder, VarMap, linear, loss};
use common::{assert_buffers_are_read_first, assert_close, fill, floats, skip_unless, tensor, var};
use cudarc::driver::{result, sys};

const WIDTH: usize = 512;

/// So deep that a stream that is not waited for still has much work left.
struct Deep(Vec<Linear>);

fn build(vb: VarBuilder) -> candle_core::Result<Deep> {
    let mut layers =
        (0..12).map(|layer| linear(WIDTH, WIDTH, vb.pp(layer))).collect::<candle_core::Result<Vec<_>>>()?;
    layers.push(linear(WIDTH, 16, vb.pp("last"))?);
    Ok(Deep(layers))
}

impl Module for Deep {
    fn forward(&self, xs: &Tensor) -> candle_core::Result<Tensor> {
        self.0.iter().try_fold(xs.clone(), |xs, layer| layer.forward(&xs.tanh()?))
    }
}

/// Fills weights so that neither values nor gradients vanish or explode.
fn fill_small(varmap: &VarMap) {
    fill(varmap, 1);
    for var in varmap.all_vars() {
        var.set(&(var.as_tensor() * 0.25).unwrap()).unwrap();
    }
}

/// Returns lists of devices to train on; none without a GPU.
fn lists(test: &str) -> Vec<Vec<Device>> {
    let gpus: Vec<Device> = (0..8).map_while(|ordinal| Device::new_cuda_with_stream(ordinal).ok()).collect();
    let Some(first) = gpus.first() else {
        skip_unless("CANDLE_DDP_REQUIRE_GPU", test, "there is no GPU");
        return Vec::new();
    };
    let usual = Device::new_cuda(0).unwrap();
    let mut lists = vec![vec![usual.clone()], vec![usual, Device::Cpu], vec![Device::Cpu, first.clone()]];
    if gpus.len() > 1 {
        lists.push(gpus);
    }
    lists
}

#[test]
fn freed_memory_stays_with_the_process() {
    use sys::CUmemPool_attribute::{CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT};
    let Some(devices) = lists("freed_memory_stays_with_the_process").into_iter().next() else { return };
    let stream = devices[0].as_cuda_device().unwrap().cuda_stream();
    let mut bytes = 0u64;
    // SAFETY: the device exists.
    let pool = unsafe { result::device::get_mem_pool(stream.context().cu_device()) }.unwrap();
    // As in a program without other groups. SAFETY: the attribute is such a number.
    unsafe { result::mem_pool::set_attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, (&raw mut bytes).cast()) }
        .unwrap();
    DataParallel::new(&devices, &devices[0], &VarMap::new(), build).unwrap();
    let tensor = Tensor::zeros(64 << 20, DType::F32, &devices[0]).unwrap();
    devices[0].synchronize().unwrap();
    drop(tensor);
    // The first one tells the pool of the free.
    devices[0].synchronize().unwrap();
    devices[0].synchronize().unwrap();
    // SAFETY: as above.
    unsafe { result::mem_pool::get_attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, (&raw mut bytes).cast()) }
        .unwrap();
    assert!(bytes >= 256 << 20, "{} MiB", bytes >> 20);
}

#[test]
fn steps_match_one_cpu() {
    for devices in lists("steps_match_one_cpu") {
        for output_device in [&devices[0], &devices[devices.len() - 1]] {
            let (ours, plain) = (VarMap::new(), VarMap::new());
            let dp = DataParallel::new(&devices, output_device, &ours, build).unwrap();
            let net = build(VarBuilder::from_varmap(&plain, DType::F32, &Device::Cpu)).unwrap();
            fill_small(&ours);
            fill_small(&plain);
            let mut our_steps = SGD::new(dp.parameters(), 0.5).unwrap();
            let mut plain_steps = SGD::new(plain.all_vars(), 0.5).unwrap();
            // Compared only at the end: reading a value waits for the GPU, which would hide a missing wait elsewhere.
            let mut losses = Vec::new();
            for step in 0..5 {
                let (x, y) = (tensor(&[65, WIDTH], 2 * step), tensor(&[65, 16], 2 * step + 1));
                let output = dp.forward(&x).unwrap();
                assert!(output.device().same_device(output_device));
                let here = dp.loss(&output, &y.to_device(output_device).unwrap(), loss::mse).unwrap();
                our_steps.step(&dp.backward(&here).unwrap()).unwrap();
                let there = loss::mse(&net.forward(&x).unwrap(), &y).unwrap();
                plain_steps.backward_step(&there).unwrap();
                losses.push((here, there));
            }
            for (step, (here, there)) in losses.iter().enumerate() {
                assert_close(&floats(here), &floats(there), 1e-4, &format!("{devices:?}, step {step}"));
            }
            for (name, ours) in ours.data().lock().unwrap().iter() {
                assert!(ours.device().same_device(&devices[0]));
                assert_close(&floats(ours), &floats(&var(&plain, name)), 1e-3, name);
            }
        }
    }
}

#[test]
fn tensors_on_another_device_are_refused_with_advice() {
    for devices in lists("tensors_on_another_device_are_refused_with_advice") {
        if devices[0].is_cpu() {
            continue;
        }
        let varmap = VarMap::new();
        let _on_the_cpu = build(VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu)).unwrap();
        match DataParallel::new(&devices, &devices[0], &varmap, build).map(|_| ()) {
            Err(Error::Parameter { parameter, reason }) => {
                assert_eq!(parameter, "0.weight");
                assert!(reason.contains("on device cuda:0 (devices[0])") && reason.contains("device: cpu"), "{reason}");
            }
            other => panic!("{other:?}"),
        }
        let dp = DataParallel::new(&devices, &devices[0], &VarMap::new(), build).unwrap();
        let output = dp.forward(&tensor(&[4, WIDTH], 1)).unwrap();
        match dp.loss(&output, &tensor(&[4, 16], 1), loss::mse) {
            Err(Error::InvalidArgument { argument: "target", reason }) => {
                assert!(reason.contains("on device cpu") && reason.contains("outputs on device cuda:0"), "{reason}");
            }
            other => panic!("{other:?}"),
        }
        let twice = [devices[0].clone(), Device::new_cuda(0).unwrap()];
        assert!(DataParallel::new(&twice, &devices[0], &VarMap::new(), build).is_err());
        if let (Some(_), Ok(second)) = (devices[1..].iter().find(|device| device.is_cuda()), Device::new_cuda(1)) {
            let error = DataParallel::new(&[devices[0].clone(), second], &devices[0], &VarMap::new(), build).err();
            let error = error.map(|error| error.to_string()).unwrap_or_default();
            assert!(error.contains("cuda:1") && error.contains("new_cuda_with_stream"), "{error}");
        }
    }
}

/// Inputs that need gradients get them on their own device.
#[test]
fn gradients_go_back_to_the_inputs_device() {
    for devices in lists("gradients_go_back_to_the_inputs_device") {
        let varmap = VarMap::new();
        let dp = DataParallel::new(&devices, &devices[0], &varmap, build).unwrap();
        let x = candle_core::Var::from_tensor(&tensor(&[5, WIDTH], 1)).unwrap();
        let sum = |output: Tensor| output.sqr().unwrap().sum_all().unwrap();
        let grads = dp.backward(&sum(dp.forward(&x).unwrap())).unwrap();
        let on_first = x.to_device(&devices[0]).unwrap();
        let expected = sum(dp.module().forward(&on_first).unwrap()).backward().unwrap();
        assert!(grads.get(&x).unwrap().device().is_cpu());
        assert_close(&floats(grads.get(&x).unwrap()), &floats(expected.get(&x).unwrap()), 1e-4, "x");
    }
}

/// Work on the calling thread's stream is complete before other threads see its results.
#[test]
fn pending_inputs_are_waited_for() {
    for devices in lists("pending_inputs_are_waited_for") {
        let ([gpu, Device::Cpu], true) = (&devices[..], devices[0].is_cuda()) else { continue };
        let replicas = replicate(&devices, &VarMap::new(), DType::F32, build).unwrap();
        let x = tensor(&[WIDTH, WIDTH], 1);
        let identity = Tensor::eye(WIDTH, DType::F32, gpu).unwrap();
        let mut late = x.to_device(gpu).unwrap();
        for _ in 0..20 {
            late = late.matmul(&identity).unwrap();
        }
        let outputs = parallel_apply(&replicas, vec![late, x.clone()], |_, input| input.affine(1.0, 0.0)).unwrap();
        outputs.iter().for_each(|output| assert_eq!(floats(output), floats(&x)));
    }
}

#[test]
fn no_replica_computes_before_all_have_read_the_buffers() {
    for devices in lists("no_replica_computes_before_all_have_read_the_buffers") {
        assert_buffers_are_read_first(&devices, 5);
    }
}

/// DDP, and layers that communicate, on one GPU without NCCL.
#[test]
fn one_rank_trains_without_nccl() {
    let Some(gpu) = lists("one_rank_trains_without_nccl").into_iter().flatten().find(Device::is_cuda) else { return };
    common::single::works_on(&gpu, Backend::Single);
    #[cfg(not(feature = "nccl"))]
    common::single::works_on(&gpu, Backend::Auto);
}
