//! No function makes a graph under `no_grad`, and all compute the same there.
use candle_core::{DType, Device, IndexOp, Result, Tensor, Var};
use candle_ddp_nn::attention::{AttnMask, flash_attn};
use candle_ddp_nn::kv_cache::{ConcatKvCache, KvCache, RotatingKvCache};
use candle_ddp_nn::{self as nn, Activation, AttentionOptions, Module, ModuleT, loss, no_grad, ops};
use candle_ddp_tensor::seed::Generator;
use candle_ddp_testing::{bits, tensor};

/// Computes `function` of variables in and outside of `no_grad`.
#[track_caller]
fn check(name: &str, shapes: &[&[usize]], function: impl Fn(&[Tensor]) -> Result<Tensor>) {
    let variable =
        |(seed, shape): (usize, &&[usize])| Var::from_tensor(&tensor(shape, seed as u64)).unwrap().as_tensor().clone();
    let vars: Vec<Tensor> = shapes.iter().enumerate().map(variable).collect();
    let tracked = function(&vars).unwrap();
    assert!(tracked.track_op(), "{name}: the test needs a graph to miss");
    let plain = no_grad(|| function(&vars)).unwrap();
    assert!(!plain.track_op(), "{name}: a graph");
    assert_eq!(bits(&plain), bits(&tracked), "{name}");
}

#[test]
fn none_makes_a_graph() {
    let rows: &[usize] = &[4, 6];
    let planes: &[usize] = &[2, 3, 4, 4];
    let heads: &[usize] = &[2, 2, 3, 4];
    let activations = [
        Activation::Gelu,
        Activation::NewGelu,
        Activation::GeluPytorchTanh,
        Activation::Relu,
        Activation::Relu2,
        Activation::Relu6,
        Activation::Silu,
        Activation::Sigmoid,
        Activation::HardSigmoid,
        Activation::Swiglu,
        Activation::Swish,
        Activation::Mish,
        Activation::HardSwish,
        Activation::Elu(0.5),
        Activation::LeakyRelu(0.1),
    ];
    for activation in activations {
        check(&format!("{activation:?}"), &[rows], |x| activation.forward(&x[0]));
    }
    check("selu", &[rows], |x| ops::selu(&x[0], 1.7, 1.1));
    check("swiglu", &[rows], |x| ops::swiglu(&x[0]));
    check("mish", &[rows], |x| ops::mish(&x[0]));
    check("softmax", &[rows], |x| nn::softmax(&x[0], 0));
    check("log_softmax", &[rows], |x| nn::log_softmax(&x[0], 1));
    check("softmax of a view", &[rows], |x| nn::softmax_last_dim(&x[0].t()?));
    check("add", &[rows, rows], |x| nn::add(&x[0], &x[1]));
    check("add by candle", &[rows, &[4, 1]], |x| nn::add(&x[0], &x[1].t()?.t()?.broadcast_as(rows)?));
    check("dropout", &[rows], |x| nn::dropout(&x[0], 0.5, &mut Generator::new(1)));
    check("linear", &[rows, &[5, 6], &[5]], |x| nn::Linear::new(x[1].clone(), Some(x[2].clone())).forward(&x[0]));
    check("linear of a view", &[&[6, 4], &[5, 6]], |x| nn::Linear::new(x[1].clone(), None).forward(&x[0].t()?));
    check("layer_norm", &[rows, &[6], &[6]], |x| nn::LayerNorm::new(x[1].clone(), x[2].clone(), 1e-5).forward(&x[0]));
    check("rms_norm", &[rows, &[6]], |x| nn::RmsNorm::new(x[1].clone(), 1e-5).forward(&x[0]));
    check("group_norm", &[planes, &[3], &[3]], |x| {
        nn::GroupNorm::new(x[1].clone(), x[2].clone(), 3, 1, 1e-5)?.forward(&x[0])
    });
    check("instance_norm", &[planes], |x| nn::InstanceNorm::new(3, None, 1e-5)?.forward(&x[0]));
    check("embedding", &[rows], |x| {
        nn::Embedding::new(x[0].clone(), 6).forward(&Tensor::new(&[1u32, 3], &Device::Cpu)?)
    });
    check("conv1d", &[&[2, 3, 5], &[4, 3, 3]], |x| {
        nn::Conv1d::new(x[1].clone(), None, Default::default()).forward(&x[0])
    });
    check("conv2d", &[planes, &[4, 3, 3, 3], &[4]], |x| {
        nn::Conv2d::new(x[1].clone(), Some(x[2].clone()), Default::default()).forward(&x[0])
    });
    check("conv_transpose2d", &[planes, &[3, 2, 3, 3]], |x| {
        nn::ConvTranspose2d::new(x[1].clone(), None, Default::default()).forward(&x[0])
    });
    let ones = |n: usize| Tensor::ones(n, DType::F32, &Device::Cpu);
    for train in [false, true] {
        check("batch_norm", &[planes, &[3], &[3], planes], |x| {
            let norm = nn::BatchNorm::new(3, ones(3)?, ones(3)?, x[1].clone(), x[2].clone(), 1e-5)?;
            let fused = norm.forward_add_relu_t(&norm.forward_relu_t(&x[0], train)?, &x[3], train)?;
            norm.forward_t(&fused, train)
        });
    }
    check("absorb_bn", &[planes, &[3, 3, 1, 1], &[3], &[3]], |x| {
        let norm = nn::BatchNorm::new(3, ones(3)?, ones(3)?, x[2].clone(), x[3].clone(), 1e-5)?;
        nn::Conv2d::new(x[1].clone(), None, Default::default()).absorb_bn(&norm)?.forward(&x[0])
    });
    check("max_pool2d", &[planes], |x| nn::max_pool2d(&x[0], 2, Default::default()));
    check("avg_pool2d", &[planes], |x| nn::avg_pool2d(&x[0], 2, Default::default()));
    check("adaptive_avg_pool2d", &[planes], |x| nn::adaptive_avg_pool2d(&x[0], 1));
    check("interpolate", &[planes], |x| nn::interpolate(&x[0], (7, 3), nn::InterpolateMode::Nearest));
    check("rope", &[heads], |x| nn::rope(&x[0], &tensor(&[3, 2], 1), &tensor(&[3, 2], 2)));
    check("attention", &[heads, heads, heads], |x| {
        nn::scaled_dot_product_attention(&x[0], &x[1], &x[2], AttentionOptions::default())
    });
    check("flash_attn", &[heads, heads, heads], |x| {
        flash_attn::<f32>(&x[0], &x[1], &x[2], 0.5, AttnMask::Causal { kv_offset: 0 }, None, None)
    });
    let sequence: &[usize] = &[3, 2, 6];
    let vb = |x: &[Tensor]| {
        let names = ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"].map(String::from);
        nn::VarBuilder::from_tensors(names.into_iter().zip(x[1..].iter().cloned()).collect(), DType::F32, &Device::Cpu)
    };
    check("lstm", &[sequence, &[20, 6], &[20, 5], &[20], &[20]], |x| {
        let layers = nn::StackedLSTM::new(6, 5, Default::default(), vb(x))?;
        let (y, state) = layers.forward_with_lengths(&x[0], &[1, 3], None, true)?;
        Tensor::cat(&[y, state.h, state.c], 0)
    });
    check("gru", &[sequence, &[15, 6], &[15, 5], &[15], &[15]], |x| {
        let layers = nn::StackedGRU::new(6, 5, Default::default(), vb(x))?;
        let (y, state) = layers.forward(&x[0], None, true)?;
        Tensor::cat(&[y, state.h], 0)
    });
    check("lstm by steps", &[sequence, &[20, 6], &[20, 5], &[20], &[20]], |x| {
        let layer = nn::lstm(6, 5, Default::default(), vb(x))?;
        nn::RNN::states_to_tensor(&layer, &nn::RNN::seq(&layer, &x[0])?)
    });
    let classes = Tensor::new(&[0u32, 5, 1, 2], &Device::Cpu).unwrap();
    check("cross_entropy", &[rows], |x| nn::cross_entropy(&x[0], &classes));
    check("ctc_loss", &[&[5, 2, 4]], |x| {
        let targets = Tensor::new(&[[1u32, 2], [3, 0]], &Device::Cpu)?;
        nn::ctc_loss(&nn::log_softmax(&x[0], 2)?, &targets, &[5, 4], &[2, 1], Default::default())
    });
    check("linear_cross_entropy", &[rows, &[7, 6], &[7]], |x| {
        nn::linear_cross_entropy(&x[0], &x[1], Some(&x[2]), &classes)
    });
    check("mse", &[rows, rows], |x| loss::mse(&x[0], &x[1]));
    check("nll", &[rows], |x| loss::nll(&x[0], &classes));
    check("huber", &[rows, rows], |x| loss::huber(&x[0], &x[1], 0.5));
    check("binary_cross_entropy", &[rows, rows], |x| loss::binary_cross_entropy_with_logit(&x[0], &x[1]));
    check("checkpoint", &[rows], |x| nn::checkpoint(&[&x[0]], |x| nn::relu(&x[0])));
}

