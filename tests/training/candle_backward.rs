//! What docs/migrating.md says of candle's backward passes. A test that fails after an update of candle is good news.
use crate::common::{assert_close, floats, tensor};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{ops, rotary_emb};

fn input(shape: &[usize]) -> Var {
    Var::from_tensor(&tensor(shape, 1)).unwrap()
}

/// The gradient of the sum of `f` of `x`, weighted so that no two elements count the same.
fn gradient(x: &Var, f: impl Fn(&Tensor) -> candle_core::Result<Tensor>) -> candle_core::Result<Option<Vec<f32>>> {
    let y = f(x)?;
    let loss = (&y * tensor(y.dims(), 2))?.sum_all()?;
    Ok(loss.backward()?.get(x).map(floats))
}

#[test]
fn fused_operations_have_no_backward() {
    let (x, ones) = (input(&[1, 2, 4, 8]), Tensor::ones(8, DType::F32, &Device::Cpu).unwrap());
    let (cos, sin) = (tensor(&[4, 4], 3), tensor(&[4, 4], 4));
    assert_eq!(gradient(&x, |x| ops::layer_norm(x, &ones, &ones, 1e-5)).unwrap(), None);
    assert_eq!(gradient(&x, |x| ops::rms_norm(x, &ones, 1e-5)).unwrap(), None);
    assert_eq!(gradient(&x, ops::softmax_last_dim).unwrap(), None);
    assert_eq!(gradient(&x, |x| rotary_emb::rope(x, &cos, &sin)).unwrap(), None);
    assert_eq!(gradient(&x, |x| rotary_emb::rope_i(x, &cos, &sin)).unwrap(), None);
    // Those that do.
    assert!(gradient(&x, |x| ops::softmax(x, 3)).unwrap().is_some());
    assert!(gradient(&x, |x| rotary_emb::rope_slow(x, &cos, &sin)).unwrap().is_some());
    assert!(gradient(&x, |x| rotary_emb::rope_i_slow(x, &cos, &sin)).unwrap().is_some());
}

#[test]
fn pooling_by_maximum_has_too_small_a_gradient() {
    let x = input(&[1, 1, 4, 6]);
    let pooled = gradient(&x, |x| x.max_pool2d(2)).unwrap().unwrap();
    let windows = |x: &Tensor| x.reshape((1, 1, 2, 2, 3, 2))?.max(5)?.max(3);
    let right = gradient(&x, windows).unwrap().unwrap();
    assert_eq!(floats(&x.max_pool2d(2).unwrap()), floats(&windows(&x).unwrap()));
    assert_close(&pooled, &right.iter().map(|g| g / 4.0).collect::<Vec<_>>(), 1e-6, "a quarter");
    assert!(gradient(&x, |x| x.max_pool2d_with_stride(2, 1)).is_err());
}

#[test]
fn pooling_by_average_needs_whole_windows() {
    let mean = |x: &Tensor| x.reshape((1, 1, 2, 2, 3, 2))?.mean(5)?.mean(3);
    let x = input(&[1, 1, 4, 6]);
    let (actual, expected) = (gradient(&x, |x| x.avg_pool2d(2)).unwrap(), gradient(&x, mean).unwrap());
    assert_close(&actual.unwrap(), &expected.unwrap(), 1e-6, "gradient");
    assert!(gradient(&x, |x| x.avg_pool2d_with_stride(2, 1)).is_err());
    // The last row and column are in no window, and get a gradient all the same.
    let x = input(&[1, 1, 5, 7]);
    let cut = |x: &Tensor| mean(&x.narrow(2, 0, 4)?.narrow(3, 0, 6)?.contiguous()?);
    let (actual, right) = (gradient(&x, |x| x.avg_pool2d(2)).unwrap().unwrap(), gradient(&x, cut).unwrap().unwrap());
    assert!(right[6] == 0.0 && actual[6] != 0.0);
}

