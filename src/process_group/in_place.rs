//! Collectives write into tensors without the knowledge of a graph that contains them.
use crate::backend::Collective;
use crate::{Error, Result};
use candle_core::Tensor;

/// Refuses a collective that would write into a tensor through which gradients flow. (PyTorch warns when a backward
/// pass reaches such a tensor.) Variables may be written, as by `Var::set`. All ranks refuse alike, even those on which
/// this collective only reads.
pub(super) fn check(rank: usize, collective: &Collective) -> Result<()> {
    let written = match collective {
        Collective::AllReduce { tensor, .. }
        | Collective::Broadcast { tensor, .. }
        | Collective::Reduce { tensor, .. }
        | Collective::Recv { tensor, .. } => Some(tensor),
        Collective::AllGather { output, .. }
        | Collective::ReduceScatter { output, .. }
        | Collective::AllToAll { output, .. }
        | Collective::Scatter { output, .. } => Some(output),
        Collective::Gather { output, .. } => output.as_ref(),
        Collective::Send { .. } | Collective::Barrier => None,
    };
    match written {
        Some(tensor) if has_gradient(tensor) => Err(Error::InvalidTensor {
            rank,
            operation: collective.name().to_string(),
            reason:
                "it was computed from variables, and gradients flow back through it. The collective would change its \
                     values in place, unnoticed by the backward pass. Give a copy without a graph, \
                     `tensor.detach().copy()?`, and read the result from that"
                    .to_string(),
        }),
        _ => Ok(()),
    }
}

fn has_gradient(tensor: &Tensor) -> bool {
    // Having an operation proves nothing: no gradient flows back through a comparison. Only the graph shows it, and
    // most tensors have none.
    tensor.track_op() && !tensor.is_variable() && !tensor.sorted_nodes().is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device, Var};

    #[test]
    fn tensors_through_which_gradients_flow_are_told_from_others() -> candle_core::Result<()> {
        let var = Var::zeros((2, 3), DType::F32, &Device::Cpu)?;
        assert!(has_gradient(&var.sqr()?) && has_gradient(&var.narrow(0, 0, 1)?));
        assert!(!has_gradient(&var) && !has_gradient(&var.detach()) && !has_gradient(&var.sqr()?.detach().copy()?));
        // The number of correct answers.
        let right = var.argmax(1)?.eq(&Tensor::zeros(2, DType::U32, &Device::Cpu)?)?.to_dtype(DType::F32)?.sum_all()?;
        assert!(!has_gradient(&right));
        Ok(())
    }
}
