//! Values, tensors and variables.
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};

/// Returns reproducible values in -1..1, different for every seed.
pub fn values(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(0x1234_5678_9abc_def1);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    next();
    (0..count).map(|_| next()).collect()
}

/// Returns a tensor of [`values`].
pub fn tensor(shape: &[usize], seed: u64) -> Tensor {
    Tensor::from_vec(values(shape.iter().product(), seed), shape, &Device::Cpu).unwrap()
}

/// Fills the variables of `varmap` with values that depend on `seed` and on each variable's name.
pub fn fill(varmap: &VarMap, seed: u64) {
    for (name, var) in varmap.data().lock().unwrap().iter() {
        let seed = name.bytes().fold(seed, |hash, byte| hash.wrapping_mul(31).wrapping_add(u64::from(byte)));
        let value = (tensor(var.dims(), seed) * 0.3).unwrap().to_dtype(var.dtype()).unwrap();
        let value = value.to_device(var.device()).unwrap();
        var.set(&value).unwrap();
    }
}

/// Returns the model that `build` makes without DDP, and its variables: [`fill`] has set them.
#[track_caller]
pub fn plain<M>(build: impl FnOnce(VarBuilder<'static>) -> Result<M>, dtype: DType, seed: u64) -> (M, VarMap) {
    let varmap = VarMap::new();
    let model = build(VarBuilder::from_varmap(&varmap, dtype, &Device::Cpu)).unwrap();
    fill(&varmap, seed);
    (model, varmap)
}

/// Returns the elements in f32, whatever the dtype and the shape are.
pub fn floats(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Returns the bits of the elements in f32.
pub fn bits(tensor: &Tensor) -> Vec<u32> {
    floats(tensor).into_iter().map(f32::to_bits).collect()
}

/// Returns a tensor of f64 with the sines of other angles for every seed.
pub fn sine(shape: &[usize], seed: usize) -> Tensor {
    let value = |index: usize| (1.7 * index as f64 + seed as f64).sin();
    Tensor::from_vec((0..shape.iter().product()).map(value).collect::<Vec<f64>>(), shape, &Device::Cpu).unwrap()
}

/// Returns a tensor of f64 whose element i is sin((37 i + from) / 10), so that neighbours differ.
pub fn waves(shape: &[usize], from: usize) -> Tensor {
    let value = |index: usize| ((index * 37 + from) as f64 * 0.1).sin();
    Tensor::from_vec((0..shape.iter().product()).map(value).collect::<Vec<f64>>(), shape, &Device::Cpu).unwrap()
}

/// Returns the gradients of `vars`, all of which must have one.
pub fn gradients(grads: &GradStore, vars: &[Var]) -> Vec<f32> {
    vars.iter().flat_map(|var| floats(grads.get(var).expect("a gradient"))).collect()
}

/// Returns a variable with the values of [`tensor`].
pub fn new_var(shape: &[usize], seed: u64, dtype: DType, device: &Device) -> Var {
    Var::from_tensor(&tensor(shape, seed).to_dtype(dtype).unwrap().to_device(device).unwrap()).unwrap()
}

/// Returns the variable `name` of `varmap`.
pub fn var(varmap: &VarMap, name: &str) -> Var {
    varmap.data().lock().unwrap()[name].clone()
}

/// Asserts that two lists of values are equal within a tolerance relative to the largest value.
#[track_caller]
pub fn assert_close(actual: &[f32], expected: &[f32], tolerance: f32, what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(1e-6f32, |largest, value| largest.max(value.abs()));
    for (index, (a, e)) in actual.iter().zip(expected).enumerate() {
        assert!((a - e).abs() <= tolerance * largest, "{what}: element {index} is {a}, expected {e}");
    }
}
