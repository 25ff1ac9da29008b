//! The sum of a residual connection.
use crate::autocast;
use candle_core::{Result, Tensor};
use candle_ddp_tensor::function;

/// `a` + `b`, of the same dtype. `b` has the shape of `a`, or its last dimensions: then it is added for each index of the others, like
/// the positions of a transformer to all sequences of a batch. Leading dimensions of size 1, as in positions of shape (1, N, D), may come
/// in addition. Its last dimensions may be 1 instead, like those of a vector that is added to all pixels of an image.
///
/// Under [`autocast`](crate::autocast()) by lists, the sum of two dtypes is calculated in f32, and f32. Apart from that, this is
/// [`candle_ddp_tensor::function::add`].
///
/// ```
/// # use candle_core::{Device, Result, Tensor};
/// # fn main() -> Result<()> {
/// use candle_ddp_nn::add;
/// let a = Tensor::new(&[[1f32, 2.], [3., 4.]], &Device::Cpu)?;
/// assert_eq!(add(&a, &Tensor::new(&[10f32, 20.], &Device::Cpu)?)?.to_vec2::<f32>()?, [[11., 22.], [13., 24.]]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// candle's, for tensors of other shapes, or of different dtypes or devices.
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let [a, b] = autocast::widest(a, b)?;
    function::add(&a, &b)
}
