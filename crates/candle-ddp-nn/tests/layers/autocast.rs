//! Autocast, compared with PyTorch's.
use crate::bf16::{GRU, LSTM, check, recurrent, wave};
use candle_core::{DType, Device, Module, ModuleT, Result, Tensor, Var, safetensors};
use candle_ddp_nn::{
    AttentionOptions, Autocast, AvgPool2dOptions, BatchNorm, Conv1d, Conv1dConfig, Conv2d, Conv2dConfig,
    ConvTranspose1d, ConvTranspose1dConfig, ConvTranspose2d, ConvTranspose2dConfig, CtcLossOptions, Embedding,
    GroupNorm, InstanceNorm, InterpolateMode, LayerNorm, Linear, MaxPool2dOptions, RmsNorm, add, autocast,
    autocast_mode, autocast_off, avg_pool2d, cat, checkpoint, cross_entropy, ctc_loss, gelu, interpolate,
    linear_cross_entropy, log_softmax, loss, matmul, max_pool2d, no_grad, relu, rope, scaled_dot_product_attention,
    scaled_dot_product_attention_qkvpacked, set_autocast, silu, softmax,
};
use candle_ddp_testing::{assert_error, floats};
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

type Run<'a> = &'a dyn Fn(&[Tensor]) -> Result<Tensor>;

fn classes() -> Result<Tensor> {
    Tensor::new((0..6).map(|at| at * 3 % 10).collect::<Vec<u32>>(), &Device::Cpu)
}

fn linear(x: &[Tensor]) -> Result<Tensor> {
    Linear::new(x[1].clone(), x.get(2).cloned()).forward(&x[0])
}

fn conv1d(x: &[Tensor]) -> Result<Tensor> {
    let config = Conv1dConfig { padding: 1, ..Default::default() };
    Conv1d::new(x[1].clone(), Some(x[2].clone()), config).forward(&x[0])
}

fn conv2d(x: &[Tensor]) -> Result<Tensor> {
    let config = Conv2dConfig { padding: 1, ..Default::default() };
    Conv2d::new(x[1].clone(), Some(x[2].clone()), config).forward(&x[0])
}

fn conv_transpose1d(x: &[Tensor]) -> Result<Tensor> {
    let config = ConvTranspose1dConfig { padding: 1, output_padding: 1, stride: 2, ..Default::default() };
    ConvTranspose1d::new(x[1].clone(), Some(x[2].clone()), config).forward(&x[0])
}

fn conv_transpose2d(x: &[Tensor]) -> Result<Tensor> {
    let config = ConvTranspose2dConfig { padding: 1, output_padding: 1, stride: 2, dilation: 1 };
    ConvTranspose2d::new(x[1].clone(), Some(x[2].clone()), config).forward(&x[0])
}

fn attention(x: &[Tensor]) -> Result<Tensor> {
    let options = AttentionOptions { is_causal: true, ..Default::default() };
    scaled_dot_product_attention(&x[0], &x[1], &x[2], options)
}

fn layer_norm(x: &[Tensor]) -> Result<Tensor> {
    LayerNorm::new(x[1].clone(), x[2].clone(), 1e-5).forward(&x[0])
}

fn group_norm(x: &[Tensor]) -> Result<Tensor> {
    GroupNorm::new(x[1].clone(), x[2].clone(), 6, 3, 1e-5)?.forward(&x[0])
}

fn instance_norm(x: &[Tensor]) -> Result<Tensor> {
    InstanceNorm::new(3, None, 1e-5)?.forward(&x[0])
}

fn rms_norm(x: &[Tensor]) -> Result<Tensor> {
    RmsNorm::new(x[1].clone(), 1e-5).forward(&x[0])
}