/// A cache that gets its first tensors outside of `no_grad` gives those, and later ones, without a graph inside.
#[test]
fn caches_record_nothing() {
    for recorded_before in [0, 1, 2] {
        let append = |append: &mut dyn FnMut(&Tensor) -> Result<Tensor>| {
            let x = Var::from_tensor(&tensor(&[1, 2, 3], 1)).unwrap();
            let mut all = Vec::new();
            for number in 0..4 {
                let result = if number < recorded_before { append(&x) } else { no_grad(|| append(&x)) }.unwrap();
                assert_eq!(result.track_op(), number < recorded_before, "{number}");
                all.push(bits(&result));
            }
            all
        };
        let mut concat = ConcatKvCache::new(1);
        let expected = append(&mut |x| Ok(concat.append(x, x)?.0));
        let mut cache = KvCache::new(1, 2);
        assert_eq!(append(&mut |x| Ok(cache.append(x, x)?.0)), expected);
        let mut ring = RotatingKvCache::new(1, 8);
        assert_eq!(append(&mut |x| Ok(ring.append(x, x)?.0)), expected);
        let mut short = RotatingKvCache::new(1, 3);
        append(&mut |x| Ok(short.append(x, x)?.0));
    }
}

/// Inputs that cannot be trained can be evaluated.
#[test]
fn inputs_without_gradients_may_be_parameters() {
    let x = Var::from_tensor(&tensor(&[2, 2, 3, 3], 1)).unwrap();
    let masked = || {
        let options = AttentionOptions { mask: Some(x.as_tensor().clone()), ..Default::default() };
        nn::scaled_dot_product_attention(&x, &x, &x, options)
    };
    assert!(masked().unwrap_err().to_string().contains("mask"));
    assert!(!no_grad(masked).unwrap().track_op());
    let one = x.i(..1).unwrap();
    let capped = || flash_attn::<f32>(&one, &one, &one, 0.5, AttnMask::None, None, Some(10.));
    assert!(capped().unwrap_err().to_string().contains("softcap"));
    assert!(!no_grad(capped).unwrap().track_op());
}
