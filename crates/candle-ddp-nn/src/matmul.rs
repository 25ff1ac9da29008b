//! Products of two tensors of the graph.
use crate::autocast::{Casts, to_dtype};
use crate::gemm::{Strides, gemm, product, symmetric, threads};
use candle_core::backend::BackendStorage;
use candle_core::op::BackpropOp;
use candle_core::{DType, Result, Shape, Storage, Tensor, WithDType};
use candle_ddp_tensor::borrow::{slice_tensor, with_slice};
use candle_ddp_tensor::copy::snapshot_tensor;
use candle_ddp_tensor::error::describe_placed;
use candle_ddp_tensor::function::{Function, apply};
use candle_ddp_tensor::parallel::Each;
use candle_ddp_tensor::{Element, Error, dispatch, hold};
use rayon::prelude::*;

/// The products of the matrices in `a`, (…, m, k), with those in `b`, (…, k, n): `torch.matmul`, without its products of vectors. The
/// dimensions in front are the same in both, or `b` is one matrix for all in `a`.
///
/// Tensors of f32, f64, f16 and bf16 on CPUs and CUDA; sums are calculated in f32 (f64 for f64). Under
/// [`autocast`](crate::autocast()), it is a product like [`Linear`](crate::Linear)'s, while candle's [`Tensor::matmul`] casts nothing.
///
/// ```
/// # use candle_core::{Device, Result, Tensor};
/// # fn main() -> Result<()> {
/// use candle_ddp_nn::matmul;
/// let a = Tensor::new(&[[1f32, 2.], [3., 4.]], &Device::Cpu)?;
/// assert_eq!(matmul(&a, &Tensor::new(&[[1f32], [10.]], &Device::Cpu)?)?.to_vec2::<f32>()?, [[21.], [43.]]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// Returns [`InvalidArgument`](Error::Base), carried by candle's error, for shapes that do not fit, two dtypes or devices, and dtypes that
/// are not floating-point.
pub fn matmul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let Some(casts) = Casts::of_product([a, b])? else { return product_of(a, (b, b.dtype())) };
    // One matrix may be a parameter.
    let factor = if b.rank() == 2 { casts.unrounded(b) } else { casts.of(b) }?;
    casts.result(product_of(&casts.of(a)?, (&factor, casts.dtype_of(b)))?, a)
}

/// The products, with the second factor and the dtype that it is rounded to.
fn product_of(a: &Tensor, (b, dtype): (&Tensor, DType)) -> Result<Tensor> {
    let batch = a.dims().split_last_chunk::<2>();
    let fits = match (batch, b.dims()) {
        (Some((_, [_, k])), [rows, _]) => k == rows,
        (Some((batch, [_, k])), [of_b @ .., rows, _]) => k == rows && batch == of_b,
        _ => false,
    };
    if !fits || a.dtype() != dtype || !a.dtype().is_float() || !a.device().same_device(b.device()) {
        let (of_a, of_b) = (describe_placed(a), describe_placed(b));
        let reason = format!(
            "they are {of_a} and {of_b}: they must be (…, m, k) and (…, k, n) or (k, n), of the same floating-point dtype \
             and on the same device"
        );
        return Err(Error::invalid("the factors of matmul", reason).into());
    }
    [a, b].into_iter().try_for_each(hold::check)?;
    let factors = Matmul { a: a.detach(), b: b.detach() };
    let (storage, shape) = multiply(&factors.a, &to_dtype(&factors.b, dtype)?)?;
    apply(&[a, b], (storage, shape), factors)
}

/// The product of two matrices of one dtype on CPUs, without a graph and in the dtype of its sums. Sums of 16-bit numbers are f32, and stay unrounded. If
/// it `is_symmetric`, about half of it is calculated.
///
/// # Errors
/// Errors of candle, for other tensors.
pub fn matmul_sums(a: &Tensor, b: &Tensor, is_symmetric: bool) -> Result<Tensor> {
    let ((m, k), (of_b, n)) = (a.dims2()?, b.dims2()?);
    if k != of_b || is_symmetric && m != n {
        candle_core::bail!("a product of {} and {}", describe_placed(a), describe_placed(b))
    }
    let ((a, of_a), (b, of_b)) = (stored(&matrices(a, (1, m, k))?)?, stored(&matrices(b, (1, k, n))?)?);
    dispatch!(a.dtype(), "matmul", T => with_slice::<T, _>(&a, |a| with_slice::<T, _>(&b, |b| {
        let mut sums = vec![<T as Element>::Real::default(); m * n];
        match is_symmetric {
            true => symmetric((m, k), &mut sums, (a, of_a), (b, of_b), threads())?,
            false => gemm((m, n, k), &mut sums, false, (a, of_a), (b, of_b), threads())?,
        }
        Ok(slice_tensor(sums, &Shape::from((m, n))))
    })))
}

/// The factors, which are not tracked.
struct Matmul {
    a: Tensor,
    /// The second matrix in the dtype of `a`, or in f32, which is rounded to that dtype in each pass.
    b: Tensor,
}

