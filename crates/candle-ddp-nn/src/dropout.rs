//! Dropout with reproducible masks.
use crate::view::contiguous;
use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaDevice, CudaStorage, CustomOp1, DType, Device, Layout, ModuleT, Result, Shape, Tensor, WithDType,
};
use candle_ddp_tensor::Error;
use candle_ddp_tensor::borrow::{slice, with_slice};
use candle_ddp_tensor::function::op1;
use candle_ddp_tensor::kernels::{self, Address, Grid, Kernel, Launch, Output};
use candle_ddp_tensor::parallel::Each;
use candle_ddp_tensor::seed::{Draw, Generator, default_generator, draw};
use candle_ddp_tensor::{Element, dispatch};
use rayon::prelude::*;
use std::sync::{Arc, Mutex, PoisonError};

/// The number of elements that a thread takes at a time; a multiple of four, the numbers in a block of the generator.
const BLOCK_ELEMENTS: usize = 1 << 12;

/// The numbers in a block of the generator. A thread of the kernel takes the elements of 16 bytes, but at least as many as these.
const DROPPED: usize = 4;

/// Makes each element zero with the probability `p`, and divides the others by 1 − p: `torch.nn.functional.dropout` in
/// training, and `candle_nn::ops::dropout`, with random numbers from a generator.
///
/// `x` has any shape and the dtype f32, f64, f16 or bf16. The mask is not stored: the backward pass computes it again.
/// It is the same on the CPU and on a GPU, where the kernel computes it.
///
/// # Errors
/// [`InvalidArgument`](Error::Base), carried by candle's error, for a `p` that is not `0 <= p < 1`;
/// [`Error::UnsupportedDType`].
pub fn dropout(x: &Tensor, p: f32, generator: &mut Generator) -> Result<Tensor> {
    if !(0.0..1.0).contains(&p) {
        return Err(Error::invalid(
            "the probability of dropout",
            format!("it must be at least 0 and less than 1, not {p}"),
        )
        .into());
    }
    if p == 0.0 || x.elem_count() == 0 {
        return Ok(x.clone());
    }
    let draw = draw(generator, x.elem_count());
    let mask = Mask { draw, threshold: (f64::from(p) * 2f64.powi(32)) as u32, scale: 1.0 / (1.0 - f64::from(p)) };
    let x = contiguous(x)?;
    op1(&x, mask)
}

/// A drop-in for `candle_nn::Dropout`: see [`dropout`].
///
/// A layer of [`new`](Self::new) draws from the [process's generator](candle_ddp_tensor::seed::default_generator), which
/// `candle_ddp::seed::seed_everything` seeds for each rank. A layer of [`with_generator`](Self::with_generator) draws from the given one;
/// for masks that differ from rank to rank, make it by [`Generator::for_rank`]. To continue with the same masks after a restart,
/// save the generator with the checkpoint.
///
/// ```
/// # use candle_core::{Device, Result, Tensor};
/// # fn main() -> Result<()> {
/// use candle_ddp_nn::Dropout;
/// let (layer, x) = (Dropout::new(0.5), Tensor::new(&[3f32; 100], &Device::Cpu)?);
/// let y = layer.forward(&x, true)?.to_vec1::<f32>()?;
/// assert!(y.iter().all(|y| *y == 0. || *y == 6.));
/// assert_eq!(layer.forward(&x, false)?.to_vec1::<f32>()?, [3.; 100]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Dropout {
    p: f32,
    generator: Arc<Mutex<Generator>>,
}

impl Dropout {
    /// A layer that makes each element zero with the probability `p`, 0 <= p < 1.
    pub fn new(p: f32) -> Self {
        Self::with_generator(p, default_generator())
    }

    /// A layer with its own generator, or one that layers share.
    pub fn with_generator(p: f32, generator: Arc<Mutex<Generator>>) -> Self {
        Self { p, generator }
    }

    /// In training [`dropout`], otherwise `x`.
    ///
    /// # Errors
    /// The errors of [`dropout`].
    pub fn forward(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        if !train {
            return Ok(x.clone());
        }
        dropout(x, self.p, &mut self.generator.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl ModuleT for Dropout {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.forward(x, train)
    }
}

/// The elements that stay, as a function of numbers that can be recomputed.
#[derive(Clone, Copy)]
struct Mask {
    draw: Draw,
    /// Elements with a number below this become zero.
    threshold: u32,
    scale: f64,
}

impl Mask {
    fn apply<T: Element>(&self, x: &[T]) -> Vec<T> {
        let zero = T::from_f64(0.0);
        let scale = T::Real::from_f64(self.scale);
        let mut y = vec![zero; x.len()];
        let blocks = y.par_chunks_mut(BLOCK_ELEMENTS).zip(x.par_chunks(BLOCK_ELEMENTS)).enumerate();
        blocks.each_with(
            || vec![0; BLOCK_ELEMENTS],
            |numbers, (block, (y, x))| {
                let numbers = &mut numbers[..x.len()];
                self.fill(block, numbers);
                candle_ddp_tensor::vectorise!(|| {
                    for ((y, x), number) in y.iter_mut().zip(x).zip(&*numbers) {
                        *y = if *number < self.threshold { zero } else { T::narrow(x.widen() * scale) };
                    }
                });
            },
        );
        y
    }

    /// The numbers of one block of elements.
    fn fill(&self, block: usize, numbers: &mut [u32]) {
        self.draw.fill(block * BLOCK_ELEMENTS, numbers);
    }

    fn on_cuda(&self, device: &CudaDevice, (x, dtype): (Address, DType), shape: &Shape) -> Result<Output> {
        kernels::supported(dtype, "dropout")?;
        let (y, Draw { seed, sequence, offset }) = (Output::new(device, dtype, shape)?, self.draw);
        let (elements, tensors, threshold) = (shape.elem_count(), [x, y.address()?], self.threshold as usize);
        let is_vector = usize::from(tensors.iter().all(|tensor| tensor.is_aligned()));
        let launch = Launch {
            kernel: Kernel::Dropout,
            dtype,
            grid: Grid::Threads(elements.div_ceil(DROPPED.max(16 / dtype.size_in_bytes()))),
            tensors: &tensors,
            numbers: &[elements, seed as usize, sequence as usize, offset as usize, threshold, is_vector],
            reals: &[self.scale],
        };
        kernels::launch(device, launch)?;
        Ok(y)
    }
}

impl CustomOp1 for Mask {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let y =
            dispatch!(x.dtype(), self.name(), T => Ok(T::to_cpu_storage_owned(self.apply(slice::<T>(x, layout)?))))?;
        Ok((y, layout.shape().clone()))
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let input = (kernels::storage_address(x, layout)?, x.dtype());
        Ok(self.on_cuda(x.device(), input, layout.shape())?.into_parts())
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let dy = dy.contiguous()?;
        if let Device::Cuda(device) = dy.device() {
            let dx = self.on_cuda(device, (kernels::address(&dy)?, dy.dtype()), dy.shape())?;
            return Ok(Some(dx.into_tensor()));
        }
        dispatch!(x.dtype(), self.name(), T => with_slice::<T, _>(&dy, |dy| {
            Ok(Some(Tensor::from_vec(self.apply(dy), x.shape(), x.device())?))
        }))
    }
}
