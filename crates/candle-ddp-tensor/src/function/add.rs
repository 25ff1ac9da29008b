//! A differentiable sum.
use super::grad_mode::argument;
use super::operation::{apply, apply_in};
use super::token::Function;
use crate::column_sums::{column_sums, spread_sums};
use crate::memory_format::MemoryFormat;
use crate::sum::{is_fast, takes, values, with_spread};
use candle_core::{Result, Shape, Storage, Tensor};

/// `a` + `b`, of the same dtype. `b` has the shape of `a`, or its last dimensions: then it is added for each index of the others, like
/// the positions of a transformer to all sequences of a batch. It may have leading dimensions of size 1 in addition, for some of those.
/// Its last dimensions may be 1 instead, like those of a vector that is added to all pixels of an image.
///
/// Tensors of f32, f64, f16 and bf16 on CPUs and CUDA are added in one pass; the sum has the [memory format](MemoryFormat) of `a`
/// unless `b` is repeated. Backward, the gradient passes to both unchanged, but to a
/// repeated `b` its sum, in one pass, with f16 and bf16 in f32. Others are added by candle, as on CUDA those whose last dimensions are 1.
///
/// # Errors
/// candle's, for tensors of other shapes, or of different dtypes or devices.
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    if let Some(last) = after_ones(a.dims(), b.dims()) {
        return add(a, &argument(b).reshape(last)?);
    }
    if let Some(each) = spread(a, b) {
        let sums = with_spread(&a.detach().contiguous()?, &b.detach().contiguous()?, each)?;
        return apply(&[a, b], sums, Add { repeated: Some(b.shape().clone()), each });
    }
    if b.rank() == a.rank() && b.dims().ends_with(&[1]) && a.shape() != b.shape() {
        return argument(a).broadcast_add(&argument(b));
    }
    if !is_fast(a, b) {
        let (a, b) = (argument(a), argument(b));
        return if a.shape() != b.shape() && a.dims().ends_with(b.dims()) { a.broadcast_add(&b) } else { a.add(&b) };
    }
    let repeated = (a.shape() != b.shape()).then(|| b.shape().clone());
    let format = if repeated.is_some() { MemoryFormat::Contiguous } else { MemoryFormat::of(a) };
    let sums = values(&format.stored(&a.detach())?, &format.stored(&b.detach())?)?;
    apply_in(format, &[a, b], sums, Add { repeated, each: 1 })
}

/// How many neighbours in `a` each element of `b` is added to, if the last dimensions of `b` are 1, those before them are those of `a`, and
/// the first may be 1 too.
fn spread(a: &Tensor, b: &Tensor) -> Option<usize> {
    let ones = b.dims().iter().rev().take_while(|size| **size == 1).count();
    let (kept, spread) = a.dims().split_at_checked(b.rank().checked_sub(ones)?)?;
    let first = b.dims().iter().take_while(|size| **size == 1).count();
    let fits = a.rank() == b.rank() && first < kept.len() && kept[first..] == b.dims()[first..kept.len()];
    let each = spread.iter().product();
    (fits && each > 1 && a.elem_count() > 0 && a.device().is_cpu() && takes(a, b)).then_some(each)
}

/// The dimensions of b after those leading ones of size 1 that must go, so that the rest are the last ones of a.
fn after_ones<'b>(a: &[usize], b: &'b [usize]) -> Option<&'b [usize]> {
    if b.len() > a.len() || a.ends_with(b) {
        return None;
    }
    let ones = b.iter().take_while(|size| **size == 1).count();
    (1..=ones).map(|skipped| &b[skipped..]).find(|last| a.ends_with(last))
}

/// The sum of two tensors of one shape, which has been computed already.
pub fn added(a: &Tensor, b: &Tensor, sum: (Storage, Shape)) -> Result<Tensor> {
    apply(&[a, b], sum, Add { repeated: None, each: 1 })
}

struct Add {
    /// The shape of b, if it differs from the shape of a.
    repeated: Option<Shape>,
    /// How many neighbours in a each element of b is added to.
    each: usize,
}

