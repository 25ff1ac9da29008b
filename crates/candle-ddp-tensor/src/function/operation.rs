//! Creates functions together with their results.
use super::token::{Edge, Function, apply_edges};
use crate::memory_format::MemoryFormat;
use candle_core::{CustomOp1, CustomOp2, CustomOp3, Result, Shape, Storage, Tensor};
use std::sync::{Arc, OnceLock};

/// Creates a tensor of `storage`, which must be contiguous, of shape `shape` and on the device of the arguments; its
/// gradient flows through `function` to `arguments`.
///
/// # Errors
/// Returns an error if an argument's gradient cannot flow through a function.
pub fn apply(arguments: &[&Tensor], result: (Storage, Shape), function: impl Function) -> Result<Tensor> {
    apply_in(MemoryFormat::Contiguous, arguments, result, function)
}

/// [`apply`] for a result in the memory format `format`: its shape is that of the storage, (N, H, W, C) for channels last. The
/// function gets the result's gradient in the same format. A single pixel counts as contiguous.
pub fn apply_in(
    format: MemoryFormat,
    arguments: &[&Tensor],
    result: (Storage, Shape),
    function: impl Function,
) -> Result<Tensor> {
    apply_dyn(format, arguments, result, Box::new(function))
}

/// Compiled once for all functions.
fn apply_dyn(
    format: MemoryFormat,
    arguments: &[&Tensor],
    (storage, shape): (Storage, Shape),
    function: Box<dyn Function>,
) -> Result<Tensor> {
    let edges = arguments.iter().map(|argument| Edge::new(argument)).collect::<Result<Vec<_>>>()?;
    let (format, shape) = match (format, shape.dims()) {
        (MemoryFormat::ChannelsLast, &[n, 1, 1, channels]) => (MemoryFormat::Contiguous, (n, channels, 1, 1).into()),
        _ => (format, shape),
    };
    apply_edges(edges, format, (storage, shape), function)
}

/// [`op1`] in the memory format `format`: the operation gets what is stored of `x`, of its result and of the result's gradient, and
/// returns what is stored.
pub fn op1_in(format: MemoryFormat, x: &Tensor, op: impl CustomOp1 + Send + Sync + 'static) -> Result<Tensor> {
    let stored = format.stored(&x.detach())?;
    let result = op1_result(&stored, &op)?;
    operation(op.name(), format, &[x], result, move |result, gradient| {
        let dx = op.bwd(&stored, &format.stored(result)?, &format.stored(gradient)?)?;
        Ok(vec![dx.map(|dx| format.view(&dx)).transpose()?])
    })
}

/// Like [`Tensor::apply_op1`], without candle's sums of gradients.
///
/// # Errors
/// Returns the error of the operation's forward pass.
pub fn op1(x: &Tensor, op: impl CustomOp1 + Send + Sync + 'static) -> Result<Tensor> {
    let (result, name, arg) = (op1_result(x, &op)?, op.name(), x.detach());
    operation(name, MemoryFormat::Contiguous, &[x], result, move |result, gradient| {
        Ok(vec![op.bwd(&arg, result, gradient)?])
    })
}

fn op1_result(x: &Tensor, op: &impl CustomOp1) -> Result<(Storage, Shape)> {
    let (storage, layout) = x.storage_and_layout();
    match &*storage {
        Storage::Cpu(x) => op.cpu_fwd(x, layout).map(|(storage, shape)| (Storage::Cpu(storage), shape)),
        Storage::Cuda(x) => op.cuda_fwd(x, layout).map(|(storage, shape)| (Storage::Cuda(storage), shape)),
        Storage::Metal(_) => candle_core::bail!("{}: Metal is not supported", op.name()),
    }
}

/// Like [`Tensor::apply_op2`], without candle's sums of gradients.
///
/// # Errors
/// Returns the error of the operation's forward pass.
pub fn op2(a: &Tensor, b: &Tensor, op: impl CustomOp2 + Send + Sync + 'static) -> Result<Tensor> {
    let result = {
        let ((a, a_layout), (b, b_layout)) = (a.storage_and_layout(), b.storage_and_layout());
        match (&*a, &*b) {
            (Storage::Cpu(a), Storage::Cpu(b)) => {
                op.cpu_fwd(a, a_layout, b, b_layout).map(|(storage, shape)| (Storage::Cpu(storage), shape))
            }
            (Storage::Cuda(a), Storage::Cuda(b)) => {
                op.cuda_fwd(a, a_layout, b, b_layout).map(|(storage, shape)| (Storage::Cuda(storage), shape))
            }
            _ => candle_core::bail!(
                "{}: its arguments are on different devices, or on a kind it does not know",
                op.name()
            ),
        }?
    };
    let (name, args) = (op.name(), [a.detach(), b.detach()]);
    operation(name, MemoryFormat::Contiguous, &[a, b], result, move |result, gradient| {
        let (a, b) = op.bwd(&args[0], &args[1], result, gradient)?;
        Ok(vec![a, b])
    })
}

/// Like [`Tensor::apply_op3`], without candle's sums of gradients.
///
/// # Errors
/// Returns the error of the operation's forward pass.
pub fn op3(a: &Tensor, b: &Tensor, c: &Tensor, op: impl CustomOp3 + Send + Sync + 'static) -> Result<Tensor> {
    let result = {
        let (a, b, c) = (a.storage_and_layout(), b.storage_and_layout(), c.storage_and_layout());
        match (&*a.0, &*b.0, &*c.0) {
            (Storage::Cpu(x), Storage::Cpu(y), Storage::Cpu(z)) => {
                op.cpu_fwd(x, a.1, y, b.1, z, c.1).map(|(storage, shape)| (Storage::Cpu(storage), shape))
            }
            (Storage::Cuda(x), Storage::Cuda(y), Storage::Cuda(z)) => {
                op.cuda_fwd(x, a.1, y, b.1, z, c.1).map(|(storage, shape)| (Storage::Cuda(storage), shape))
            }
            _ => candle_core::bail!(
                "{}: its arguments are on different devices, or on a kind it does not know",
                op.name()
            ),
        }?
    };
    let (name, args) = (op.name(), [a.detach(), b.detach(), c.detach()]);
    operation(name, MemoryFormat::Contiguous, &[a, b, c], result, move |result, gradient| {
        let (a, b, c) = op.bwd(&args[0], &args[1], &args[2], result, gradient)?;
        Ok(vec![a, b, c])
    })
}

/// Creates a tensor of `result`, whose gradient flows to `arguments` through `backward`, which gets the result and its
/// gradient.
pub(super) fn operation(
    name: &'static str,
    format: MemoryFormat,
    arguments: &[&Tensor],
    result: (Storage, Shape),
    backward: impl Fn(&Tensor, &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
) -> Result<Tensor> {
    let own = Arc::new(OnceLock::<Tensor>::new());
    let result = {
        let own = Arc::clone(&own);
        let backward = move |gradient: &Tensor, _: &[bool]| match own.get() {
            Some(result) => backward(result, gradient),
            None => candle_core::bail!("{name}: its backward pass must not run before its result exists"),
        };
        apply_in(format, arguments, result, Op { name, backward })?
    };
    let _ = own.set(result.detach());
    Ok(result)
}

/// A backward pass given as a closure.
pub(super) struct Op<B> {
    pub(super) name: &'static str,
    pub(super) backward: B,
}

impl<B: Fn(&Tensor, &[bool]) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static> Function for Op<B> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn backward(&self, gradient: &Tensor, needed: &[bool]) -> Result<Vec<Option<Tensor>>> {
        (self.backward)(gradient, needed)
    }
}
