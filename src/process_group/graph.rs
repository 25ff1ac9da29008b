//! A collective knows nothing of the graph to which its tensors belong.
use crate::backend::{Access, Collective, P2pOp};
use crate::tensor::function::is_input_gradient;
use crate::{Error, Result};
use candle_core::Tensor;

/// Refuses a collective with a tensor through which gradients flow: it would write into the tensor, unnoticed by the backward
/// pass, or read it, and no gradient would come back from the ranks that get its values. (PyTorch warns when a backward pass
/// reaches such a tensor.) Variables may be read and written, as by `Var::set`.
pub(super) fn check(rank: usize, collective: &Collective) -> Result<()> {
    collective
        .tensors()
        .try_for_each(|(argument, tensor, access)| check_tensor(rank, collective.name(), argument, tensor, access))
}

/// The same for the messages of a batch.
pub(super) fn check_batch(rank: usize, batch: &[P2pOp]) -> Result<()> {
    batch.iter().try_for_each(|message| {
        let access = if message.is_recv() { Access::Write } else { Access::Read };
        check_tensor(rank, "batch_isend_irecv", "tensor", message.tensor(), access)
    })
}

/// The same for one tensor of an operation.
pub(super) fn check_tensor(
    rank: usize,
    operation: &str,
    argument: &str,
    tensor: &Tensor,
    access: Access,
) -> Result<()> {
    if !has_gradient(tensor) {
        return Ok(());
    }
    let reason = match access {
        Access::Write => format!(
            "`{argument}` was computed from variables, and gradients flow back through it. The collective would change its values \
             in place, unnoticed by the backward pass. Give a copy without a graph, `{argument}.detach().copy()?`, and \
             read the result from that"
        ),
        Access::Read => format!(
            "`{argument}` was computed from variables, and its gradient would end here: none comes back through a \
             collective. If only the values are to be sent, pass `{argument}.detach()`. Gradients flow through the functions of \
             `with_grad`"
        ),
    };
    Err(Error::InvalidTensor { rank, operation: operation.to_string(), reason })
}

fn has_gradient(tensor: &Tensor) -> bool {
    // Having an operation proves nothing: no gradient flows back through a comparison. Only the graph shows it, and
    // most tensors have none.
    // The gradient of a model's input has a graph only to be known.
    let has = |nodes: Vec<&Tensor>| nodes.iter().any(|node| node.is_variable() && !is_input_gradient(node.id()));
    tensor.track_op() && !tensor.is_variable() && has(tensor.sorted_nodes())
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
