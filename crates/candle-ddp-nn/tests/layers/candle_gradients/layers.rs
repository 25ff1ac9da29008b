//! candle_nn's layers, with their weights as inputs.
use super::{Case, Error, Missing, Refused, Right, Wrong, case};
use candle_core::{DType, Device, Module, ModuleT, Result, Tensor};
use candle_nn::{
    BatchNorm, Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d, Dropout, Embedding, GRU, GRUConfig, GroupNorm, LSTM,
    LSTMConfig, LayerNorm, Linear, PReLU, RNN, RmsNorm, VarBuilder,
};

const FUSED: &str = "applied without a backward pass if the input is contiguous";

fn batch_norm([x, w, b]: [&Tensor; 3], train: bool) -> Result<Tensor> {
    let mean = Tensor::full(0.3f64, w.dims(), &Device::Cpu)?;
    let var = Tensor::full(1.7f64, w.dims(), &Device::Cpu)?;
    BatchNorm::new(w.dim(0)?, mean, var, w.clone(), b.clone(), 1e-5)?.forward_t(x, train)
}

/// The parameters of a recurrent layer.
pub(super) fn builder(weights: &[&Tensor]) -> VarBuilder<'static> {
    let names = ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"];
    let weights = names.into_iter().zip(weights).map(|(name, &weight)| (name.to_string(), weight.clone()));
    VarBuilder::from_tensors(weights.collect(), DType::F64, &Device::Cpu)
}

fn norms() -> Vec<Case> {
    let image: [&[usize]; 3] = [&[2, 3, 2, 2], &[3], &[3]];
    let rows: [&[usize]; 3] = [&[2, 3, 4], &[4], &[4]];
    vec![
        case("candle_nn::BatchNorm", image, |x| batch_norm(x, true)).variant("in training"),
        case("candle_nn::BatchNorm", [&[4, 3], &[3], &[3]], |x| batch_norm(x, true)).variant("of features"),
        case("candle_nn::BatchNorm", image, |x| batch_norm(x, false)).variant("in evaluation"),
        case("candle_nn::GroupNorm", [&[2, 4, 2, 2], &[4], &[4]], |[x, w, b]| {
            GroupNorm::new(w.clone(), b.clone(), 4, 2, 1e-5)?.forward(x)
        }),
        case("candle_nn::LayerNorm", rows, |[x, w, b]| LayerNorm::new(w.clone(), b.clone(), 1e-5).forward(x))
            .single()
            .is(Missing, FUSED)
            .strided(Right),
        case("candle_nn::LayerNorm", [&[2, 3, 4], &[4]], |[x, w]| LayerNorm::new_no_bias(w.clone(), 1e-5).forward(x))
            .variant("without bias"),
        case("candle_nn::RmsNorm", [&[2, 3, 4], &[4]], |[x, w]| RmsNorm::new(w.clone(), 1e-5).forward(x))
            .single()
            .is(Missing, FUSED)
            .strided(Right),
        case("candle_nn::RmsNorm::forward_diff", [&[2, 3, 4], &[4]], |[x, w]| {
            RmsNorm::new(w.clone(), 1e-5).forward_diff(x)
        }),
    ]
}

fn products() -> Vec<Case> {
    let linear = |[x, w, b]: [&Tensor; 3]| Linear::new(w.clone(), Some(b.clone())).forward(x);
    vec![
        case("candle_nn::Linear", [&[2, 4], &[3, 4], &[3]], linear),
        case("candle_nn::Linear", [&[2, 2, 4], &[3, 4], &[3]], linear).variant("of rank 3"),
        case("candle_nn::Linear", [&[2, 2, 2, 4], &[3, 4], &[3]], linear).variant("of rank 4").transposed(Refused),
        case("candle_nn::Conv1d", [&[2, 2, 5], &[3, 2, 3], &[3]], |[x, w, b]| {
            Conv1d::new(w.clone(), Some(b.clone()), Default::default()).forward(x)
        })
        .is(Wrong, "conv1d"),
        case("candle_nn::Conv2d", [&[2, 2, 4, 4], &[3, 2, 3, 3], &[3]], |[x, w, b]| {
            Conv2d::new(w.clone(), Some(b.clone()), Default::default()).forward(x)
        }),
        case("candle_nn::Conv2d", [&[2, 2, 6, 5], &[3, 2, 3, 3], &[3]], |[x, w, b]| {
            let config = candle_nn::Conv2dConfig { stride: 2, padding: 1, ..Default::default() };
            Conv2d::new(w.clone(), Some(b.clone()), config).forward(x)
        })
        .variant("with different numbers of pixels left over")
        .is(Error, "conv2d"),
        case("candle_nn::ConvTranspose1d", [&[2, 2, 4], &[2, 3, 3], &[3]], |[x, w, b]| {
            ConvTranspose1d::new(w.clone(), Some(b.clone()), Default::default()).forward(x)
        })
        .is(Error, "conv_transpose1d")
        .strided(Wrong),
        case("candle_nn::ConvTranspose2d", [&[2, 2, 3, 3], &[2, 3, 2, 2], &[3]], |[x, w, b]| {
            ConvTranspose2d::new(w.clone(), Some(b.clone()), Default::default()).forward(x)
        }),
    ]
}

fn recurrent() -> Vec<Case> {
    vec![
        case("candle_nn::LSTM", [&[2, 3, 2], &[12, 2], &[12, 3], &[12], &[12]], |[x, weights @ ..]| {
            let lstm = LSTM::new(2, 3, LSTMConfig::default(), builder(&weights))?;
            lstm.states_to_tensor(&lstm.seq(x)?)
        }),
        case("candle_nn::GRU", [&[2, 3, 2], &[9, 2], &[9, 3], &[9], &[9]], |[x, weights @ ..]| {
            let gru = GRU::new(2, 3, GRUConfig::default(), builder(&weights))?;
            gru.states_to_tensor(&gru.seq(x)?)
        }),
    ]
}

fn others() -> Vec<Case> {
    vec![
        case("candle_nn::Embedding", [&[5, 3]], |[w]| {
            Embedding::new(w.clone(), 3).forward(&Tensor::new(&[[4u32, 0], [4, 1]], &Device::Cpu)?)
        })
        .strided(Refused),
        case("candle_nn::PReLU", [&[2, 3, 4], &[3]], |[x, w]| PReLU::new(w.clone(), false).forward(x)),
        case("candle_nn::PReLU", [&[2, 3], &[1]], |[x, w]| PReLU::new(w.clone(), true).forward(x))
            .variant("with one weight"),
        case("candle_nn::Dropout", [&[2, 3]], |[x]| Dropout::new(0.5).forward(x, false)).variant("in evaluation"),
        case("candle_nn::Sequential", [&[2, 4], &[3, 4]], |[x, w]| {
            candle_nn::seq().add(Linear::new(w.clone(), None)).add_fn(|x| x.relu()).forward(x)
        }),
    ]
}

pub(super) fn cases() -> Vec<Case> {
    [norms(), products(), recurrent(), others()].into_iter().flatten().collect()
}

/// Each element is either kept and scaled, or dropped; its gradient likewise.
#[test]
fn dropout_passes_gradients_of_kept_elements_only() {
    let x = candle_core::Var::ones((4, 50), DType::F64, &Device::Cpu).unwrap();
    let y = Dropout::new(0.5).forward(&x, true).unwrap();
    let grads = y.sum_all().unwrap().backward().unwrap();
    assert_eq!(grads.get(&x).unwrap().to_vec2::<f64>().unwrap(), y.to_vec2::<f64>().unwrap());
}
