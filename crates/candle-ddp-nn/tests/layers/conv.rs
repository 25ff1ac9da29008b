//! Linear layers, convolutions and batch normalisation, compared with PyTorch.
use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_ddp_nn::{Linear, conv_transpose2d, conv2d, conv2d_no_bias};
use candle_ddp_testing::assert_error;
use candle_nn::{Conv2dConfig, ConvTranspose2dConfig, VarBuilder, VarMap};

/// A chain of layers has the right gradients, with or without candle's operations in between.
#[test]
fn gradients_pass_through_candles_operations() {
    let vars = |seed: usize, shape: &[usize]| {
        let count = shape.iter().product();
        let values: Vec<f64> = (0..count).map(|i| ((i * 31 + seed * 7) as f64 * 0.77).sin()).collect();
        Var::from_tensor(&Tensor::from_vec(values, shape, &Device::Cpu).unwrap()).unwrap()
    };
    let (x, first, second) = (vars(1, &[3, 4]), vars(2, &[4, 4]), vars(3, &[4, 4]));
    let layers = [&first, &second].map(|weight| Linear::new(weight.as_tensor().clone(), None));
    let of_candle = [&first, &second].map(|weight| candle_nn::Linear::new(weight.as_tensor().clone(), None));
    // The first layer's result goes to a layer and to one of candle's operations, and one of these uses it twice.
    let run = |layers: [&dyn Module; 2]| -> Result<Vec<Vec<f64>>> {
        let y = layers[0].forward(&x)?;
        let z = layers[1].forward(&layers[1].forward(&y)?)?;
        let loss = ((&y * &y)? + (z * y.sin()?)?)?.sum_all()?;
        let once = loss.backward()?;
        let again = loss.backward()?;
        [&x, &first, &second]
            .into_iter()
            .map(|var| {
                let gradients = [&once, &again].map(|grads| grads.get(var).unwrap().flatten_all().unwrap());
                let [once, again] = gradients.map(|gradient| gradient.to_vec1::<f64>().unwrap());
                assert_eq!(once, again);
                Ok(once)
            })
            .collect()
    };
    let ours = run([&layers[0], &layers[1]]).unwrap();
    let candles = run([&of_candle[0], &of_candle[1]]).unwrap();
    for (ours, candles) in ours.iter().flatten().zip(candles.iter().flatten()) {
        assert!((ours - candles).abs() <= 1e-12 * candles.abs().max(1.0), "{ours} and {candles}");
    }
}

#[test]
fn invalid_options_are_refused_at_construction() {
    let varmap = VarMap::new();
    let vb = || VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    let config = Conv2dConfig::default();
    let refused = |config, part: &str| assert_error(conv2d(6, 4, 3, config, vb()), &[part]);
    refused(Conv2dConfig { stride: 0, ..config }, "stride must be at least 1");
    refused(Conv2dConfig { dilation: 0, ..config }, "dilation must be at least 1");
    refused(Conv2dConfig { groups: 0, ..config }, "0 does not divide 6 input channels and 4 output channels");
    refused(Conv2dConfig { groups: 3, ..config }, "3 does not divide");
    assert!(
        conv2d_no_bias(6, 4, 0, config, vb()).unwrap_err().to_string().contains("the kernel's size must be at least 1")
    );
    let transposed = ConvTranspose2dConfig { output_padding: 2, stride: 2, ..Default::default() };
    let text = conv_transpose2d(6, 4, 3, transposed, vb()).unwrap_err().to_string();
    assert!(text.contains("output_padding must be less than stride 2 or dilation 1, not 2"), "{text}");
    assert!(varmap.all_vars().is_empty());
}

#[test]
fn inputs_that_do_not_fit_are_refused() {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    let layer = conv2d(3, 4, 3, Conv2dConfig::default(), vb).unwrap();
    let text = |shape: &[usize], dtype| {
        layer.forward(&Tensor::zeros(shape, dtype, &Device::Cpu).unwrap()).unwrap_err().to_string()
    };
    assert!(text(&[2, 5, 8, 8], DType::F32).contains("(N, 3, H, W)"));
    assert!(text(&[3, 8, 8], DType::F32).contains("(N, 3, H, W)"));
    assert!(text(&[2, 3, 8, 8], DType::F64).contains("f64[2, 3, 8, 8]"));
    assert!(text(&[2, 3, 2, 8], DType::F32).contains("the kernel is larger than the padded input"));
    let empty = layer.forward(&Tensor::zeros((0, 3, 8, 8), DType::F32, &Device::Cpu).unwrap()).unwrap();
    assert_eq!(empty.dims(), [0, 4, 6, 6]);
    let linear = Linear::new(Tensor::zeros((4, 3), DType::F32, &Device::Cpu).unwrap(), None);
    assert_error(linear.forward(&Tensor::zeros((2, 4), DType::F32, &Device::Cpu).unwrap()), &["it must be (…, 3)"]);
}
