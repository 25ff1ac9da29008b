//! Functions that are computed again in the backward pass.
use super::grad_mode::enable_grad;
use super::leaf::{Leaves, Rerun};
use super::operation::Op;
use super::token::{Edge, apply_edges};
use crate::memory_format::MemoryFormat;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, Var};

/// Returns a copy of `result`, which `again` computes from `inputs` and `leaves`. Nothing else is kept: the backward
/// pass computes it again. What `again` returns next to it lives until the backward pass through it has ended.
pub fn rerun<G>(
    name: &'static str,
    inputs: &[&Tensor],
    leaves: Leaves,
    result: &Tensor,
    again: impl Fn(&[Tensor]) -> Result<(Tensor, G)> + Send + Sync + 'static,
) -> Result<Tensor> {
    let Leaves { variables, copies } = leaves;
    let arguments = inputs.iter().copied().chain(&variables);
    let mut edges = arguments.map(Edge::new).collect::<Result<Vec<_>>>()?;
    edges.extend(copies);
    let inputs: Vec<Tensor> = inputs.iter().map(|input| input.detach()).collect();
    let backward = move |gradient: &Tensor, needed: &[bool]| {
        // A variable is contiguous, so that it is made of what is stored, and the input is a view of it.
        let fresh = |(input, needed): (&Tensor, &bool)| match (MemoryFormat::of(input), needed) {
            (format, true) => {
                let var = Var::from_tensor(&format.stored(input)?)?;
                Ok((format.view(&var)?, Some((format, var))))
            }
            (_, false) => Ok((input.clone(), None)),
        };
        let fresh = inputs.iter().zip(needed).map(fresh).collect::<Result<Vec<_>>>()?;
        let (inputs, vars): (Vec<_>, Vec<_>) = fresh.into_iter().unzip();
        let gradient = gradient.clone();
        // As in the forward pass, even if the backward pass runs under `no_grad`.
        let (result, _held) = enable_grad(|| again(&inputs))?;
        let end = result.apply_op1(Start(gradient))?;
        drop(result);
        let mut grads = {
            let _rerun = Rerun::begin();
            end.backward()?
        };
        // Gradients of copies are already in their sums.
        let mut of_inputs = Vec::with_capacity(vars.len() + variables.len());
        for var in &vars {
            let gradient = var.as_ref().and_then(|(format, var)| Some((format, grads.remove(var)?)));
            of_inputs.push(gradient.map(|(format, gradient)| format.view(&gradient)).transpose()?);
        }
        of_inputs.extend(variables.iter().map(|variable| grads.remove(variable)));
        Ok(of_inputs)
    };
    let format = MemoryFormat::of(result);
    apply_edges(edges, format, format.snapshot(result)?, Box::new(Op { name, backward }))
}

/// A token of the result, from which a backward pass starts with a given gradient. It has an element, since candle begins with
/// its gradient, a one.
struct Start(Tensor);

impl CustomOp1 for Start {
    fn name(&self) -> &'static str {
        "start"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(1)))
    }

    fn cuda_fwd(&self, result: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        let shape = Shape::from(1);
        Ok((result.device().zeros_impl(&shape, DType::F32)?, shape))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.0.clone()))
    }
}
