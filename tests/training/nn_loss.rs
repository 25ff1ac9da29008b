//! Softmax and cross entropy against PyTorch's.
use crate::common::tensor;
use crate::golden_layers::check;
use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_ddp::nn::{
    CrossEntropyOptions, Reduction, cross_entropy, cross_entropy_with_options, log_softmax, softmax, softmax_last_dim,
};

#[test]
fn softmax_is_pytorchs() {
    check("softmax", |case, x| softmax(&x[0], case.numbers("dim")[0]));
    check("log_softmax", |case, x| log_softmax(&x[0], case.numbers("dim")[0]));
}

#[test]
fn softmax_of_any_dimension() {
    let x = tensor(&[2, 3, 4], 1);
    let flat = |t: Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(flat(softmax_last_dim(&x).unwrap()), flat(softmax(&x, 2).unwrap()));
    assert_eq!(flat(softmax(&x, D::Minus2).unwrap()), flat(softmax(&x, 1).unwrap()));
    assert!(softmax(&x, 3).is_err());
    assert_eq!(softmax(&tensor(&[2, 0], 1), 1).unwrap().dims(), [2, 0]);
}

#[test]
fn cross_entropy_is_pytorchs() {
    check("cross_entropy", |case, x| {
        let (shape, dtype) = (x[0].dims(), x[0].dtype());
        let classes = shape[1] as i64;
        let targets: Vec<i64> = (0..(x[0].elem_count() / shape[1]) as i64).map(|i| i * i % classes).collect();
        let targets = Tensor::from_vec(targets, [&shape[..1], &shape[2..]].concat(), &Device::Cpu)?;
        let weight = || Tensor::arange(0f64, classes as f64, &Device::Cpu)?.affine(1.0, 0.5)?.to_dtype(dtype);
        let options = CrossEntropyOptions {
            weight: case.flag("weighted").then(weight).transpose()?,
            ignore_index: case.float("ignore") as i64,
            label_smoothing: case.float("smoothing"),
            reduction: if case.flag("mean") { Reduction::Mean } else { Reduction::Sum },
        };
        let loss = cross_entropy_with_options(&x[0], &targets, &options)?;
        if targets.min_all()?.to_scalar::<i64>()? >= 0 {
            let again = cross_entropy_with_options(&x[0], &targets.to_dtype(DType::U32)?, &options)?;
            assert_eq!(loss.to_dtype(DType::F64)?.to_scalar::<f64>()?, again.to_dtype(DType::F64)?.to_scalar::<f64>()?);
        }
        Ok(loss)
    });
}

#[test]
fn it_takes_the_place_of_candles() {
    let (logits, targets) = (tensor(&[4, 5], 1), Tensor::new(&[0u32, 4, 2, 2], &Device::Cpu).unwrap());
    let ours = cross_entropy(&logits, &targets).unwrap().to_scalar::<f32>().unwrap();
    let candles = candle_nn::loss::cross_entropy(&logits, &targets).unwrap().to_scalar::<f32>().unwrap();
    assert!((ours - candles).abs() < 1e-6, "{ours} and {candles}");
}

#[test]
fn large_logits_stay_finite() {
    let logits = Var::new(&[[1e4f32, -1e4, 0.0]], &Device::Cpu).unwrap();
    let loss = cross_entropy(&logits, &Tensor::new(&[1i64], &Device::Cpu).unwrap()).unwrap();
    assert_eq!(loss.to_scalar::<f32>().unwrap(), 2e4);
    let grads = loss.backward().unwrap();
    assert_eq!(grads.get(&logits).unwrap().to_vec2::<f32>().unwrap(), [[1.0, -1.0, 0.0]]);
}

#[test]
fn without_samples_the_mean_is_nan() {
    let logits = Var::from_tensor(&tensor(&[2, 3], 1)).unwrap();
    let loss = cross_entropy(&logits, &Tensor::new(&[-100i64, -100], &Device::Cpu).unwrap()).unwrap();
    assert!(loss.to_scalar::<f32>().unwrap().is_nan());
    let grads = loss.backward().unwrap();
    assert_eq!(grads.get(&logits).unwrap().to_vec2::<f32>().unwrap(), [[0.0; 3]; 2]);
    let none = Tensor::zeros(0, DType::U32, &Device::Cpu).unwrap();
    let empty = cross_entropy(&Tensor::zeros((0, 3), DType::F32, &Device::Cpu).unwrap(), &none).unwrap();
    assert!(empty.to_scalar::<f32>().unwrap().is_nan());
}

#[test]
fn bad_targets() {
    let logits = tensor(&[2, 3], 1);
    let refused = |result: Result<Tensor>, text: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    };
    let targets = |targets: &[i64]| Tensor::new(targets, &Device::Cpu).unwrap();
    refused(cross_entropy(&logits, &targets(&[0, 3])), "3 is neither one of 3 classes");
    refused(cross_entropy(&logits, &targets(&[-1, 0])), "-1 is neither");
    refused(cross_entropy(&logits, &targets(&[0, 1, 2])), "(N, …) are expected");
    refused(cross_entropy(&logits, &tensor(&[2], 1)), "u32, i64 or u8");
    let with = |options| cross_entropy_with_options(&logits, &targets(&[0, 1]), &options);
    refused(with(CrossEntropyOptions { label_smoothing: 1.5, ..Default::default() }), "1.5");
    refused(with(CrossEntropyOptions { weight: Some(tensor(&[2], 1)), ..Default::default() }), "each of 3 classes");
}
