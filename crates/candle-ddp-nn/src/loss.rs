//! Losses with the names and signatures of [`candle_nn::loss`].
pub use crate::cross_entropy::cross_entropy;
#[doc(no_inline)]
pub use candle_nn::loss::*;

use crate::activation::softplus;
use candle_core::{Result, Tensor};

/// The mean of ln(1 + e^x) − x × target: `torch.nn.functional.binary_cross_entropy_with_logits`, finite for every
/// finite logit, unlike candle's. `logits` and `targets` have the same shape and dtype, and targets are from 0 to 1.
///
/// # Errors
/// Returns an error for tensors of different shapes or dtypes.
pub fn binary_cross_entropy_with_logit(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    (softplus(logits)? - (logits * targets)?)?.mean_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Var};

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
