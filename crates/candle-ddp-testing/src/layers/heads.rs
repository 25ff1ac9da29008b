//! `linear_cross_entropy` against a linear layer and `cross_entropy`.
use crate::{assert_close, floats, tensor};
use candle_core::{DType, Device, Module, Tensor, Var};
use candle_ddp_nn::{
    CrossEntropyOptions, Linear, LinearCrossEntropyOptions, Reduction, cross_entropy_with, linear_cross_entropy,
    linear_cross_entropy_with, no_grad,
};

/// A head of (classes, features), and as many rows.
struct Head {
    x: Var,
    weight: Var,
    bias: Var,
    targets: Tensor,
}

impl Head {
    /// Every fifth target is class 1.
    fn new(shape: &[usize], classes: usize, dtype: DType, device: &Device) -> Self {
        let features = shape[shape.len() - 1];
        let var = |shape: &[usize], seed, by: f64| {
            let values = (tensor(shape, seed) * by).unwrap().to_dtype(dtype).unwrap();
            Var::from_tensor(&values.to_device(device).unwrap()).unwrap()
        };
        let rows: usize = shape[..shape.len() - 1].iter().product();
        let targets: Vec<i64> = (0..rows).map(|i| if i % 5 == 4 { 1 } else { (i * i * 7 % classes) as i64 }).collect();
        let targets = Tensor::from_vec(targets, &shape[..shape.len() - 1], device).unwrap();
        let by = 4.0 / (features as f64).sqrt();
        Self { x: var(shape, 1, 1.0), weight: var(&[classes, features], 2, by), bias: var(&[classes], 3, 1.0), targets }
    }

    /// The same values in f64 on the CPU.
    fn exact(&self) -> Self {
        let exact =
            |var: &Var| Var::from_tensor(&var.to_device(&Device::Cpu).unwrap().to_dtype(DType::F64).unwrap()).unwrap();
        let targets = self.targets.to_device(&Device::Cpu).unwrap();
        Self { x: exact(&self.x), weight: exact(&self.weight), bias: exact(&self.bias), targets }
    }

    fn bias(&self, has_bias: bool) -> Option<&Tensor> {
        has_bias.then(|| self.bias.as_tensor())
    }

    fn expected(&self, has_bias: bool, options: CrossEntropyOptions) -> Tensor {
        let layer = Linear::new(self.weight.as_tensor().clone(), self.bias(has_bias).cloned());
        let logits = layer.forward(&self.x.flatten_to(self.x.rank() - 2).unwrap()).unwrap();
        cross_entropy_with(&logits, &self.targets.flatten_all().unwrap(), options).unwrap()
    }

    /// The loss, and the gradients for a gradient of the loss that is not 1, twice.
    fn gradients(&self, loss: &Tensor, factor: f64) -> Vec<Vec<f32>> {
        let mut all = vec![floats(loss)];
        let loss = (loss * factor).unwrap();
        for _ in 0..2 {
            let grads = loss.backward().unwrap();
            for var in [&self.x, &self.weight, &self.bias] {
                if let Some(gradient) = grads.get(var) {
                    assert_eq!((gradient.dtype(), gradient.dims()), (var.dtype(), var.dims()));
                    // candle cannot convert a tensor without elements on a GPU.
                    all.push(if gradient.elem_count() == 0 { Vec::new() } else { floats(gradient) });
                }
            }
        }
        all
    }
}

const DTYPES: [(DType, f32); 4] = [(DType::F64, 1e-6), (DType::F32, 2e-5), (DType::F16, 4e-3), (DType::BF16, 3e-2)];

pub fn heads_match_linear_and_cross_entropy(device: &Device) {
    for (dtype, tolerance) in DTYPES {
        for (shape, classes) in [(&[2, 7, 8][..], 16), (&[13, 5], 37), (&[1, 3], 1)] {
            let head = Head::new(shape, classes, dtype, device);
            for (case, chunk) in (0..32).flat_map(|case| [None, Some([1, 3, 100][case % 3])].map(|chunk| (case, chunk)))
            {
                let weights = |device: &Device, dtype| {
                    let weights = Tensor::arange(0f64, classes as f64, device).unwrap().affine(0.25, 0.5).unwrap();
                    weights.to_dtype(dtype).unwrap()
                };
                let options = |device: &Device, dtype| CrossEntropyOptions {
                    weight: (case & 1 == 1).then(|| weights(device, dtype)),
                    ignore_index: if case & 2 == 2 { 1 } else { -100 },
                    label_smoothing: if case & 4 == 4 { 0.3 } else { 0.0 },
                    reduction: if case & 8 == 8 { Reduction::Sum } else { Reduction::Mean },
                };
                let (has_bias, exact) = (case & 16 == 16, head.exact());
                let expected = exact.expected(has_bias, options(&Device::Cpu, DType::F64));
                let expected = exact.gradients(&expected, 3.0);
                let options =
                    LinearCrossEntropyOptions { cross_entropy: options(device, dtype), batch_chunk_size: chunk };
                let run = || {
                    let (bias, targets) = (head.bias(has_bias), &head.targets);
                    linear_cross_entropy_with(&head.x, &head.weight, bias, targets, options.clone()).unwrap()
                };
                let loss = run();
                assert_eq!(loss.dtype(), if dtype == DType::F64 { DType::F64 } else { DType::F32 });
                assert_eq!(floats(&no_grad(run)), floats(&loss));
                compare(
                    &head.gradients(&loss, 3.0),
                    &expected,
                    tolerance,
                    &format!("{dtype:?} {shape:?}, case {case}, {chunk:?}"),
                );
            }
        }
    }
}

