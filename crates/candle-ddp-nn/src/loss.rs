//! Losses with the names and signatures of [`candle_nn::loss`]. For inputs in f16 and bf16, losses are calculated and returned in
//! f32, as under PyTorch's autocast; gradients have the dtype of the inputs.
pub use crate::cross_entropy::cross_entropy;

use crate::activation::softplus;
use crate::autocast::to_dtype;
use candle_core::{DType, Result, Tensor};
use candle_ddp_tensor::function::argument;
use candle_ddp_tensor::{Error, accumulator};

/// The tensor in the dtype in which its loss is calculated.
fn wide(x: &Tensor) -> Result<Tensor> {
    match x.dtype() {
        // candle would add the gradient to zeros in 16 bits.
        DType::F16 | DType::BF16 => Ok(argument(&to_dtype(x, DType::F32)?)),
        dtype => argument(x).to_dtype(accumulator(dtype)),
    }
}

/// The mean of (input − target)²: `torch.nn.functional.mse_loss`, of tensors of one shape and dtype.
///
/// # Errors
/// candle's, for tensors of different shapes or dtypes.
pub fn mse(input: &Tensor, target: &Tensor) -> Result<Tensor> {
    candle_nn::loss::mse(&wide(input)?, &wide(target)?)
}

/// The mean of the negative log-probabilities `input`, (N, C), of the classes `target`, (N): `torch.nn.functional.nll_loss`.
///
/// # Errors
/// [`InvalidArgument`](Error::Base), carried by candle's error, for targets that are no integers; candle's, for tensors of other shapes.
pub fn nll(input: &Tensor, target: &Tensor) -> Result<Tensor> {
    if !matches!(target.dtype(), DType::U8 | DType::U32 | DType::I64) {
        let reason = format!("its dtype must be u32, i64 or u8, not {}", target.dtype().as_str());
        return Err(Error::invalid("the target of nll", reason).into());
    }
    candle_nn::loss::nll(&wide(input)?, target)
}

/// The mean of the Huber loss, which is quadratic up to a distance of `delta` and linear beyond:
/// `torch.nn.functional.huber_loss`.
///
/// # Errors
/// candle's, for tensors of different shapes or dtypes.
pub fn huber(input: &Tensor, target: &Tensor, delta: f64) -> Result<Tensor> {
    candle_nn::loss::huber(&wide(input)?, &wide(target)?, delta)
}

/// The mean of ln(1 + e^x) − x × target: `torch.nn.functional.binary_cross_entropy_with_logits`, finite for every
/// finite logit, unlike candle's. `logits` and `targets` have the same shape and dtype, and targets are from 0 to 1.
///
/// # Errors
/// Returns an error for tensors of different shapes or dtypes.
pub fn binary_cross_entropy_with_logit(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let (logits, targets) = (&wide(logits)?, &wide(targets)?);
    (softplus(logits)? - (logits * targets)?)?.mean_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Var};

    /// The mean of 1000 squares of 1.01 is 1.0201, which bf16 rounds to 1.0234.
    #[test]
    fn losses_of_16_bits_are_in_f32_and_their_gradients_in_16_bits() {
        for dtype in [DType::F16, DType::BF16] {
            let of = |value: f64| Tensor::full(value, (500, 2), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            let (x, y) = (Var::from_tensor(&of(1.01)).unwrap(), of(0.0));
            let classes = Tensor::zeros(500, DType::U32, &Device::Cpu).unwrap();
            let exact = x.to_dtype(DType::F64).unwrap().get(0).unwrap().get(0).unwrap().to_scalar::<f64>().unwrap();
            for (loss, expected) in [
                (mse(&x, &y), exact * exact),
                (huber(&x, &y, 10.0), exact * exact / 2.0),
                (nll(&x, &classes), -exact),
                (binary_cross_entropy_with_logit(&x, &y), exact.exp().ln_1p()),
                (cross_entropy(&x, &classes), std::f64::consts::LN_2),
            ] {
                let loss = loss.unwrap();
                assert_eq!(loss.dtype(), DType::F32);
                let value = f64::from(loss.to_scalar::<f32>().unwrap());
                assert!((value - expected).abs() < 1e-5, "{value}, not {expected}");
                assert_eq!(loss.backward().unwrap().get(&x).unwrap().dtype(), dtype);
            }
        }
        let wide = Tensor::ones((1, 2), DType::F64, &Device::Cpu).unwrap();
        assert_eq!(mse(&wide, &wide).unwrap().dtype(), DType::F64);
    }

    #[test]
    fn large_logits_have_finite_losses_and_gradients() {
        let x = Var::new(&[-500f32, -2., 0., 3., 500.], &Device::Cpu).unwrap();
        let targets = Tensor::new(&[0f32, 1., 0.5, 0., 0.], &Device::Cpu).unwrap();
        let loss = binary_cross_entropy_with_logit(&x, &targets).unwrap();
        let expected = (0. + 2.126_928 + std::f32::consts::LN_2 + 3.048_587_3 + 500.) / 5.;
        assert!((loss.to_scalar::<f32>().unwrap() - expected).abs() < 1e-4);
        let gradient: Vec<f32> = loss.backward().unwrap().get(&x).unwrap().to_vec1().unwrap();
        for (found, expected) in gradient.iter().zip([0., -0.880_797, 0., 0.952_574, 1.].map(|d: f32| d / 5.)) {
            assert!((found - expected).abs() < 1e-6, "{gradient:?}");
        }
    }
}
