//! A convolutional model of this crate's layers under DistributedDataParallel, compared with the CPU.
use super::common::{assert_close, buckets, fill, floats, tensor, var};
use candle_core::{IndexOp, Module, Tensor};
use candle_ddp::nn::{
    BatchNorm, Conv2d, InterpolateMode, Linear, MaxPool2dOptions, adaptive_avg_pool2d, batch_norm, conv2d,
    conv2d_no_bias, cross_entropy, interpolate, linear, max_pool2d,
};
use candle_ddp::{DdpOptions, DistributedDataParallel, ProcessGroup, Result, spawn};
use candle_nn::{Conv2dConfig, Optimizer, SGD, VarBuilder, VarMap};

const STEPS: usize = 3;
const PER_RANK: usize = 3;
const NAMES: [&str; 11] = [
    "first.weight",
    "first.bias",
    "norm.weight",
    "norm.bias",
    "norm.running_mean",
    "norm.running_var",
    "depthwise.weight",
    "second.weight",
    "second.bias",
    "last.weight",
    "last.bias",
];

struct Net {
    first: Conv2d,
    norm: BatchNorm,
    depthwise: Conv2d,
    second: Conv2d,
    last: Linear,
}

impl Net {
    fn new(vb: VarBuilder) -> candle_core::Result<Self> {
        let config = |stride, padding, groups| Conv2dConfig { stride, padding, groups, ..Default::default() };
        Ok(Self {
            first: conv2d(3, 6, 3, config(1, 1, 1), vb.pp("first"))?,
            norm: batch_norm(6, 1e-3, vb.pp("norm"))?,
            depthwise: conv2d_no_bias(6, 6, 3, config(2, 1, 6), vb.pp("depthwise"))?,
            second: conv2d(6, 4, 1, config(1, 0, 2), vb.pp("second"))?,
            last: linear(4, 5, vb.pp("last"))?,
        })
    }
}

impl Module for Net {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let x = self.norm.forward_relu_t(&self.first.forward(x)?, true)?;
        let x = max_pool2d(&x, 3, MaxPool2dOptions { stride: Some((2, 2)), padding: (1, 1), ceil_mode: false })?;
        let x = self.second.forward(&self.depthwise.forward(&x)?)?;
        let x = interpolate(&x, 5, InterpolateMode::Bilinear { align_corners: false })?;
        self.last.forward(&adaptive_avg_pool2d(&x, 1)?.flatten_from(1)?)
    }
}

/// Trains a few steps; returns the parameters and running statistics.
pub(crate) fn train(pg: &ProcessGroup) -> Result<Vec<f32>> {
    let varmap = VarMap::new();
    let mine = pg.rank() * PER_RANK..(pg.rank() + 1) * PER_RANK;
    let x = tensor(&[pg.world_size() * PER_RANK, 3, 9, 8], 1).i(mine.clone())?.to_device(pg.device())?;
    let targets: Vec<i64> = mine.map(|sample| sample as i64 * 2 % 5).collect();
    let targets = Tensor::new(targets, pg.device())?;
    let options = DdpOptions { buckets: buckets(0.0005, 0.0001), ..Default::default() };
    let ddp = DistributedDataParallel::with_options(pg, &varmap, |vb| Net::new(vb), options)?;
    fill(&varmap, 3);
    let variance = var(&varmap, "norm.running_var");
    variance.set(&(variance.as_tensor() + 2.0)?)?;
    let mut optimizer = SGD::new(ddp.parameters(), 0.1)?;
    for _ in 0..STEPS {
        optimizer.step(&ddp.backward(&cross_entropy(&ddp.forward(&x)?, &targets)?)?)?;
    }
    Ok(NAMES.map(|name| floats(&var(&varmap, name))).concat())
}

pub(crate) fn assert_like_the_cpu(reports: &[Vec<f32>]) {
    let expected = spawn(reports.len(), |pg| train(&pg)).unwrap();
    for (rank, (found, expected)) in reports.iter().zip(&expected).enumerate() {
        assert_close(found, expected, 1e-4, &format!("rank {rank}"));
    }
}