#[track_caller]
fn compare(found: &[Vec<f32>], expected: &[Vec<f32>], tolerance: f32, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_close(found, expected, tolerance, &format!("result {index} of {what}"));
    }
}

/// On a GPU, logits whose rows begin at no multiples of 16 bytes are padded if there are many.
pub fn large_heads_match_linear_and_cross_entropy(device: &Device) {
    for (dtype, tolerance) in DTYPES {
        for (classes, chunk, has_bias) in [(1027, None, true), (1025, Some(66), false), (1031, Some(64), true)] {
            let head = Head::new(&[2, 65, 256], classes, dtype, device);
            let exact = head.exact();
            let expected = exact.gradients(&exact.expected(has_bias, CrossEntropyOptions::default()), 3.0);
            let options = LinearCrossEntropyOptions { batch_chunk_size: chunk, ..Default::default() };
            let bias = head.bias(has_bias);
            let loss = linear_cross_entropy_with(&head.x, &head.weight, bias, &head.targets, options).unwrap();
            compare(&head.gradients(&loss, 3.0), &expected, tolerance, &format!("{dtype:?} {classes}, {chunk:?}"));
        }
    }
}

/// Whatever is frozen gets no gradient, and changes nothing for the others.
pub fn heads_may_be_frozen(device: &Device) {
    for chunk in [None, Some(3)] {
        let head = Head::new(&[7, 5], 11, DType::F32, device);
        let all = [&head.x, &head.weight, &head.bias];
        let run = |arguments: [&Tensor; 3]| {
            let options = LinearCrossEntropyOptions { batch_chunk_size: chunk, ..Default::default() };
            let [x, weight, bias] = arguments;
            let grads = linear_cross_entropy_with(x, weight, Some(bias), &head.targets, options).unwrap().backward();
            let grads = grads.unwrap();
            all.map(|var| grads.get(var).map(floats))
        };
        let expected = run(all.map(|var| var.as_tensor()));
        assert!(expected.iter().all(Option::is_some));
        for mask in 1..7 {
            let detached = all.map(|var| var.as_detached_tensor());
            let trained = |index: usize| mask >> index & 1 == 1;
            let found =
                run([0, 1, 2].map(|index| if trained(index) { all[index].as_tensor() } else { &detached[index] }));
            for index in 0..3 {
                assert_eq!(
                    found[index],
                    expected[index].clone().filter(|_| trained(index)),
                    "{mask}, {index}, {chunk:?}"
                );
            }
        }
    }
}

/// Probabilities that f16 could not hold after a division by the number of samples, under a scaled loss: those of the classes from 300 on.
pub fn small_gradients_survive_in_f16(device: &Device) {
    for chunk in [None, Some(500)] {
        let mut head = Head::new(&[1500, 8], 600, DType::F16, device);
        let bias: Vec<f32> = (0..600).map(|class| if class < 300 { 0.0 } else { -8.0 }).collect();
        head.bias.set(&Tensor::new(bias, device).unwrap().to_dtype(DType::F16).unwrap()).unwrap();
        let targets: Vec<i64> = (0..1500).map(|i| i * i * 7 % 300).collect();
        head.targets = Tensor::new(targets, device).unwrap();
        let exact = head.exact();
        let expected = exact.gradients(&exact.expected(true, CrossEntropyOptions::default()), 65536.0);
        let options = LinearCrossEntropyOptions { batch_chunk_size: chunk, ..Default::default() };
        let bias = Some(head.bias.as_tensor());
        let loss = linear_cross_entropy_with(&head.x, &head.weight, bias, &head.targets, options).unwrap();
        let found = head.gradients(&loss, 65536.0);
        compare(&found, &expected, 4e-3, &format!("{chunk:?}"));
        assert_close(&found[3][300..], &expected[3][300..], 2e-2, "the bias of improbable classes");
    }
}

pub fn heads_without_samples(device: &Device) {
    for (dtype, chunk) in
        [DType::F32, DType::BF16].into_iter().flat_map(|dtype| [None, Some(2)].map(|chunk| (dtype, chunk)))
    {
        let check = |head: &Head, targets: &Tensor, reduction| {
            let cross_entropy = CrossEntropyOptions { reduction, ..Default::default() };
            let options = LinearCrossEntropyOptions { cross_entropy, batch_chunk_size: chunk };
            let bias = Some(head.bias.as_tensor());
            let loss = linear_cross_entropy_with(&head.x, &head.weight, bias, targets, options).unwrap();
            for gradient in &head.gradients(&loss, 3.0)[1..] {
                assert!(gradient.iter().all(|value| *value == 0.0), "{dtype:?}, {chunk:?}: {gradient:?}");
            }
            floats(&loss)[0]
        };
        let head = Head::new(&[5, 4], 3, dtype, device);
        let ignored = Tensor::new(&[-100i64; 5], device).unwrap();
        assert!(check(&head, &ignored, Reduction::Mean).is_nan());
        assert_eq!(check(&head, &ignored, Reduction::Sum), 0.0);
        let empty = Head::new(&[0, 4], 3, dtype, device);
        assert!(check(&empty, &empty.targets, Reduction::Mean).is_nan());
        assert_eq!(check(&empty, &empty.targets, Reduction::Sum), 0.0);
        // Without features, all logits are the bias.
        let none = Head::new(&[3, 0], 4, dtype, device);
        let loss = linear_cross_entropy(&none.x, &none.weight, None, &none.targets).unwrap();
        assert_close(&floats(&loss), &[4f32.ln()], 1e-6, "without features");
    }
}