#[test]
fn upsampling_forgets_the_other_uses_of_its_input() {
    let double = |x: &Tensor| match x.rank() {
        3 => x.upsample_nearest1d(8)?.reshape((1, 1, 4, 2))?.mean(3),
        _ => x.upsample_nearest2d(4, 4)?.avg_pool2d(2),
    };
    // What is doubled and averaged is what it was: its gradient is that of the identity.
    for x in [input(&[1, 1, 4]), input(&[1, 1, 2, 2])] {
        let identity = gradient(&x, |x| x * 1.0).unwrap().unwrap();
        assert_close(&gradient(&x, double).unwrap().unwrap(), &identity, 1e-6, "alone");
        let sums = [gradient(&x, |x| double(x)? + (x * 1.0)?), gradient(&x, |x| (x * 1.0)? + double(x)?)];
        let right: Vec<f32> = identity.iter().map(|g| 2.0 * g).collect();
        let lost = |sum: Vec<f32>| sum.iter().zip(&right).any(|(sum, right)| (sum - right).abs() > 1e-3);
        assert!(sums.into_iter().any(|sum| lost(sum.unwrap().unwrap())), "{:?}", x.dims());
    }
    let x = input(&[1, 1, 2, 2]);
    assert!(gradient(&x, |x| x.upsample_nearest2d(4, 6)).is_err());
    assert!(gradient(&x, |x| x.upsample_nearest2d(3, 3)).is_err());
    assert!(gradient(&x, |x| x.upsample_bilinear2d(4, 4, false)).is_err());
}

#[test]
fn convolutions() {
    // With stride 2, the width must leave over as much as the height.
    let kernel = tensor(&[3, 2, 3, 3], 5);
    for (height, width, works) in [(8, 8, true), (8, 10, true), (8, 7, false)] {
        let x = input(&[1, 2, height, width]);
        assert_eq!(gradient(&x, |x| x.conv2d(&kernel, 1, 2, 1, 1)).is_ok(), works, "{height}×{width}");
    }
    let x = input(&[1, 2, 8]);
    let kernel = tensor(&[2, 2, 3], 6);
    assert!(gradient(&x, |x| x.conv_transpose1d(&kernel, 0, 0, 1, 1, 1)).is_err());
}

#[test]
fn convolutions_in_one_dimension() {
    // Two samples and two output channels: PyTorch's gradients of Σ y · (0, 1, …, 11).
    let x = Var::from_tensor(&Tensor::arange(0f32, 8., &Device::Cpu).unwrap().reshape((2, 1, 4)).unwrap()).unwrap();
    let kernel = Var::from_tensor(&Tensor::new(&[[[1f32, 2.]], [[3., 5.]]], &Device::Cpu).unwrap()).unwrap();
    let gradients = |y: Tensor| {
        let weights = Tensor::arange(0f32, y.elem_count() as f32, &Device::Cpu).unwrap();
        let loss = (y.flatten_all().unwrap() * weights).unwrap().sum_all().unwrap();
        let grads = loss.backward().unwrap();
        [&x, &kernel].map(|var| floats(grads.get(var).unwrap()))
    };
    let dx = [9., 28., 39., 29., 33., 94., 105., 71.];
    let dw = [112., 136., 166., 208.];
    let [wrong_dx, wrong_dw] = gradients(x.conv1d(&kernel, 0, 1, 1, 1).unwrap());
    assert!(wrong_dx != dx && wrong_dw == [67., 82., 175., 226.], "{wrong_dx:?} {wrong_dw:?}");
    // As a convolution in two dimensions it is right.
    let flat = x.unsqueeze(2).unwrap().conv2d(&kernel.unsqueeze(2).unwrap(), 0, 1, 1, 1).unwrap();
    let [right_dx, right_dw] = gradients(flat);
    assert_eq!((&right_dx[..], &right_dw[..]), (&dx[..], &dw[..]));
}

