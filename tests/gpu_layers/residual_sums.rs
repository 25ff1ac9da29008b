//! A convolution adds to the gradient that its input has from a residual connection, if nothing else holds that gradient's memory.
use super::channels_last::{channels_last, has_cudnn};
use super::{assert_like_the_cpu, on_gpu};
use crate::common::{floats, new_var, skip, tensor};
use candle_core::{DType, Device, Module, Var};
use candle_ddp::nn::{Conv2d, add, relu};
use candle_ddp_testing::take_counts;
use candle_nn::Conv2dConfig;

/// Gradients of the input from two convolutions, which are added within the second; and from a sum, whose other term has the same
/// gradient in the same memory, in both orders.
#[test]
fn convolutions_change_only_gradients_that_nobody_else_holds() {
    const TEST: &str = "convolutions_change_only_gradients_that_nobody_else_holds";
    on_gpu(TEST, |gpu| {
        for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::BF16, 3e-2)] {
            for (is_last, order) in [(false, 0), (false, 1), (false, 2), (true, 0), (true, 1), (true, 2)] {
                let run = |device: &Device| {
                    let var = |shape: &[usize], seed| new_var(shape, seed, dtype, device);
                    let (x, z) = (var(&[2, 8, 6, 6], 1), var(&[2, 8, 6, 6], 2));
                    let (first, second) = (var(&[8, 8, 3, 3], 3), var(&[8, 8, 1, 1], 4));
                    let stored =
                        |x: &Var| if is_last && device.is_cuda() { channels_last(x) } else { x.as_tensor().clone() };
                    let (a, b) = (relu(&stored(&x)).unwrap(), relu(&stored(&z)).unwrap());
                    let conv = |weight: &Var, padding| {
                        let config = Conv2dConfig { padding, ..Default::default() };
                        Conv2d::new(weight.as_tensor().clone(), None, config).forward(&a).unwrap()
                    };
                    let y = match order {
                        0 => add(&conv(&first, 1), &conv(&second, 0)).unwrap(),
                        1 => add(&add(&a, &b).unwrap(), &conv(&first, 1)).unwrap(),
                        _ => add(&conv(&first, 1), &add(&a, &b).unwrap()).unwrap(),
                    };
                    let dy = tensor(&[2, 8, 6, 6], 5).to_dtype(dtype).unwrap().to_device(device).unwrap();
                    take_counts();
                    let grads = (&y * dy).unwrap().sum_all().unwrap().backward().unwrap();
                    if let (true, true, 0, Some(counts)) = (device.is_cuda(), has_cudnn(), order, take_counts()) {
                        assert!(!counts.iter().any(|(name, _)| name.starts_with("add_")), "{counts:?}");
                    }
                    let vars = [&x, &z, &first, &second];
                    vars.into_iter().filter_map(|var| grads.get(var)).map(floats).collect::<Vec<_>>()
                };
                assert_like_the_cpu(gpu, run, tolerance, &format!("order {order}, {is_last}, in {dtype:?}"));
            }
        }
        if take_counts().is_none() {
            skip(TEST, "only an emulated GPU counts sums");
        }
    });
}
