//! The functions of `candle_ddp_nn` that replace candle's.
use super::layers::builder;
use super::{Case, case};
use candle_core::{Device, Module, Result, Tensor};
use candle_ddp_nn::{
    self as nn, AttentionOptions, AvgPool2dOptions, Conv1d, Conv2d, ConvTranspose1d, GroupNorm, InstanceNorm,
    InterpolateMode, LayerNorm, MaxPool2dOptions, RNN, RmsNorm,
};
use candle_nn::{Conv1dConfig, Conv2dConfig, ConvTranspose1dConfig};

fn pooling() -> Vec<Case> {
    fn interpolate(x: &Tensor, size: (usize, usize), align_corners: bool) -> Result<Tensor> {
        nn::interpolate(x, size, InterpolateMode::Bilinear { align_corners })
    }
    const NEAREST: InterpolateMode = InterpolateMode::Nearest;
    let stride = Some((1, 2));
    vec![
        case("candle_ddp_nn::max_pool2d", [&[2, 2, 4, 6]], |[x]| nn::max_pool2d(x, 2, MaxPool2dOptions::default())),
        case("candle_ddp_nn::max_pool2d", [&[2, 2, 5, 6]], move |[x]| {
            nn::max_pool2d(x, (2, 3), MaxPool2dOptions { stride, ..Default::default() })
        })
        .variant("with overlap"),
        case("candle_ddp_nn::avg_pool2d", [&[2, 2, 5, 7]], |[x]| nn::avg_pool2d(x, 2, AvgPool2dOptions::default())),
        case("candle_ddp_nn::avg_pool2d", [&[2, 2, 5, 6]], move |[x]| {
            nn::avg_pool2d(x, (2, 3), AvgPool2dOptions { stride, ..Default::default() })
        })
        .variant("with overlap"),
        case("candle_ddp_nn::interpolate", [&[2, 2, 2, 3]], |[x]| nn::interpolate(x, (4, 6), NEAREST)),
        case("candle_ddp_nn::interpolate", [&[2, 2, 2, 3]], |[x]| nn::interpolate(x, (3, 7), NEAREST))
            .variant("by a fraction"),
        case("candle_ddp_nn::interpolate", [&[2, 2, 2, 3]], |[x]| interpolate(x, (5, 4), false)).variant("bilinear"),
        case("candle_ddp_nn::interpolate", [&[2, 2, 2, 3]], |[x]| interpolate(x, (5, 4), true))
            .variant("bilinear, with aligned corners"),
    ]
}

fn convolutions() -> Vec<Case> {
    vec![
        case("candle_ddp_nn::conv1d", [&[2, 4, 7], &[4, 2, 3], &[4]], |[x, w, b]| {
            let config = Conv1dConfig { padding: 1, stride: 2, groups: 2, ..Default::default() };
            Conv1d::new(w.clone(), Some(b.clone()), config).forward(x)
        }),
        case("candle_ddp_nn::conv2d", [&[2, 2, 6, 5], &[3, 2, 3, 3], &[3]], |[x, w, b]| {
            let config = Conv2dConfig { padding: 1, stride: 2, ..Default::default() };
            Conv2d::new(w.clone(), Some(b.clone()), config).forward(x)
        }),
        case("candle_ddp_nn::conv_transpose1d", [&[2, 4, 4], &[4, 2, 3], &[4]], |[x, w, b]| {
            let config =
                ConvTranspose1dConfig { padding: 1, stride: 2, output_padding: 1, groups: 2, ..Default::default() };
            ConvTranspose1d::new(w.clone(), Some(b.clone()), config).forward(x)
        }),
    ]
}