impl Function for Matmul {
    fn name(&self) -> &'static str {
        "matmul"
    }

    fn backward(&self, gradient: &Tensor, needed: &[bool]) -> Result<Vec<Option<Tensor>>> {
        let Self { a, b } = self;
        let transposed = |x: &Tensor| x.transpose(x.rank() - 2, x.rank() - 1);
        let tensor = |(storage, shape)| Tensor::from_storage(storage, shape, BackpropOp::none(), false);
        let of_a = || multiply(gradient, &transposed(&to_dtype(b, a.dtype())?)?).map(tensor);
        let of_a = needed[0].then(of_a).transpose()?;
        let of_b = || {
            if b.rank() == a.rank() {
                return multiply(&transposed(a)?, gradient).map(tensor);
            }
            // One matrix for all: their rows are the rows of one product.
            let rows = |x: &Tensor| x.flatten_to(x.rank() - 2);
            multiply(&transposed(&rows(a)?)?, &rows(gradient)?).map(tensor)
        };
        let of_b = needed[1].then(of_b).transpose()?;
        Ok(vec![of_a, of_b.map(|gradient| to_dtype(&gradient, b.dtype())).transpose()?])
    }
}

/// The product of factors that fit.
fn multiply(a: &Tensor, b: &Tensor) -> Result<(Storage, Shape)> {
    let [m, k] = [a.dim(a.rank() - 2)?, a.dim(a.rank() - 1)?];
    let n = b.dim(b.rank() - 1)?;
    let shape = Shape::from([&a.dims()[..a.rank() - 1], &[n]].concat());
    if shape.elem_count() == 0 || k == 0 {
        return snapshot_tensor(&Tensor::zeros(&shape, a.dtype(), a.device())?, a.dtype());
    }
    // With one matrix for all, the rows of all are the rows of one product.
    let (batch, m) = if b.rank() == 2 { (1, a.elem_count() / k) } else { (a.elem_count() / (m * k), m) };
    let (a, b) = (matrices(a, (batch, m, k))?, matrices(b, (batch, k, n))?);
    let ((of_a, a_layout), (of_b, b_layout)) = (a.storage_and_layout(), b.storage_and_layout());
    let extents = (batch, m, n, k);
    let storage = match (&*of_a, &*of_b) {
        (Storage::Cuda(of_a), Storage::Cuda(of_b)) => Storage::Cuda(of_a.matmul(of_b, extents, a_layout, b_layout)?),
        (Storage::Cpu(of_a), Storage::Cpu(of_b)) if matches!(a.dtype(), DType::F32 | DType::F64) => {
            Storage::Cpu(of_a.matmul(of_b, extents, a_layout, b_layout)?)
        }
        _ => {
            drop((of_a, of_b));
            dispatch!(a.dtype(), "matmul", T => narrow_products::<T>(extents, &a, &b).map(|products| {
                Storage::Cpu(T::to_cpu_storage_owned(products))
            }))?
        }
    };
    Ok((storage, shape))
}

/// The matrices in `x`, each contiguous or the transpose of a contiguous one.
fn matrices(x: &Tensor, (batch, rows, columns): (usize, usize, usize)) -> Result<Tensor> {
    let is_transposed = !x.is_contiguous() && x.t()?.is_contiguous();
    if is_transposed && x.elem_count() == batch * rows * columns && x.dim(x.rank() - 2)? == rows {
        return x.t()?.reshape((batch, columns, rows))?.transpose(1, 2);
    }
    x.contiguous()?.reshape((batch, rows, columns))
}

/// The products of [`matrices`] of 16 bits on CPUs, with sums of f32.
fn narrow_products<T: Element>(
    (batch, m, n, k): (usize, usize, usize, usize),
    a: &Tensor,
    b: &Tensor,
) -> Result<Vec<T>> {
    let ((a, strides_a), (b, strides_b)) = (stored(a)?, stored(b)?);
    with_slice::<T, _>(&a, |a| {
        with_slice::<T, _>(&b, |b| {
            let one = |index: usize, threads| {
                let (a, b) = (&a[index * m * k..(index + 1) * m * k], &b[index * k * n..(index + 1) * k * n]);
                product((m, n, k), (a, strides_a), (b, strides_b), None, threads)
            };
            let threads = threads();
            if batch == 1 {
                return one(0, threads);
            }
            if batch < threads {
                let products: Result<Vec<_>> = (0..batch).map(|index| one(index, threads)).collect();
                return Ok(products?.concat());
            }
            let mut products = vec![Vec::new(); batch];
            let each = products.par_iter_mut().enumerate();
            each.try_each_with(|| (), |(), (index, product)| one(index, 1).map(|made| *product = made))?;
            Ok(products.concat())
        })
    })
}

/// The stored elements of [`matrices`], and the layout of each matrix in them.
fn stored(x: &Tensor) -> Result<(Tensor, Strides)> {
    let (_, rows, columns) = x.dims3()?;
    if x.is_contiguous() {
        return Ok((x.clone(), Strides::rows(columns)));
    }
    Ok((x.transpose(1, 2)?, Strides::transposed(rows)))
}
