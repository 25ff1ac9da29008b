//! Initial values from a seed.
use super::Generator;
use crate::error::describe;
use crate::panic::lock;
use crate::variables::not_in_varmap;
use candle_core::{DType, Device, Result, Shape, Tensor, Var};
use candle_ddp_base::hash::fnv1a_64;
use candle_nn::init::NormalOrUniform;
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder, VarMap};

/// A `VarBuilder` that makes variables in `varmap` like candle's `VarBuilder::from_varmap`, but with reproducible
/// values, as in [`init`]. Existing variables are returned unchanged.
///
/// `DdpOptions::init_seed` does the same for a model under DistributedDataParallel. For `DataParallel`,
/// build the model once with this `VarBuilder` first, which fills the `VarMap`.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_ddp::seed;
/// use candle_nn::{VarMap, linear};
///
/// # fn main() -> candle_core::Result<()> {
/// let model = |seed| linear(4, 2, seed::var_builder(&VarMap::new(), seed, DType::F32, &Device::Cpu).pp("head"));
/// let weights = |seed| model(seed)?.weight().to_vec2::<f32>();
/// assert_eq!(weights(42)?, weights(42)?);
/// assert_ne!(weights(42)?, weights(43)?);
/// # Ok(())
/// # }
/// ```
pub fn var_builder(varmap: &VarMap, seed: u64, dtype: DType, device: &Device) -> VarBuilder<'static> {
    VarBuilder::from_backend(Box::new(Seeded { varmap: varmap.clone(), seed }), dtype, device.clone())
}

/// A tensor with the values that `init` asks for, from a seed. They depend only on `seed`, `name`, the shape and
/// `init`, and not on the rank, the device, the dtype (except for rounding) or earlier random numbers. Distributions
/// and bounds are those of candle's [`Init`]; the numbers come from a [`Generator`].
///
/// # Errors
/// Returns an error for random values in an integer dtype, and the device's errors.
pub fn init(
    init: Init,
    seed: u64,
    name: &str,
    shape: impl Into<Shape>,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    let mut generator = Generator::with_sequence(seed, fnv1a_64(name.as_bytes()));
    let shape = shape.into();
    let tensor = match init {
        Init::Const(_) => return Ok(init.var(shape, dtype, device)?.into_inner()),
        Init::Uniform { lo, up } => generator.rand(lo, up, shape, dtype, device),
        Init::Randn { mean, stdev } => generator.randn(mean, stdev, shape, dtype, device),
        Init::Kaiming { dist, fan, non_linearity } => {
            let stdev = non_linearity.gain() / (fan.for_shape(&shape) as f64).sqrt();
            match dist {
                NormalOrUniform::Normal => generator.randn(0., stdev, shape, dtype, device),
                NormalOrUniform::Uniform => {
                    let bound = 3f64.sqrt() * stdev;
                    generator.rand(-bound, bound, shape, dtype, device)
                }
            }
        }
    };
    Ok(tensor?)
}

/// Like `VarMap::get`, but new variables have the values of [`init`] if there is a seed.
#[doc(hidden)]
pub fn get(
    varmap: &VarMap,
    seed: Option<u64>,
    shape: Shape,
    name: &str,
    hint: Init,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    let Some(seed) = seed else { return varmap.get(shape, name, hint, dtype, device) };
    let mut vars = lock(varmap.data());
    if let Some(var) = vars.get(name) {
        if var.shape() != &shape {
            let (is, needed) = (describe(var.dtype(), var.shape()), describe(dtype, &shape));
            candle_core::bail!("{name} is {is} in the VarMap, but the model requested it as {needed}")
        }
        return Ok(var.as_tensor().clone());
    }
    let var = Var::from_tensor(&init(hint, seed, name, shape, dtype, device)?)?;
    let tensor = var.as_tensor().clone();
    vars.insert(name.to_string(), var);
    Ok(tensor)
}

struct Seeded {
    varmap: VarMap,
    seed: u64,
}

impl SimpleBackend for Seeded {
    fn get(&self, shape: Shape, name: &str, hint: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        get(&self.varmap, Some(self.seed), shape, name, hint, dtype, device)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        let vars = lock(self.varmap.data());
        vars.get(name).map(|var| var.as_tensor().clone()).ok_or_else(|| not_in_varmap(name))
    }

    fn contains_tensor(&self, name: &str) -> bool {
        lock(self.varmap.data()).contains_key(name)
    }
}

#[cfg(test)]
mod tests;
