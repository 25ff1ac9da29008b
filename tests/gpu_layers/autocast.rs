//! Autocast on a GPU.
use crate::common::{floats, skip, tensor};
use crate::{assert_like_the_cpu, on_gpu};
use candle_core::{DType, Device, Module, Result, Var};
use candle_ddp::amp::{Autocast, autocast};
use candle_ddp::nn::{Conv2d, LayerNorm, Linear, MemoryFormat, add, softmax, to_memory_format};
use candle_ddp_testing::take_counts;
use candle_nn::Conv2dConfig;

fn var(shape: &[usize], seed: u64, device: &Device) -> Var {
    Var::from_tensor(&tensor(shape, seed).to_device(device).unwrap()).unwrap()
}

/// The gradients of all parts, and the result, in f32.
fn run(device: &Device, mode: Autocast, format: MemoryFormat) -> Result<Vec<Vec<f32>>> {
    let (x, filter, bias) = (var(&[2, 8, 5, 6], 1, device), var(&[8, 8, 3, 3], 2, device), var(&[8], 3, device));
    let (weight, gamma, beta) = (var(&[6, 6], 4, device), var(&[6], 5, device), var(&[6], 6, device));
    let tensor = |var: &Var| var.as_tensor().clone();
    let y = autocast(mode, || {
        let config = Conv2dConfig { padding: 1, ..Default::default() };
        let conv = Conv2d::new(tensor(&filter), Some(tensor(&bias)), config);
        let y = conv.forward(&to_memory_format(&x, format)?)?;
        let layer = Linear::new(tensor(&weight), None);
        let norm = LayerNorm::new(tensor(&gamma), tensor(&beta), 1e-5);
        let (sum, normed) = norm.add_norm(&layer.forward(&y)?, &layer.forward(&y)?)?;
        let residual = add(&normed, &layer.forward(&sum)?)?;
        softmax(&residual, 3)
    })?;
    let grads = y.sqr()?.sum_all()?.backward()?;
    let gradients = [&x, &filter, &bias, &weight, &gamma, &beta].map(|var| floats(grads.get(var).unwrap()));
    Ok(std::iter::once(floats(&y)).chain(gradients).collect())
}

#[test]
fn results_are_those_of_the_cpu() {
    on_gpu("results_are_those_of_the_cpu", |gpu| {
        // Sums in another order are rounded otherwise, which the softmax amplifies.
        for (mode, tolerance) in [
            (Autocast::Lists(DType::BF16), 0.1),
            (Autocast::Lists(DType::F16), 0.02),
            (Autocast::Products(DType::BF16), 0.1),
        ] {
            for format in [MemoryFormat::Contiguous, MemoryFormat::ChannelsLast] {
                let case = format!("{mode:?}, {format:?}");
                assert_like_the_cpu(gpu, |device| run(device, mode, format).unwrap(), tolerance, &case);
            }
        }
    });
}

#[test]
fn each_product_casts_its_weight_in_each_pass() {
    const NAME: &str = "each_product_casts_its_weight_in_each_pass";
    on_gpu(NAME, |gpu| {
        let (x, weight) = (var(&[4, 8], 1, gpu), var(&[8, 8], 2, gpu));
        let layer = Linear::new(weight.as_tensor().clone(), None);
        take_counts();
        let y = autocast(DType::BF16, || layer.forward(&layer.forward(&layer.forward(&x.as_detached_tensor())?)?));
        let forward = take_counts();
        y.unwrap().backward().unwrap();
        let (Some(forward), Some(backward)) = (forward, take_counts()) else {
            return skip(NAME, "only an emulated GPU counts operations");
        };
        let casts = |counts: &[(String, usize)], name: &str| -> usize {
            counts.iter().filter(|(known, _)| known == name).map(|(_, count)| count).sum()
        };
        // The input too, but no result of a product.
        assert_eq!(casts(&forward, "cast_f32_bf16"), 4, "{forward:?}");
        let both = ["cast_f32_bf16", "cast_bf16_f32"].map(|name| casts(&backward, name));
        assert_eq!(both, [3, 3], "{backward:?}");
    });
}