#[test]
fn results_gradients_and_their_dtypes_are_those_of_pytorch() {
    let golden = include_bytes!("../golden/autocast.safetensors");
    let golden: HashMap<String, Tensor> = safetensors::load_buffer(golden, &Device::Cpu).unwrap();
    let mut left = golden.len();
    let mut case = |name: &str, shapes: &[&[usize]], sixteen: &[usize], run: Run| {
        let dtype = |index| if sixteen.contains(&index) { DType::BF16 } else { DType::F32 };
        let inputs: Vec<Var> =
            shapes.iter().enumerate().map(|(index, shape)| wave(shape, index, dtype(index))).collect();
        let tensors: Vec<Tensor> = inputs.iter().map(|input| input.as_tensor().clone()).collect();
        let y = autocast(DType::BF16, || run(&tensors)).unwrap();
        let check = |result: &str, ours: &Tensor| {
            let theirs = &golden[&format!("{name}|{result}")];
            check(&format!("{name}: {result}"), theirs.dtype(), ours, theirs);
        };
        check("y", &y);
        let weight = |j: usize| (0.9 * j as f64 + 0.1).cos();
        let dy: Vec<f64> = (0..y.elem_count()).map(weight).collect();
        let dy = Tensor::from_vec(dy, y.shape(), &Device::Cpu).unwrap().to_dtype(y.dtype()).unwrap();
        let loss = (y.to_dtype(DType::F32).unwrap() * dy.to_dtype(DType::F32).unwrap()).unwrap().sum_all().unwrap();
        let gradients = loss.backward().unwrap();
        for (index, input) in inputs.iter().enumerate() {
            check(&format!("d{index}"), gradients.get(input).unwrap());
        }
        left -= 1 + inputs.len();
    };
    case("linear", &[&[5, 37], &[18, 37], &[18]], &[], &linear);
    case("linear of 16 bits", &[&[5, 37], &[18, 37], &[18]], &[0], &linear);
    case("conv1d", &[&[2, 5, 8], &[6, 5, 3], &[6]], &[], &conv1d);
    case("conv2d", &[&[2, 5, 8, 8], &[6, 5, 3, 3], &[6]], &[], &conv2d);
    case("conv_transpose1d", &[&[2, 4, 5], &[4, 3, 3], &[3]], &[], &conv_transpose1d);
    case("conv_transpose2d", &[&[2, 4, 4, 5], &[4, 3, 3, 3], &[3]], &[], &conv_transpose2d);
    case("attention", &[&[1, 2, 6, 8][..]; 3], &[], &attention);
    case("linear_cross_entropy", &[&[6, 8], &[10, 8], &[10]], &[], &|x| {
        linear_cross_entropy(&x[0], &x[1], Some(&x[2]), &classes()?)
    });
    case("softmax", &[&[4, 33]], &[0], &|x| softmax(&x[0], 1));
    case("log_softmax", &[&[4, 33]], &[0], &|x| log_softmax(&x[0], 1));
    case("layer_norm", &[&[5, 24], &[24], &[24]], &[0], &layer_norm);
    case("rms_norm", &[&[5, 24], &[24]], &[0], &rms_norm);
    case("group_norm", &[&[2, 6, 4, 5], &[6], &[6]], &[0], &group_norm);
    case("instance_norm", &[&[2, 3, 4, 5]], &[0], &instance_norm);
    case("cross_entropy", &[&[6, 10]], &[0], &|x| cross_entropy(&x[0], &classes()?));
    case("ctc_loss", &[&[5, 2, 4]], &[0], &|x| {
        let targets = Tensor::new(&[[1u32, 2], [3, 0]], &Device::Cpu)?;
        ctc_loss(&log_softmax(&x[0], 2)?, &targets, &[5, 4], &[2, 1], CtcLossOptions::default())
    });
    case("mse_loss", &[&[6, 10][..]; 2], &[0, 1], &|x| loss::mse(&x[0], &x[1]));
    case("matmul", &[&[2, 3, 5, 7], &[2, 3, 7, 4]], &[], &|x| matmul(&x[0], &x[1]));
    case("matmul of 16 bits", &[&[2, 5, 7], &[7, 4]], &[0], &|x| matmul(&x[0], &x[1]));
    case("cat", &[&[3, 17], &[3, 5]], &[1], &|x| cat(&[&x[0], &x[1]], 1));
    case("add", &[&[3, 17][..]; 2], &[1], &|x| add(&x[0], &x[1]));
    case("lstm", &LSTM, &[], &recurrent);
    assert_eq!(left, 0, "cases of the file without a test");
}

/// The dtypes of results for inputs of f32 and of bf16, on PyTorch's lists.
fn by_list(names: &[&str]) -> [DType; 2] {
    let lists = include_str!("../golden/autocast.txt");
    let of = |name: &str| {
        let lists = lists.lines().filter(|line| line.split(' ').any(|function| function == name));
        let lists: Vec<&str> = lists.map(|line| line.split(':').next().unwrap()).collect();
        match lists[..] {
            ["16 bits"] => [DType::BF16; 2],
            ["f32"] => [DType::F32; 2],
            [] | ["widest"] => [DType::F32, DType::BF16],
            _ => panic!("{name} is on {lists:?}"),
        }
    };
    let dtypes: Vec<_> = names.iter().map(|name| of(name)).collect();
    assert!(dtypes.iter().all(|these| these == &dtypes[0]), "{names:?}: {dtypes:?}");
    dtypes[0]
}

