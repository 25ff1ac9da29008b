//! Embeddings with a fast backward pass.
mod cuda;

use crate::linear::Linear;
use crate::lora::adapter::{self, Adapter};
use crate::view::{reshape, transpose};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Module, Result, Shape, Tensor, WithDType};
use candle_ddp_tensor::Error;
use candle_ddp_tensor::borrow::{slice, with_slice};
use candle_ddp_tensor::error::describe;
use candle_ddp_tensor::function::op1;
use candle_ddp_tensor::kernels::Output;
use candle_ddp_tensor::parallel::Each;
use candle_ddp_tensor::{Element, dispatch};
use candle_nn::{Init, VarBuilder};
use cuda::LookupOnCuda;
use rayon::prelude::*;

/// The approximate number of elements that a thread takes at a time.
const BLOCK_ELEMENTS: usize = 1 << 15;

/// A table of vectors that are looked up by their index: a drop-in for [`candle_nn::Embedding`], with the same name in
/// the `VarMap` (`weight`), and PyTorch's `nn.Embedding`.
///
/// The gradient of the table is dense. Contributions to the same vector are added up in f32 (f64 for f64), in the
/// order of the indices, so the result does not depend on the number of threads. On a GPU the order is another one, and fixed too.
///
/// ```
/// # use candle_core::{Device, Module, Result, Tensor};
/// # fn main() -> Result<()> {
/// use candle_ddp_nn::Embedding;
/// let table = Tensor::new(&[[0f32, 1.], [2., 3.], [4., 5.]], &Device::Cpu)?;
/// let y = Embedding::new(table, 2).forward(&Tensor::new(&[2u32, 0, 2], &Device::Cpu)?)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[4., 5.], [0., 1.], [4., 5.]]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Embedding {
    embeddings: Tensor,
    hidden_size: usize,
}

impl Embedding {
    /// A layer with the table `embeddings`, of shape (number of vectors, `hidden_size`) and dtype f32, f64, f16 or
    /// bf16.
    pub fn new(embeddings: Tensor, hidden_size: usize) -> Self {
        Self { embeddings, hidden_size }
    }

    /// The table.
    pub fn embeddings(&self) -> &Tensor {
        &self.embeddings
    }

    /// The length of a vector.
    pub fn hidden_size(&self) -> usize {
        self.hidden_size
    }
}

/// `indices` have the dtype u32, i64 or u8 and any shape, to which the result adds a dimension of `hidden_size`. An
/// index outside the table is [`InvalidArgument`](Error::Base) on the CPU; on a GPU, where a check would force a
/// synchronisation, its vector is NaN.
impl Module for Embedding {
    fn forward(&self, indices: &Tensor) -> Result<Tensor> {
        let table = &self.embeddings;
        if let Some(adapter) = adapter::of(table) {
            return adapted(&adapter, indices, self.hidden_size);
        }
        let (count, size) = table.dims2()?;
        if size != self.hidden_size {
            let reason = format!(
                "it must be a matrix with rows of hidden_size elements, but is {}, and hidden_size is {}",
                describe(table.dtype(), table.shape()),
                self.hidden_size
            );
            return Err(Error::invalid("the table of Embedding", reason).into());
        }
        let shape = [indices.dims(), &[size]].concat();
        let indices = indices.flatten_all()?;
        if !matches!(indices.dtype(), DType::U8 | DType::U32 | DType::I64) {
            let reason = format!("their dtype must be u32, i64 or u8, not {}", indices.dtype().as_str());
            return Err(Error::invalid("the indices of Embedding", reason).into());
        }
        if table.device().is_cuda() {
            let indices = wide_indices(&indices)?;
            return reshape(&op1(&table.contiguous()?, LookupOnCuda { indices, size })?, shape);
        }
        let index = |index: i64| match usize::try_from(index) {
            Ok(index) if index < count => Ok(index),
            _ => {
                let reason = format!(
                    "every index must be less than {count}, the number of vectors in the table, but \
                                      one is {index}"
                );
                Err(candle_core::Error::from(Error::invalid("the indices of Embedding", reason)))
            }
        };
        let indices = indices.to_dtype(DType::I64)?.to_vec1::<i64>()?;
        let indices = indices.into_iter().map(index).collect::<Result<Vec<_>>>()?;
        reshape(&op1(&table.contiguous()?, Lookup { indices, size })?, shape)
    }
}

