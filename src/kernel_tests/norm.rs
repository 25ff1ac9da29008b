//! Comparison of the norm kernels, without a GPU, with the norms on the CPU.
use super::{Memory, host, values};
use crate::kernels::host::Host;
use crate::kernels::norm::{Backward, Forward, Rows, backward, forward};
use crate::nn::LayerNorm;
use candle_core::{DType, Device, Module, Tensor, Var, WithDType};
use half::{bf16, f16};

/// Large enough that rows of nearly equal numbers do not produce large results.
const EPS: f64 = 0.1;
/// Numbers of rows and of their elements: for a warp and for a block, more rows than a part has, and more vectors than a block has
/// threads.
const SHAPES: [(usize, usize); 9] =
    [(1, 1), (3, 15), (40, 256), (33, 257), (7, 1000), (100, 3), (10, 4097), (34, 2080), (700, 24)];

fn close(found: &[f64], expected: &Tensor, tolerance: f64, what: &str) {
    let expected: Vec<f64> = expected.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap();
    let largest = expected.iter().fold(1f64, |largest, value| largest.max(value.abs()));
    assert_eq!(found.len(), expected.len(), "{what}");
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!((found - expected).abs() <= tolerance * largest, "{what}[{index}]: {found}, not {expected}");
    }
}

/// `E` is the dtype of x, `S` the dtype of weight and bias: that of the arithmetic, or `E`.
fn norms_alike<E: WithDType, S: WithDType>(host: &Host, tolerance: f64) {
    let kinds = [(true, true, 1), (true, true, 16), (true, false, 16), (false, false, 1)];
    for ((rows, size), (centred, with_bias, bytes)) in
        SHAPES.into_iter().flat_map(|shape| kinds.map(|kind| (shape, kind)))
    {
        let what = |part: &str| {
            format!("{part} of {:?} {rows} x {size}, centred {centred}, bias {with_bias}, aligned to {bytes}", E::DTYPE)
        };
        let count = rows * size;
        let [x, dy] =
            [1, 2].map(|seed| values(count, seed).into_iter().map(|value| 2. * value + 0.5).collect::<Vec<_>>());
        let [weight, bias] = [3, 4].map(|seed| values(size, seed));

        let [residual, earlier] = [5, 6].map(|seed| values(count, seed));
        let empty = || vec![0.; count];
        let tensors = [x.clone(), dy.clone(), empty(), empty(), residual, earlier, empty(), empty(), empty(), empty()];
        let mut wide = Memory::<E>::placed(tensors.into_iter(), bytes);
        let zeros = vec![0.; size];
        let tensors = [weight.clone(), bias.clone(), zeros.clone(), zeros];
        let mut narrow = Memory::<S>::placed(tensors.into_iter(), bytes);
        let of_rows = Rows { dtype: E::DTYPE, rows, size, eps: EPS, centred, is_narrow: E::DTYPE == S::DTYPE };
        let forward_addresses = Forward {
            x: wide.address(0),
            weight: narrow.address(0),
            bias: if with_bias { narrow.address(1) } else { 0 },
            y: wide.address(2),
            residual: None,
        };
        let statistics = forward(host, of_rows, forward_addresses).unwrap().unwrap();
        let mut sums = Memory::<f64>::placed([vec![0.; of_rows.sums()]].into_iter(), bytes);
        let addresses = Backward {
            x: wide.address(0),
            weight: narrow.address(0),
            dy: wide.address(1),
            dx: wide.address(3),
            d_weight: narrow.address(2),
            d_bias: narrow.address(3),
            sums: sums.address(0),
            earlier: 0,
        };
        assert!(!backward(host, of_rows, &statistics, addresses).unwrap());

        // The kernels that keep rows in registers add tensors on the way, as if these had been added before or after.
        let bytes_of_row = size * E::DTYPE.size_in_bytes();
        let fits = bytes == 16 && bytes_of_row.is_multiple_of(16) && bytes_of_row <= 1 << 14;
        let sum = |wide: &Memory<E>, a, b| -> Vec<f64> {
            let pairs = wide.get(a, count).into_iter().zip(wide.get(b, count));
            pairs.map(|(a, b)| E::from_f64(a + b).to_f64()).collect()
        };
        let onto = Backward { dx: wide.address(7), earlier: wide.address(5), ..addresses };
        assert_eq!(backward(host, of_rows, &statistics, onto).unwrap(), fits, "{}", what("dx"));
        let dx = if fits { sum(&wide, 5, 3) } else { wide.get(3, count) };
        assert_eq!(wide.get(7, count), dx, "{}", what("dx and an earlier gradient"));
        let residual = Some([wide.address(4), wide.address(6)]);
        let of_sum = Forward { y: wide.address(8), residual, ..forward_addresses };
        let statistics = forward(host, of_rows, of_sum).unwrap();
        assert_eq!(statistics.is_some(), fits, "{}", what("the sum"));
        if fits {
            assert_eq!(wide.get(6, count), sum(&wide, 0, 4), "{}", what("the sum"));
            let alone = Forward { x: wide.address(6), y: wide.address(9), ..forward_addresses };
            assert_eq!(forward(host, of_rows, alone).unwrap(), statistics, "{}", what("the sum's statistics"));
            assert_eq!(wide.get(8, count), wide.get(9, count), "{}", what("the sum's norm"));
        }

        let var = |values: Vec<f64>, shape: &[usize], dtype| {
            Var::from_tensor(&Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()).unwrap()
        };
        let (x, dy) = (var(x, &[rows, size], E::DTYPE), var(dy, &[rows, size], E::DTYPE));
        let (weight, bias) = (var(weight, &[size], S::DTYPE), var(bias, &[size], S::DTYPE));
        let (w, b) = (weight.as_tensor().clone(), bias.as_tensor().clone());
        let norm = match (centred, with_bias) {
            (true, true) => LayerNorm::new(w, b, EPS),
            (true, false) => LayerNorm::new_no_bias(w, EPS),
            _ => LayerNorm::rms_norm(w, EPS),
        };
        let y = norm.forward(&x).unwrap();
        let grads = (&y * dy.as_tensor()).unwrap().backward().unwrap();
        close(&wide.get(2, count), &y, tolerance, &what("y"));
        close(&wide.get(3, count), grads.get(&x).unwrap(), tolerance, &what("dx"));
        close(&narrow.get(2, size), grads.get(&weight).unwrap(), tolerance, &what("the gradient of the weight"));
        if with_bias {
            close(&narrow.get(3, size), grads.get(&bias).unwrap(), tolerance, &what("the gradient of the bias"));
        }
    }
}

#[test]
fn norms_match_the_cpu() {
    let Some(host) = host("norms_match_the_cpu") else { return };
    norms_alike::<f32, f32>(&host, 2e-6);
    norms_alike::<f64, f64>(&host, 1e-12);
    norms_alike::<f16, f32>(&host, 1e-3);
    norms_alike::<bf16, f32>(&host, 8e-3);
    norms_alike::<f16, f16>(&host, 1e-3);
    norms_alike::<bf16, bf16>(&host, 8e-3);
}
