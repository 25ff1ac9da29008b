//! A model whose gradients a test chooses: the loss is the sum of the products of parameters and gradients.
use crate::common::{buckets, floats, tensor};
use candle_core::{DType, Device, Tensor, Var};
use candle_ddp::comm_hook::CommHook;
use candle_ddp::{DdpOptions, DistributedDataParallel, Error, ProcessGroup, Result, Unused};
use candle_nn::{VarBuilder, VarMap};

pub(crate) struct Weights(pub(crate) Vec<Tensor>);

pub(crate) type Model = DistributedDataParallel<Weights>;

/// Names and shapes of parameters, in registration order.
pub(crate) type Shapes<'a> = &'a [(&'a str, &'a [usize])];

/// 253 elements. Gradients arrive in another order, so the buckets are rebuilt.
pub(crate) const SHAPES: Shapes = &[("a", &[12, 10]), ("bias", &[9]), ("conv", &[8, 3, 5]), ("small", &[2, 2])];

pub(crate) fn wrap(pg: &ProcessGroup, shapes: Shapes, options: DdpOptions) -> Result<Model> {
    let build = |vb: VarBuilder<'static>| {
        let weight = |(name, shape): &(&str, &[usize])| vb.get(*shape, name);
        Ok::<_, Error>(Weights(shapes.iter().map(weight).collect::<candle_core::Result<_>>()?))
    };
    DistributedDataParallel::with_options(pg, &VarMap::new(), build, options)
}

/// A model of [`SHAPES`].
pub(crate) fn model(pg: &ProcessGroup, hook: impl CommHook, options: DdpOptions) -> Result<Model> {
    let ddp = wrap(pg, SHAPES, options)?;
    ddp.register_comm_hook(hook)?;
    Ok(ddp)
}

/// Buckets of 500 bytes; rebuilding them moves parameters between buckets.
pub(crate) fn small_buckets() -> DdpOptions {
    let mib = 500.0 / f64::from(1 << 20);
    DdpOptions { unused: Unused::Allow, buckets: buckets(mib, mib), ..Default::default() }
}

/// All gradients of rank `rank` in step `step`.
pub(crate) fn full(shapes: Shapes, rank: usize, step: usize) -> Vec<Option<Tensor>> {
    let seed = |index: usize| (1 + rank * 1000 + step * 10 + index) as u64;
    shapes.iter().enumerate().map(|(index, (_, shape))| Some(tensor(shape, seed(index)))).collect()
}

pub(crate) fn flat(gradients: &[Option<Tensor>]) -> Vec<f32> {
    gradients.iter().flat_map(|gradient| floats(gradient.as_ref().expect("a gradient"))).collect()
}

/// Runs a backward pass in which the gradient of parameter `i` is `gradients[i]`; with `None`, the parameter is not
/// used. Returns copies of the results, because the next pass overwrites the views.
pub(crate) fn backward(ddp: &Model, gradients: &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>> {
    let loss = ddp.call(|net| {
        let mut loss = Tensor::new(0f64, &Device::Cpu)?;
        // Reversed, so that gradients do not arrive in reverse registration order, which DDP expects, and the buckets
        // are rebuilt.
        for (weight, gradient) in net.0.iter().zip(gradients).rev() {
            if let Some(gradient) = gradient {
                // Multiplies in the wider of the two dtypes.
                let dtype = if weight.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
                let product = (weight.to_dtype(dtype)? * gradient.to_dtype(dtype)?)?.sum_all()?;
                loss = (loss + product.to_dtype(DType::F64)?)?;
            }
        }
        Ok::<_, Error>(loss)
    })?;
    let grads = ddp.backward(&loss)?;
    let gradient = |var: &Var| grads.get(var).map(Tensor::copy).transpose();
    Ok(ddp.parameters().iter().map(gradient).collect::<candle_core::Result<_>>()?)
}
