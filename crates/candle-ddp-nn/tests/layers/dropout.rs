//! Dropout with reproducible masks.
use candle_core::{DType, Device, Tensor};
use candle_ddp_nn::{Dropout, dropout};
use candle_ddp_tensor::seed::Generator;
use candle_ddp_testing::assert_error;
use std::sync::{Arc, Mutex};

fn ones(count: usize) -> Tensor {
    Tensor::ones(count, DType::F32, &Device::Cpu).unwrap()
}

fn values(t: &Tensor) -> Vec<f32> {
    t.to_vec1().unwrap()
}

#[test]
fn it_is_a_drop_in_for_candles() {
    let generator = Arc::new(Mutex::new(Generator::new(1)));
    let layer = Dropout::with_generator(0.5, Arc::clone(&generator));
    assert_eq!(values(&layer.forward(&ones(4), false).unwrap()), [1.0; 4]);
    assert_eq!(generator.lock().unwrap().offset(), 0);
    layer.forward(&ones(10), true).unwrap();
    assert_eq!(generator.lock().unwrap().offset(), 3);
    for p in [1.0, -0.1, f32::NAN] {
        assert_error(dropout(&ones(4), p, &mut Generator::new(1)), &["at least 0 and less than 1"]);
    }
    assert_eq!(values(&dropout(&ones(4), 0.0, &mut Generator::new(1)).unwrap()), [1.0; 4]);
}
