//! The building blocks of loops over rows, to be inlined into vector code. Each of these loops does one thing: the
//! compiler vectorises an exponential function, or independent partial sums, but not both in one loop.
use candle_core::WithDType;
use candle_ddp_tensor::{Element, Real};

/// Independent partial results.
const LANES: usize = 16;

/// The larger one; NaN if either is NaN.
#[inline(always)]
pub(super) fn larger<R: Real>(a: R, b: R) -> R {
    #[expect(clippy::eq_op)] // asks for NaN
    if (b > a) | (b != b) { b } else { a }
}

/// The maximum of the elements and `start`; NaN if an element is NaN.
#[inline(always)]
pub(super) fn maximum<T: Element>(x: &[T], start: T::Real) -> T::Real {
    let mut lanes = [start; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] = larger(lanes[lane], chunk[lane].widen());
        }
    }
    let mut result = start;
    for lane in lanes {
        result = larger(result, lane);
    }
    for x in rest {
        result = larger(result, x.widen());
    }
    result
}

/// Writes e^(x − shift).
#[inline(always)]
pub(super) fn exponentials<T: Element>(x: &[T], shift: T::Real, to: &mut [T::Real]) {
    for (to, x) in to.iter_mut().zip(x) {
        *to = (x.widen() - shift).exp();
    }
}

/// The sum of the elements.
#[inline(always)]
pub(super) fn sum<T: Element>(x: &[T]) -> T::Real {
    let zero = T::Real::from_f64(0.0);
    let mut lanes = [zero; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] += chunk[lane].widen();
        }
    }
    let mut result = zero;
    for lane in lanes {
        result += lane;
    }
    for x in rest {
        result += x.widen();
    }
    result
}

/// The sum of the products of elements.
#[inline(always)]
pub(super) fn dot<T: Element>(x: &[T], y: &[T]) -> T::Real {
    let zero = T::Real::from_f64(0.0);
    let mut lanes = [zero; LANES];
    let ((xs, x_rest), (ys, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    for (x, y) in xs.iter().zip(ys) {
        for lane in 0..LANES {
            lanes[lane] += x[lane].widen() * y[lane].widen();
        }
    }
    let mut result = zero;
    for lane in lanes {
        result += lane;
    }
    for (x, y) in x_rest.iter().zip(y_rest) {
        result += x.widen() * y.widen();
    }
    result
}