/// Parameters are f32. What PyTorch has on no list takes any dtype.
#[test]
fn each_function_is_on_pytorchs_list() {
    let run = |names: &[&str], shapes: &[&[usize]], parameters: usize, run: Run| {
        for (dtype, expected) in [DType::F32, DType::BF16].into_iter().zip(by_list(names)) {
            let dtype = |index| if index < shapes.len() - parameters { dtype } else { DType::F32 };
            let inputs = shapes.iter().enumerate().map(|(index, shape)| wave(shape, index, dtype(index)));
            let inputs: Vec<Tensor> = inputs.map(|input| input.as_tensor().clone()).collect();
            let y = autocast(DType::BF16, || run(&inputs)).unwrap();
            assert_eq!(y.dtype(), expected, "{names:?} of {:?}", dtype(0));
            if by_list(names) == [DType::BF16; 2] {
                let y = autocast(Autocast::Products(DType::BF16), || run(&inputs)).unwrap();
                assert_eq!(y.dtype(), dtype(0), "{names:?}");
            }
        }
    };
    run(&["linear", "matmul", "addmm"], &[&[5, 37], &[18, 37], &[18]], 2, &linear);
    run(&["matmul", "bmm"], &[&[2, 5, 7], &[2, 7, 3]], 0, &|x| matmul(&x[0], &x[1]));
    run(&["cat"], &[&[3, 17][..]; 2], 0, &|x| cat(&[&x[0], &x[1]], 0));
    run(&["conv1d"], &[&[2, 5, 8], &[6, 5, 3], &[6]], 2, &conv1d);
    run(&["conv2d"], &[&[2, 5, 8, 8], &[6, 5, 3, 3], &[6]], 2, &conv2d);
    run(&["conv_transpose1d"], &[&[2, 4, 5], &[4, 3, 3], &[3]], 2, &conv_transpose1d);
    run(&["conv_transpose2d"], &[&[2, 4, 4, 5], &[4, 3, 3, 3], &[3]], 2, &conv_transpose2d);
    run(&["scaled_dot_product_attention"], &[&[1, 2, 6, 8][..]; 3], 0, &attention);
    run(&["scaled_dot_product_attention"], &[&[2, 6, 24]], 0, &|x| {
        scaled_dot_product_attention_qkvpacked(&x[0], 2, AttentionOptions::default())
    });
    run(&["linear"], &LSTM, 4, &recurrent);
    run(&["linear"], &GRU, 4, &recurrent);
    run(&["softmax"], &[&[4, 33]], 0, &|x| softmax(&x[0], 1));
    run(&["softmax"], &[&[4, 0]], 0, &|x| softmax(&x[0], 1));
    run(&["log_softmax"], &[&[4, 33]], 0, &|x| log_softmax(&x[0], 1));
    run(&["layer_norm"], &[&[5, 24], &[24], &[24]], 2, &layer_norm);
    run(&["group_norm"], &[&[2, 6, 4, 5], &[6], &[6]], 2, &group_norm);
    // PyTorch calls batch_norm.
    run(&["instance_norm", "batch_norm"], &[&[2, 3, 4, 5]], 0, &instance_norm);
    run(&["rms_norm"], &[&[5, 24], &[24]], 1, &rms_norm);
    run(&["layer_norm"], &[&[5, 24], &[5, 24], &[24], &[24]], 2, &|x| {
        Ok(LayerNorm::new(x[2].clone(), x[3].clone(), 1e-5).add_norm(&x[0], &x[1])?.1)
    });
    run(&["log_softmax", "nll_loss"], &[&[6, 10]], 0, &|x| cross_entropy(&x[0], &classes()?));
    run(&["nll_loss"], &[&[6, 10]], 0, &|x| loss::nll(&x[0], &classes()?));
    run(&["mse_loss"], &[&[6, 10][..]; 2], 0, &|x| loss::mse(&x[0], &x[1]));
    run(&["smooth_l1_loss"], &[&[6, 10][..]; 2], 0, &|x| loss::huber(&x[0], &x[1], 1.0));
    run(&["binary_cross_entropy_with_logits"], &[&[6, 10][..]; 2], 0, &|x| {
        loss::binary_cross_entropy_with_logit(&x[0], &x[1])
    });
    run(&["add"], &[&[3, 17][..]; 2], 0, &|x| add(&x[0], &x[1]));
    run(&["relu"], &[&[3, 17]], 0, &|x| relu(&x[0]));
    run(&["gelu"], &[&[3, 17]], 0, &|x| gelu(&x[0]));
    run(&["silu"], &[&[3, 17]], 0, &|x| silu(&x[0]));
    run(&["max_pool2d"], &[&[2, 3, 7, 8]], 0, &|x| max_pool2d(&x[0], 3, MaxPool2dOptions::default()));
    run(&["avg_pool2d"], &[&[2, 3, 7, 8]], 0, &|x| avg_pool2d(&x[0], 3, AvgPool2dOptions::default()));
    run(&["interpolate", "upsample_bilinear2d"], &[&[1, 2, 4, 5]], 0, &|x| {
        interpolate(&x[0], (7, 9), InterpolateMode::Bilinear { align_corners: false })
    });
    run(&["dropout"], &[&[3, 17]], 0, &|x| candle_ddp_nn::Dropout::new(0.5).forward_t(&x[0], true));
    run(&["batch_norm"], &[&[2, 3, 4, 4], &[3], &[3]], 2, &|x| {
        let statistic = || Tensor::ones(3, DType::F32, &Device::Cpu);
        BatchNorm::new(3, statistic()?, statistic()?, x[1].clone(), x[2].clone(), 1e-5)?.forward_t(&x[0], true)
    });
    let indices = Tensor::new(&[1u32, 0], &Device::Cpu).unwrap();
    run(&["embedding"], &[&[7, 9]], 0, &|x| Embedding::new(x[0].clone(), 9).forward(&indices));
}

