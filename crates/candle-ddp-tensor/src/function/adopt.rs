//! Results of candle's own operations whose gradients stay outside candle's graph.
use super::grad_mode::is_tracked;
use super::token::{Edge, Function, Node, token_of};
use crate::memory_format::MemoryFormat;
use candle_core::{Result, Tensor};

/// Makes functions find a token for `result`, which candle's own operations made of `arguments`: the gradients that they contribute
/// go through `function`. Those of candle's operations go through candle's graph as before, which adds each to zeros.
///
/// If no function has made one of the arguments, candle's graph has the whole gradient. If the result is an argument itself, as the
/// whole of a tensor, there is nothing to do.
pub fn adopt(result: Tensor, arguments: &[&Tensor], function: impl Function) -> Result<Tensor> {
    adopt_dyn(result, arguments, Box::new(function))
}

fn adopt_dyn(result: Tensor, arguments: &[&Tensor], function: Box<dyn Function>) -> Result<Tensor> {
    if !is_tracked(&result) || arguments.iter().any(|argument| argument.id() == result.id()) {
        return Ok(result);
    }
    let nodes: Vec<_> = arguments.iter().map(|argument| Node::find(argument.id())).collect();
    // It lives as long as the argument, and so as long as the result. Edges do not hold nodes that were found: this one's results
    // include the edges.
    let Some(holder) = nodes.iter().flatten().next() else { return Ok(result) };
    let edges = arguments.iter().zip(&nodes).map(|(argument, node)| match node {
        Some(node) if is_tracked(argument) => Ok(node.edge()),
        _ => Edge::new(argument),
    });
    let edges = edges.collect::<Result<_>>()?;
    let (token, sum) = token_of(edges, MemoryFormat::Contiguous, function)?;
    holder.hold(&result, token, sum);
    Ok(result)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::function::add;
    use candle_core::{DType, Device, Var};

    struct Same;

    impl Function for Same {
        fn name(&self) -> &'static str {
            "same"
        }

        fn backward(&self, gradient: &Tensor, needed: &[bool]) -> Result<Vec<Option<Tensor>>> {
            Ok(vec![Some(gradient.clone()); needed.len()])
        }
    }

    /// candle returns some views of a whole tensor as that tensor, whose token stays what it is: it may be a variable's copy, which lives
    /// for many passes.
    #[test]
    fn a_tensor_that_is_its_own_view_keeps_its_token() {
        let x = Var::zeros(3, DType::F32, &Device::Cpu).unwrap();
        let sum = add(&x, &x).unwrap();
        let token = || Node::find(sum.id()).unwrap().edge().token.unwrap().id();
        let before = token();
        let whole = adopt(sum.narrow(0, 0, 3).unwrap(), &[&sum], Same).unwrap();
        assert_eq!((whole.id(), token()), (sum.id(), before));
    }

    /// Nodes that held each other would keep a graph for ever.
    #[test]
    fn nodes_end_with_their_tensors() {
        let x = Var::zeros(3, DType::F32, &Device::Cpu).unwrap();
        let (sum, other) = (add(&x, &x).unwrap(), x.affine(2.0, 0.0).unwrap());
        let results: Vec<Tensor> =
            (0..100).map(|_| adopt((&sum + &other).unwrap(), &[&sum, &other], Same).unwrap()).collect();
        let of_result = adopt((&results[99] + x.as_tensor()).unwrap(), &[&results[99], x.as_tensor()], Same).unwrap();
        let used = add(&of_result, &results[0]).unwrap();
        let ids = [&sum, &other, &results[99], &of_result, x.as_tensor()].map(Tensor::id);
        assert!(ids[2..4].iter().all(|&id| Node::find(id).is_some()));
        drop((sum, other, results, of_result));
        let gradients = used.sum_all().unwrap().backward().unwrap();
        assert_eq!(gradients.get(&x).unwrap().to_vec1::<f32>().unwrap(), [9.0; 3]);
        drop(used);
        assert!(ids.iter().all(|&id| Node::find(id).is_none()));
    }
}
