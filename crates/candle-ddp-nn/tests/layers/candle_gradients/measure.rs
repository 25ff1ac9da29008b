//! Compares candle's backward pass with central differences.
use super::{Case, Error, Gradient, Missing, Refused, Right, Values, Wrong};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_ddp_testing::values;

/// Memory layout of the inputs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Layout {
    Contiguous,
    /// The dimensions are in reverse order.
    Transposed,
    /// The middle of a tensor that is larger in its first and last dimensions.
    Narrowed,
}
pub(super) const LAYOUTS: [Layout; 3] = [Layout::Contiguous, Layout::Transposed, Layout::Narrowed];

impl Layout {
    /// Whether all inputs of `case` are contiguous.
    pub(super) fn is_contiguous(self, case: &Case) -> bool {
        let view = |shape: &Vec<usize>| {
            let x = Tensor::zeros(shape.as_slice(), DType::F64, &Device::Cpu)?;
            self.view(&self.store(&x)?)
        };
        case.shapes.iter().all(|shape| view(shape).unwrap().is_contiguous())
    }

    /// Returns the tensor from which `view` makes `x`.
    fn store(self, x: &Tensor) -> Result<Tensor> {
        match self {
            Layout::Contiguous => Ok(x.clone()),
            Layout::Transposed => reverse(x)?.contiguous(),
            Layout::Narrowed if x.rank() == 0 => Ok(x.clone()),
            Layout::Narrowed => x.pad_with_zeros(0, 1, 2)?.pad_with_zeros(x.rank() - 1, 2, 1),
        }
    }

    fn view(self, stored: &Tensor) -> Result<Tensor> {
        match (self, stored.rank()) {
            (Layout::Contiguous, _) | (Layout::Narrowed, 0) => Ok(stored.clone()),
            (Layout::Transposed, _) => reverse(stored),
            (Layout::Narrowed, 1) => stored.narrow(0, 3, stored.dim(0)? - 6),
            (Layout::Narrowed, rank) => {
                stored.narrow(0, 1, stored.dim(0)? - 3)?.narrow(rank - 1, 2, stored.dim(rank - 1)? - 3)
            }
        }
    }
}

fn reverse(x: &Tensor) -> Result<Tensor> {
    x.permute((0..x.rank()).rev().collect::<Vec<_>>())
}

