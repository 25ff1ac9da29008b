//! Tokens represent arguments and results in candle's graph.
use super::grad_mode::is_tracked;
use super::pass::{GradientSum, or_end};
use crate::kernels::{self, Output};
use crate::memory_format::MemoryFormat;
use candle_core::backend::BackendStorage;
use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, DType, Layout, Result, Shape, Storage, Tensor, TensorId,
};
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, LazyLock, Weak};

/// A function's backward pass.
pub trait Function: Send + Sync + 'static {
    /// The function's name, for messages.
    fn name(&self) -> &'static str;

    /// Returns the gradients of the arguments, in order, from the result's gradient, which is contiguous (or in the memory format
    /// that the result was made in). Those that are not `needed` are ignored. Gradients end here: candle does not differentiate a backward pass.
    ///
    /// # Errors
    /// An error ends the backward pass.
    fn backward(&self, gradient: &Tensor, needed: &[bool]) -> Result<Vec<Option<Tensor>>>;

    /// Whether nothing else holds the memory of the gradient that it returns for this argument, so that the next function may change it.
    #[doc(hidden)]
    fn owns(&self, _argument: usize) -> bool {
        false
    }

    /// [`backward`](Self::backward), where other functions may have contributed to the gradients of the arguments before. A function that adds to such a
    /// sum in the same pass over memory takes it and returns the new sum.
    #[doc(hidden)]
    fn backward_onto(&self, gradient: &Tensor, needed: &[bool], _: Earlier) -> Result<Vec<Option<Tensor>>> {
        self.backward(gradient, needed)
    }
}

/// The contributions of other functions to the gradients of a function's arguments in this backward pass.
#[derive(Clone, Copy, Debug, Default)]
pub struct Earlier<'a>(&'a [Edge]);

impl Earlier<'_> {
    /// Takes the sum for an argument, if there is one.
    pub fn take(&self, argument: usize) -> Option<Tensor> {
        self.0.get(argument)?.sum.take()
    }

    /// The same for a sum that the function may change, if it `fits`.
    pub fn take_owned(&self, argument: usize, fits: impl FnOnce(&Tensor) -> bool) -> Option<Tensor> {
        self.0.get(argument)?.sum.take_owned(fits)
    }
}

/// Creates the tensor of `result`, whose gradient flows through `function` along `edges`.
pub(super) fn apply_edges(
    edges: Vec<Edge>,
    format: MemoryFormat,
    result: (Storage, Shape),
    function: Box<dyn Function>,
) -> Result<Tensor> {
    if edges.iter().all(|edge| edge.token.is_none()) {
        return format.view(&Tensor::from_storage(result.0, result.1, BackpropOp::none(), false));
    }
    let (token, sum) = token_of(edges, format, function)?;
    attach(format, result, token, sum)
}

/// The token of a result whose gradient, of the memory format `format`, flows through `function` along `edges`, and the sum that
/// collects it. At least one of the edges has a token.
pub(super) fn token_of(
    edges: Vec<Edge>,
    format: MemoryFormat,
    function: Box<dyn Function>,
) -> Result<(Tensor, Arc<GradientSum>)> {
    let tokens: Vec<Tensor> = edges.iter().filter_map(|edge| edge.token.clone()).collect();
    let sum = Arc::new(GradientSum::default());
    let needed = edges.iter().map(|edge| edge.token.is_some()).collect();
    let backward = Backward { function, format, sum: Arc::clone(&sum), edges, needed };
    let token = match join(tokens)?.as_slice() {
        [a] => a.apply_op1(backward)?,
        [a, b] => a.apply_op2(b, backward)?,
        [a, b, c] => a.apply_op3(b, c, backward)?,
        _ => candle_core::bail!("a function has one to three tokens after joining"),
    };
    Ok((token, sum))
}

/// A tensor with a token, while it lives: a result of this module, or another argument of its functions.
#[derive(Debug)]
pub(super) struct Node {
    id: TensorId,
    token: Tensor,
    sum: Arc<GradientSum>,
    /// The nodes of what candle's operations made of the tensor, the latest last.
    results: Mutex<VecDeque<Arc<Node>>>,
}

/// How many of its results a node holds. Their users hold them too, so a result only needs this until the function that uses it is
/// called. A variable's copy has more results in each pass, and lives for many.
const HELD_RESULTS: usize = 64;