/// The layer whose table has this adapter.
fn adapted(adapter: &Adapter, indices: &Tensor, size: usize) -> Result<Tensor> {
    let y = Embedding::new(adapter.base().clone(), size).forward(indices)?;
    let [down, up] = adapter.matrices()?;
    let rank = up.dim(1)?;
    let narrow = adapter.scaled(&Embedding::new(up, rank).forward(indices)?)?;
    adapter::sum(&y, &Linear::new(transpose(&down, 0, 1)?, None).forward(&narrow)?)
}

/// An [`Embedding`] of `in_size` vectors of length `out_size`.
///
/// # Errors
/// Returns an error if the variables that `vb` has do not have this size.
pub fn embedding(in_size: usize, out_size: usize, vb: VarBuilder) -> Result<Embedding> {
    let init = Init::Randn { mean: 0., stdev: 1. };
    Ok(Embedding::new(vb.get_with_hints((in_size, out_size), "weight", init)?, out_size))
}

struct Lookup {
    indices: Vec<usize>,
    size: usize,
}

impl Lookup {
    fn forward<T: Element>(&self, table: &[T]) -> Vec<T> {
        let mut y = vec![T::from_f64(0.0); self.indices.len() * self.size];
        let rows = y.par_chunks_exact_mut(self.size.max(1)).zip(&self.indices);
        rows.with_min_len((BLOCK_ELEMENTS / self.size.max(1)).max(1)).each(|(y, index)| {
            y.copy_from_slice(&table[index * self.size..][..self.size]);
        });
        y
    }

    fn backward<T: Element>(&self, dy: &[T], count: usize) -> Vec<T> {
        let size = self.size;
        let mut d_table = vec![T::from_f64(0.0); count * size];
        if d_table.is_empty() {
            return d_table;
        }
        // Sorted by vector, and by position for the same vector.
        let mut order: Vec<(usize, usize)> = self.indices.iter().copied().zip(0..).collect();
        order.par_sort_unstable();
        let rows = (BLOCK_ELEMENTS / size).max(1);
        d_table.par_chunks_mut(rows * size).enumerate().each_with(
            || vec![T::Real::from_f64(0.0); size],
            |sum, (block, d_table)| {
                let first = block * rows;
                let start = order.partition_point(|(index, _)| *index < first);
                let end = order.partition_point(|(index, _)| *index < first + rows);
                for same in order[start..end].chunk_by(|a, b| a.0 == b.0) {
                    candle_ddp_tensor::vectorise!(|| {
                        sum.fill(T::Real::from_f64(0.0));
                        for (_, row) in same {
                            let dy = &dy[row * size..][..size];
                            sum.iter_mut().zip(dy).for_each(|(sum, dy)| *sum += dy.widen());
                        }
                        let row = &mut d_table[(same[0].0 - first) * size..][..size];
                        row.iter_mut().zip(&*sum).for_each(|(to, sum)| *to = T::narrow(*sum));
                    });
                }
            },
        );
        d_table
    }
}

impl CustomOp1 for Lookup {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn cpu_fwd(&self, table: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let y = dispatch!(table.dtype(), self.name(), T => {
            Ok(T::to_cpu_storage_owned(self.forward(slice::<T>(table, layout)?)))
        })?;
        Ok((y, Shape::from((self.indices.len(), self.size))))
    }

    fn bwd(&self, table: &Tensor, _: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let dy = dy.contiguous()?;
        dispatch!(table.dtype(), self.name(), T => with_slice::<T, _>(&dy, |dy| {
            Ok(Some(Tensor::from_vec(self.backward(dy, table.dim(0)?), table.shape(), table.device())?))
        }))
    }
}

/// Indices on CUDA as the kernels expect them: in i64, and contiguous.
pub(super) fn wide_indices(indices: &Tensor) -> Result<Tensor> {
    if indices.elem_count() == 0 {
        // candle cannot convert a tensor without elements on a GPU.
        return Ok(Output::zeros(indices.device().as_cuda_device()?, DType::I64, indices.shape())?.into_tensor());
    }
    indices.detach().to_dtype(DType::I64)?.contiguous()
}
