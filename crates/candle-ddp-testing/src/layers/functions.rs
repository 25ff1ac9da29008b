//! Functions against closed forms, and against candle's.
use crate::{assert_close, floats, tensor};
use candle_core::{DType, Device, Module, Tensor, Var};
use candle_ddp_nn::{Embedding, cross_entropy, dropout, rope, rope_i, rope_thd, tanh};
use candle_ddp_tensor::seed::Generator;
use candle_nn::rotary_emb;

/// A bf16 table whose rows are used so often that sums in bf16 would stop growing.
pub fn embedding_adds_in_f32(device: &Device) {
    let table = Var::from_tensor(&Tensor::zeros((3, 2), DType::BF16, device).unwrap()).unwrap();
    let indices = Tensor::ones(1000, DType::U32, device).unwrap();
    let y = Embedding::new(table.as_tensor().clone(), 2).forward(&indices).unwrap();
    let grads = y.sum_all().unwrap().backward().unwrap();
    assert_eq!(floats(grads.get(&table).unwrap()), [0., 0., 1000., 1000., 0., 0.]);
}

/// GPUs load several elements at once where a row's length allows, and add in tiles of 64 lookups.
pub fn embeddings_of_any_size(device: &Device) {
    const ROWS: usize = 5;
    for (size, dtype) in [(8, DType::F32), (8, DType::BF16), (16, DType::F16), (5, DType::F32), (4, DType::F64)] {
        let numbers = |count: usize, by: usize| (0..count).map(|i| (i * by % 7) as f32).collect::<Vec<_>>();
        let indices: Vec<usize> = (0..400).map(|i| i * i % ROWS).collect();
        let (values, dy) = (numbers(ROWS * size, 3), numbers(indices.len() * size, 5));
        let of = |values: &[f32], rows: usize| {
            Tensor::from_vec(values.to_vec(), (rows, size), device).unwrap().to_dtype(dtype).unwrap()
        };
        let table = Var::from_tensor(&of(&values, ROWS)).unwrap();
        let on_device = Tensor::from_iter(indices.iter().map(|index| *index as i64), device).unwrap();
        let y = Embedding::new(table.as_tensor().clone(), size).forward(&on_device).unwrap();
        let looked_up: Vec<f32> =
            indices.iter().flat_map(|index| &values[index * size..(index + 1) * size]).copied().collect();
        assert_eq!(floats(&y), looked_up, "{size} x {dtype:?}");
        let mut sums = vec![0f32; ROWS * size];
        for (lookup, index) in indices.iter().enumerate() {
            (0..size).for_each(|column| sums[index * size + column] += dy[lookup * size + column]);
        }
        let grads = (y * of(&dy, indices.len())).unwrap().sum_all().unwrap().backward().unwrap();
        let expected = Tensor::from_vec(sums, (ROWS, size), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        assert_eq!(floats(grads.get(&table).unwrap()), floats(&expected), "{size} x {dtype:?}");
    }
}

/// Several times as many numbers as a vector has, some of them beyond where the result is 1, and views.
pub fn tanh_takes_the_place_of_candles(device: &Device) {
    for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-6), (DType::F16, 2e-3), (DType::BF16, 1e-2)] {
        let values: Vec<f64> = (0..333).map(|i| (f64::from(i) - 166.0) * 0.2).collect();
        let x = Tensor::from_vec(values, (9, 37), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        let x = Var::from_tensor(&x.to_device(device).unwrap()).unwrap();
        let run = |tanh: fn(&Tensor) -> candle_core::Result<Tensor>| {
            let y = tanh(&x.t().unwrap()).unwrap();
            let dy = tensor(&[37, 9], 3).to_dtype(dtype).unwrap().to_device(device).unwrap();
            let grads = (&y * &dy).unwrap().sum_all().unwrap().backward().unwrap();
            [floats(&y), floats(grads.get(&x).unwrap())].concat()
        };
        assert_close(&run(tanh), &run(Tensor::tanh), tolerance, "tanh");
    }
}