impl Node {
    /// Makes the token known as the one of the tensor `id`.
    fn list(id: TensorId, token: Tensor, sum: Arc<GradientSum>) -> Arc<Self> {
        let node = Arc::new(Self { id, token, sum, results: Mutex::default() });
        NODES.lock().insert(id, Arc::downgrade(&node));
        node
    }

    pub(super) fn find(id: TensorId) -> Option<Arc<Self>> {
        // Bound first: this may be the last reference to the node, whose drop locks the nodes.
        let node = NODES.lock().get(&id).cloned();
        node.and_then(|node| node.upgrade())
    }

    /// An edge to the tensor.
    pub(super) fn edge(&self) -> Edge {
        Edge::to(self.token.clone(), Arc::clone(&self.sum))
    }

    /// Makes `token` known as the one of `result`, which candle's operations made of this node's tensor, and so holds it.
    pub(super) fn hold(&self, result: &Tensor, token: Tensor, sum: Arc<GradientSum>) {
        let node = Self::list(result.id(), token, sum);
        let mut results = self.results.lock();
        let oldest = if results.len() == HELD_RESULTS { results.pop_front() } else { None };
        results.push_back(node);
        // The drop of a node may drop others, which lock their results.
        drop(results);
        drop(oldest);
    }
}

/// The nodes, since candle does not reveal which operation made a tensor.
static NODES: LazyLock<Mutex<HashMap<TensorId, Weak<Node>>>> = LazyLock::new(Mutex::default);

impl Drop for Node {
    fn drop(&mut self) {
        NODES.lock().remove(&self.id);
    }
}

/// How a gradient reaches an argument.
#[derive(Debug)]
pub(super) struct Edge {
    /// Collects the gradient; without a token, nothing reads it.
    pub(super) sum: Arc<GradientSum>,
    /// None if candle does not track the argument, or under `no_grad`.
    pub(super) token: Option<Tensor>,
    /// Other functions find the argument's token as long as this lives.
    _node: Option<Arc<Node>>,
}

impl Edge {
    pub(super) fn new(argument: &Tensor) -> Result<Self> {
        if !is_tracked(argument) || !argument.dtype().is_float() {
            return Ok(Self { sum: Arc::default(), token: None, _node: None });
        }
        let lift = || {
            let sum = Arc::new(GradientSum::default());
            let token = argument.apply_op1(Lift(Arc::clone(&sum)))?;
            Ok::<_, candle_core::Error>(Node::list(argument.id(), token, sum))
        };
        let node = Node::find(argument.id()).map_or_else(lift, Ok)?;
        Ok(Self { sum: Arc::clone(&node.sum), token: Some(node.token.clone()), _node: Some(node) })
    }

    /// An edge to a tensor with this token.
    pub(super) fn to(token: Tensor, sum: Arc<GradientSum>) -> Self {
        Self { sum, token: Some(token), _node: None }
    }
}

/// Turns `result` into the tensor that `token` represents. In other formats than the contiguous one it is a view of candle's, by
/// which the functions of this module find the token.
pub(super) fn attach(
    format: MemoryFormat,
    result: (Storage, Shape),
    token: Tensor,
    sum: Arc<GradientSum>,
) -> Result<Tensor> {
    let node = Arc::new(Mutex::new(None));
    let attach = Attach { format, result: Mutex::new(Some(result)), sum: Arc::clone(&sum), _node: Arc::clone(&node) };
    let result = format.view(&token.apply_op1(attach)?)?;
    *node.lock() = Some(Node::list(result.id(), token, sum));
    Ok(result)
}

/// The operation from a token to the result that it represents.
struct Attach {
    format: MemoryFormat,
    /// Taken by the forward pass, which runs once.
    result: Mutex<Option<(Storage, Shape)>>,
    sum: Arc<GradientSum>,
    /// Lives as long as the result.
    _node: Arc<Mutex<Option<Arc<Node>>>>,
}

impl CustomOp1 for Attach {
    fn name(&self) -> &'static str {
        "attach"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        match self.result.lock().take() {
            Some((Storage::Cpu(storage), shape)) => Ok((storage, shape)),
            _ => candle_core::bail!("a function's result must be on the device of its arguments"),
        }
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        match self.result.lock().take() {
            Some((Storage::Cuda(storage), shape)) => Ok((storage, shape)),
            _ => candle_core::bail!("a function's result must be on the device of its arguments"),
        }
    }

    /// Called if candle's own operations used the result too.
    fn bwd(&self, token: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        // candle's gradient is that of what is stored.
        self.sum.add(self.format.view(gradient)?, false)?;
        Ok(Some(token.clone()))
    }
}

