//! Layers and functions in bf16, compared with PyTorch's in bf16.
use candle_core::{DType, Device, Module, Result, Tensor, Var, safetensors};
use candle_ddp_nn::rnn::{GRUState, LSTMState};
use candle_ddp_nn::{
    AttentionOptions, AvgPool2dOptions, Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig, CtcLossOptions,
    Embedding, GroupNorm, InstanceNorm, InterpolateMode, LayerNorm, Linear, MaxPool2dOptions, RNNOptions, RmsNorm,
    StackedGRU, StackedLSTM, VarBuilder, add, avg_pool2d, cross_entropy, ctc_loss, gelu, gelu_erf, interpolate,
    log_softmax, max_pool2d, relu, scaled_dot_product_attention, silu, softmax,
};
use candle_ddp_testing::floats;
use std::collections::HashMap;

/// Input number `index` of a case, as the script makes it.
pub(crate) fn wave(shape: &[usize], index: usize, dtype: DType) -> Var {
    let number = |j: usize| 2.0 * (1.7 * j as f64 + index as f64 + 0.3).sin();
    let numbers: Vec<f64> = (0..shape.iter().product()).map(number).collect();
    let x = Tensor::from_vec(numbers, shape, &Device::Cpu).unwrap();
    Var::from_tensor(&x.to_dtype(dtype).unwrap()).unwrap()
}

/// Both results are sums in f32 which are rounded once, or, in PyTorch, twice at some places: they may be two units in
/// the last place apart, of the element or of what it is a difference of. PyTorch's recurrent layers round gates and their gradients in
/// each step; it is then up to two such bounds away from its own results in f64.
pub(crate) fn check(name: &str, dtype: DType, ours: &Tensor, theirs: &Tensor) {
    let bounds = if name.starts_with("lstm") || name.starts_with("gru") { 3.0 } else { 1.0 };
    assert_eq!((ours.dtype(), ours.dims()), (dtype, theirs.dims()), "{name}");
    let (ours, theirs) = (floats(ours), floats(theirs));
    let largest = theirs.iter().fold(0f32, |largest, value| largest.max(value.abs()));
    for (at, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
        let bound = bounds * (theirs.abs() / 64.0 + largest / 256.0);
        assert!((ours - theirs).abs() <= bound, "{name}[{at}] is {ours}, in PyTorch {theirs}");
    }
}

/// Shapes of x, the states, the weights and the biases.
pub(crate) const LSTM: [&[usize]; 7] = [&[3, 5, 9], &[1, 5, 6], &[1, 5, 6], &[24, 9], &[24, 6], &[24], &[24]];
pub(crate) const GRU: [&[usize]; 6] = [&[3, 5, 9], &[1, 5, 6], &[18, 9], &[18, 6], &[18], &[18]];

/// The outputs and the last states of a layer of such inputs.
pub(crate) fn recurrent(x: &[Tensor]) -> Result<Tensor> {
    let (inputs, weights) = x.split_at(x.len() - 4);
    let names = ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"];
    let weights: HashMap<_, _> = names.into_iter().map(String::from).zip(weights.iter().cloned()).collect();
    let dtype = weights["weight_ih_l0"].dtype();
    let vb = VarBuilder::from_tensors(weights, dtype, &Device::Cpu);
    let results = match inputs {
        [x, h, c] => {
            let state = LSTMState::new(h.clone(), c.clone());
            let (y, state) = StackedLSTM::new(9, 6, RNNOptions::default(), vb)?.forward(x, Some(&state), true)?;
            vec![y, state.h, state.c]
        }
        [x, h] => {
            let state = GRUState { h: h.clone() };
            let (y, state) = StackedGRU::new(9, 6, RNNOptions::default(), vb)?.forward(x, Some(&state), true)?;
            vec![y, state.h]
        }
        _ => candle_core::bail!("x and one or two states"),
    };
    Tensor::cat(&results.iter().map(Tensor::flatten_all).collect::<Result<Vec<_>>>()?, 0)
}

