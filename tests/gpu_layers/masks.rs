//! The ReLU behind the sum of a normalised batch and a residual connection keeps a bit for each element, and not the sum's terms.
use super::channels_last::channels_last;
use super::on_gpu;
use crate::common::{floats, new_var};
use candle_core::backprop::GradStore;
use candle_core::{DType, ModuleT, Tensor};
use candle_ddp::nn::{BatchNorm, cat, flatten, permute};

/// What is kept, where the bits of a vector are in a byte, and the elements of the forward pass or those of the backward pass begin
/// between vectors, or are none.
#[test]
fn a_bit_for_each_element_is_kept_of_a_sum_behind_a_norm() {
    on_gpu("a_bit_for_each_element_is_kept_of_a_sum_behind_a_norm", |gpu| {
        let shapes = [
            ([2, 8, 4, 4], false),
            ([3, 16, 7, 7], false),
            ([2, 5, 3, 3], false),
            ([2, 16, 5, 3], true),
            ([3, 3, 5, 2], true),
        ];
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            for ((shape, is_last), (skipped, skipped_back)) in
                shapes.into_iter().flat_map(|shape| [(0, 0), (1, 0), (0, 1), (1, 1)].map(|skipped| (shape, skipped)))
            {
                let elements = shape.iter().product::<usize>();
                let var = |shape: &[usize], seed| new_var(shape, seed, dtype, gpu);
                let (x, z) = (var(&shape, 1), var(&[elements + skipped], 2));
                let dy = var(&[elements + skipped_back], 3);
                // Contiguous, or channels_last, from element `skipped` on.
                let in_memory = if is_last { [shape[0], shape[2], shape[3], shape[1]] } else { shape };
                let view = |flat: &Tensor, skipped| {
                    let view = flat.narrow(0, skipped, elements).unwrap().reshape(&in_memory).unwrap();
                    if is_last { view.permute((0, 3, 1, 2)).unwrap() } else { view }
                };
                let batch = if is_last { channels_last(&x) } else { x.as_tensor().clone() };
                let statistic = |value: f64| Tensor::full(value, shape[1], gpu).unwrap().to_dtype(dtype).unwrap();
                let (weight, bias) = (var(&shape[1..2], 4), var(&shape[1..2], 5));
                let [w, b] = [&weight, &bias].map(|var| var.as_tensor().clone());
                let layer = BatchNorm::new(shape[1], statistic(0.0), statistic(1.0), w, b, 1e-5).unwrap();
                let y = layer.forward_add_relu_t(&batch, &view(&z, skipped), true).unwrap();
                let in_order = if is_last { permute(&y, (0, 2, 3, 1)).unwrap() } else { y };
                let positive: Vec<bool> = floats(&in_order).iter().map(|y| *y > 0.0).collect();
                // The backward pass does not need it any more.
                z.set(&z.zeros_like().unwrap()).unwrap();
                // The gradient of y is a part of dy.
                let before = Tensor::zeros(skipped_back, dtype, gpu).unwrap();
                let shifted = cat(&[&before, &flatten(&in_order, 0, 3).unwrap()], 0).unwrap();
                let grads = (shifted * dy.as_tensor()).unwrap().sum_all().unwrap().backward().unwrap();
                let passed = |(dy, passes): (&f32, &bool)| if *passes { *dy } else { 0.0 };
                let expected: Vec<f32> = floats(&dy)[skipped_back..].iter().zip(&positive).map(passed).collect();
                let found = &floats(grads.get(&z).unwrap())[skipped..];
                assert_eq!(found, expected, "{shape:?} from {skipped} and {skipped_back} on in {dtype:?}");
                if skipped_back == 0 {
                    // Bit for bit the gradients of a norm alone that gets what has passed.
                    let flat = Tensor::from_vec(expected, elements, gpu).unwrap().to_dtype(dtype).unwrap();
                    let alone = layer.forward_t(&batch, true).unwrap();
                    let alone = (alone * view(&flat, 0)).unwrap().sum_all().unwrap().backward().unwrap();
                    for (name, var) in [("input", &x), ("weight", &weight), ("bias", &bias)] {
                        let of = |grads: &GradStore| floats(grads.get(var).unwrap()).into_iter().map(f32::to_bits);
                        let (ours, others): (Vec<_>, Vec<_>) = (of(&grads).collect(), of(&alone).collect());
                        assert_eq!(ours, others, "{name} of {shape:?} from {skipped} on in {dtype:?}");
                    }
                }
            }
        }
    });
}
