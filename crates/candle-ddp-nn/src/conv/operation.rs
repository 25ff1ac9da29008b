//! Convolutions and transposed convolutions as operations with their own backward pass.
use super::geometry::{Geometry, positions};
use super::{cpu, cuda};
use crate::autocast::{Casts, to_dtype};
use crate::channels;
use crate::gemm::wide;
use crate::to_memory_format;
use candle_core::{DType, Result, Shape, Storage, Tensor, WithDType};
use candle_ddp_tensor::borrow::{slice_tensor, tensor, with_slice};
use candle_ddp_tensor::copy;
use candle_ddp_tensor::dispatch;
use candle_ddp_tensor::error::describe_placed;
use candle_ddp_tensor::function::{Earlier, Function, add, apply_in};
use candle_ddp_tensor::kernels::{self, Convolve};
use candle_ddp_tensor::{Error, MemoryFormat};

/// The settings that a layer was made with; the same along all axes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settings {
    pub(super) stride: usize,
    pub(super) padding: usize,
    /// Used by transposed convolutions only.
    pub(super) output_padding: usize,
    pub(super) dilation: usize,
    pub(super) groups: usize,
    pub(super) transposed: bool,
}

impl Settings {
    /// Checks whether a layer for `inputs` and `outputs` channels can have these settings.
    pub(super) fn check(
        &self,
        name: &str,
        inputs: usize,
        outputs: usize,
        kernel: usize,
    ) -> candle_ddp_tensor::Result<()> {
        let reason = match self {
            Self { stride: 0, .. } => "stride must be at least 1".to_string(),
            Self { dilation: 0, .. } => "dilation must be at least 1 (1: no dilation)".to_string(),
            _ if kernel == 0 => "the kernel's size must be at least 1".to_string(),
            Self { groups, .. }
                if *groups == 0 || !inputs.is_multiple_of(*groups) || !outputs.is_multiple_of(*groups) =>
            {
                format!(
                    "groups must divide the channels, but {groups} does not divide {inputs} input channels and \
                         {outputs} output channels"
                )
            }
            Self { output_padding, stride, dilation, .. }
                if *output_padding >= *stride.max(dilation) && self.transposed =>
            {
                format!("output_padding must be less than stride {stride} or dilation {dilation}, not {output_padding}")
            }
            _ => return Ok(()),
        };
        Err(Error::invalid("config", format!("{name}: {reason}")))
    }
}

/// A convolution over images (N, C, H, W), or lines (N, C, L), as `weight` has four or three dimensions.
pub(super) fn convolution(
    name: &'static str,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    settings: Settings,
) -> Result<Tensor> {
    let Some(casts) = Casts::of_product([x, weight].into_iter().chain(bias))? else {
        return convolve(name, x, (weight, weight.dtype()), bias, settings);
    };
    let bias = bias.map(|bias| casts.of(bias)).transpose()?;
    let weight = (&casts.unrounded(weight)?, casts.dtype_of(weight));
    casts.result(convolve(name, &casts.of(x)?, weight, bias.as_ref(), settings)?, x)
}

/// The convolution, with the weight and the dtype that it is rounded to.
fn convolve(
    name: &'static str,
    x: &Tensor,
    (weight, dtype): (&Tensor, DType),
    bias: Option<&Tensor>,
    settings: Settings,
) -> Result<Tensor> {
    let (geometry, transposed) = (geometry(name, x, (weight, dtype), bias, settings)?, settings.transposed);
    // Only cuDNN takes channels last.
    let wanted = match x.device().is_cuda() && kernels::has_cudnn()? && !geometry.is_empty() {
        true => MemoryFormat::of(x),
        false => MemoryFormat::Contiguous,
    };
    let format = cuda::format((&geometry, wanted), x, kinds(transposed)[0])?;
    let (stored_x, stored_weight) = (format.stored(&x.detach())?, format.stored(&weight.detach())?);
    let function = Convolution { name, geometry, format, transposed, x: stored_x, weight: stored_weight };
    let result = function.forward(bias)?;
    let result = match bias {
        Some(bias) => apply_in(format, &[x, weight, bias], result, function),
        None => apply_in(format, &[x, weight], result, function),
    }?;
    if format == wanted { Ok(result) } else { to_memory_format(&result, wanted) }
}

/// The kinds of the forward pass and of the gradient of x.
fn kinds(transposed: bool) -> [Convolve; 2] {
    match transposed {
        false => [Convolve::Forward, Convolve::BackwardData],
        true => [Convolve::BackwardData, Convolve::Forward],
    }
}