#[test]
fn layers_in_bf16_match_pytorch() {
    let golden = include_bytes!("../golden/bf16.safetensors");
    let golden: HashMap<String, Tensor> = safetensors::load_buffer(golden, &Device::Cpu).unwrap();
    let mut left = golden.len();
    let mut case = |name: &str, shapes: &[&[usize]], run: &dyn Fn(&[Tensor]) -> candle_core::Result<Tensor>| {
        let inputs: Vec<Var> =
            shapes.iter().enumerate().map(|(index, shape)| wave(shape, index, DType::BF16)).collect();
        let tensors: Vec<Tensor> = inputs.iter().map(|input| input.as_tensor().clone()).collect();
        let y = run(&tensors).unwrap();
        check(&format!("{name}: y"), DType::BF16, &y, &golden[&format!("{name}|y")]);
        let weight = |j: usize| (0.9 * j as f64 + 0.1).cos();
        let dy =
            Tensor::from_vec((0..y.elem_count()).map(weight).collect::<Vec<_>>(), y.shape(), &Device::Cpu).unwrap();
        let loss = (y.to_dtype(DType::F32).unwrap() * dy.to_dtype(DType::BF16).unwrap().to_dtype(DType::F32).unwrap())
            .and_then(|products| products.sum_all());
        let gradients = loss.unwrap().backward().unwrap();
        for (index, input) in inputs.iter().enumerate() {
            let gradient = gradients.get(input).unwrap();
            check(&format!("{name}: d{index}"), DType::BF16, gradient, &golden[&format!("{name}|d{index}")]);
        }
        left -= 1 + inputs.len();
    };
    let conv = |x: &[Tensor], config| Conv2d::new(x[1].clone(), x.get(2).cloned(), config).forward(&x[0]);
    let config = Conv2dConfig { padding: 1, ..Default::default() };
    case("linear", &[&[5, 37], &[18, 37], &[18]], &|x| Linear::new(x[1].clone(), Some(x[2].clone())).forward(&x[0]));
    case("conv2d", &[&[2, 5, 8, 8], &[6, 5, 3, 3], &[6]], &|x| conv(x, config));
    case("conv2d stride 2", &[&[2, 4, 9, 7], &[6, 4, 3, 3], &[6]], &|x| conv(x, Conv2dConfig { stride: 2, ..config }));
    case("conv2d 1x1", &[&[2, 9, 4, 4], &[6, 9, 1, 1], &[6]], &|x| conv(x, Conv2dConfig::default()));
    case("conv2d groups", &[&[1, 6, 7, 6], &[4, 3, 3, 3]], &|x| {
        conv(x, Conv2dConfig { padding: 2, dilation: 2, groups: 2, ..Default::default() })
    });
    case("conv2d depthwise", &[&[2, 4, 6, 5], &[4, 1, 3, 3]], &|x| conv(x, Conv2dConfig { groups: 4, ..config }));
    case("conv_transpose2d", &[&[2, 4, 4, 5], &[4, 3, 3, 3], &[3]], &|x| {
        let config = ConvTranspose2dConfig { padding: 1, output_padding: 1, stride: 2, dilation: 1 };
        ConvTranspose2d::new(x[1].clone(), Some(x[2].clone()), config).forward(&x[0])
    });
    case("relu", &[&[3, 17]], &|x| relu(&x[0]));
    case("gelu", &[&[3, 17]], &|x| gelu(&x[0]));
    case("gelu_erf", &[&[3, 17]], &|x| gelu_erf(&x[0]));
    case("silu", &[&[3, 17]], &|x| silu(&x[0]));
    case("softmax", &[&[4, 33]], &|x| softmax(&x[0], 1));
    case("log_softmax", &[&[4, 33]], &|x| log_softmax(&x[0], 1));
    case("layer_norm", &[&[5, 24], &[24], &[24]], &|x| LayerNorm::new(x[1].clone(), x[2].clone(), 1e-5).forward(&x[0]));
    case("rms_norm", &[&[5, 24], &[24]], &|x| RmsNorm::new(x[1].clone(), 1e-5).forward(&x[0]));
    case("group_norm", &[&[2, 6, 4, 5], &[6], &[6]], &|x| {
        GroupNorm::new(x[1].clone(), x[2].clone(), 6, 3, 1e-5)?.forward(&x[0])
    });
    case("instance_norm", &[&[2, 3, 4, 5]], &|x| InstanceNorm::new(3, None, 1e-5)?.forward(&x[0]));
    case("cross_entropy", &[&[6, 10]], &|x| {
        let classes: Vec<u32> = (0..6).map(|at| at * 3 % 10).collect();
        cross_entropy(&x[0], &Tensor::new(classes, &Device::Cpu)?)?.to_dtype(DType::BF16) // the loss is in f32
    });
    case("ctc_loss", &[&[5, 2, 4]], &|x| {
        let log_probs = log_softmax(&x[0].to_dtype(DType::F32)?, 2)?;
        let targets = Tensor::new(&[[1u32, 2], [3, 0]], &Device::Cpu)?;
        ctc_loss(&log_probs, &targets, &[5, 4], &[2, 1], CtcLossOptions::default())?.to_dtype(DType::BF16)
    });
    case("embedding", &[&[7, 9]], &|x| {
        let indices: Vec<u32> = (0..12).map(|at| at * 5 % 7).collect();
        Embedding::new(x[0].clone(), 9).forward(&Tensor::from_vec(indices, (3, 4), &Device::Cpu)?)
    });
    case("attention", &[&[1, 2, 6, 8], &[1, 2, 6, 8], &[1, 2, 6, 8]], &|x| {
        let options = AttentionOptions { is_causal: true, ..Default::default() };
        scaled_dot_product_attention(&x[0], &x[1], &x[2], options)
    });
    case("max_pool2d", &[&[2, 3, 7, 8]], &|x| {
        max_pool2d(&x[0], 3, MaxPool2dOptions { stride: Some((2, 2)), padding: (1, 1), ceil_mode: false })
    });
    case("avg_pool2d", &[&[2, 3, 7, 8]], &|x| {
        avg_pool2d(&x[0], 3, AvgPool2dOptions { stride: Some((2, 2)), padding: (1, 1), ..Default::default() })
    });
    case("bilinear", &[&[1, 2, 4, 5]], &|x| {
        interpolate(&x[0], (7, 9), InterpolateMode::Bilinear { align_corners: false })
    });
    case("add", &[&[3, 17], &[3, 17]], &|x| add(&x[0], &x[1]));
    let halved = |x: &[Tensor], states: usize| {
        let half =
            |(index, x): (usize, &Tensor)| if [1, 2].contains(&(index - states)) { x / 2.0 } else { Ok(x.clone()) };
        x.iter()
            .enumerate()
            .skip(states)
            .map(half)
            .collect::<Result<Vec<_>>>()
            .map(|rest| [&x[..states], &rest].concat())
    };
    case("lstm", &LSTM, &|x| recurrent(&halved(x, 2)?));
    case("gru", &GRU, &|x| recurrent(&halved(x, 1)?));
    assert_eq!(left, 0, "cases of the file without a test");
}
