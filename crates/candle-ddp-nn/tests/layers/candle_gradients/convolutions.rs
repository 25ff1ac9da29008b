//! Convolutions with stride, padding, dilation and groups.
use super::{Case, Error, Wrong, case};
use candle_core::Tensor;
use candle_ddp_testing::{assert_close, floats, tensor};

fn conv1d() -> Vec<Case> {
    const KERNEL: &str = "the gradient is a conv1d with a transposed kernel";
    vec![
        case("conv1d", [&[2, 2, 6], &[3, 2, 3]], |[x, k]| x.conv1d(k, 0, 1, 1, 1)).is(Wrong, KERNEL),
        case("conv1d", [&[1, 2, 6], &[3, 2, 3]], |[x, k]| x.conv1d(k, 0, 1, 1, 1))
            .variant("of one sample")
            .strided(Wrong),
        case("conv1d", [&[2, 2, 6], &[1, 2, 3]], |[x, k]| x.conv1d(k, 0, 1, 1, 1))
            .variant("with one output channel")
            .strided(Wrong),
        case("conv1d", [&[2, 2, 7], &[3, 2, 2]], |[x, k]| x.conv1d(k, 1, 2, 1, 1))
            .variant("with padding and stride")
            .is(Wrong, KERNEL),
        case("conv1d", [&[2, 2, 7], &[3, 2, 3]], |[x, k]| x.conv1d(k, 1, 1, 2, 1))
            .variant("with dilation")
            .is(Wrong, KERNEL),
        case("conv1d", [&[2, 4, 6], &[4, 2, 3]], |[x, k]| x.conv1d(k, 0, 1, 1, 2))
            .variant("in groups")
            .is(Wrong, KERNEL),
        case("conv1d", [&[2, 2, 6], &[2, 1, 3]], |[x, k]| x.conv1d(k, 1, 1, 1, 2))
            .variant("of each channel")
            .transposed(Wrong),
    ]
}

fn conv2d() -> Vec<Case> {
    vec![
        case("conv2d", [&[2, 2, 5, 4], &[3, 2, 3, 2]], |[x, k]| x.conv2d(k, 0, 1, 1, 1)),
        case("conv2d", [&[2, 2, 4, 5], &[3, 2, 1, 1]], |[x, k]| x.conv2d(k, 0, 1, 1, 1)).variant("of single pixels"),
        case("conv2d", [&[2, 2, 6, 6], &[3, 2, 3, 3]], |[x, k]| x.conv2d(k, 1, 2, 1, 1))
            .variant("with padding and stride"),
        case("conv2d", [&[2, 2, 6, 5], &[3, 2, 3, 3]], |[x, k]| x.conv2d(k, 1, 2, 1, 1))
            .variant("with different numbers of pixels left over")
            .is(Error, "the width is assumed to equal the height"),
        case("conv2d", [&[2, 2, 6, 5], &[3, 2, 2, 3]], |[x, k]| x.conv2d(k, 1, 1, 2, 1)).variant("with dilation"),
        case("conv2d", [&[2, 2, 7, 7], &[3, 2, 2, 2]], |[x, k]| x.conv2d(k, 0, 3, 1, 1)).variant("with a stride of 3"),
        case("conv2d", [&[2, 2, 8, 8], &[3, 2, 2, 1]], |[x, k]| x.conv2d(k, 1, 2, 2, 1))
            .variant("with stride and dilation"),
        case("conv2d", [&[2, 2, 3, 4], &[3, 2, 1, 1]], |[x, k]| x.conv2d(k, 1, 1, 1, 1))
            .variant("of single pixels with padding"),
        case("conv2d", [&[2, 4, 4, 4], &[4, 2, 3, 3]], |[x, k]| x.conv2d(k, 1, 1, 1, 2)).variant("in groups"),
        case("conv2d", [&[2, 3, 4, 4], &[3, 1, 3, 3]], |[x, k]| x.conv2d(k, 1, 1, 1, 3)).variant("of each channel"),
    ]
}

fn transposed() -> Vec<Case> {
    vec![
        case("conv_transpose1d", [&[2, 2, 4], &[2, 3, 3]], |[x, k]| x.conv_transpose1d(k, 0, 0, 1, 1, 1))
            .is(Error, "not implemented")
            .strided(Wrong),
        case("conv_transpose1d", [&[1, 2, 4], &[2, 3, 3]], |[x, k]| x.conv_transpose1d(k, 0, 0, 1, 1, 1))
            .variant("of one sample")
            .is(Error, "not implemented"),
        case("conv_transpose1d", [&[2, 4, 4], &[4, 1, 3]], |[x, k]| x.conv_transpose1d(k, 1, 1, 2, 1, 2))
            .variant("in groups")
            .is(Error, "not implemented"),
        case("conv_transpose2d", [&[2, 2, 3, 4], &[2, 3, 2, 3]], |[x, k]| x.conv_transpose2d(k, 0, 0, 1, 1)),
        case("conv_transpose2d", [&[2, 2, 3, 4], &[2, 3, 3, 3]], |[x, k]| x.conv_transpose2d(k, 1, 1, 2, 1))
            .variant("with padding and stride"),
        case("conv_transpose2d", [&[2, 2, 3, 4], &[2, 3, 2, 2]], |[x, k]| x.conv_transpose2d(k, 1, 0, 1, 2))
            .variant("with dilation"),
        case("conv_transpose2d", [&[2, 2, 2, 3], &[2, 3, 2, 1]], |[x, k]| x.conv_transpose2d(k, 0, 2, 3, 2))
            .variant("with a stride of 3 and dilation"),
    ]
}

pub(super) fn cases() -> Vec<Case> {
    [conv1d(), conv2d(), transposed()].into_iter().flatten().collect()
}

/// candle's CPU kernel is right for each sample by itself.
#[test]
fn conv_transpose1d_of_several_samples_is_wrong_forward() {
    let (x, kernel) = (tensor(&[2, 2, 5], 1), tensor(&[2, 3, 3], 6));
    let transposed = |x: &Tensor| floats(&x.conv_transpose1d(&kernel, 0, 0, 1, 1, 1).unwrap());
    let sample = |index| transposed(&x.narrow(0, index, 1).unwrap().contiguous().unwrap());
    let right = [sample(0), sample(1)].concat();
    let plane = x.unsqueeze(2).unwrap().conv_transpose2d(&kernel.unsqueeze(2).unwrap(), 0, 0, 1, 1).unwrap();
    assert_close(&floats(&plane), &right, 1e-6, "in two dimensions");
    assert!(transposed(&x).iter().zip(&right).any(|(a, b)| (a - b).abs() > 0.1));
}