fn numbers(x: &Tensor) -> Vec<f64> {
    x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

fn constant(shape: &[usize], seed: u64) -> Tensor {
    let numbers = values(shape.iter().product(), seed).into_iter().map(f64::from).collect();
    Tensor::from_vec(numbers, shape, &Device::Cpu).unwrap()
}

fn input(case: &Case, index: usize) -> Tensor {
    let shape = case.shapes[index].as_slice();
    let count = shape.iter().product();
    let random = || values(count, 1 + index as u64).into_iter().map(f64::from);
    let numbers: Vec<f64> = match case.values {
        Values::Both => random().map(|x| x + 0.2f64.copysign(x)).collect(),
        Values::Positive => random().map(|x| x.abs() + 0.2).collect(),
        Values::These(these) => these.iter().copied().cycle().take(count).collect(),
    };
    Tensor::from_vec(numbers, shape, &Device::Cpu).unwrap().to_dtype(case.dtype).unwrap()
}

/// The sum of `y`, weighted so that no two elements count the same.
fn weighted(y: &Tensor) -> Result<Tensor> {
    (y.to_dtype(DType::F64)? * constant(y.dims(), 99))?.sum_all()
}

/// The result and derivatives of a case with contiguous inputs, or the error of its forward pass.
pub(super) struct Numerical(Result<(Vec<f64>, Vec<Vec<f64>>)>);

impl Numerical {
    pub(super) fn of(case: &Case) -> Self {
        Self(numerical(case))
    }
}

fn numerical(case: &Case) -> Result<(Vec<f64>, Vec<Vec<f64>>)> {
    let mut inputs: Vec<Tensor> = (0..case.shapes.len()).map(|index| input(case, index)).collect();
    let y = numbers(&(case.operation)(&inputs)?);
    let step = case.precision.0;
    let mut derivatives = Vec::new();
    for index in 0..inputs.len() {
        let x = inputs[index].clone();
        let start = numbers(&x);
        let mut at = |element: usize, step: f64| -> Result<f64> {
            let mut moved = start.clone();
            moved[element] += step;
            inputs[index] = Tensor::from_vec(moved, x.dims(), &Device::Cpu)?.to_dtype(case.dtype)?;
            weighted(&(case.operation)(&inputs)?)?.to_scalar()
        };
        let derivative = |element| Ok((at(element, step)? - at(element, -step)?) / (2.0 * step));
        derivatives.push((0..start.len()).map(derivative).collect::<Result<Vec<f64>>>()?);
        inputs[index] = x;
    }
    Ok((y, derivatives))
}

/// Returns the kind of candle's gradient, with a detail if it is not right.
pub(super) fn measure(case: &Case, layout: Layout, numerical: &Numerical) -> (Gradient, String) {
    let (result, derivatives) = match &numerical.0 {
        Ok(numerical) => numerical,
        Err(error) => return (Refused, first_line(error)),
    };
    let vars: Vec<Var> = (0..case.shapes.len())
        .map(|index| Var::from_tensor(&layout.store(&input(case, index)).unwrap()).unwrap())
        .collect();
    let inputs: Vec<Tensor> = vars.iter().map(|var| layout.view(var).unwrap()).collect();
    let y = match (case.operation)(&inputs) {
        Ok(y) => y,
        Err(error) => return (Refused, first_line(error)),
    };
    if let Some(difference) = differs(&numbers(&y), result, 1e-6) {
        return (Wrong, format!("result: {difference}"));
    }
    let other = |index: usize| {
        (inputs[index].to_dtype(DType::F64)? * constant(&case.shapes[index], 50 + index as u64))?.sum_all()
    };
    let others = || (1..inputs.len()).try_fold(other(0)?, |sum, index| sum + other(index)?);
    let uses = [weighted(&y), weighted(&y).and_then(|y| y + others()?), others().and_then(|sum| sum + weighted(&y)?)];
    for (loss, has_others) in uses.into_iter().zip([false, true, true]) {
        let grads = match loss.and_then(|loss| loss.backward()) {
            Ok(grads) => grads,
            Err(error) => return (Error, first_line(error)),
        };
        for (index, var) in vars.iter().enumerate() {
            let actual = gradient(&grads, var, layout);
            let mut expected = derivatives[index].clone();
            if has_others {
                let weights = numbers(&constant(&case.shapes[index], 50 + index as u64));
                expected.iter_mut().zip(weights).for_each(|(expected, weight)| *expected += weight);
            }
            let difference =
                differs(actual.as_deref().unwrap_or(&vec![0.0; expected.len()]), &expected, case.precision.1);
            if let Some(difference) = difference {
                let gradient = if actual.is_none() { Missing } else { Wrong };
                return (gradient, format!("input {index}, other uses: {has_others}: {difference}"));
            }
        }
    }
    (Right, String::new())
}

/// Drops the backtrace that candle's errors may contain.
fn first_line(error: impl std::fmt::Display) -> String {
    error.to_string().lines().next().unwrap_or_default().to_string()
}

fn gradient(grads: &GradStore, var: &Var, layout: Layout) -> Option<Vec<f64>> {
    grads.get(var).map(|gradient| numbers(&layout.view(gradient).unwrap()))
}

/// Describes the first element that differs by more than `tolerance` relative to the largest, or is NaN.
fn differs(actual: &[f64], expected: &[f64], tolerance: f64) -> Option<String> {
    if actual.len() != expected.len() {
        return Some(format!("{} elements, not {}", actual.len(), expected.len()));
    }
    let largest = expected.iter().fold(1.0f64, |largest, value| largest.max(value.abs()));
    let wrong =
        |(a, e): &(&f64, &f64)| (*a - *e).abs().partial_cmp(&(tolerance * largest)).is_none_or(|order| order.is_gt());
    actual.iter().zip(expected).find(wrong).map(|(a, e)| format!("{a} instead of {e}"))
}