/// The forward pass of an operation on tokens, which makes another token: the storages of the first token and of as many more as
/// there are names.
macro_rules! makes_token {
    ($($other:ident)*) => {
        fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, $($other: &CpuStorage, _: &Layout),*) -> Result<(CpuStorage, Shape)> {
            Ok(cpu_token())
        }

        fn cuda_fwd(
            &self,
            first: &CudaStorage,
            _: &Layout,
            $($other: &CudaStorage, _: &Layout),*
        ) -> Result<(CudaStorage, Shape)> {
            cuda_token(first)
        }
    };
}

/// The operation from an argument that no function has made to its token.
struct Lift(Arc<GradientSum>);

impl CustomOp1 for Lift {
    fn name(&self) -> &'static str {
        "lift"
    }

    makes_token!();

    fn bwd(&self, argument: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        match self.0.take() {
            Some(gradient) => Ok(Some(gradient)),
            // candle requires a gradient for everything but variables.
            None if argument.is_variable() => Ok(None),
            None => argument.zeros_like().map(Some),
        }
    }
}

/// Joins `tokens` until there are at most three, as many as candle's operations take. Their order stays: candle's backward pass visits
/// the graph of the first one last, and so the parameters of a checkpointed function, which follow its inputs, before everything that
/// came before it.
fn join(mut tokens: Vec<Tensor>) -> Result<Vec<Tensor>> {
    while tokens.len() > 3 {
        let mut joined = Vec::with_capacity(tokens.len().div_ceil(3) + 1);
        for group in tokens.chunks(3) {
            match group {
                [a, b, c] => joined.push(a.apply_op3(b, c, Join)?),
                rest => joined.extend_from_slice(rest),
            }
        }
        tokens = joined;
    }
    Ok(tokens)
}

struct Join;

impl CustomOp3 for Join {
    fn name(&self) -> &'static str {
        "join"
    }

    makes_token!(_second _third);

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        Ok((Some(gradient.clone()), Some(gradient.clone()), Some(gradient.clone())))
    }
}

/// The operation from the tokens of a function's arguments to the one of its result.
struct Backward {
    function: Box<dyn Function>,
    /// The result's.
    format: MemoryFormat,
    /// The result's gradient.
    sum: Arc<GradientSum>,
    /// The edges to the arguments.
    edges: Vec<Edge>,
    needed: Vec<bool>,
}

impl Backward {
    /// Passes the result's gradient on to the arguments.
    fn run(&self) -> Result<()> {
        let Some(gradient) = self.sum.take() else { return Ok(()) };
        let backward = |gradient: Tensor| self.function.backward_onto(&gradient, &self.needed, Earlier(&self.edges));
        let gradients = self.format.arrange(&gradient).and_then(backward);
        for (index, (edge, gradient)) in self.edges.iter().zip(or_end(gradients)?).enumerate() {
            if let (true, Some(gradient)) = (self.needed[index], gradient) {
                edge.sum.add(gradient.detach(), self.function.owns(index))?;
            }
        }
        Ok(())
    }
}

impl CustomOp1 for Backward {
    fn name(&self) -> &'static str {
        self.function.name()
    }

    makes_token!();

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.run()?;
        Ok(Some(gradient.clone()))
    }
}

impl CustomOp2 for Backward {
    fn name(&self) -> &'static str {
        self.function.name()
    }

    makes_token!(_second);

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        self.run()?;
        Ok((Some(gradient.clone()), Some(gradient.clone())))
    }
}

impl CustomOp3 for Backward {
    fn name(&self) -> &'static str {
        self.function.name()
    }

    makes_token!(_second _third);

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        self.run()?;
        Ok((Some(gradient.clone()), Some(gradient.clone()), Some(gradient.clone())))
    }
}

/// A token needs no elements, and candle's sums of tensors without elements are free.
pub(super) fn cpu_token() -> (CpuStorage, Shape) {
    (CpuStorage::F32(Vec::new()), Shape::from(0))
}

pub(super) fn cuda_token(neighbour: &CudaStorage) -> Result<(CudaStorage, Shape)> {
    let device = neighbour.device();
    let token = match kernels::allocates_nothing(device) {
        true => Output::nothing(device),
        false => Output::zeros(device, DType::F32, 1),
    };
    Ok(token?.into_parts())
}
