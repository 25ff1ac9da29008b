//! Layers and functions on tensors without elements: PyTorch's result or a typed error, in every dtype and both directions.
use candle_core::{DType, Device, Module, ModuleT, Result, Tensor, Var};
use candle_ddp_base::Error::InvalidArgument;
use candle_ddp_nn::{
    AttentionOptions, AvgPool2dOptions, BatchNorm, Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d,
    CrossEntropyOptions, CtcLossOptions, Embedding, GroupNorm, InstanceNorm, InterpolateMode, LayerNorm, Linear,
    MaxPool2dOptions, RNNOptions, Reduction, RmsNorm, StackedGRU, StackedLSTM, adaptive_avg_pool2d, add, avg_pool2d,
    checkpoint, cross_entropy, cross_entropy_with, ctc_loss, dropout, gelu, gelu_erf, interpolate, log_softmax, loss,
    max_pool2d, ops, relu, rope, rope_i, rope_thd, scaled_dot_product_attention,
    scaled_dot_product_attention_qkvpacked, silu, softmax, softmax_last_dim, tanh,
};
use candle_ddp_tensor::Error;
use candle_ddp_tensor::seed::Generator;
use candle_ddp_testing::floats;
use candle_nn::{Conv1dConfig, Conv2dConfig, ConvTranspose1dConfig, ConvTranspose2dConfig, VarBuilder};
use std::panic::{AssertUnwindSafe, catch_unwind};

const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

/// The shape of the result, or [`InvalidArgument`].
enum Expected<'a> {
    Shape(&'a [usize]),
    Refused,
}
use Expected::{Refused, Shape};

/// Failures of all cases, so that one run shows them all.
#[derive(Default)]
struct Failures(Vec<String>);

impl Failures {
    fn case(&mut self, name: &str, shapes: &[&[usize]], expected: Expected, run: impl Fn(&[Tensor]) -> Result<Tensor>) {
        for dtype in DTYPES {
            let case = format!("{name} of {shapes:?} in {dtype:?}");
            let result = catch_unwind(AssertUnwindSafe(|| check(shapes, dtype, &expected, &run)));
            match result {
                Ok(None) => {}
                Ok(Some(difference)) => self.0.push(format!("{case}: {difference}")),
                Err(_) => self.0.push(format!("{case}: panicked")),
            }
        }
    }

    fn assert_none(&self) {
        assert!(self.0.is_empty(), "{} cases fail:\n{}", self.0.len(), self.0.join("\n"));
    }
}

/// The difference from the expectation, if there is one.
fn check(
    shapes: &[&[usize]],
    dtype: DType,
    expected: &Expected,
    run: &impl Fn(&[Tensor]) -> Result<Tensor>,
) -> Option<String> {
    let inputs: Vec<Var> = shapes.iter().map(|shape| Var::ones(*shape, dtype, &Device::Cpu).unwrap()).collect();
    let tensors: Vec<Tensor> = inputs.iter().map(|input| input.as_tensor().clone()).collect();
    let (y, shape) = match (run(&tensors), expected) {
        (Ok(y), Shape(shape)) => (y, shape),
        (Err(error), Refused) => {
            let error = Error::from(error);
            return (!matches!(error, Error::Base(InvalidArgument { .. }))).then(|| format!("{error:?}"));
        }
        (Ok(y), Refused) => return Some(format!("a result of shape {:?} instead of an error", y.dims())),
        (Err(error), Shape(_)) => return Some(error.to_string()),
    };
    if y.dims() != *shape {
        return Some(format!("a result of shape {:?}", y.dims()));
    }
    let gradients = match y.sum_all().and_then(|sum| sum.backward()) {
        Ok(gradients) => gradients,
        Err(error) => return Some(format!("backward: {error}")),
    };
    for (index, input) in inputs.iter().enumerate() {
        // candle leaves out some gradients without elements.
        let Some(gradient) = gradients.get(input) else { continue };
        if gradient.shape() != input.shape() || gradient.dtype() != dtype {
            return Some(format!("gradient {index} is {gradient:?}"));
        }
        let values = floats(gradient);
        if values.iter().any(|value| !value.is_finite()) || (y.elem_count() == 0 && values.iter().any(|v| *v != 0.0)) {
            return Some(format!("gradient {index} is {values:?}"));
        }
    }
    None
}

