//! Dropout whose masks can be repeated.
use candle_core::{DType, Device, Tensor, Var};
use candle_ddp::nn::{Dropout, dropout};
use candle_ddp::optim::StateDict;
use candle_ddp::seed::Generator;
use std::sync::{Arc, Mutex};

fn ones(count: usize) -> Tensor {
    Tensor::ones(count, DType::F32, &Device::Cpu).unwrap()
}

fn values(t: &Tensor) -> Vec<f32> {
    t.to_vec1().unwrap()
}

#[test]
fn gradients_have_the_mask_of_the_forward_pass() {
    let mut generator = Generator::new(1);
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        let x = Var::from_tensor(&ones(10_000).to_dtype(dtype).unwrap()).unwrap();
        let y = dropout(&x, 0.2, &mut generator).unwrap();
        let grads = y.sum_all().unwrap().backward().unwrap();
        let wide = |t: &Tensor| values(&t.to_dtype(DType::F32).unwrap());
        assert_eq!(wide(&y), wide(grads.get(&x).unwrap()));
        assert!(wide(&y).iter().all(|y| *y == 0.0 || (y - 1.25).abs() < 0.01));
        let kept = wide(&y).iter().filter(|y| **y > 0.0).count();
        assert!((7850..8150).contains(&kept), "{kept}");
    }
}

#[test]
fn masks_follow_from_seed_rank_and_state() {
    let mask = |generator: &mut Generator| values(&dropout(&ones(100), 0.5, generator).unwrap());
    let (mut a, mut b) = (Generator::for_rank(3, 0), Generator::for_rank(3, 1));
    let first = mask(&mut a);
    assert!(first != mask(&mut b) && first == mask(&mut Generator::for_rank(3, 0)));
    let state = a.state_dict().unwrap();
    let second = mask(&mut a);
    assert!(first != second);
    let mut restored = Generator::for_rank(3, 0);
    restored.load_state_dict(&state).unwrap();
    assert_eq!(mask(&mut restored), second);
}

/// Element i is dropped where number i of the generator is less than p × 2³²: also on other devices, and by other
/// threads.
#[test]
fn masks_are_the_generators_numbers() {
    let y = values(&dropout(&ones(10_001), 0.25, &mut Generator::new(5)).unwrap());
    let mut numbers = vec![0; y.len()];
    Generator::new(5).draw(y.len()).fill(0, &mut numbers);
    assert!(y.iter().zip(numbers).all(|(y, number)| (*y == 0.0) == (number < 1 << 30)));
}

#[test]
fn it_takes_the_place_of_candles() {
    let generator = Arc::new(Mutex::new(Generator::new(1)));
    let layer = Dropout::new(0.5, Arc::clone(&generator));
    assert_eq!(values(&layer.forward(&ones(4), false).unwrap()), [1.0; 4]);
    assert_eq!(generator.lock().unwrap().offset(), 0);
    layer.forward(&ones(10), true).unwrap();
    assert_eq!(generator.lock().unwrap().offset(), 3);
    for p in [1.0, -0.1, f32::NAN] {
        let error = dropout(&ones(4), p, &mut Generator::new(1)).unwrap_err().to_string();
        assert!(error.contains("0 <= p < 1"), "{error}");
    }
    assert_eq!(values(&dropout(&ones(4), 0.0, &mut Generator::new(1)).unwrap()), [1.0; 4]);
}
