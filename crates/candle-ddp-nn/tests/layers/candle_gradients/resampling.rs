//! Pooling and interpolation.
use super::{Case, Error, Wrong, case};
use candle_core::{Result, Tensor, Var};
use candle_ddp_testing::{assert_close, floats, tensor};

pub(super) fn cases() -> Vec<Case> {
    const STRIDE: &str = "not implemented where the stride is not the window";
    const OTHERS: &str = "the gradients of other uses are lost";
    const UNEVEN: &str = "not implemented for factors that are not whole or differ";
    vec![
        case("avg_pool2d", [&[2, 2, 4, 6]], |[x]| x.avg_pool2d(2)),
        case("avg_pool2d", [&[2, 2, 5, 7]], |[x]| x.avg_pool2d(2))
            .variant("with pixels left over")
            .is(Wrong, "the gradient is in the wrong places"),
        case("avg_pool2d", [&[2, 2, 4, 6]], |[x]| x.avg_pool2d((2, 3))).variant("with an oblong window"),
        case("avg_pool2d_with_stride", [&[2, 2, 4, 6]], |[x]| x.avg_pool2d_with_stride(2, 2)),
        case("avg_pool2d_with_stride", [&[2, 2, 5, 6]], |[x]| x.avg_pool2d_with_stride(2, 1))
            .variant("with overlap")
            .is(Error, STRIDE),
        case("max_pool2d", [&[2, 2, 4, 6]], |[x]| x.max_pool2d(2)).is(Wrong, "divided by the window's elements"),
        case("max_pool2d_with_stride", [&[2, 2, 5, 6]], |[x]| x.max_pool2d_with_stride(2, 1)).is(Error, STRIDE),
        case("upsample_nearest1d", [&[2, 2, 3]], |[x]| x.upsample_nearest1d(6)).is(Wrong, OTHERS),
        case("upsample_nearest1d", [&[2, 2, 3]], |[x]| x.upsample_nearest1d(5))
            .variant("by a fraction")
            .is(Error, UNEVEN),
        case("interpolate1d", [&[2, 2, 3]], |[x]| x.interpolate1d(6)).is(Wrong, OTHERS),
        case("upsample_nearest2d", [&[2, 2, 2, 3]], |[x]| x.upsample_nearest2d(4, 6)).is(Wrong, OTHERS),
        case("upsample_nearest2d", [&[2, 2, 2, 3]], |[x]| x.upsample_nearest2d(4, 3))
            .variant("by different factors")
            .is(Error, UNEVEN),
        case("interpolate2d", [&[2, 2, 2, 3]], |[x]| x.interpolate2d(4, 6)).is(Wrong, OTHERS),
        case("upsample_bilinear2d", [&[2, 2, 2, 3]], |[x]| x.upsample_bilinear2d(4, 6, false))
            .is(Error, "not implemented"),
        case("upsample_bilinear2d_with_scale", [&[2, 2, 2, 3]], |[x]| {
            x.upsample_bilinear2d_with_scale(2.0, 2.0, false)
        })
        .is(Error, "not implemented"),
    ]
}

#[test]
fn max_pool2d_has_a_gradient_that_is_too_small_by_the_elements_of_the_window() {
    let x = Var::from_tensor(&tensor(&[2, 2, 4, 6], 1)).unwrap();
    let gradient = |pool: &dyn Fn(&Tensor) -> Result<Tensor>| {
        floats(pool(&x).unwrap().sqr().unwrap().sum_all().unwrap().backward().unwrap().get(&x).unwrap())
    };
    let right = gradient(&|x| x.reshape((2, 2, 2, 2, 3, 2))?.max(5)?.max(3));
    let quarter: Vec<f32> = right.iter().map(|gradient| gradient / 4.0).collect();
    assert_close(&gradient(&|x| x.max_pool2d(2)), &quarter, 1e-6, "a quarter");
}