#[test]
fn products_and_lookups() {
    let mut all = Failures::default();
    let linear = |x: &[Tensor]| Linear::new(x[1].clone(), x.get(2).cloned()).forward(&x[0]);
    for bias in [&[][..], &[4]] {
        // A bias of no elements stands for none.
        let with = |x: &'static [usize], weight: &'static [usize]| {
            if bias.is_empty() { vec![x, weight] } else { vec![x, weight, &[4]] }
        };
        all.case("linear", &with(&[0, 3], &[4, 3]), Shape(&[0, 4]), linear);
        all.case("linear", &with(&[2, 0, 3], &[4, 3]), Shape(&[2, 0, 4]), linear);
        all.case("linear", &with(&[5, 0], &[4, 0]), Shape(&[5, 4]), linear);
        all.case("linear", &with(&[0, 0], &[4, 0]), Shape(&[0, 4]), linear);
        all.case("linear", &with(&[700, 0], &[4, 0]), Shape(&[700, 4]), linear);
    }
    all.case("linear", &[&[5, 3], &[0, 3]], Shape(&[5, 0]), linear);
    all.case("linear", &[&[5, 3], &[0, 3], &[0]], Shape(&[5, 0]), linear);
    all.case("linear", &[&[0, 0], &[0, 0], &[0]], Shape(&[0, 0]), linear);
    // More columns than a block of the product has.
    all.case("linear", &[&[0, 3], &[900, 3]], Shape(&[0, 900]), linear);
    all.case("linear", &[&[2, 0], &[900, 0], &[900]], Shape(&[2, 900]), linear);

    let none = Tensor::zeros(0, DType::U32, &Device::Cpu).unwrap();
    let one = Tensor::zeros(1, DType::U32, &Device::Cpu).unwrap();
    all.case("embedding", &[&[5, 3]], Shape(&[0, 3]), |x| Embedding::new(x[0].clone(), 3).forward(&none));
    all.case("embedding", &[&[5, 0]], Shape(&[1, 0]), |x| Embedding::new(x[0].clone(), 0).forward(&one));
    all.case("embedding", &[&[0, 3]], Shape(&[0, 3]), |x| Embedding::new(x[0].clone(), 3).forward(&none));
    all.case("embedding", &[&[0, 3]], Refused, |x| Embedding::new(x[0].clone(), 3).forward(&one));
    all.case("add", &[&[0, 3], &[0, 3]], Shape(&[0, 3]), |x| add(&x[0], &x[1]));
    all.case("add", &[&[0, 3], &[3]], Shape(&[0, 3]), |x| add(&x[0], &x[1]));
    all.case("add", &[&[3, 0], &[0]], Shape(&[3, 0]), |x| add(&x[0], &x[1]));
    all.assert_none();
}

