//! Elementwise functions of one and two tensors, with and without broadcasting.
use super::{Case, Wrong, case};
use candle_core::{DType, Result, Tensor};

fn unary(name: &'static str, f: fn(&Tensor) -> Result<Tensor>) -> Case {
    case(name, [&[2, 3, 4]], move |[x]| f(x))
}

fn binary(name: &'static str, f: fn(&Tensor, &Tensor) -> Result<Tensor>) -> Case {
    case(name, [&[2, 3, 4], &[2, 3, 4]], move |[a, b]| f(a, b))
}

fn broadcast(name: &'static str, f: fn(&Tensor, &Tensor) -> Result<Tensor>) -> [Case; 3] {
    [
        case(name, [&[2, 3, 4], &[3, 1]], move |[a, b]| f(a, b)).variant("right"),
        case(name, [&[4], &[2, 3, 4]], move |[a, b]| f(a, b)).variant("left"),
        case(name, [&[2, 1, 4], &[3, 1]], move |[a, b]| f(a, b)).variant("both"),
    ]
}

const SIX_DIGITS: &str = "constants of six digits";

pub(super) fn cases() -> Vec<Case> {
    let mut cases = vec![
        unary("neg", Tensor::neg),
        unary("recip", Tensor::recip),
        unary("exp", Tensor::exp),
        unary("log", Tensor::log).positive(),
        unary("sin", Tensor::sin),
        unary("cos", Tensor::cos),
        unary("tanh", Tensor::tanh),
        unary("abs", Tensor::abs),
        unary("sqr", Tensor::sqr),
        unary("sqrt", Tensor::sqrt).positive(),
        unary("erf", Tensor::erf),
        unary("relu", Tensor::relu),
        unary("silu", Tensor::silu),
        unary("silu", Tensor::silu).variant("of large numbers").values(&[-800., 800.]),
        unary("gelu", Tensor::gelu).is(Wrong, SIX_DIGITS),
        unary("gelu_erf", Tensor::gelu_erf).is(Wrong, SIX_DIGITS),
        unary("elu", |x| x.elu(0.7)),
        unary("powf", |x| x.powf(3.0)),
        unary("powf", |x| x.powf(-1.3)).variant("with a fraction").positive(),
        unary("powf", |x| x.powf(2.0)).variant("at 0").values(&[0., 1.]),
        unary("affine", |x| x.affine(1.5, -0.5)),
        unary("affine", |x| x.affine(0.0, 2.0)).variant("by 0"),
        unary("clamp", |x| x.clamp(-0.7, 0.5)),
        unary("maximum", |x| x.maximum(0.5)).variant("with a scalar"),
        unary("minimum", |x| x.minimum(0.5)).variant("with a scalar"),
        // Their derivative is zero.
        unary("ceil", Tensor::ceil),
        unary("floor", Tensor::floor),
        unary("round", Tensor::round),
        unary("round_to", |x| x.round_to(1)),
        unary("sign", Tensor::sign),
        unary("to_dtype", |x| x.to_dtype(DType::F64)?.sqr()?.to_dtype(DType::F32)).single(),
        unary("to_device", |x| x.to_device(x.device())),
        unary("copy", Tensor::copy),
        unary("contiguous", Tensor::contiguous),
        unary("force_contiguous", Tensor::force_contiguous),
        binary("add", Tensor::add),
        binary("sub", Tensor::sub),
        binary("mul", Tensor::mul),
        binary("div", Tensor::div),
        binary("maximum", |a, b| a.maximum(b)),
        binary("minimum", |a, b| a.minimum(b)),
        binary("clamp", |a, b| a.clamp(&(b - 0.4)?, &(b + 0.4)?)).variant("with tensors"),
        binary("pow", Tensor::pow).positive(),
        binary("pow", Tensor::pow).variant("of negative numbers").values(&[-2.0]).is(Wrong, "not a number"),
        unary("add", |x| x + x).variant("to itself"),
        unary("mul", |x| x * x).variant("by itself"),
        unary("div", |x| x / x.exp()?).variant("by a function of itself"),
        binary("where_cond", |a, b| a.gt(b)?.where_cond(&a.sqr()?, b)),
        case("where_cond", [&[2, 3], &[3]], |[a, b]| a.gt(0.0)?.where_cond(a, &b.broadcast_as(a.shape())?))
            .variant("with a broadcast tensor"),
    ];
    for (name, f) in [
        ("broadcast_add", Tensor::broadcast_add as fn(&Tensor, &Tensor) -> Result<Tensor>),
        ("broadcast_sub", Tensor::broadcast_sub),
        ("broadcast_mul", Tensor::broadcast_mul),
        ("broadcast_div", Tensor::broadcast_div),
        ("broadcast_maximum", Tensor::broadcast_maximum),
        ("broadcast_minimum", Tensor::broadcast_minimum),
    ] {
        cases.extend(broadcast(name, f));
    }
    cases.extend(broadcast("broadcast_pow", Tensor::broadcast_pow).map(Case::positive));
    let negative = case("broadcast_pow", [&[2, 3], &[3]], |[a, b]| a.broadcast_pow(b));
    cases.push(negative.variant("of negative numbers").values(&[-2.0]).is(Wrong, "not a number"));
    cases
}