pub fn rope_takes_the_place_of_candles(device: &Device) {
    // GPUs load four pairs at once, where rows allow.
    for half in [8, 3] {
        let tensor = |shape: &[usize], seed| tensor(shape, seed).to_device(device).unwrap();
        let x = Var::from_tensor(&tensor(&[2, 3, 5, 2 * half], 1)).unwrap();
        let angles = tensor(&[7, half], 2);
        let (cos, sin) = (angles.cos().unwrap(), angles.sin().unwrap());
        let dy = tensor(&[2, 3, 5, 2 * half], 3);
        let run = |y: Tensor| {
            let grads = (&y * &dy).unwrap().sum_all().unwrap().backward().unwrap();
            [floats(&y), floats(grads.get(&x).unwrap())].concat()
        };
        let slow = run(rotary_emb::rope_slow(&x, &cos, &sin).unwrap());
        assert_close(&run(rope(&x, &cos, &sin).unwrap()), &slow, 1e-6, "rope");
        let transposed = x.transpose(1, 2).unwrap();
        let thd = rope_thd(&transposed, &cos, &sin).unwrap().transpose(1, 2).unwrap();
        assert_close(&run(thd), &slow, 1e-6, "rope_thd");
        let slow = run(rotary_emb::rope_i_slow(&x, &cos, &sin).unwrap());
        assert_close(&run(rope_i(&x, &cos, &sin).unwrap()), &slow, 1e-6, "rope_i");
        for f in [rope, rope_i, rope_thd] {
            // A sample that has its own table is rotated as if it were alone.
            let [cos, sin] = [4, 5].map(|seed| tensor(&[2, 7, half], seed));
            let alone =
                |sample| f(&x.narrow(0, sample, 1).unwrap(), &cos.get(sample).unwrap(), &sin.get(sample).unwrap());
            let alone = Tensor::cat(&[0, 1].map(|sample| alone(sample).unwrap()), 0).unwrap();
            assert_close(&run(f(&x, &cos, &sin).unwrap()), &run(alone), 1e-6, "a table for each sample");
            // 16 bits are rounded results.
            for (dtype, tolerance) in [(DType::F16, 2e-3), (DType::BF16, 1.6e-2)] {
                let [x, cos, sin, dy] = [x.as_tensor(), &cos, &sin, &dy].map(|t| t.to_dtype(dtype).unwrap());
                let run = |dtype| {
                    let [x, cos, sin, dy] = [&x, &cos, &sin, &dy].map(|t| t.to_dtype(dtype).unwrap());
                    let x = Var::from_tensor(&x).unwrap();
                    let y = f(&x, &cos, &sin).unwrap();
                    let grads = (&y * &dy).unwrap().sum_all().unwrap().backward().unwrap();
                    [floats(&y), floats(grads.get(&x).unwrap())].concat()
                };
                assert_close(&run(dtype), &run(DType::F64), tolerance, &format!("{dtype:?}"));
            }
        }
    }
}

pub fn large_logits_stay_finite(device: &Device) {
    let logits = Var::new(&[[1e4f32, -1e4, 0.0]], device).unwrap();
    let loss = cross_entropy(&logits, &Tensor::new(&[1i64], device).unwrap()).unwrap();
    assert_eq!(loss.to_scalar::<f32>().unwrap(), 2e4);
    let grads = loss.backward().unwrap();
    assert_eq!(grads.get(&logits).unwrap().to_vec2::<f32>().unwrap(), [[1.0, -1.0, 0.0]]);
}

pub fn without_samples_the_mean_is_nan(device: &Device) {
    let logits = Var::from_tensor(&tensor(&[2, 3], 1).to_device(device).unwrap()).unwrap();
    let loss = cross_entropy(&logits, &Tensor::new(&[-100i64, -100], device).unwrap()).unwrap();
    assert!(loss.to_scalar::<f32>().unwrap().is_nan());
    let grads = loss.backward().unwrap();
    assert_eq!(grads.get(&logits).unwrap().to_vec2::<f32>().unwrap(), [[0.0; 3]; 2]);
    let none = Tensor::zeros(0, DType::U32, device).unwrap();
    let empty = cross_entropy(&Tensor::zeros((0, 3), DType::F32, device).unwrap(), &none).unwrap();
    assert!(empty.to_scalar::<f32>().unwrap().is_nan());
}

pub fn gradients_have_the_mask_of_the_forward_pass(device: &Device) {
    let mut generator = Generator::new(1);
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        let x = Var::from_tensor(&Tensor::ones(10_000, dtype, device).unwrap()).unwrap();
        let y = dropout(&x, 0.2, &mut generator).unwrap();
        let grads = y.sum_all().unwrap().backward().unwrap();
        let wide = floats;
        assert_eq!(wide(&y), wide(grads.get(&x).unwrap()));
        assert!(wide(&y).iter().all(|y| *y == 0.0 || (y - 1.25).abs() < 0.01));
        let kept = wide(&y).iter().filter(|y| **y > 0.0).count();
        assert!((7850..8150).contains(&kept), "{kept}");
    }
}

/// Element i is dropped if number i of the generator is less than p × 2³², on every device and with any number of
/// threads.
pub fn masks_are_the_generators_numbers(device: &Device) {
    let mut numbers = vec![0; 10_001];
    Generator::new(5).draw(numbers.len()).fill(0, &mut numbers);
    let ones = Tensor::ones(numbers.len() + 1, DType::F32, device).unwrap();
    // The second one begins at an address that is no multiple of 16.
    for start in [0, 1] {
        let x = ones.narrow(0, start, numbers.len()).unwrap();
        let y = floats(&dropout(&x, 0.25, &mut Generator::new(5)).unwrap());
        assert!(y.iter().zip(&numbers).all(|(y, number)| *y == if *number < 1 << 30 { 0.0 } else { 1.0 / 0.75 }));
    }
}