#[test]
fn convolutions() {
    let mut all = Failures::default();
    let conv2d = |x: &[Tensor], config| Conv2d::new(x[1].clone(), x.get(2).cloned(), config).forward(&x[0]);
    let plain = Conv2dConfig::default();
    let padded = Conv2dConfig { padding: 1, ..plain };
    let configs: [(&[usize], Conv2dConfig); 6] = [
        (&[4, 4, 3, 3], padded),
        (&[4, 4, 1, 1], plain),
        (&[4, 4, 3, 3], Conv2dConfig { stride: 2, ..padded }),
        (&[4, 2, 3, 3], Conv2dConfig { groups: 2, ..padded }),
        (&[4, 1, 3, 3], Conv2dConfig { groups: 4, ..padded }),
        (&[4, 4, 5, 5], Conv2dConfig { padding: 2, dilation: 1, ..plain }),
    ];
    for (weight, config) in configs {
        for bias in [&[][..], &[4]] {
            let shapes: Vec<&[usize]> = match bias.is_empty() {
                true => vec![&[0, 4, 8, 8], weight],
                false => vec![&[0, 4, 8, 8], weight, bias],
            };
            let size = 8 / config.stride;
            all.case(&format!("conv2d {config:?}"), &shapes, Shape(&[0, 4, size, size]), |x| conv2d(x, config));
        }
    }
    // Many channels: the fast algorithms.
    all.case("conv2d", &[&[0, 64, 14, 14], &[64, 64, 3, 3]], Shape(&[0, 64, 14, 14]), |x| conv2d(x, padded));
    all.case("conv2d", &[&[2, 0, 8, 8], &[4, 0, 3, 3]], Shape(&[2, 4, 8, 8]), |x| conv2d(x, padded));
    all.case("conv2d", &[&[2, 0, 8, 8], &[4, 0, 3, 3], &[4]], Shape(&[2, 4, 8, 8]), |x| conv2d(x, padded));
    all.case("conv2d", &[&[2, 3, 8, 8], &[0, 3, 3, 3]], Shape(&[2, 0, 8, 8]), |x| conv2d(x, padded));
    all.case("conv2d", &[&[2, 3, 8, 8], &[0, 3, 3, 3], &[0]], Shape(&[2, 0, 8, 8]), |x| conv2d(x, padded));
    all.case("conv2d", &[&[2, 0, 8, 8], &[0, 0, 1, 1]], Shape(&[2, 0, 8, 8]), |x| conv2d(x, plain));
    all.case("conv2d", &[&[2, 3, 0, 8], &[4, 3, 3, 3]], Refused, |x| conv2d(x, padded));
    all.case("conv2d", &[&[2, 3, 0, 8], &[4, 3, 1, 1]], Refused, |x| conv2d(x, plain));
    all.case("conv2d", &[&[2, 3, 8, 8], &[4, 3, 0, 3]], Refused, |x| conv2d(x, plain));
    // Nothing but padding.
    let wide = Conv2dConfig { padding: 2, ..plain };
    all.case("conv2d", &[&[2, 3, 0, 0], &[4, 3, 3, 3]], Shape(&[2, 4, 2, 2]), |x| conv2d(x, wide));

    let conv1d = |x: &[Tensor], config| Conv1d::new(x[1].clone(), x.get(2).cloned(), config).forward(&x[0]);
    let line = Conv1dConfig { padding: 1, ..Default::default() };
    all.case("conv1d", &[&[0, 3, 8], &[4, 3, 3], &[4]], Shape(&[0, 4, 8]), |x| conv1d(x, line));
    all.case("conv1d", &[&[2, 0, 8], &[4, 0, 3], &[4]], Shape(&[2, 4, 8]), |x| conv1d(x, line));
    all.case("conv1d", &[&[2, 3, 0], &[4, 3, 3], &[4]], Refused, |x| conv1d(x, line));

    let turned = |x: &[Tensor], config| ConvTranspose2d::new(x[1].clone(), x.get(2).cloned(), config).forward(&x[0]);
    let doubled = ConvTranspose2dConfig { padding: 1, output_padding: 1, stride: 2, dilation: 1 };
    all.case("conv_transpose2d", &[&[0, 4, 4, 4], &[4, 3, 3, 3], &[3]], Shape(&[0, 3, 8, 8]), |x| turned(x, doubled));
    all.case("conv_transpose2d", &[&[2, 0, 4, 4], &[0, 3, 3, 3], &[3]], Shape(&[2, 3, 8, 8]), |x| turned(x, doubled));
    all.case("conv_transpose2d", &[&[2, 4, 4, 4], &[4, 0, 3, 3]], Shape(&[2, 0, 8, 8]), |x| turned(x, doubled));
    all.case("conv_transpose2d", &[&[2, 4, 0, 4], &[4, 3, 3, 3]], Refused, |x| turned(x, doubled));
    let plain = ConvTranspose2dConfig::default();
    all.case("conv_transpose2d", &[&[0, 4, 4, 4], &[4, 3, 3, 3], &[3]], Shape(&[0, 3, 6, 6]), |x| turned(x, plain));
    let line = ConvTranspose1dConfig::default();
    all.case("conv_transpose1d", &[&[0, 4, 4], &[4, 3, 3], &[3]], Shape(&[0, 3, 6]), |x| {
        ConvTranspose1d::new(x[1].clone(), x.get(2).cloned(), line).forward(&x[0])
    });
    all.assert_none();
}