fn functions() -> Vec<Case> {
    let rotated: [&[usize]; 1] = [&[2, 2, 3, 4]];
    let angles = |f: fn(&Tensor) -> Result<Tensor>| f(&Tensor::arange(0f64, 6.0, &Device::Cpu)?.reshape((3, 2))?);
    vec![
        case("candle_ddp_nn::gelu", [&[2, 3, 4]], |[x]| nn::gelu(x)),
        case("candle_ddp_nn::gelu_erf", [&[2, 3, 4]], |[x]| nn::gelu_erf(x)),
        case("candle_ddp_nn::softmax_last_dim", [&[2, 3, 4]], |[x]| nn::softmax_last_dim(x)),
        case("candle_ddp_nn::layer_norm", [&[2, 3, 4], &[4], &[4]], |[x, w, b]| {
            LayerNorm::new(w.clone(), b.clone(), 1e-5).forward(x)
        }),
        case("candle_ddp_nn::group_norm", [&[2, 4, 3, 2], &[4], &[4]], |[x, w, b]| {
            GroupNorm::new(w.clone(), b.clone(), 4, 2, 1e-5)?.forward(x)
        }),
        case("candle_ddp_nn::instance_norm", [&[2, 2, 5]], |[x]| InstanceNorm::new(2, None, 1e-5)?.forward(x)),
        case("candle_ddp_nn::rms_norm", [&[2, 3, 4], &[4]], |[x, w]| RmsNorm::new(w.clone(), 1e-5).forward(x)),
        case("candle_ddp_nn::rope", rotated, move |[x]| nn::rope(x, &angles(Tensor::cos)?, &angles(Tensor::sin)?)),
        case("candle_ddp_nn::rope_i", rotated, move |[x]| nn::rope_i(x, &angles(Tensor::cos)?, &angles(Tensor::sin)?)),
        case("candle_ddp_nn::rope_thd", [&[2, 3, 2, 4]], move |[x]| {
            nn::rope_thd(x, &angles(Tensor::cos)?, &angles(Tensor::sin)?)
        }),
        case(
            "candle_ddp_nn::scaled_dot_product_attention",
            [&[2, 4, 3, 4], &[2, 2, 3, 4], &[2, 2, 3, 4]],
            |[q, k, v]| {
                nn::scaled_dot_product_attention(q, k, v, AttentionOptions { is_causal: true, ..Default::default() })
            },
        ),
    ]
}

fn recurrent() -> Vec<Case> {
    vec![
        case("candle_ddp_nn::LSTM", [&[2, 3, 2], &[12, 2], &[12, 3], &[12], &[12]], |[x, weights @ ..]| {
            let lstm = nn::lstm(2, 3, Default::default(), builder(&weights))?;
            let states = lstm.seq(x)?;
            let cells: Vec<_> = states.iter().map(|state| state.c.clone()).collect();
            Tensor::cat(&[lstm.states_to_tensor(&states)?, Tensor::stack(&cells, 1)?], 1)
        }),
        case("candle_ddp_nn::GRU", [&[2, 3, 2], &[9, 2], &[9, 3], &[9], &[9]], |[x, weights @ ..]| {
            let gru = nn::gru(2, 3, Default::default(), builder(&weights))?;
            gru.states_to_tensor(&gru.seq(x)?)
        }),
        case(
            "candle_ddp_nn::StackedLSTM",
            [&[3, 2, 2], &[1, 2, 3], &[1, 2, 3], &[12, 2], &[12, 3], &[12], &[12]],
            |[x, h, c, weights @ ..]| {
                let layers = nn::StackedLSTM::new(2, 3, Default::default(), builder(&weights))?;
                let state = nn::rnn::LSTMState::new(h.clone(), c.clone());
                let (y, state) = layers.forward_with_lengths(x, &[2, 3], Some(&state), true)?;
                Tensor::cat(&[y, state.h, state.c], 0)
            },
        ),
        case(
            "candle_ddp_nn::StackedGRU",
            [&[3, 2, 2], &[1, 2, 3], &[9, 2], &[9, 3], &[9], &[9]],
            |[x, h, weights @ ..]| {
                let layers = nn::StackedGRU::new(2, 3, Default::default(), builder(&weights))?;
                let state = nn::rnn::GRUState { h: h.clone() };
                let (y, state) = layers.forward_with_lengths(x, &[2, 3], Some(&state), true)?;
                Tensor::cat(&[y, state.h], 0)
            },
        ),
    ]
}

pub(super) fn cases() -> Vec<Case> {
    [pooling(), convolutions(), functions(), recurrent()].into_iter().flatten().collect()
}
