//! An evaluation under `no_grad` holds no more memory than a model of tensors that candle does not track.
#![allow(clippy::unwrap_used)]

use candle_core::{DType, Device, ModuleT, Result, Tensor};
use candle_ddp::nn::{self, Sequential, no_grad};
use candle_ddp::vision::models::{ResNet, ResNetOptions, resnet18};
use candle_ddp::{DistributedDataParallel, ProcessGroup};
use candle_nn::{BatchNormConfig, Conv2dConfig, VarBuilder, VarMap};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// The memory in MiB that `forward` takes at its peak, and what its result holds.
fn measure(forward: impl Fn() -> Tensor) -> (f64, f64) {
    forward(); // starts threads and makes tables
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    let result = forward();
    let (peak, held) = (ALLOCATOR.peak_usage(), ALLOCATOR.current_usage());
    drop(result);
    let mib = |bytes: usize| (bytes.saturating_sub(before)) as f64 / f64::from(1 << 20);
    (mib(peak), mib(held))
}

type Build<M> = fn(VarBuilder<'static>) -> Result<M>;

/// Compares a model in evaluation with one of detached tensors. Without `has_no_grad_model`, it is the same model that trains.
fn check<M: ModuleT>(pg: &ProcessGroup, name: &str, build: Build<M>, images: &[usize], has_no_grad_model: bool) {
    let varmap = VarMap::new();
    let mut ddp = DistributedDataParallel::new(pg, &varmap, build).unwrap();
    if has_no_grad_model {
        ddp = ddp.with_no_grad_model(build).unwrap();
    }
    let detached = varmap.data().lock().unwrap().iter().map(|(name, var)| (name.clone(), var.detach())).collect();
    let detached = build(VarBuilder::from_tensors(detached, DType::F32, &Device::Cpu)).unwrap();
    let images = Tensor::ones(images, DType::F32, &Device::Cpu).unwrap();

    let (needed, _) = measure(|| detached.forward_t(&images, false).unwrap());
    let (peak, held) = measure(|| no_grad(|| ddp.forward_t(&images, false)).unwrap());
    let (graph_peak, graph_held) = measure(|| ddp.forward_t(&images, false).unwrap());
    println!(
        "{name}: detached {needed:.2} MiB, no_grad {peak:.2} MiB of which {held:.2} are kept, with a graph {graph_peak:.2} MiB of \
         which {graph_held:.2} are kept"
    );
    assert!(peak <= 1.1 * needed, "{name}: {peak:.2} MiB instead of {needed:.2}");
    assert!(held <= 0.1 * needed, "{name}: {held:.2} MiB are left after the pass");
    // Otherwise there is nothing to notice here.
    assert!(graph_held > 0.5 * needed, "{name}: a graph keeps only {graph_held:.2} MiB");
}

/// The model of the example `train`, with more channels.
fn train(vb: VarBuilder) -> Result<Sequential> {
    let padded = Conv2dConfig { padding: 1, ..Default::default() };
    let pool = |x: &Tensor| nn::max_pool2d(x, 2, Default::default());
    let conv = |from, to, name: &str| nn::conv2d(from, to, 3, padded, vb.pp(name));
    let (conv1, conv2) = (conv(1, 16, "conv1")?, conv(16, 32, "conv2")?);
    let features = nn::seq().add(conv1).add(nn::Activation::Relu).add_fn(pool);
    let features = features.add(conv2).add(nn::Activation::Relu).add_fn(pool);
    Ok(features.add_fn(|x| x.flatten_from(1)).add(nn::linear(32 * 8 * 8, 10, vb.pp("head"))?))
}

/// A narrow ResNet-18.
fn resnet(vb: VarBuilder<'static>) -> Result<ResNet> {
    resnet18(ResNetOptions { width: 16, ..Default::default() }, vb)
}

/// Layers of candle_nn, and parameters that candle's own operations get.
struct Candles {
    convs: Vec<candle_nn::Conv2d>,
    norms: Vec<candle_nn::BatchNorm>,
    shifts: Vec<Tensor>,
    head: candle_nn::Linear,
}

impl Candles {
    fn new(vb: VarBuilder) -> Result<Self> {
        let config = Conv2dConfig { padding: 1, ..Default::default() };
        let number = |index: usize| vb.pp(index);
        Ok(Self {
            convs: (0..6).map(|index| candle_nn::conv2d(8, 8, 3, config, number(index))).collect::<Result<_>>()?,
            norms: (0..6)
                .map(|index| candle_nn::batch_norm(8, BatchNormConfig::default(), number(index).pp("norm")))
                .collect::<Result<_>>()?,
            shifts: (0..6).map(|index| number(index).get((8, 1, 1), "shift")).collect::<Result<_>>()?,
            head: candle_nn::linear(8, 10, vb.pp("head"))?,
        })
    }
}

impl ModuleT for Candles {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let mut x = x.clone();
        for ((conv, norm), shift) in self.convs.iter().zip(&self.norms).zip(&self.shifts) {
            let y = norm.forward_t(&x.apply(conv)?.broadcast_add(shift)?, train)?;
            x = (x + y.relu()?)?;
        }
        x.mean((2, 3))?.apply(&self.head)
    }
}

/// The mean output of recurrent layers.
struct Recurrent(nn::StackedLSTM);

impl Recurrent {
    fn new(vb: VarBuilder) -> Result<Self> {
        let options = nn::RNNOptions { num_layers: 3, ..Default::default() };
        Ok(Self(nn::StackedLSTM::new(64, 64, options, vb)?))
    }
}

impl ModuleT for Recurrent {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.0.forward(x, None, train)?.0.mean_all()
    }
}

#[test]
fn an_evaluation_keeps_no_activations() {
    candle_ddp::spawn(1, |pg| {
        // Each thread has memory for parts of activations, which it takes with its first part. On a busy machine, a second
        // thread may get its first part only while memory is measured.
        let threads = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        threads.install(|| {
            for has_no_grad_model in [false, true] {
                check(&pg, "train", train, &[64, 1, 32, 32], has_no_grad_model);
                check(&pg, "ResNet-18", resnet, &[2, 3, 96, 96], has_no_grad_model);
                check(&pg, "LSTM", |vb| Recurrent::new(vb), &[200, 16, 64], has_no_grad_model);
            }
            check(&pg, "candle_nn", Candles::new, &[4, 8, 32, 32], true);
        });
        Ok(())
    })
    .unwrap();
}