#[test]
fn norms() {
    let mut all = Failures::default();
    for shape in [&[0, 4][..], &[2, 0, 4]] {
        all.case("layer_norm", &[shape, &[4], &[4]], Shape(shape), |x| {
            LayerNorm::new(x[1].clone(), x[2].clone(), 1e-5).forward(&x[0])
        });
        all.case("rms_norm", &[shape, &[4]], Shape(shape), |x| RmsNorm::new(x[1].clone(), 1e-5).forward(&x[0]));
        all.case("ops::rms_norm", &[shape, &[4]], Shape(shape), |x| ops::rms_norm(&x[0], &x[1], 1e-5));
        all.case("ops::layer_norm", &[shape, &[4], &[4]], Shape(shape), |x| ops::layer_norm(&x[0], &x[1], &x[2], 1e-5));
    }
    all.case("layer_norm", &[&[3, 0], &[0], &[0]], Refused, |x| {
        LayerNorm::new(x[1].clone(), x[2].clone(), 1e-5).forward(&x[0])
    });
    all.case("rms_norm", &[&[3, 0], &[0]], Refused, |x| RmsNorm::new(x[1].clone(), 1e-5).forward(&x[0]));
    let group_norm =
        |x: &[Tensor]| GroupNorm::new(x[1].clone(), x[2].clone(), x[1].elem_count(), 2, 1e-5)?.forward(&x[0]);
    for shape in [&[0, 4][..], &[0, 4, 3, 3], &[2, 4, 0, 3]] {
        all.case("group_norm", &[shape, &[4], &[4]], Shape(shape), group_norm);
    }
    all.case("group_norm", &[&[2, 0, 3], &[0], &[0]], Shape(&[2, 0, 3]), group_norm);
    for shape in [&[0, 4, 3][..], &[2, 4, 0]] {
        all.case("instance_norm", &[shape], Shape(shape), |x| InstanceNorm::new(4, None, 1e-5)?.forward(&x[0]));
    }
    all.case("instance_norm", &[&[2, 0, 3]], Shape(&[2, 0, 3]), |x| InstanceNorm::new(0, None, 1e-5)?.forward(&x[0]));
    let norm = |x: &[Tensor]| {
        let channels = x[1].elem_count();
        let running = || Tensor::ones(channels, DType::F32, &Device::Cpu);
        BatchNorm::new(channels, running()?, running()?, x[1].clone(), x[2].clone(), 1e-5)
    };
    for shape in [&[0, 4][..], &[0, 4, 3, 3], &[2, 4, 0, 3]] {
        all.case("batch_norm", &[shape, &[4], &[4]], Shape(shape), |x| norm(x)?.forward_t(&x[0], false));
        all.case("batch_norm in training", &[shape, &[4], &[4]], Refused, |x| norm(x)?.forward_t(&x[0], true));
        all.case("batch_norm + relu", &[shape, &[4], &[4]], Shape(shape), |x| norm(x)?.forward_relu_t(&x[0], false));
        all.case("batch_norm + add + relu", &[shape, &[4], &[4], shape], Shape(shape), |x| {
            norm(x)?.forward_add_relu_t(&x[0], &x[3], false)
        });
    }
    for shape in [&[2, 0][..], &[2, 0, 3, 3]] {
        all.case("batch_norm", &[shape, &[0], &[0]], Shape(shape), |x| norm(x)?.forward_t(&x[0], false));
        all.case("batch_norm in training", &[shape, &[0], &[0]], Refused, |x| norm(x)?.forward_t(&x[0], true));
    }
    all.assert_none();
}

#[test]
fn functions() {
    let mut all = Failures::default();
    let shapes: [&[usize]; 4] = [&[0], &[0, 3], &[3, 0], &[2, 0, 3]];
    for shape in shapes {
        all.case("relu", &[shape], Shape(shape), |x| relu(&x[0]));
        all.case("gelu", &[shape], Shape(shape), |x| gelu(&x[0]));
        all.case("gelu_erf", &[shape], Shape(shape), |x| gelu_erf(&x[0]));
        all.case("silu", &[shape], Shape(shape), |x| silu(&x[0]));
        all.case("tanh", &[shape], Shape(shape), |x| tanh(&x[0]));
        all.case("mish", &[shape], Shape(shape), |x| candle_ddp_nn::activation::mish(&x[0]));
        all.case("selu", &[shape], Shape(shape), |x| ops::selu(&x[0], 1.67, 1.05));
        all.case("dropout", &[shape], Shape(shape), |x| dropout(&x[0], 0.5, &mut Generator::new(1)));
        all.case("softmax_last_dim", &[shape], Shape(shape), |x| softmax_last_dim(&x[0]));
        all.case("checkpoint", &[shape], Shape(shape), |x| checkpoint(&[&x[0]], |x| relu(&x[0])));
        for dim in 0..shape.len() {
            all.case("softmax", &[shape], Shape(shape), |x| softmax(&x[0], dim));
            all.case("log_softmax", &[shape], Shape(shape), |x| log_softmax(&x[0], dim));
        }
    }
    all.case("swiglu", &[&[0, 4]], Shape(&[0, 2]), |x| ops::swiglu(&x[0]));
    for (b, h, t, d) in [(0, 2, 5, 4), (2, 0, 5, 4), (2, 2, 0, 4), (2, 2, 5, 0)] {
        let (cos, sin): (&[usize], &[usize]) = (&[5, 2], &[5, 2]);
        let table: [&[usize]; 2] = if d == 0 { [&[5, 0], &[5, 0]] } else { [cos, sin] };
        let x = [b, h, t, d];
        all.case("rope", &[&x, table[0], table[1]], Shape(&x), |x| rope(&x[0], &x[1].detach(), &x[2].detach()));
        all.case("rope_i", &[&x, table[0], table[1]], Shape(&x), |x| rope_i(&x[0], &x[1].detach(), &x[2].detach()));
        let x = [b, t, h, d];
        all.case("rope_thd", &[&x, table[0], table[1]], Shape(&x), |x| rope_thd(&x[0], &x[1].detach(), &x[2].detach()));
    }
    all.assert_none();
}