/// PyTorch promotes the products of a rotation, and the sum at the end of a residual block.
#[test]
fn arguments_of_two_dtypes_become_f32() {
    let of = |shape: &[usize], dtype| wave(shape, 0, dtype).as_detached_tensor();
    let (x, residual) = (of(&[2, 3, 4, 4], DType::BF16), of(&[2, 3, 4, 4], DType::F32));
    let (cos, sin) = (of(&[4, 2], DType::F32), of(&[4, 2], DType::F32));
    let ones = Tensor::ones(3, DType::F32, &Device::Cpu).unwrap();
    let norm = BatchNorm::new(3, ones.clone(), ones.clone(), ones.clone(), ones, 1e-5).unwrap();
    let run = || -> Result<[Tensor; 2]> { Ok([rope(&x, &cos, &sin)?, norm.forward_add_relu_t(&x, &residual, true)?]) };
    assert_eq!(autocast(DType::BF16, run).unwrap().map(|y| y.dtype()), [DType::F32; 2]);
    assert!(run().is_err() && autocast(Autocast::Products(DType::BF16), run).is_err());
    let both = || rope(&residual, &cos.to_dtype(DType::BF16)?, &sin.to_dtype(DType::BF16)?);
    assert_eq!(autocast(DType::BF16, both).unwrap().dtype(), DType::F32);
    let both = || add(&of(&[3], DType::F16), &of(&[3], DType::BF16));
    assert_eq!(autocast(DType::F16, both).unwrap().dtype(), DType::F32);
}

#[test]
fn only_products_have_16_bits_in_the_mode_for_any_model() {
    let [x, weight, bias] = [&[5, 37][..], &[18, 37], &[18]].map(|shape| wave(shape, 0, DType::F32));
    let inputs = [&x, &weight, &bias].map(|var| var.as_tensor().clone());
    let [lists, products] = [Autocast::Lists(DType::BF16), Autocast::Products(DType::BF16)].map(|mode| {
        let y = autocast(mode, || softmax(&linear(&inputs)?, 1)).unwrap();
        let gradients = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        let of = |var: &Var| gradients.get(var).unwrap().clone();
        [y, of(&x), of(&weight), of(&bias)]
    });
    for (lists, products) in lists.iter().zip(&products) {
        assert_eq!((lists.dtype(), floats(lists)), (DType::F32, floats(products)));
    }
    let product = |dtype: DType| {
        let x = x.to_dtype(dtype)?;
        autocast(Autocast::Products(DType::BF16), || linear(&[x, weight.as_tensor().clone()]))
    };
    assert_eq!(product(DType::F32).unwrap().dtype(), DType::F32);
    assert_eq!(product(DType::BF16).unwrap().dtype(), DType::BF16);
    let half = wave(&[4, 33], 0, DType::BF16).as_detached_tensor();
    let y = autocast(Autocast::Products(DType::BF16), || softmax(&half, 1)).unwrap();
    assert_eq!(y.dtype(), DType::BF16);
}

