//! Views, concatenation, reductions and matrix products.
use super::{Case, Error, Refused, Wrong, case};
use candle_core::{D, IndexOp, Result, Tensor};

fn on(name: &'static str, f: impl Fn(&Tensor) -> Result<Tensor> + 'static) -> Case {
    case(name, [&[2, 3, 4]], move |[x]| f(x))
}

fn views() -> Vec<Case> {
    vec![
        on("reshape", |x| x.reshape((4, 6))),
        on("flatten", |x| x.flatten(1, 2)),
        on("flatten_to", |x| x.flatten_to(1)),
        on("flatten_from", |x| x.flatten_from(1)),
        on("flatten_all", Tensor::flatten_all),
        on("t", Tensor::t),
        on("transpose", |x| x.transpose(0, 2)),
        on("permute", |x| x.permute((2, 0, 1))),
        case("squeeze", [&[2, 1, 3]], |[x]| x.squeeze(1)),
        on("unsqueeze", |x| x.unsqueeze(1)),
        on("narrow", |x| x.narrow(1, 1, 2)),
        on("narrow", |x| x.narrow(2, 1, 2)).variant("in the middle"),
        on("narrow", |x| x.narrow(0, 0, 1)? + x.narrow(0, 1, 1)?).variant("twice"),
        on("get", |x| x.get(1)),
        on("get_on_dim", |x| x.get_on_dim(1, 2)),
        on("i", |x| x.i((.., 1.., 2))),
        on("chunk", |x| x.chunk(2, 2)?[1].sqr()),
        on("broadcast_as", |x| x.broadcast_as((5, 2, 3, 4))),
        case("broadcast_as", [&[2, 1, 4]], |[x]| x.broadcast_as((3, 2, 3, 4))).variant("of a dimension of 1"),
        case("broadcast_as", [&[]], |[x]| x.broadcast_as((2, 3))).variant("of a scalar"),
        case("expand", [&[2, 1, 4]], |[x]| x.expand((2, 3, 4))),
        on("broadcast_left", |x| x.broadcast_left((2, 2))),
        on("repeat", |x| x.repeat((2, 1, 3))),
        on("repeat", |x| x.repeat((2, 1, 1, 3))).variant("with a new dimension"),
        case("meshgrid", [&[2], &[3]], |[a, b]| {
            let grids = Tensor::meshgrid(&[a, b], true)?;
            &grids[0] * &grids[1]
        }),
        on("roll", |x| x.roll(1, 1)),
        on("roll", |x| x.roll(-3, 2)).variant("backwards"),
        on("unfold", |x| x.unfold(2, 2, 2)).variant("of the last dimension in whole windows"),
        on("unfold", |x| x.unfold(2, 3, 1))
            .variant("with overlap")
            .is(Error, "the gradient of a reshape with another number of elements"),
        case("unfold", [&[4, 3]], |[x]| x.unfold(0, 2, 2))
            .variant("of another dimension")
            .is(Wrong, "the gradient of a reshape, although the elements change their order"),
        case("cat", [&[2, 3, 4], &[2, 2, 4]], |[a, b]| Tensor::cat(&[a, b, a], 1)),
        case("cat", [&[2, 3], &[1, 3]], |[a, b]| Tensor::cat(&[a, b], 0)).variant("of rows"),
        case("cat", [&[2, 3], &[2, 1]], |[a, b]| Tensor::cat(&[a, b], D::Minus1)).variant("of columns"),
        case("stack", [&[2, 3], &[2, 3]], |[a, b]| Tensor::stack(&[a, b], 1)),
        case("stack", [&[2, 3], &[2, 3]], |[a, b]| Tensor::stack(&[a, b], 2)).variant("at the end"),
        on("pad_with_zeros", |x| x.pad_with_zeros(1, 1, 2)),
        on("pad_with_zeros", |x| x.pad_with_zeros(2, 0, 2)).variant("on the right"),
        on("pad_with_same", |x| x.pad_with_same(1, 1, 2)),
        on("pad_with_same", |x| x.pad_with_same(2, 2, 0)).variant("on the left"),
    ]
}

fn reductions() -> Vec<Case> {
    vec![
        on("sum", |x| x.sum(1)),
        on("sum", |x| x.sum((0, 2))).variant("over two dimensions"),
        on("sum_keepdim", |x| x.sum_keepdim((1, 2))),
        on("sum_all", Tensor::sum_all),
        on("mean", |x| x.mean((0, 2))),
        on("mean_keepdim", |x| x.mean_keepdim(1)),
        on("mean_all", Tensor::mean_all),
        on("var", |x| x.var(1)),
        on("var_keepdim", |x| x.var_keepdim(2)),
        on("max", |x| x.max(1)),
        on("max_keepdim", |x| x.max_keepdim(0)),
        on("max_all", Tensor::max_all),
        on("min", |x| x.min(2)),
        on("min_keepdim", |x| x.min_keepdim(1)),
        on("min_all", Tensor::min_all),
        on("log_sum_exp", |x| x.log_sum_exp(1)),
        on("log_sum_exp", |x| x.log_sum_exp((0, 2))).variant("over two dimensions"),
        on("log_sum_exp", |x| x.log_sum_exp(2)).variant("of large numbers").values(&[800., 801., -800.]),
        on("log_sum_exp", |x| Tensor::stack(&[x, &x.zeros_like()?], 3)?.log_sum_exp(3))
            .variant("as ln(1 + e^x)")
            .values(&[800., -800., 40.]),
        on("norm", Tensor::norm),
        on("cumsum", |x| x.cumsum(2)),
        on("cumsum", |x| x.cumsum(0)).variant("over the first dimension"),
        case("cumsum", [&[4]], |[x]| x.cumsum(0)).variant("of a vector"),
    ]
}

fn products() -> Vec<Case> {
    vec![
        case("dot", [&[4], &[4]], |[a, b]| a.dot(b)),
        case("mv", [&[3, 4], &[4]], |[a, b]| a.mv(b)),
        case("matmul", [&[2, 3], &[3, 4]], |[a, b]| a.matmul(b)),
        case("matmul", [&[2, 2, 3, 4], &[2, 2, 4, 2]], |[a, b]| a.matmul(b)).variant("in batches").transposed(Refused),
        case("matmul", [&[2, 3, 4]], |[a]| a.matmul(&a.t()?)).variant("by its own transpose"),
        case("broadcast_matmul", [&[2, 1, 3, 4], &[3, 4, 2]], |[a, b]| a.broadcast_matmul(b)),
        case("broadcast_matmul", [&[2, 2, 3, 4], &[4, 2]], |[a, b]| a.broadcast_matmul(b))
            .variant("by one matrix")
            .transposed(Refused),
        case("broadcast_matmul", [&[3, 4], &[2, 4, 2]], |[a, b]| a.broadcast_matmul(b)).variant("of one matrix"),
    ]
}

pub(super) fn cases() -> Vec<Case> {
    [views(), reductions(), products()].into_iter().flatten().collect()
}
