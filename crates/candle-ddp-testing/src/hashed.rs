//! Variables and images whose numbers are hashes, as in `scripts/golden_resnet.py`.
use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Numbers from `shift - scale / 2` to `shift + scale / 2` that depend on the name and the place of each.
pub fn hashed(name: &str, shape: &[usize], scale: f64, shift: f64) -> Tensor {
    let start = name.bytes().fold(2_166_136_261_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(16_777_619));
    let value = |place: u32| {
        let mut hash = start.wrapping_add(place.wrapping_mul(0x9e37_79b1));
        hash = (hash ^ (hash >> 16)).wrapping_mul(0x85eb_ca6b);
        hash = (hash ^ (hash >> 13)).wrapping_mul(0xc2b2_ae35);
        ((f64::from(hash ^ (hash >> 16)) / 4_294_967_296. - 0.5) * scale + shift) as f32
    };
    let values: Vec<f32> = (0..shape.iter().product::<usize>() as u32).map(value).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// The value of a variable, as in the script.
pub fn variable(name: &str, dims: &[usize]) -> Tensor {
    match dims.len() {
        1 if name.ends_with("weight") || name.ends_with("running_var") => hashed(name, dims, 0.5, 1.),
        1 => hashed(name, dims, 0.5, 0.),
        _ => hashed(name, dims, (12. / dims[1..].iter().product::<usize>() as f64).sqrt(), 0.),
    }
}

/// Makes variables by [`variable`], and counts the trained ones. Random initial values take long in a debug build.
#[derive(Debug)]
pub struct Hashed(Arc<AtomicUsize>);

impl Hashed {
    /// A builder of variables of `dtype` on the CPU, and the count of the elements that it has made.
    pub fn builder(dtype: DType) -> (VarBuilder<'static>, Arc<AtomicUsize>) {
        let count = Arc::new(AtomicUsize::new(0));
        let backend = Box::new(Self(Arc::clone(&count)));
        (VarBuilder::from_backend(backend, dtype, Device::Cpu), count)
    }
}

impl SimpleBackend for Hashed {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, _: &Device) -> Result<Tensor> {
        if !name.contains("running_") {
            self.0.fetch_add(shape.elem_count(), Ordering::Relaxed);
        }
        variable(name, shape.dims()).to_dtype(dtype)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        candle_core::bail!("{name} has no shape")
    }

    fn contains_tensor(&self, _: &str) -> bool {
        true
    }
}
