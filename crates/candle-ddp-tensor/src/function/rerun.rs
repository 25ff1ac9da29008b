//! Functions that are computed again in the backward pass.
use super::grad_mode::enable_grad;
use super::leaf::{Leaves, Rerun};
use super::operation::Op;
use super::token::{Edge, apply_edges};
use crate::copy;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, Var};

/// Returns a copy of `result`, which `again` computes from `inputs` and `leaves`. Nothing else is kept: the backward
/// pass computes it again.
pub fn rerun(
    name: &'static str,
    inputs: &[&Tensor],
    leaves: Leaves,
    result: &Tensor,
    again: impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
) -> Result<Tensor> {
    let Leaves { variables, copies } = leaves;
    let arguments = inputs.iter().copied().chain(&variables);
    let mut edges = arguments.map(Edge::new).collect::<Result<Vec<_>>>()?;
    edges.extend(copies);
    let inputs: Vec<Tensor> = inputs.iter().map(|input| input.detach()).collect();
    let backward = move |gradient: &Tensor, needed: &[bool]| {
        let fresh = |(input, needed): (&Tensor, &bool)| match needed {
            true => Var::from_tensor(input).map(|var| var.as_tensor().clone()),
            false => Ok(input.clone()),
        };
        let inputs = inputs.iter().zip(needed).map(fresh).collect::<Result<Vec<_>>>()?;
        let gradient = gradient.clone();
        // As in the forward pass, even if the backward pass runs under `no_grad`.
        let end = enable_grad(|| again(&inputs))?.apply_op1(Start(gradient))?;
        let mut grads = {
            let _rerun = Rerun::begin();
            end.backward()?
        };
        // Gradients of copies are already in their sums.
        Ok(inputs.iter().chain(&variables).map(|tensor| grads.remove(tensor)).collect())
    };
    apply_edges(edges, copy::snapshot_tensor(result, result.dtype())?, Op { name, backward })
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