impl Function for Add {
    fn name(&self) -> &'static str {
        "add"
    }

    fn backward(&self, gradient: &Tensor, needed: &[bool]) -> Result<Vec<Option<Tensor>>> {
        let of_b = match &self.repeated {
            Some(shape) if needed[1] && self.each > 1 => Some(spread_sums(gradient, shape, self.each)?),
            Some(shape) if needed[1] => Some(column_sums(gradient, shape)?),
            Some(_) => None,
            None => Some(gradient.clone()),
        };
        Ok(vec![Some(gradient.clone()), of_b])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device, Var};

    /// Sums of sums, with views and broadcast gradients, are candle's in both directions, and rounded once.
    #[test]
    fn sums_and_gradients_are_those_of_candle() {
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            let values = |start: f64| Tensor::arange(start, start + 12.0, &Device::Cpu).unwrap().sin().unwrap();
            let var =
                |start| Var::from_tensor(&values(start).reshape((3, 4)).unwrap().to_dtype(dtype).unwrap()).unwrap();
            let (a, b) = (var(0.0), var(7.0));
            let run = |add: fn(&Tensor, &Tensor) -> Result<Tensor>| {
                let sum = add(&add(&a.t().unwrap(), &b.t().unwrap()).unwrap(), &a.t().unwrap()).unwrap();
                let gradients = sum.sqr().unwrap().sum_all().unwrap().backward().unwrap();
                [&sum, &gradients.get(&a).unwrap().t().unwrap(), &gradients.get(&b).unwrap().t().unwrap()]
                    .map(|t| t.to_dtype(DType::F64).unwrap().contiguous().unwrap().to_vec2::<f64>().unwrap())
            };
            assert_eq!(run(add), run(|a, b| a + b), "{dtype:?}");
        }
        let of = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu).unwrap();
        assert!(add(&of(&[2], DType::F32), &of(&[3], DType::F32)).is_err());
        assert!(add(&of(&[2, 3], DType::F32), &of(&[1, 1, 3], DType::F32)).is_err());
        assert!(add(&of(&[2, 3], DType::F32), &of(&[3, 1], DType::F32)).is_err());
        assert!(add(&of(&[2, 3, 4], DType::F32), &of(&[2, 1, 4], DType::F32)).is_err());
        assert!(add(&of(&[2, 3], DType::F32), &of(&[2, 1], DType::BF16)).is_err());
        assert!(add(&of(&[2], DType::F32), &of(&[2], DType::BF16)).is_err());
        assert_eq!(add(&of(&[2], DType::U32), &of(&[2], DType::U32)).unwrap().dtype(), DType::U32);
        assert_eq!(add(&of(&[0, 3], DType::BF16), &of(&[0, 3], DType::BF16)).unwrap().dims(), [0, 3]);
    }

    fn var(shape: &[usize], dtype: DType, start: f64) -> Var {
        let values: Vec<f64> = (0..shape.iter().product()).map(|i: usize| (i as f64 + start).sin()).collect();
        let values = Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        Var::from_tensor(&values).unwrap()
    }

    /// The sum of a and b, and the gradients of both in the loss that is the sum of its squares: by this crate, and by candle.
    fn ours_and_candles(a: &Var, b: &Var) -> [[Vec<f64>; 3]; 2] {
        [add(a, b).unwrap(), a.broadcast_add(b).unwrap()].map(|sum| {
            let gradients = (&sum * &sum).unwrap().sum_all().unwrap().backward().unwrap();
            // candle leaves out some gradients without elements.
            let of = |var: &Var| gradients.get(var).cloned().unwrap_or(var.zeros_like().unwrap());
            let flat = |t: &Tensor| t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>();
            [sum.clone(), of(a), of(b)].map(|t| flat(&t).unwrap())
        })
    }

    /// Positions, for example: also single numbers, and tensors without elements. candle sums gradients of 16 bits in 16 bits.
    #[test]
    fn the_last_dimensions_are_added_for_all_others() {
        for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-6), (DType::F16, 5e-3), (DType::BF16, 4e-2)] {
            for shape in [&[5, 3, 4][..], &[70, 1, 5], &[9, 0, 2], &[0, 3, 2]] {
                for (skipped, ones) in [(1, 0), (2, 0), (3, 0), (1, 1), (2, 1), (2, 2), (3, 3)] {
                    let of_b = [&[1; 3][..ones], &shape[skipped..]].concat();
                    let (a, b) = (var(shape, dtype, 0.0), var(&of_b, dtype, 7.0));
                    let [ours, candles] = ours_and_candles(&a, &b);
                    for (ours, candles) in ours.iter().zip(&candles) {
                        assert_eq!(ours.len(), candles.len());
                        let largest = candles.iter().fold(1.0f64, |largest, value| largest.max(value.abs()));
                        let differs = ours.iter().zip(candles).any(|(a, b)| (a - b).abs() > tolerance * largest);
                        assert!(!differs, "{dtype:?} {shape:?} without {skipped}: {ours:?}, not {candles:?}");
                    }
                }
            }
        }
    }

    /// A vector for all pixels of an image, for example. candle sums gradients of 16 bits in 16 bits.
    #[test]
    fn each_element_is_added_to_its_neighbours() {
        for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-6), (DType::F16, 5e-3), (DType::BF16, 4e-2)] {
            for (shape, of_b) in [
                (&[2, 3, 4, 5][..], &[2, 3, 1, 1][..]),
                (&[2, 3, 4, 5], &[2, 3, 4, 1]),
                (&[2, 3, 4, 5], &[1, 3, 1, 1]),
                (&[2, 3, 4, 5], &[1, 3, 4, 1]),
                (&[3, 70], &[3, 1]),
                (&[1, 300, 67], &[1, 300, 1]),
                (&[3, 0], &[3, 1]),
                (&[0, 4], &[0, 1]),
            ] {
                let (a, b) = (var(shape, dtype, 0.0), var(of_b, dtype, 7.0));
                let [ours, candles] = ours_and_candles(&a, &b);
                assert_eq!(ours[..2], candles[..2], "{dtype:?} {shape:?} {of_b:?}");
                let largest = candles[2].iter().fold(1.0f64, |largest, value| largest.max(value.abs()));
                let differs = ours[2].iter().zip(&candles[2]).any(|(a, b)| (a - b).abs() > tolerance * largest);
                assert!(!differs && ours[2].len() == candles[2].len(), "{dtype:?} {shape:?} {of_b:?}: {ours:?}");
                // The last dimensions exchanged: a view.
                let (a, b) = (a.detach(), b.detach());
                let last = shape.len() - 1;
                if of_b[last - 1] == 1 && a.elem_count() > 0 {
                    let a = a.transpose(last - 1, last).unwrap();
                    let values =
                        |t: Tensor| t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
                    assert_eq!(values(add(&a, &b).unwrap()), values(a.broadcast_add(&b).unwrap()));
                }
            }
        }
        let nan = Tensor::new(&[[1f32, 2.], [f32::NAN, 3.]], &Device::Cpu).unwrap();
        let b = Var::new(&[[f32::NAN], [1.]], &Device::Cpu).unwrap();
        let sum = add(&nan, &b).unwrap();
        let values = sum.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert!(values[..3].iter().all(|value| value.is_nan()) && values[3] == 4.0);
    }
}
