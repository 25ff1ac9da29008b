//! A differentiable sum.
use super::operation::apply;
use super::token::Function;
use crate::sum::{is_fast, values};
use candle_core::{Result, Tensor};

/// `a` + `b`, of the same shape and dtype: candle's sum, whose gradient passes to both unchanged.
///
/// Tensors of f32, f64, f16 and bf16 on CPUs and CUDA are added in one pass, and no pass is needed backward. Others are added by candle.
///
/// # Errors
/// candle's, for tensors of different shapes, dtypes or devices.
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    if !is_fast(a, b) {
        return a.add(b);
    }
    let (a, b) = (a.contiguous()?, b.contiguous()?);
    apply(&[&a, &b], values(&a, &b)?, Add)
}

struct Add;

impl Function for Add {
    fn name(&self) -> &'static str {
        "add"
    }

    fn backward(&self, gradient: &Tensor, _: &[bool]) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(gradient.clone()), Some(gradient.clone())])
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
        assert!(add(&of(&[2], DType::F32), &of(&[2], DType::BF16)).is_err());
        assert_eq!(add(&of(&[2], DType::U32), &of(&[2], DType::U32)).unwrap().dtype(), DType::U32);
        assert_eq!(add(&of(&[0, 3], DType::BF16), &of(&[0, 3], DType::BF16)).unwrap().dims(), [0, 3]);
    }
}