#[test]
fn f64_and_other_dtypes_than_those_of_16_bits() {
    let of = |shape: &[usize]| wave(shape, 0, DType::F64).as_detached_tensor();
    assert_eq!(autocast(DType::F16, || linear(&[of(&[5, 7]), of(&[3, 7])])).unwrap().dtype(), DType::F64);
    assert_eq!(autocast(DType::F16, || softmax(&of(&[5, 7]), 1)).unwrap().dtype(), DType::F64);
    let x = wave(&[5, 7], 0, DType::F32).as_detached_tensor();
    let runs: [Run; 2] = [&|x| linear(&[x[0].clone(), x[0].clone()]), &|x| softmax(&x[0], 1)];
    for run in runs {
        assert_error(autocast(DType::F64, || run(std::slice::from_ref(&x))), &["must be F16 or BF16, not F64"]);
    }
}

#[test]
fn the_state_is_nested_belongs_to_its_thread_and_ends_with_a_panic() {
    let (outer, inner) = (Autocast::Lists(DType::BF16), Autocast::Products(DType::F16));
    assert_eq!(autocast_mode(), None);
    autocast(DType::BF16, || {
        assert_eq!(autocast_mode(), Some(outer));
        autocast(inner, || {
            assert_eq!(autocast_mode(), Some(inner));
            autocast_off(|| assert_eq!(autocast_mode(), None));
            assert!(catch_unwind(AssertUnwindSafe(|| autocast_off(|| panic!("inside")))).is_err());
            assert_eq!(autocast_mode(), Some(inner));
        });
        assert_eq!(autocast_mode(), Some(outer));
        assert_eq!(std::thread::spawn(autocast_mode).join().unwrap(), None);
        let mode = autocast_mode();
        assert_eq!(std::thread::spawn(move || set_autocast(mode, autocast_mode)).join().unwrap(), Some(outer));
    });
    assert_eq!(autocast_mode(), None);
}

/// Its own weight twice, so that its gradient is the sum of two.
fn twice(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let convolution = Conv1d::new(weight.clone(), None, Conv1dConfig::default());
    convolution.forward(&relu(&convolution.forward(x)?)?)
}

#[test]
fn a_weight_that_changes_in_the_region_is_cast_again() {
    let (x, weight) = (wave(&[3, 4, 1], 0, DType::F32), wave(&[4, 4, 1], 1, DType::F32));
    let run = || twice(&x, &weight).unwrap();
    let (first, second) = autocast(DType::BF16, || {
        // Without a gradient, nothing is kept, nor taken later by a pass with one.
        let without = no_grad(run);
        assert!(!without.track_op());
        let first = run();
        assert_eq!(floats(&first), floats(&without));
        let gradients = first.to_dtype(DType::F32).unwrap().sum_all().unwrap().backward().unwrap();
        let gradient = gradients.get(&weight).unwrap();
        assert_eq!(gradient.dtype(), DType::F32);
        weight.set(&(weight.as_tensor() - gradient).unwrap()).unwrap();
        (first, run())
    });
    assert_ne!(floats(&first), floats(&second));
    assert_eq!(floats(&second), floats(&autocast(DType::BF16, run)));
    let stays = autocast(DType::BF16, || {
        no_grad(run);
        weight.set(&weight.ones_like().unwrap()).unwrap();
        no_grad(run)
    });
    assert_eq!(floats(&stays), floats(&autocast(DType::BF16, run)));
}

