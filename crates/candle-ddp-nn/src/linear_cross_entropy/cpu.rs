//! The head of a language model on a CPU: products, and the loops of the cross entropy.
use super::head::Head;
use crate::cross_entropy::{CrossEntropy, CrossEntropyOptions};
use crate::gemm::{Strides, gemm, product, threads};
use candle_core::{DType, Result, Shape, Storage, Tensor, WithDType};
use candle_ddp_tensor::borrow::{slice_tensor, with_slice};
use candle_ddp_tensor::function::{Function, apply};
use candle_ddp_tensor::{Element, dispatch, vectorise};
use std::marker::PhantomData;

/// The arguments have been checked.
pub(super) fn linear_cross_entropy(head: &Head, targets: &Tensor, options: &CrossEntropyOptions) -> Result<Tensor> {
    let losses = CrossEntropy::new(targets, head.weight.dim(0)?, options)?;
    dispatch!(head.x.dtype(), "linear_cross_entropy", T => {
        type Real = <T as Element>::Real;
        match head.weight.dtype() == head.x.dtype() {
            true => apply_with::<T, T>(head, &losses),
            false => apply_with::<T, Real>(head, &losses),
        }
    })
}

/// A weight of another type than `T` is rounded to `T` when it is multiplied.
fn apply_with<T: Element, W: Element<Real = T::Real>>(head: &Head, losses: &CrossEntropy) -> Result<Tensor> {
    let (loss, gradients) = with_slice::<T, _>(head.x, |x| {
        with_slice::<W, _>(head.weight, |weight| match head.bias {
            Some(bias) => with_slice::<T, _>(bias, |bias| run(head, losses, x, weight, Some(bias))),
            None => run(head, losses, x, weight, None),
        })
    })?;
    let loss = Storage::Cpu(T::Real::to_cpu_storage_owned(vec![T::Real::from_f64(loss)]));
    apply(&head.arguments(), (loss, Shape::from(())), gradients)
}

/// Returns the loss, and its gradients as far as they are needed.
fn run<T: Element, W: Element<Real = T::Real>>(
    head: &Head,
    losses: &CrossEntropy,
    x: &[T],
    weight: &[W],
    bias: Option<&[T]>,
) -> Result<(f64, Gradients<T, W>)> {
    let (rows, features, classes) = head.extents()?;
    let needed = head.needed();
    // In f16, gradients of the logits that are divided by the number of samples would vanish. But an infinite factor, of a mean of no
    // samples, must meet the zeros of samples that are ignored first.
    let (of_logits, factor) = if losses.scale.is_infinite() { (losses.scale, 1.0) } else { (1.0, losses.scale) };
    let sizes = [x.len(), weight.len(), classes];
    let mut sums = [0, 1, 2].map(|index| needed[index].then(|| vec![T::Real::default(); sizes[index]]));
    let mut loss = 0.0;
    for start in (0..rows).step_by(head.chunk) {
        let samples = start..rows.min(start + head.chunk);
        let (count, elements) = (samples.len(), samples.start * features..samples.end * features);
        let x = (&x[elements.clone()], Strides::rows(features));
        let transposed = (weight, Strides::transposed(features));
        let logits = product((count, classes, features), x, transposed, bias, threads())?;
        let (part, shape) = (losses.part(samples, of_logits), Shape::from((count, classes)));
        loss += part.sum(&logits, &shape);
        if !needed.contains(&true) {
            continue;
        }
        let d_logits = part.backward(&logits, &shape, 1.0)?;
        drop(logits);
        let [dx, d_weight, d_bias] = &mut sums;
        if let Some(dx) = dx {
            let factors = ((&d_logits[..], Strides::rows(classes)), (weight, Strides::rows(features)));
            gemm((count, features, classes), &mut dx[elements], false, factors.0, factors.1, threads())?;
        }
        if let Some(d_weight) = d_weight {
            let d_logits = (&d_logits[..], Strides::transposed(classes));
            gemm((classes, features, count), d_weight, start > 0, d_logits, x, threads())?;
        }
        if let Some(d_bias) = d_bias {
            vectorise!(|| {
                for row in d_logits.chunks_exact(classes) {
                    d_bias.iter_mut().zip(row).for_each(|(sum, value)| *sum += value.widen());
                }
            });
        }
    }
    let shapes = head.arguments().into_iter().map(|argument| argument.shape().clone()).collect();
    Ok((loss * losses.scale, Gradients { sums, shapes, factor, types: PhantomData }))
}

/// The gradients of the arguments for a loss with the gradient 1, without the factor.
struct Gradients<T: Element, W> {
    sums: [Option<Vec<T::Real>>; 3],
    shapes: Vec<Shape>,
    factor: f64,
    /// The types of the arguments and of the weight.
    types: PhantomData<(T, W)>,
}

impl<T: Element, W: Element<Real = T::Real>> Function for Gradients<T, W> {
    fn name(&self) -> &'static str {
        "linear_cross_entropy"
    }

    fn backward(&self, gradient: &Tensor, needed: &[bool]) -> Result<Vec<Option<Tensor>>> {
        let gradient = gradient.to_dtype(DType::F64)?.to_scalar::<f64>()?;
        let factor = T::Real::from_f64(gradient * self.factor);
        let gradients = self.sums.iter().zip(&self.shapes).zip(needed).enumerate();
        let gradient = |(index, ((sums, shape), needed)): (usize, ((&Option<Vec<_>>, &Shape), &bool))| {
            let sums = sums.as_ref().filter(|_| *needed)?;
            Some(if index == 1 { scaled::<W>(sums, factor, shape) } else { scaled::<T>(sums, factor, shape) })
        };
        Ok(gradients.map(gradient).collect())
    }
}

fn scaled<E: Element>(sums: &[E::Real], factor: E::Real, shape: &Shape) -> Tensor {
    let values: Vec<E> = vectorise!(|| sums.iter().map(|sum| E::narrow(*sum * factor)).collect());
    slice_tensor(values, shape)
}
