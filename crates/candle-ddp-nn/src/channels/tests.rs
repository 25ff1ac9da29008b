//! The loops of the CPU against candle's operations.
use super::composite::*;
use super::*;
use candle_core::op::BackpropOp;
use candle_core::{DType, Device};

fn batch(seed: f64) -> Tensor {
    let values: Vec<f64> = (0..3 * 19 * 11).map(|i| ((f64::from(i) + seed) * 1.7).sin() * 3.0 + seed).collect();
    Tensor::from_vec(values, (3, 19, 11), &Device::Cpu).unwrap()
}

fn assert_close(a: &Tensor, b: &Tensor, tolerance: f64) {
    let values = |t: &Tensor| t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
    assert_eq!((a.dims(), a.dtype()), (b.dims(), b.dtype()));
    for (a, b) in values(a).iter().zip(values(b)) {
        assert!((a - b).abs() <= tolerance * b.abs().max(1.0), "{a} and {b}");
    }
}

/// The loops of the CPU agree with candle's operations, which other devices use.
#[test]
fn loops_agree_with_composites() {
    for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-5), (DType::F16, 1e-2), (DType::BF16, 5e-2)] {
        let acc = candle_ddp_tensor::accumulator(dtype);
        let (x, dy) = (batch(1.0).to_dtype(dtype).unwrap(), batch(2.0).to_dtype(dtype).unwrap());
        for centred in [true, false] {
            let loops = moments(&x, centred).unwrap();
            assert_close(&loops, &moments_composite(&x, centred).unwrap(), tolerance);
            assert_eq!(
                loops
                    .get(0)
                    .unwrap()
                    .sqr()
                    .unwrap()
                    .sum_all()
                    .unwrap()
                    .to_dtype(DType::F64)
                    .unwrap()
                    .to_scalar::<f64>()
                    .unwrap()
                    > 0.0,
                centred
            );
        }
        let row = |start: f64| {
            let values: Vec<f64> = (0..19).map(|i| start + f64::from(i) / 19.0).collect();
            Tensor::new(values, &Device::Cpu).unwrap().to_dtype(acc).unwrap()
        };
        let (mean, scale, a, b) = (row(0.5), row(1.0), row(-0.3), row(0.2));
        let loops = gradient_sums(&x, &dy, &mean, None).unwrap();
        assert_close(&loops, &gradient_sums_composite(&x, &dy, &mean).unwrap(), tolerance);
        let channels = [&mean, &scale, &a, &b];
        let loops = input_gradient(&x, &dy, channels, None).unwrap();
        assert_close(&loops, &input_gradient_composite(&x, &dy, channels).unwrap(), tolerance);

        let channels = [&mean, &scale, &a];
        let (storage, shape) = normalise(&x, channels, &After::Nothing).unwrap();
        let loops = Tensor::from_storage(storage, shape, BackpropOp::none(), false);
        assert_close(&loops, &normalise_composite(&x, channels).unwrap(), tolerance);
    }
}

#[test]
fn without_samples_there_are_zeros() {
    let x = Tensor::zeros((0, 3, 2), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(moments(&x, true).unwrap().to_vec2::<f32>().unwrap(), [[0.0; 3]; 2]);
    let mean = Tensor::ones(3, DType::F32, &Device::Cpu).unwrap();
    assert_eq!(gradient_sums(&x, &x, &mean, None).unwrap().to_vec2::<f32>().unwrap(), [[0.0; 3]; 2]);
    assert_eq!(input_gradient(&x, &x, [&mean; 4], None).unwrap().dims(), [0, 3, 2]);

    let x = x.to_dtype(DType::F16).unwrap();
    assert_eq!(moments_composite(&x, true).unwrap().to_vec2::<f32>().unwrap(), [[0.0; 3]; 2]);
    assert_eq!(gradient_sums_composite(&x, &x, &mean).unwrap().to_vec2::<f32>().unwrap(), [[0.0; 3]; 2]);
    let dx = input_gradient_composite(&x, &x, [&mean; 4]).unwrap();
    assert_eq!((dx.dims(), dx.dtype()), (x.dims(), x.dtype()));
}
