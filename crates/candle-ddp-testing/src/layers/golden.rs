//! Compares layers with PyTorch's results in `layers.safetensors` of candle-ddp-nn's tests, in all dtypes, contiguous or not.
use crate::{assert_close, floats};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_ddp_nn::{MemoryFormat, to_memory_format};
use std::collections::{BTreeMap, HashMap};

/// The parameters of a case, by name.
pub(crate) struct Parameters(pub(crate) HashMap<String, String>);

impl Parameters {
    pub(crate) fn text(&self, name: &str) -> &str {
        &self.0[name]
    }

    pub(crate) fn numbers(&self, name: &str) -> Vec<usize> {
        self.text(name).split(',').map(|number| number.parse().unwrap()).collect()
    }

    pub(crate) fn pair(&self, name: &str) -> (usize, usize) {
        let numbers = self.numbers(name);
        (numbers[0], numbers[1])
    }

    pub(crate) fn float(&self, name: &str) -> f64 {
        self.text(name).parse().unwrap()
    }

    pub(crate) fn flag(&self, name: &str) -> bool {
        self.text(name) == "1"
    }

    fn shapes(&self) -> Vec<Vec<usize>> {
        let shape = |text: &str| text.split(',').map(|size| size.parse().unwrap()).collect();
        self.text("shapes").split('/').map(shape).collect()
    }

    /// Input number `index`, from the same formula as in the script.
    fn input(&self, shape: &[usize], index: usize, device: &Device) -> Tensor {
        let count = shape.iter().product::<usize>();
        let value = |j: usize| match self.text("values") {
            "line" => (j as f64 - (count / 2) as f64) / 10.0,
            kind => {
                let value = 2.0 * (1.7 * j as f64 + index as f64 + 0.3).sin();
                if kind == "ties" { value.round_ties_even() } else { value }
            }
        };
        Tensor::from_vec((0..count).map(value).collect(), shape, device).unwrap()
    }

    /// Whether the function is smooth at this input, so that differences approximate its derivative.
    fn is_smooth(&self) -> bool {
        let elements = |shape: &Vec<usize>| shape.iter().product::<usize>();
        self.text("values") == "sine" && self.shapes().iter().map(elements).sum::<usize>() < 500
    }
}

/// Checks `function` on `device` in all its cases: `apply` gets a case's parameters and inputs.
pub(crate) fn check(device: &Device, function: &str, apply: impl Fn(&Parameters, &[Tensor]) -> Result<Tensor>) {
    // Within the program, which may run where the repository is not.
    let golden = include_bytes!("../../../candle-ddp-nn/tests/golden/layers.safetensors");
    let mut cases: BTreeMap<String, HashMap<String, Tensor>> = BTreeMap::new();
    for (name, tensor) in candle_core::safetensors::load_buffer(golden, &Device::Cpu).unwrap() {
        let (case, result) = name.rsplit_once('|').unwrap();
        if case.split_once('|').unwrap().0 == function {
            cases.entry(case.to_string()).or_default().insert(result.to_string(), tensor);
        }
    }
    assert!(!cases.is_empty(), "no golden data for {function}");
    for (case, golden) in &cases {
        let parameters = case.split_once('|').unwrap().1.split(';').map(|parameter| {
            let (name, value) = parameter.split_once('=').unwrap();
            (name.to_string(), value.to_string())
        });
        let parameters = Parameters(parameters.collect());
        let inputs: Vec<Tensor> = parameters
            .shapes()
            .iter()
            .enumerate()
            .map(|(index, shape)| parameters.input(shape, index, device))
            .collect();
        let apply = |inputs: &[Tensor]| apply(&parameters, inputs).unwrap_or_else(|error| panic!("{case}: {error}"));
        let golden: Vec<_> = ["y".to_string()]
            .into_iter()
            .chain((0..inputs.len()).map(|index| format!("d{index}")))
            .map(|name| floats(&golden[&name]))
            .collect();
        check_golden(case, &inputs, &golden, &apply);
        check_half(case, &inputs, &apply);
        // On an emulated GPU the many launches would take minutes.
        if device.is_cpu() && parameters.is_smooth() {
            check_differences(case, &inputs, &apply);
        }
    }
}

type Apply<'a> = &'a dyn Fn(&[Tensor]) -> Tensor;

/// How the inputs are stored.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Order {
    Contiguous,
    Transposed,
    /// Those of four dimensions.
    ChannelsLast,
}