#[test]
fn images() {
    let mut all = Failures::default();
    let (max, average) = (MaxPool2dOptions::default, AvgPool2dOptions::default);
    let modes = [
        InterpolateMode::Nearest,
        InterpolateMode::Bilinear { align_corners: true },
        InterpolateMode::Bilinear { align_corners: false },
    ];
    for (n, c) in [(0, 3), (2, 0)] {
        let (x, half, double) = ([n, c, 6, 6], [n, c, 3, 3], [n, c, 12, 12]);
        all.case("max_pool2d", &[&x], Shape(&half), |x| max_pool2d(&x[0], 2, max()));
        all.case("max_pool2d", &[&x], Shape(&half), |x| {
            max_pool2d(&x[0], 3, MaxPool2dOptions { stride: Some((2, 2)), padding: (1, 1), ..max() })
        });
        all.case("avg_pool2d", &[&x], Shape(&half), |x| avg_pool2d(&x[0], 2, average()));
        all.case("adaptive_avg_pool2d", &[&x], Shape(&half), |x| adaptive_avg_pool2d(&x[0], 3));
        for mode in modes {
            all.case("interpolate", &[&x], Shape(&double), |x| interpolate(&x[0], 12, mode));
        }
    }
    let flat: [usize; 4] = [2, 3, 0, 6];
    all.case("max_pool2d", &[&flat], Refused, |x| max_pool2d(&x[0], 2, max()));
    all.case("avg_pool2d", &[&flat], Refused, |x| avg_pool2d(&x[0], 2, average()));
    all.case("max_pool2d", &[&[2, 3, 6, 6]], Refused, |x| max_pool2d(&x[0], 0, max()));
    all.case("avg_pool2d", &[&[2, 3, 6, 6]], Refused, |x| avg_pool2d(&x[0], 0, average()));
    all.case("adaptive_avg_pool2d", &[&flat], Refused, |x| adaptive_avg_pool2d(&x[0], 3));
    all.case("adaptive_avg_pool2d", &[&[2, 3, 6, 6]], Refused, |x| adaptive_avg_pool2d(&x[0], 0));
    for mode in modes {
        all.case("interpolate", &[&flat], Refused, |x| interpolate(&x[0], 12, mode));
        all.case("interpolate", &[&[2, 3, 6, 6]], Refused, |x| interpolate(&x[0], 0, mode));
    }
    all.assert_none();
}

#[test]
fn attention() {
    let mut all = Failures::default();
    let attend = |x: &[Tensor], causal: bool| {
        let options = AttentionOptions { is_causal: causal, ..Default::default() };
        scaled_dot_product_attention(&x[0], &x[1], &x[2], options)
    };
    for causal in [false, true] {
        // Images, heads, queries and elements that are missing.
        for shape in [[0, 2, 5, 4], [2, 2, 0, 4]] {
            all.case("attention", &[&shape, &shape, &shape], Shape(&shape), |x| attend(x, causal));
        }
        let no_heads = [2, 0, 5, 4];
        all.case("attention", &[&no_heads, &no_heads, &no_heads], Refused, |x| attend(x, causal));
        let (queries, none) = ([2, 2, 5, 4], [2, 2, 0, 4]);
        // Without keys, PyTorch's result is zero.
        all.case("attention", &[&queries, &none, &none], Shape(&queries), |x| attend(x, causal));
        all.case("attention", &[&none, &queries, &queries], Shape(&none), |x| attend(x, causal));
        all.case("attention", &[&queries, &queries, &[2, 2, 5, 0]], Refused, |x| attend(x, causal));
    }
    for (n, t) in [(0, 5), (2, 0)] {
        all.case("attention of packed tensors", &[&[n, t, 24]], Shape(&[n, t, 8]), |x| {
            scaled_dot_product_attention_qkvpacked(&x[0], 2, AttentionOptions::default())
        });
    }
    all.assert_none();
}

