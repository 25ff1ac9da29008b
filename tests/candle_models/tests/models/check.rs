//! Compares all gradients of a model with central differences.
use crate::autocast;
use candle::{DType, Device, Result, Shape, Tensor, Var};
use candle_ddp::seed::{var_builder, Generator};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder, VarMap};
use serde::de::DeserializeOwned;

/// The settings for checking a model file.
pub struct Check<'a> {
    /// The dtype of all parameters.
    pub dtype: DType,
    /// Parts of the names of parameters that the file's forward pass does not use.
    pub unused: &'a [&'a str],
    /// Parts of the names of parameters that checkpoints of this model do not contain. Some files have the layers whose
    /// parameters are there; a `VarMap` would make all of them.
    pub absent: &'a [&'a str],
    /// The factor of weights. Where batch norms have no statistics yet, activations grow from layer to layer.
    pub gain: f64,
    /// Parameters and elements to compare, where a forward pass takes long.
    pub limits: (usize, usize),
}

/// Compares everything, in f64.
pub const F64: Check = Check { dtype: DType::F64, unused: &[], absent: &[], gain: 1., limits: (60, 3) };
/// For files that compute in f32 themselves: one direction of each parameter, since single elements are lost in the rounding.
pub const F32: Check = Check { dtype: DType::F32, ..F64 };
/// For files without small configurations: some of the parameters.
pub const LARGE: Check = Check { limits: (12, 1), ..F64 };
pub const LARGE_F32: Check = Check { dtype: DType::F32, limits: (8, 1), ..LARGE };

/// A configuration as a model's `config.json` has it.
pub fn config<T: DeserializeOwned>(json: serde_json::Value) -> Result<T> {
    serde_json::from_value(json).map_err(candle::Error::wrap)
}

/// Token ids below `vocabulary`, u32.
pub fn tokens(shape: (usize, usize), vocabulary: u64) -> Result<Tensor> {
    let mut generator = Generator::new(11);
    let ids: Vec<u32> = (0..shape.0 * shape.1).map(|_| generator.below(vocabulary) as u32).collect();
    Tensor::from_vec(ids, shape, &Device::Cpu)
}

/// Normally distributed numbers, in the dtype of `vb`.
pub fn random(shape: impl Into<Shape>, vb: &VarBuilder) -> Result<Tensor> {
    Generator::new(12).randn(0., 1., shape, vb.dtype(), &Device::Cpu).map_err(candle::Error::wrap)
}

/// The parameters of `varmap` by name. The running statistics of batch norms are buffers: they get no gradient.
pub fn parameters(varmap: &VarMap) -> Vec<(String, Var)> {
    let vars = varmap.data().lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let mut parameters: Vec<_> = vars.iter().map(|(name, var)| (name.clone(), var.clone())).collect();
    parameters.retain(|(name, _)| !name.ends_with("running_mean") && !name.ends_with("running_var"));
    parameters.sort_by(|a, b| a.0.cmp(&b.0));
    parameters
}

/// Gives every parameter its own value: those that begin as a constant (norms, biases, tensors that a file takes
/// without an initialisation) are spread around it.
pub(crate) fn spread(parameters: &[(String, Var)], gain: f64) -> Result<()> {
    let mut generator = Generator::new(13);
    for (_, var) in parameters {
        let fan_in = var.dims().iter().skip(1).product::<usize>().max(1);
        let width = if var.rank() > 1 { (3. / fan_in as f64).sqrt().min(0.5) } else { 0.2 };
        let values = var.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
        if values.iter().all(|value| *value == values[0]) {
            let noise = generator.rand(-width, width, var.shape(), var.dtype(), &Device::Cpu);
            var.set(&(var.as_tensor() + noise.map_err(candle::Error::wrap)?)?.detach())?;
        }
        if var.rank() > 1 && gain != 1. {
            var.set(&(var.as_tensor() * gain)?.detach())?;
        }
    }
    Ok(())
}

/// A `VarMap` without the parameters that `absent` names.
struct Without {
    vb: VarBuilder<'static>,
    absent: Vec<String>,
}

impl SimpleBackend for Without {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, _: &Device) -> Result<Tensor> {
        if !self.contains_tensor(name) {
            candle::bail!("{name} is absent");
        }
        self.vb.get_with_hints_dtype(shape, name, init, dtype)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, _: &Device) -> Result<Tensor> {
        self.vb.get_unchecked_dtype(name, dtype)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        !self.absent.iter().any(|part| name.contains(part))
    }
}

pub(crate) type Model<'a> = &'a dyn Fn(VarBuilder) -> Result<Tensor>;

pub(crate) struct Measured<'a> {
    pub(crate) varmap: VarMap,
    pub(crate) check: &'a Check<'a>,
    pub(crate) model: Model<'a>,
}