/// The extents of the convolution; for a transposed one, of the convolution whose backward pass it is.
fn geometry(
    name: &'static str,
    x: &Tensor,
    (weight, dtype): (&Tensor, DType),
    bias: Option<&Tensor>,
    settings: Settings,
) -> Result<Geometry> {
    let refuse = |what: &'static str, tensor: &Tensor, expected: String| -> candle_core::Error {
        let reason = format!(
            "{name}: it is {}, and the weight is {}: {expected}",
            describe_placed(tensor),
            describe_placed(weight)
        );
        Error::invalid(what, reason).into()
    };
    let alike = |other: &Tensor| other.dtype() == dtype && other.device().same_device(weight.device());
    let (rank, Settings { stride, padding, output_padding, dilation, groups, transposed }) = (weight.rank(), settings);
    if !(3..=4).contains(&rank) {
        return Err(refuse("weight", weight, "it must have 3 or 4 dimensions".to_string()));
    }
    let (outer, inner, kernel) = (weight.dim(0)?, weight.dim(1)? * groups, &weight.dims()[2..]);
    let (inputs, outputs) = if transposed { (outer, inner) } else { (inner, outer) };
    settings.check(name, inputs, outputs, kernel.iter().copied().min().unwrap_or(0))?;
    if x.rank() != rank || x.dim(1)? != inputs || !alike(x) {
        let axes = if rank == 4 { "H, W" } else { "L" };
        return Err(refuse(
            "input",
            x,
            format!("it must be (N, {inputs}, {axes}) of the same dtype and on the same device"),
        ));
    }
    if let Some(bias) = bias
        && (bias.dims() != [outputs] || !alike(bias))
    {
        return Err(refuse("bias", bias, format!("it must be ({outputs}) of the same dtype and on the same device")));
    }
    // Along an axis: how large the other side is.
    let other_side = |size: usize, kernel: usize| {
        if transposed {
            let span = (size.checked_sub(1)? * stride + dilation * (kernel - 1) + output_padding + 1)
                .checked_sub(2 * padding)?;
            (span > 0).then_some(span)
        } else {
            positions(size, kernel, stride, padding, dilation)
        }
    };
    let sizes = &x.dims()[2..];
    let found: Option<Vec<usize>> = sizes.iter().zip(kernel).map(|(size, kernel)| other_side(*size, *kernel)).collect();
    let Some(found) = found else {
        return Err(refuse(
            "input",
            x,
            format!("the kernel is larger than the padded input (padding {padding}, dilation {dilation})"),
        ));
    };
    // A line is an image that is one pixel high; neither stride nor padding nor dilation acts on its height.
    let pair = |values: &[usize], neutral| if let [a, b] = *values { [a, b] } else { [neutral, values[0]] };
    let both = |value, neutral| if rank == 4 { [value; 2] } else { [neutral, value] };
    let (here, there) = (pair(sizes, 1), pair(&found, 1));
    let (input, output) = if transposed { (there, here) } else { (here, there) };
    let (ci, co) = if transposed { (outputs, inputs) } else { (inputs, outputs) };
    Ok(Geometry {
        n: x.dim(0)?,
        ci,
        co,
        groups,
        input,
        output,
        kernel: pair(kernel, 1),
        stride: both(stride, 1),
        padding: both(padding, 0),
        dilation: both(dilation, 1),
    })
}

/// The operation, with the tensors that its gradients need.
struct Convolution {
    name: &'static str,
    geometry: Geometry,
    /// In which x and the weights are stored, and the result.
    format: MemoryFormat,
    transposed: bool,
    x: Tensor,
    /// The weight in the dtype of `x`, or in f32, which is rounded to that dtype in each pass.
    weight: Tensor,
}

impl Convolution {
    fn rounded_weight(&self) -> Result<Tensor> {
        to_dtype(&self.weight, self.x.dtype())
    }

    fn forward(&self, bias: Option<&Tensor>) -> Result<(Storage, Shape)> {
        let (Self { geometry, format, x, .. }, weight) = (self, &self.rounded_weight()?);
        let (channels, size) =
            if self.transposed { (geometry.ci, geometry.input) } else { (geometry.co, geometry.output) };
        let mut shape = vec![geometry.n, channels];
        shape.extend(if x.rank() == 4 { &size[..] } else { &size[1..] });
        let shape = format.stored_shape(&Shape::from(shape));
        if geometry.is_empty() {
            return self.bias_alone(bias, &shape);
        }
        if x.device().is_cuda() {
            let y = match self.transposed {
                false => cuda::forward((geometry, *format), x, weight, bias, shape)?,
                true => cuda::backward_data((geometry, *format), x, weight, bias, shape)?,
            };
            return Ok(y.into_result());
        }
        let storage = dispatch!(x.dtype(), self.name, T => {
            let bias = bias.map(|bias| with_slice::<T, _>(bias, |bias| Ok(wide(bias).into_owned()))).transpose()?;
            with_slice::<T, _>(x, |x| with_slice::<T, _>(weight, |weight| {
                let y = match self.transposed {
                    false => cpu::forward::<T>(geometry, x, weight, bias.as_deref())?,
                    true => cpu::backward_data::<T>(geometry, x, weight, bias.as_deref())?,
                };
                Ok(T::to_cpu_storage_owned(y))
            }))
        })?;
        Ok((Storage::Cpu(storage), shape))
    }