/// A batch may be empty, a sequence must not.
#[test]
fn sequences() {
    fn vb(x: &[Tensor]) -> VarBuilder<'static> {
        let names = ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"].map(String::from);
        VarBuilder::from_tensors(names.into_iter().zip(x[1..].iter().cloned()).collect(), x[0].dtype(), &Device::Cpu)
    }
    let lstm = |x: &[Tensor]| {
        let (y, state) = StackedLSTM::new(x[0].dim(2)?, 5, RNNOptions::default(), vb(x))?.forward(&x[0], None, true)?;
        Tensor::cat(&[y, state.h, state.c], 0)
    };
    let gru = |x: &[Tensor]| {
        let layers = StackedGRU::new(x[0].dim(2)?, 5, RNNOptions::default(), vb(x))?;
        let (y, state) = layers.forward_with_lengths(&x[0], &vec![1; x[0].dim(1)?], None, true)?;
        Tensor::cat(&[y, state.h], 0)
    };
    let mut all = Failures::default();
    all.case("lstm", &[&[3, 0, 6], &[20, 6], &[20, 5], &[20], &[20]], Shape(&[5, 0, 5]), lstm);
    all.case("lstm", &[&[3, 2, 0], &[20, 0], &[20, 5], &[20], &[20]], Shape(&[5, 2, 5]), lstm);
    all.case("lstm", &[&[0, 2, 6], &[20, 6], &[20, 5], &[20], &[20]], Refused, lstm);
    all.case("gru", &[&[3, 0, 6], &[15, 6], &[15, 5], &[15], &[15]], Shape(&[4, 0, 5]), gru);
    all.case("gru", &[&[3, 2, 0], &[15, 0], &[15, 5], &[15], &[15]], Shape(&[4, 2, 5]), gru);
    all.case("gru", &[&[0, 2, 6], &[15, 6], &[15, 5], &[15], &[15]], Refused, gru);
    all.assert_none();
}

/// The mean of nothing is NaN, as in PyTorch, and its gradient has no elements.
#[test]
fn losses() {
    let classes = Tensor::zeros(0, DType::U32, &Device::Cpu).unwrap();
    for dtype in DTYPES {
        let x = Var::zeros((0, 3), dtype, &Device::Cpu).unwrap();
        let targets = x.zeros_like().unwrap();
        let sum = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
        let value = |loss: Tensor| {
            let gradients = loss.backward().unwrap();
            assert!(gradients.get(&x).is_none_or(|gradient| gradient.shape() == x.shape()));
            floats(&loss)[0]
        };
        assert_eq!(value(cross_entropy_with(&x, &classes, sum).unwrap()), 0.0);
        assert!(value(cross_entropy(&x, &classes).unwrap()).is_nan(), "{dtype:?}");
        assert!(value(loss::mse(&x, &targets).unwrap()).is_nan(), "{dtype:?}");
        assert!(value(loss::nll(&x, &classes).unwrap()).is_nan(), "{dtype:?}");
        assert!(value(loss::binary_cross_entropy_with_logit(&x, &targets).unwrap()).is_nan(), "{dtype:?}");
    }
    let mut all = Failures::default();
    let none = Tensor::zeros((1, 0), DType::U32, &Device::Cpu).unwrap();
    let ctc = |x: &[Tensor]| ctc_loss(&x[0], &none, &[0], &[0], CtcLossOptions::default())?.to_dtype(x[0].dtype());
    all.case("ctc_loss without times", &[&[0, 1, 3]], Shape(&[]), ctc);
    all.case("ctc_loss without classes", &[&[0, 1, 0]], Refused, ctc);
    all.case("cross_entropy without classes", &[&[2, 0]], Refused, |x| {
        cross_entropy(&x[0], &Tensor::zeros(2, DType::U32, &Device::Cpu)?)
    });
    all.assert_none();
}