/// The result and the gradients for dy = cos(0.9 j + 0.1), rounded to the dtype `rounded`.
fn run(inputs: &[Tensor], dtype: DType, rounded: DType, order: Order, apply: Apply) -> Vec<Tensor> {
    let turn = |t: &Tensor| match order {
        Order::Transposed => t.transpose(0, t.rank() - 1).unwrap(),
        _ => t.clone(),
    };
    let var = |t: &Tensor| Var::from_tensor(&turn(&t.to_dtype(dtype).unwrap()).contiguous().unwrap()).unwrap();
    let vars: Vec<Var> = inputs.iter().map(var).collect();
    let input = |var: &Var| match (order, var.rank()) {
        (Order::ChannelsLast, 4) => to_memory_format(var, MemoryFormat::ChannelsLast).unwrap(),
        _ => turn(var),
    };
    let y = apply(&vars.iter().map(input).collect::<Vec<_>>());
    let dy: Vec<f64> = (0..y.elem_count()).map(|j| (0.9 * j as f64 + 0.1).cos()).collect();
    let dy = Tensor::from_vec(dy, y.shape(), y.device()).unwrap().to_dtype(rounded).unwrap();
    let dy = dy.to_dtype(dtype).unwrap();
    let grads = (&y * dy).unwrap().sum_all().unwrap().backward().unwrap();
    let gradient = |var: &Var| turn(grads.get(var).unwrap()).contiguous().unwrap();
    let results: Vec<Tensor> = std::iter::once(y.clone()).chain(vars.iter().map(gradient)).collect();
    assert!(results.iter().all(|result| result.dtype() == dtype));
    results
}

fn check_golden(case: &str, inputs: &[Tensor], golden: &[Vec<f32>], apply: Apply) {
    let has_images = inputs.iter().any(|input| input.rank() == 4);
    for (dtype, order) in [
        (DType::F32, Order::Contiguous),
        (DType::F32, Order::Transposed),
        (DType::F64, Order::Contiguous),
        (DType::F32, Order::ChannelsLast),
        (DType::F64, Order::ChannelsLast),
    ] {
        if order == Order::ChannelsLast && !has_images {
            continue;
        }
        for (index, (ours, golden)) in run(inputs, dtype, dtype, order, apply).iter().zip(golden).enumerate() {
            assert_close(&floats(ours), golden, 1e-5, &format!("result {index} of {case} in {dtype:?}, {order:?}"));
        }
    }
}

/// Results in f16 and bf16 must equal those in f64 for the same inputs within two units in the last place of the
/// largest element: a small gradient computed from a rounded result inherits its error.
fn check_half(case: &str, inputs: &[Tensor], apply: Apply) {
    for (dtype, tolerance) in [(DType::F16, 2e-3), (DType::BF16, 1.6e-2)] {
        let rounded: Vec<Tensor> = inputs.iter().map(|t| t.to_dtype(dtype).unwrap()).collect();
        let [ours, exact] = [dtype, DType::F64].map(|this| run(&rounded, this, dtype, Order::Contiguous, apply));
        let [ours, exact] = [ours, exact].map(|results| results.iter().flat_map(floats).collect::<Vec<_>>());
        assert_close(&ours, &exact, tolerance, &format!("results of {case} in {dtype:?}"));
    }
}

/// The gradients in f64 must match central differences.
fn check_differences(case: &str, inputs: &[Tensor], apply: Apply) {
    const STEP: f64 = 1e-6;
    let gradients = &run(inputs, DType::F64, DType::F64, Order::Contiguous, apply)[1..];
    let loss = |inputs: &[Tensor]| -> f64 {
        let y = apply(inputs).flatten_all().unwrap().to_vec1::<f64>().unwrap();
        y.iter().enumerate().map(|(j, y)| y * (0.9 * j as f64 + 0.1).cos()).sum()
    };
    for (index, gradient) in gradients.iter().enumerate() {
        let gradient = gradient.flatten_all().unwrap().to_vec1::<f64>().unwrap();
        let largest = gradient.iter().fold(1e-3f64, |largest, value| largest.max(value.abs()));
        let values = inputs[index].flatten_all().unwrap().to_vec1::<f64>().unwrap();
        for place in 0..values.len() {
            let moved = |by: f64| {
                let mut values = values.clone();
                values[place] += by;
                let mut inputs = inputs.to_vec();
                inputs[index] = Tensor::from_vec(values, inputs[index].shape(), &Device::Cpu).unwrap();
                loss(&inputs)
            };
            let difference = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
            let error = (difference - gradient[place]).abs();
            assert!(error <= 1e-6 * largest, "d{index}[{place}] of {case}: {} and {difference}", gradient[place]);
        }
    }
}
