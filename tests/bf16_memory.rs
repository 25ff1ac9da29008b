//! Layers read and write bf16 once: no pass over a whole tensor converts it to f32 or back, which would need memory for the copy.
#![allow(clippy::unwrap_used)]

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_ddp::nn::{
    AttentionOptions, AvgPool2dOptions, BatchNorm, Conv2d, Conv2dConfig, Dropout, Embedding, LayerNorm, Linear,
    MaxPool2dOptions, Module, ModuleT, RmsNorm, add, avg_pool2d, cross_entropy, gelu, gelu_erf, max_pool2d, relu,
    scaled_dot_product_attention, silu, softmax,
};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// The elements of an activation, which are many more than those of weights.
const ELEMENTS: usize = 1 << 20;

fn ones(shape: &[usize]) -> Tensor {
    Tensor::ones(shape, DType::BF16, &Device::Cpu).unwrap()
}

/// The memory that `run` takes at its peak, in bytes per element of an activation.
fn peak<T>(run: impl FnOnce() -> T) -> (T, f64) {
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    let result = run();
    (result, (ALLOCATOR.peak_usage() - before) as f64 / ELEMENTS as f64)
}

/// Checks that neither pass of `layer` has the memory for an activation in f32: the forward pass takes that of its result, and the
/// backward pass that of `gradients` activations in bf16, of which candle needs two to add a gradient to zeros.
fn check(name: &str, inputs: &[&[usize]], gradients: f64, layer: impl Fn(&[Tensor]) -> Result<Tensor>) {
    let vars: Vec<Var> = inputs.iter().map(|shape| Var::from_tensor(&ones(shape)).unwrap()).collect();
    let x: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    layer(&x).unwrap(); // starts threads and makes tables
    let (y, forward) = peak(|| layer(&x).unwrap());
    let (_gradients, backward) = peak(|| y.backward().unwrap());
    let result = 2. * y.elem_count() as f64 / ELEMENTS as f64;
    // A copy in f32 takes 4 bytes. Less than 2 are needed for a part of an activation at a time, and for indices.
    assert!(forward < result + 1.5, "{name}: {forward:.2} bytes per element in the forward pass");
    assert!(backward < 2. * gradients + 1., "{name}: {backward:.2} bytes per element in the backward pass");
}

#[test]
fn no_layer_copies_an_activation_in_f32() {
    // Each thread has memory for parts of activations.
    rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap().install(layers);
}

fn layers() {
    let rows = [ELEMENTS / 256, 256];
    let images = [16, 16, 64, 64];
    check("relu", &[&rows], 3., |x| relu(&x[0]));
    check("gelu", &[&rows], 3., |x| gelu(&x[0]));
    check("gelu_erf", &[&rows], 3., |x| gelu_erf(&x[0]));
    check("silu", &[&rows], 3., |x| silu(&x[0]));
    check("softmax", &[&rows], 3., |x| softmax(&x[0], 1));
    check("add", &[&rows, &rows], 4., |x| add(&x[0], &x[1]));
    check("dropout", &[&rows], 3., |x| Dropout::new(0.1).forward(&x[0], true));
    check("layer_norm", &[&rows, &[256], &[256]], 3., |x| {
        LayerNorm::new(x[1].clone(), x[2].clone(), 1e-5).forward(&x[0])
    });
    check("rms_norm", &[&rows, &[256]], 3., |x| RmsNorm::new(x[1].clone(), 1e-5).forward(&x[0]));
    let norm = BatchNorm::new(16, ones(&[16]), ones(&[16]), ones(&[16]), ones(&[16]), 1e-5).unwrap();
    check("batch_norm", &[&images], 3., |x| norm.forward_t(&x[0], true));
    check("max_pool2d", &[&images], 3., |x| max_pool2d(&x[0], 2, MaxPool2dOptions::default()));
    check("avg_pool2d", &[&images], 3., |x| avg_pool2d(&x[0], 2, AvgPool2dOptions::default()));
    check("cross_entropy", &[&rows], 3., |x| cross_entropy(&x[0], &Tensor::zeros(rows[0], DType::U32, &Device::Cpu)?));
    check("embedding", &[&[512, 256]], 3., |x| {
        Embedding::new(x[0].clone(), 256).forward(&Tensor::zeros(rows[0], DType::U32, &Device::Cpu)?)
    });
    // Without these instructions, the factors of products are converted first.
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx512bf16") {
        products(&rows, &images);
    }
}

#[cfg(target_arch = "x86_64")]
fn products(rows: &[usize], images: &[usize]) {
    let heads = [8, 8, 256, 64];
    check("attention", &[&heads, &heads, &heads], 8., |x| {
        let options = AttentionOptions { is_causal: true, ..Default::default() };
        scaled_dot_product_attention(&x[0], &x[1], &x[2], options)
    });
    // By tiles, 2 MB of an activation are packed at a time, for all threads, and half a megabyte for each.
    check("linear", &[rows, &[256, 256], &[256]], 4., |x| Linear::new(x[1].clone(), Some(x[2].clone())).forward(&x[0]));
    check("conv2d", &[images, &[16, 16, 3, 3]], 3., |x| {
        Conv2d::new(x[1].clone(), None, Conv2dConfig { padding: 1, ..Default::default() }).forward(&x[0])
    });
}
