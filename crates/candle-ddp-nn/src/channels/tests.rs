//! Channels in blocks, and batches without samples.
use super::*;
use candle_core::op::BackpropOp;
use candle_core::{DType, Device};

/// A channel gives the same bits among others, in any block, as alone. PyTorch's results are in `tests/layers`.
#[test]
fn channels_do_not_depend_on_each_other() {
    const CHANNELS: usize = 19;
    for (spatial, dtype) in [(11, DType::F32), (33, DType::F32), (33, DType::BF16)] {
        let values = |shape: &[usize], seed: f64| {
            let values = (0..shape.iter().product()).map(|i: usize| ((i as f64 + seed) * 1.7).sin() * 3.0 + seed);
            Tensor::from_vec(values.collect(), shape, &Device::Cpu).unwrap().to_dtype(DType::F32).unwrap()
        };
        let [x, dy] = [1.0, 2.0].map(|seed| values(&[3, CHANNELS, spatial], seed).to_dtype(dtype).unwrap());
        let [mean, scale, a, b] = [3.0, 4.0, 5.0, 6.0].map(|seed| values(&[CHANNELS], seed));
        let all = |from: usize, count: usize| {
            let [x, dy] = [&x, &dy].map(|t| t.narrow(1, from, count).unwrap().contiguous().unwrap());
            let [mean, scale, a, b] =
                [&mean, &scale, &a, &b].map(|t| t.narrow(0, from, count).unwrap().contiguous().unwrap());
            let ((storage, shape), _) = normalise(&x, [&mean, &scale, &a], After::Nothing, true).unwrap();
            [
                moments(&x, true).unwrap(),
                moments(&x, false).unwrap(),
                gradient_sums(&x, &dy, &mean, None).unwrap(),
                input_gradient(&x, &dy, [&mean, &scale, &a, &b], None).unwrap(),
                Tensor::from_storage(storage, shape, BackpropOp::none(), false),
            ]
        };
        let flat = |t: &Tensor| t.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let together = all(0, CHANNELS);
        for channel in 0..CHANNELS {
            for (index, (together, alone)) in together.iter().zip(all(channel, 1)).enumerate() {
                let together = together.narrow(1, channel, 1).unwrap();
                assert_eq!(flat(&together), flat(&alone), "{index} of channel {channel} of {spatial} × {dtype:?}");
            }
        }
    }
}

#[test]
fn without_samples_there_are_zeros() {
    let x = Tensor::zeros((0, 3, 2), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(moments(&x, true).unwrap().to_vec2::<f32>().unwrap(), [[0.0; 3]; 2]);
    let mean = Tensor::ones(3, DType::F32, &Device::Cpu).unwrap();
    assert_eq!(gradient_sums(&x, &x, &mean, None).unwrap().to_vec2::<f32>().unwrap(), [[0.0; 3]; 2]);
    assert_eq!(input_gradient(&x, &x, [&mean; 4], None).unwrap().dims(), [0, 3, 2]);
}
