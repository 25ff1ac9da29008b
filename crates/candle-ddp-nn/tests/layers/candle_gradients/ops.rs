//! Functions of `candle_nn::ops`, `loss` and `rotary_emb`, and the activations.
use super::{Case, Gradient, Missing, Refused, Right, Wrong, case};
use candle_core::{Device, Module, Result, Tensor};
use candle_nn::{Activation, loss, ops, rotary_emb};

fn on(name: &'static str, f: impl Fn(&Tensor) -> Result<Tensor> + 'static) -> Case {
    case(name, [&[2, 3, 4]], move |[x]| f(x))
}

const FUSED: &str = "applied without a backward pass";

fn functions() -> Vec<Case> {
    vec![
        on("candle_nn::ops::softmax", |x| ops::softmax(x, 1)),
        on("candle_nn::ops::log_softmax", |x| ops::log_softmax(x, 2)),
        on("candle_nn::ops::softmax_last_dim", ops::softmax_last_dim).is(Missing, FUSED).strided(Refused),
        on("candle_nn::ops::silu", ops::silu),
        on("candle_nn::ops::swiglu", ops::swiglu),
        on("candle_nn::ops::sigmoid", ops::sigmoid),
        on("candle_nn::ops::sigmoid", ops::sigmoid).variant("of large numbers").values(&[-800., 800.]),
        on("candle_nn::ops::hard_sigmoid", ops::hard_sigmoid).values(&[-4., -1., 2., 5.]),
        on("candle_nn::ops::mish", ops::mish),
        on("candle_nn::ops::mish", ops::mish).variant("of large numbers").values(&[800.]).is(Wrong, "exp is infinite"),
        on("candle_nn::ops::leaky_relu", |x| ops::leaky_relu(x, 0.1)),
        on("candle_nn::ops::selu", |x| ops::selu(x, 1.67, 1.05)).variant("in f64").is(Refused, "f32 only"),
        on("candle_nn::ops::selu", |x| ops::selu(x, 1.67, 1.05)).single(),
        on("candle_nn::ops::selu", |x| ops::selu(x, 1.67, 1.05))
            .variant("of large numbers")
            .single()
            .values(&[100.])
            .is(Wrong, "exp is infinite"),
        on("candle_nn::ops::dropout", |x| ops::dropout(x, 0.0)),
        on("candle_nn::ops::Identity", |x| ops::Identity.forward(x)),
        case("candle_nn::ops::rms_norm", [&[2, 3, 4], &[4]], |[x, w]| ops::rms_norm(x, w, 1e-5))
            .single()
            .is(Missing, FUSED)
            .strided(Refused),
        case("candle_nn::ops::rms_norm_slow", [&[2, 3, 4], &[4]], |[x, w]| ops::rms_norm_slow(x, w, 1e-5)),
        case("candle_nn::ops::layer_norm", [&[2, 3, 4], &[4], &[4]], |[x, w, b]| ops::layer_norm(x, w, b, 1e-5))
            .single()
            .is(Missing, FUSED)
            .strided(Refused),
        case("candle_nn::ops::layer_norm_slow", [&[2, 3, 4], &[4], &[4]], |[x, w, b]| {
            ops::layer_norm_slow(x, w, b, 1e-5)
        }),
        case("candle_nn::ops::pixel_shuffle", [&[2, 8, 2, 3]], |[x]| ops::pixel_shuffle(x, 2)),
        case("candle_nn::ops::pixel_unshuffle", [&[2, 2, 4, 6]], |[x]| ops::pixel_unshuffle(x, 2)),
        case("candle_nn::ops::replication_pad2d", [&[2, 2, 2, 3]], |[x]| ops::replication_pad2d(x, 1)),
    ]
}

fn losses() -> Vec<Case> {
    let classes = || Tensor::new(&[2u32, 0, 2], &Device::Cpu);
    let binary = || Tensor::new(&[[0f64, 1., 1.], [1., 0., 0.]], &Device::Cpu);
    vec![
        case("candle_nn::loss::nll", [&[3, 4]], move |[x]| loss::nll(x, &classes()?)).strided(Refused),
        case("candle_nn::loss::cross_entropy", [&[3, 4]], move |[x]| loss::cross_entropy(x, &classes()?)),
        case("candle_nn::loss::mse", [&[2, 3], &[2, 3]], |[x, y]| loss::mse(x, y)),
        case("candle_nn::loss::binary_cross_entropy_with_logit", [&[2, 3]], move |[x]| {
            loss::binary_cross_entropy_with_logit(x, &binary()?)
        }),
        case("candle_nn::loss::binary_cross_entropy_with_logit", [&[2, 3]], move |[x]| {
            loss::binary_cross_entropy_with_logit(x, &binary()?)
        })
        .variant("of large logits")
        .values(&[40.])
        .is(Wrong, "the logarithm of zero"),
        case("candle_nn::loss::huber", [&[3, 4], &[3, 4]], |[x, y]| loss::huber(x, y, 0.8)),
    ]
}

fn rotary() -> Vec<Case> {
    let x: [&[usize]; 3] = [&[2, 2, 3, 4], &[3, 2], &[3, 2]];
    vec![
        case("candle_nn::rotary_emb::rope", x, |[x, cos, sin]| rotary_emb::rope(x, cos, sin))
            .is(Missing, FUSED)
            .strided(Refused),
        case("candle_nn::rotary_emb::rope_i", x, |[x, cos, sin]| rotary_emb::rope_i(x, cos, sin))
            .is(Missing, FUSED)
            .strided(Refused),
        case("candle_nn::rotary_emb::rope_thd", [&[2, 3, 2, 4], &[3, 2], &[3, 2]], |[x, cos, sin]| {
            rotary_emb::rope_thd(x, cos, sin)
        })
        .is(Missing, FUSED)
        .strided(Refused),
        case("candle_nn::rotary_emb::rope_slow", x, |[x, cos, sin]| rotary_emb::rope_slow(x, cos, sin)),
        case("candle_nn::rotary_emb::rope_i_slow", x, |[x, cos, sin]| rotary_emb::rope_i_slow(x, cos, sin)),
    ]
}

fn activations() -> Vec<Case> {
    use Activation::*;
    let all = [
        ("Gelu", Gelu, Wrong),
        ("NewGelu", NewGelu, Wrong),
        ("GeluPytorchTanh", GeluPytorchTanh, Wrong),
        ("Relu", Relu, Right),
        ("Relu2", Relu2, Right),
        ("Relu6", Relu6, Right),
        ("Silu", Silu, Right),
        ("Sigmoid", Sigmoid, Right),
        ("HardSigmoid", HardSigmoid, Right),
        ("Swiglu", Swiglu, Right),
        ("Swish", Swish, Right),
        ("Mish", Mish, Right),
        ("HardSwish", HardSwish, Right),
        ("Elu", Elu(0.7), Right),
        ("LeakyRelu", LeakyRelu(0.1), Right),
    ];
    let case = |(name, f, expected): (&'static str, Activation, Gradient)| {
        on("candle_nn::Activation", move |x| f.forward(x)).variant(name).is(expected, "constants of six digits")
    };
    all.into_iter().map(case).collect()
}

pub(super) fn cases() -> Vec<Case> {
    [functions(), losses(), rotary(), activations()].into_iter().flatten().collect()
}