/// Each parameter, in every layer that casts one, by `Var::set` alone.
#[test]
fn parameters_that_are_set_in_the_region_are_cast_again() {
    let check = |name: &str, shapes: &[&[usize]], first: usize, run: Run| {
        let vars = || -> Vec<Var> { shapes.iter().zip(0..).map(|(of, at)| wave(of, at, DType::F32)).collect() };
        for index in first..shapes.len() {
            let vars = vars();
            let run = || run(&vars.iter().map(|var| var.as_tensor().clone()).collect::<Vec<_>>()).unwrap();
            let (before, after) = autocast(DType::BF16, || {
                let before = run();
                vars[index].set(&(vars[index].as_detached_tensor() * 2.0).unwrap()).unwrap();
                (before, run())
            });
            assert_ne!(floats(&before), floats(&after), "{name}, parameter {index}");
            assert_eq!(floats(&after), floats(&autocast(DType::BF16, run)), "{name}, parameter {index}");
        }
    };
    check("linear", &[&[5, 7], &[3, 7], &[3]], 1, &linear);
    check("linear_cross_entropy", &[&[6, 7], &[10, 7], &[10]], 1, &|x| {
        linear_cross_entropy(&x[0], &x[1], x.get(2), &classes()?)
    });
    check("matmul", &[&[5, 7], &[7, 3]], 0, &|x| matmul(&x[0], &x[1]));
    check("conv1d", &[&[2, 5, 8], &[6, 5, 3], &[6]], 1, &conv1d);
    check("conv2d", &[&[2, 5, 8, 8], &[6, 5, 3, 3], &[6]], 1, &conv2d);
    check("conv_transpose1d", &[&[2, 4, 5], &[4, 3, 3], &[3]], 1, &conv_transpose1d);
    check("conv_transpose2d", &[&[2, 4, 4, 5], &[4, 3, 3, 3], &[3]], 1, &conv_transpose2d);
    check("attention", &[&[1, 2, 6, 8][..]; 3], 0, &attention);
    check("lstm", &LSTM, 3, &recurrent);
    check("gru", &GRU, 2, &recurrent);
}

/// Exactly as if they had been cast before, in all products. Their gradients have the bits of sums in f32.
#[test]
fn linear_layers_and_heads_round_their_weights() {
    let arguments = [wave(&[37, 45], 0, DType::F32), wave(&[51, 45], 1, DType::F32), wave(&[51], 2, DType::F32)];
    let targets = Tensor::arange(0u32, 37, &Device::Cpu).unwrap();
    let head = |x: &[Tensor]| linear_cross_entropy(&x[0], &x[1], x.get(2), &targets);
    for (name, run) in [("linear", &linear as Run), ("linear_cross_entropy", &head)] {
        for dtype in [DType::BF16, DType::F16] {
            let tensors = |vars: &[Var]| vars.iter().map(|var| var.as_tensor().clone()).collect::<Vec<_>>();
            let y = autocast(dtype, || run(&tensors(&arguments))).unwrap();
            let narrow = arguments.each_ref().map(|t| Var::from_tensor(&t.to_dtype(dtype).unwrap()).unwrap());
            let y16 = run(&tensors(&narrow)).unwrap();
            assert_eq!(floats(&y), floats(&y16), "{name}, {dtype:?}");
            let gradients = [(y, &arguments), (y16, &narrow)].map(|(y, arguments)| {
                let gradients = y.to_dtype(DType::F32).unwrap().sqr().unwrap().sum_all().unwrap().backward().unwrap();
                arguments.each_ref().map(|argument| gradients.get(argument).unwrap().clone())
            });
            let [[dx, d_weight, _], [dx16, d_weight16, _]] = &gradients;
            assert_eq!(floats(dx), floats(dx16), "{name}, {dtype:?}");
            let rounded = d_weight.to_dtype(dtype).unwrap();
            assert_eq!(floats(&rounded), floats(d_weight16), "{name}, {dtype:?}: rounded, they are the same");
            assert_ne!(floats(d_weight), floats(d_weight16), "{name}, {dtype:?}: the first are not rounded");
        }
    }
}

/// The backward pass runs outside of the region, and inside of another one.
#[test]
fn a_checkpoint_casts_again_as_before() {
    let (x, weight) = (wave(&[3, 4, 1], 0, DType::F32), wave(&[4, 4, 1], 1, DType::F32));
    let results = |y: &Tensor, outside: Option<Autocast>| {
        let loss = y.to_dtype(DType::F32).unwrap().sqr().unwrap().sum_all().unwrap();
        let gradients = set_autocast(outside, || loss.backward()).unwrap();
        [Some(y), gradients.get(&x), gradients.get(&weight)].map(|t| (t.unwrap().dtype(), floats(t.unwrap())))
    };
    for mode in [Autocast::Lists(DType::BF16), Autocast::Products(DType::BF16)] {
        let expected = results(&autocast(mode, || twice(&x, &weight)).unwrap(), None);
        for outside in [None, Some(Autocast::Lists(DType::F16)), Some(mode)] {
            let weight = weight.as_tensor().clone();
            let y = autocast(mode, || checkpoint(&[&x], move |x| twice(&x[0], &weight))).unwrap();
            assert_eq!(results(&y, outside), expected, "{mode:?} inside of {outside:?}");
        }
    }
}