#[test]
fn convolutions_in_one_dimension_are_wrong_forward() {
    let apart = |a: &[f32], b: &[f32]| a.len() == b.len() && a.iter().zip(b).any(|(a, b)| (a - b).abs() > 0.1);
    let sample = |x: &Tensor, index| x.narrow(0, index, 1).unwrap().contiguous().unwrap();
    // Each sample by itself is right.
    let (x, kernel) = (tensor(&[2, 2, 5], 1), tensor(&[2, 3, 3], 6));
    let transposed = |x: &Tensor| floats(&x.conv_transpose1d(&kernel, 0, 0, 1, 1, 1).unwrap());
    let right = [transposed(&sample(&x, 0)), transposed(&sample(&x, 1))].concat();
    let flat = |x: &Tensor| x.unsqueeze(2).unwrap().conv_transpose2d(&kernel.unsqueeze(2).unwrap(), 0, 0, 1, 1);
    assert_close(&floats(&flat(&x).unwrap()), &right, 1e-6, "in two dimensions");
    assert!(apart(&transposed(&x), &right));
    // The same kernel in another layout.
    let kernel = tensor(&[3, 2, 3], 7);
    let strided = kernel.t().unwrap().contiguous().unwrap().t().unwrap();
    let [right, wrong] = [&kernel, &strided].map(|kernel| floats(&x.conv1d(kernel, 0, 1, 1, 1).unwrap()));
    assert!(apart(&wrong, &right));
}

/// candle exchanges the gradients that `scatter` and `scatter_add` have for the tensor that is written to.
#[test]
fn scattering() {
    let source = tensor(&[2], 3);
    let index = Tensor::new(&[1u32, 2], &Device::Cpu).unwrap();
    let x = input(&[2]);
    let seen = tensor(&[2], 2).to_vec1::<f32>().unwrap();
    // Overwritten elements have no influence, and get a gradient.
    assert_eq!(gradient(&x, |x| x.scatter(&Tensor::new(&[1u32, 0], x.device())?, &source, 0)).unwrap(), Some(seen));
    // Elements that are added to keep theirs, and lose it.
    let lost = gradient(&x, |x| x.scatter_add(&Tensor::new(&[1u32, 0], x.device())?, &source, 0)).unwrap();
    assert_eq!(lost, Some(vec![0., 0.]));
    // With a source smaller than the tensor there is no backward pass of `scatter_add`.
    let x = input(&[4]);
    assert!(gradient(&x, |x| x.scatter_add(&index, &source, 0)).is_err());
    let added = gradient(&x, |x| x.index_add(&index, &source, 0)).unwrap().unwrap();
    assert_eq!(added, floats(&tensor(&[4], 2)));
}

/// Where a function has no derivative, candle and PyTorch choose differently.
#[test]
fn conventions_at_kinks() {
    let ones = |x: &[f32], f: &dyn Fn(&Tensor) -> candle_core::Result<Tensor>| {
        let x = Var::new(x, &Device::Cpu).unwrap();
        floats(f(&x).unwrap().sum_all().unwrap().backward().unwrap().get(&x).unwrap())
    };
    assert_eq!(ones(&[-1., 0., 1.], &|x| x.relu()), [0., 1., 1.]); // PyTorch: 0 at 0
    assert_eq!(ones(&[-1., 0., 1.], &|x| x.abs()), [-1., 1., 1.]); // PyTorch: 0 at 0
    assert_eq!(ones(&[-1., 0., 2.], &|x| x.clamp(0f32, 1f32)), [0., 0.5, 0.]); // PyTorch: 1 at the bound
    assert_eq!(ones(&[3., 1., 3.], &|x| x.max(0)), [1., 0., 1.]); // PyTorch: to one of the equal ones
}

/// The gradient of `gelu_erf` multiplies by 0.398942, which is 1/√(2π) to six digits.
#[test]
fn gelu_is_differentiated_to_six_digits() {
    let x = Var::new(&[1f64], &Device::Cpu).unwrap();
    let gradient = |x: &Var| {
        let grads = x.gelu_erf().unwrap().sum_all().unwrap().backward().unwrap();
        grads.get(x).unwrap().to_vec1::<f64>().unwrap()[0]
    };
    // Φ(1) + φ(1).
    let right = 0.841_344_746_068_542_9 + 0.241_970_724_519_143_37;
    let error = (gradient(&x) - right).abs();
    assert!(1e-8 < error && error < 1e-6, "{error}");
}