    /// The result of shape `shape` if there is nothing to multiply.
    fn bias_alone(&self, bias: Option<&Tensor>, shape: &Shape) -> Result<(Storage, Shape)> {
        let result = match bias {
            Some(bias) => {
                let mut one_per_channel = vec![1; shape.rank()];
                one_per_channel[1] = bias.elem_count();
                bias.detach().reshape(one_per_channel)?.broadcast_as(shape)?.contiguous()?
            }
            None => Tensor::zeros(shape, self.x.dtype(), self.x.device())?,
        };
        copy::snapshot_tensor(&result, result.dtype())
    }

    fn backward_of_nothing(&self, needed: &[bool]) -> Result<Vec<Option<Tensor>>> {
        let mut gradients = vec![None; needed.len()];
        for (gradient, of) in gradients.iter_mut().zip([&self.x, &self.weight]) {
            *gradient = Some(of.zeros_like()?);
        }
        Ok(gradients)
    }

    fn backward_on_cuda(&self, dy: &Tensor, needed: &[bool], earlier: Earlier) -> Result<Vec<Option<Tensor>>> {
        let (Self { geometry, x, transposed, .. }, weight) = (self, &self.rounded_weight()?);
        // cuDNN may lack some of the convolutions in channels last.
        let stored = |kind, tensor: &Tensor| {
            let format = cuda::format((geometry, self.format), x, kind)?;
            Ok::<_, candle_core::Error>((format, format.stored(&self.format.view(tensor)?)?, format.stored(dy)?))
        };
        let mut gradients = vec![None; needed.len()];
        if needed[0] {
            let (format, weight, dy) = stored(kinds(*transposed)[1], weight)?;
            // In a residual connection, no separate passes over memory add the two gradients of x.
            let fits = |sum: &Tensor| {
                MemoryFormat::of(sum) == format && (format == MemoryFormat::ChannelsLast || sum.is_contiguous())
            };
            let earlier = if *transposed { None } else { earlier.take_owned(0, fits) };
            gradients[0] = Some(match earlier {
                Some(sum) if cuda::add_backward_data((geometry, format), &dy, &weight, &format.stored(&sum)?)? => sum,
                earlier => {
                    let shape = format.stored_shape(self.format.view(x)?.shape());
                    let dx = match transposed {
                        true => cuda::forward((geometry, format), &dy, &weight, None, shape)?,
                        false => cuda::backward_data((geometry, format), &dy, &weight, None, shape)?,
                    };
                    let dx = format.view(&dx.into_tensor())?;
                    earlier.map_or(Ok(dx.clone()), |earlier| add(&earlier, &dx))?
                }
            });
        }
        if needed[1] {
            let (format, x, dy) = stored(Convolve::BackwardFilter, x)?;
            let shape = format.stored_shape(self.format.view(weight)?.shape());
            let (x, dy) = if *transposed { (&dy, &x) } else { (&x, &dy) };
            let dw = cuda::backward_filter((geometry, format), x, dy, &shape)?;
            gradients[1] = Some(MemoryFormat::Contiguous.stored(&format.view(&dw)?)?);
        }
        Ok(gradients)
    }

    fn backward_on_cpu(&self, dy: &Tensor, needed: &[bool]) -> Result<Vec<Option<Tensor>>> {
        let (Self { geometry, x, transposed, .. }, weight) = (self, &self.rounded_weight()?);
        let mut gradients = vec![None; needed.len()];
        dispatch!(dy.dtype(), self.name, T => with_slice::<T, _>(dy, |dy| {
            if needed[0] {
                gradients[0] = Some(with_slice::<T, _>(weight, |weight| {
                    let dx = match transposed {
                        true => cpu::forward::<T>(geometry, dy, weight, None)?,
                        false => cpu::backward_data::<T>(geometry, dy, weight, None)?,
                    };
                    Ok(slice_tensor(dx, x.shape()))
                })?);
            }
            if needed[1] {
                gradients[1] = Some(with_slice::<T, _>(x, |x| {
                    let (x, dy) = if *transposed { (dy, x) } else { (x, dy) };
                    Ok(tensor::<T>(cpu::backward_filter::<T>(geometry, x, dy)?, weight.shape()))
                })?);
            }
            Ok(())
        }))?;
        Ok(gradients)
    }
}

impl Function for Convolution {
    fn name(&self) -> &'static str {
        self.name
    }

    fn owns(&self, argument: usize) -> bool {
        argument == 0 && self.x.device().is_cuda()
    }

    fn backward(&self, dy: &Tensor, needed: &[bool]) -> Result<Vec<Option<Tensor>>> {
        self.backward_onto(dy, needed, Earlier::default())
    }

    fn backward_onto(&self, dy: &Tensor, needed: &[bool], earlier: Earlier) -> Result<Vec<Option<Tensor>>> {
        let mut gradients = match dy.device().is_cuda() {
            _ if self.geometry.is_empty() => self.backward_of_nothing(needed),
            true => self.backward_on_cuda(dy, needed, earlier),
            false => self.backward_on_cpu(dy, needed),
        }?;
        gradients[1] = gradients[1].take().map(|d_weight| to_dtype(&d_weight, self.weight.dtype())).transpose()?;
        if needed.get(2) == Some(&true) {
            gradients[2] = Some(channels::totals(&channels::batch_of(self.format, dy)?)?);
        }
        Ok(gradients)
    }
}