impl Measured<'_> {
    /// A fixed random projection of the model's output. The model is built anew: some files compute with their parameters
    /// when they are built.
    pub(crate) fn loss(&self) -> Result<Tensor> {
        let mut vb = var_builder(&self.varmap, 7, self.check.dtype, &Device::Cpu);
        if !self.check.absent.is_empty() {
            let absent = self.check.absent.iter().map(|part| part.to_string()).collect();
            vb = VarBuilder::from_backend(Box::new(Without { vb, absent }), self.check.dtype, Device::Cpu);
        }
        let output = (self.model)(vb)?.to_dtype(DType::F64)?;
        let weights = Generator::new(14).randn(0., 1., output.shape(), DType::F64, &Device::Cpu);
        (output * weights.map_err(candle::Error::wrap)?)?.sum_all()
    }

    pub(crate) fn value(&self) -> Result<f64> {
        self.loss()?.to_scalar()
    }

    /// The slope of the loss where `var` moves along `direction`: from two points in f64, and from four in f32, which needs
    /// longer steps.
    fn slope(&self, var: &Var, direction: &Tensor) -> Result<f64> {
        let start = var.as_detached_tensor().copy()?;
        let difference = |step: f64| -> Result<f64> {
            let at = |step: f64| {
                var.set(&(&start + (direction * step)?)?)?;
                self.value()
            };
            Ok((at(step)? - at(-step)?) / (2. * step))
        };
        let slope = match self.check.dtype {
            DType::F64 => difference(1e-5),
            _ => Ok((4. * difference(1e-3)? - difference(2e-3)?) / 3.),
        };
        var.set(&start)?;
        slope
    }
}

/// Builds `model` with random values and compares the gradients of all its parameters with differences of the loss.
///
/// # Panics
/// If one is missing or wrong, or if other parameters than `check.unused` have no influence on the loss.
pub fn check(check: Check, model: impl Fn(VarBuilder) -> Result<Tensor>) {
    let wrong = measure(&check, &model).expect("the model runs forward and backward");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    autocast::check(&check, &model);
}

/// Returns the wrong gradients of `model`, one line for each parameter.
///
/// # Errors
/// Those of the model's forward and backward passes.
pub fn measure(check: &Check, model: &dyn Fn(VarBuilder) -> Result<Tensor>) -> Result<Vec<String>> {
    let measured = Measured { varmap: VarMap::new(), check, model };
    measured.value()?;
    let parameters = parameters(&measured.varmap);
    spread(&parameters, check.gain)?;
    let loss = measured.loss()?;
    let grads = loss.backward()?;
    let loss = loss.to_scalar::<f64>()?;
    let mut generator = Generator::new(15);
    let (mut wrong, mut unused) = (Vec::new(), Vec::new());
    if !loss.is_finite() {
        wrong.push(format!("the loss is {loss}"));
    }
    // A sample that is spread over the whole model.
    let (most, elements) = check.limits;
    let every = parameters.len().div_ceil(most);
    for (index, (name, var)) in parameters.iter().enumerate() {
        let random = generator.rand(-1., 1., var.shape(), var.dtype(), &Device::Cpu).map_err(candle::Error::wrap)?;
        let Some(grad) = grads.get(var) else {
            let start = var.as_detached_tensor().copy()?;
            var.set(&(&start + random)?)?;
            if measured.value()? == loss {
                unused.push(name.as_str());
            } else {
                wrong.push(format!("{name}: no gradient"));
            }
            var.set(&start)?;
            continue;
        };
        if index % every != 0 {
            continue;
        }
        let grad = grad.to_dtype(DType::F64)?;
        let largest = grad.abs()?.max_all()?.to_scalar::<f64>()?;
        let scale = (16. / (var.elem_count() as f64).sqrt()).min(1.);
        let directions = if check.dtype == DType::F64 {
            (0..elements).map(|_| unit(var, &mut generator)).collect::<Result<Vec<_>>>()?
        } else {
            // Single elements are lost in the rounding of f32, and very many at once change which units are active.
            vec![(random.sign()? * scale)?]
        };
        for direction in directions {
            let slope = measured.slope(var, &direction)?;
            let direction = direction.to_dtype(DType::F64)?;
            let computed = (&grad * &direction)?.sum_all()?.to_scalar::<f64>()?;
            let tolerance = if check.dtype == DType::F64 {
                1e-5 * slope.abs().max(0.1 * largest) + 1e-8 * (1. + loss.abs())
            } else {
                2e-2 * scale * grad.sqr()?.sum_all()?.to_scalar::<f64>()?.sqrt() + 3e-3 * (1. + loss.abs())
            };
            // A NaN is not close.
            let is_close = (slope - computed).abs() <= tolerance;
            if !is_close {
                wrong.push(format!("{name} {:?}: gradient {computed}, difference {slope}", var.dims()));
            }
        }
    }
    let is_listed = |name: &&str| check.unused.iter().any(|part| name.contains(part));
    if !unused.iter().all(is_listed) || !check.unused.iter().all(|part| unused.iter().any(|name| name.contains(part))) {
        wrong.push(format!("without influence: {unused:?}, expected {:?}", check.unused));
    }
    Ok(wrong)
}

/// The direction of one random element of `var`.
fn unit(var: &Var, generator: &mut Generator) -> Result<Tensor> {
    let count = var.elem_count();
    let chosen = generator.below(count as u64) as usize;
    let direction: Vec<f64> = (0..count).map(|element| f64::from(element == chosen)).collect();
    Tensor::from_vec(direction, var.shape(), &Device::Cpu)?.to_dtype(var.dtype())
}
