//! Tokens represent arguments and results in candle's graph.
use super::pass::{GradientSum, or_end};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, DType, Layout, Result, Shape, Storage, Tensor, TensorId,
};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Weak};

/// A function's backward pass.
pub trait Function: Send + Sync + 'static {
    /// The function's name, for messages.
    fn name(&self) -> &'static str;

    /// Returns the gradients of the arguments, in order, from the result's gradient, which is contiguous. Those that
    /// are not `needed` are ignored.
    fn backward(&self, gradient: &Tensor, needed: &[bool]) -> Result<Vec<Option<Tensor>>>;
}

/// Creates the tensor of `result`, whose gradient flows through `function` along `edges`.
pub(super) fn apply_edges(edges: Vec<Edge>, result: (Storage, Shape), function: impl Function) -> Result<Tensor> {
    let tokens: Vec<Tensor> = edges.iter().filter_map(|edge| edge.token.clone()).collect();
    if tokens.is_empty() {
        return Ok(Tensor::from_storage(result.0, result.1, BackpropOp::none(), false));
    }
    let sum = Arc::new(GradientSum::default());
    let needed = edges.iter().map(|edge| edge.token.is_some()).collect();
    let sums = edges.into_iter().map(|edge| edge.sum).collect();
    let token = join(tokens, Backward { function, sum: Arc::clone(&sum), sums, needed })?;
    attach(result, token, sum)
}

/// A result of this module, while it lives.
struct Node {
    id: TensorId,
    token: Tensor,
    sum: Arc<GradientSum>,
}

/// The results of this module, since candle does not tell which operation made a tensor.
static NODES: LazyLock<Mutex<HashMap<TensorId, Weak<Node>>>> = LazyLock::new(Mutex::default);

impl Drop for Node {
    fn drop(&mut self) {
        NODES.lock().remove(&self.id);
    }
}

/// How a gradient reaches an argument.
pub(super) struct Edge {
    /// Collects the gradient; without a token, nothing reads it.
    pub(super) sum: Arc<GradientSum>,
    /// None if candle does not track the argument.
    pub(super) token: Option<Tensor>,
}

impl Edge {
    pub(super) fn new(argument: &Tensor) -> Result<Self> {
        if !argument.track_op() || !argument.dtype().is_float() {
            return Ok(Self { sum: Arc::default(), token: None });
        }
        // Bound first: this may be the last reference to the node, whose drop locks the nodes.
        let node = NODES.lock().get(&argument.id()).cloned();
        if let Some(node) = node.and_then(|node| node.upgrade()) {
            return Ok(Self { sum: Arc::clone(&node.sum), token: Some(node.token.clone()) });
        }
        let sum = Arc::new(GradientSum::default());
        let token = argument.apply_op1(Lift(Arc::clone(&sum)))?;
        Ok(Self { sum, token: Some(token) })
    }
}

/// Turns `result` into the tensor that `token` represents.
pub(super) fn attach(result: (Storage, Shape), token: Tensor, sum: Arc<GradientSum>) -> Result<Tensor> {
    let node = Arc::new(Mutex::new(None));
    let attach = Attach { result: Mutex::new(Some(result)), sum: Arc::clone(&sum), _node: Arc::clone(&node) };
    let result = token.apply_op1(attach)?;
    let known = Arc::new(Node { id: result.id(), token, sum });
    NODES.lock().insert(result.id(), Arc::downgrade(&known));
    *node.lock() = Some(known);
    Ok(result)
}

/// The operation from a token to the result that it represents.
struct Attach {
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
            _ => candle_core::bail!("a function's result and its arguments are on different devices"),
        }
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        match self.result.lock().take() {
            Some((Storage::Cuda(storage), shape)) => Ok((storage, shape)),
            _ => candle_core::bail!("a function's result and its arguments are on different devices"),
        }
    }

    /// Called if candle's own operations used the result too.
    fn bwd(&self, token: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.sum.add(gradient.clone())?;
        token.zeros_like().map(Some)
    }
}

/// The operation from an argument that no function has made to its token.
struct Lift(Arc<GradientSum>);

impl CustomOp1 for Lift {
    fn name(&self) -> &'static str {
        "lift"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok(cpu_token())
    }

    fn cuda_fwd(&self, argument: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        cuda_token(argument)
    }

    fn bwd(&self, argument: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        match self.0.take() {
            Some(gradient) => Ok(Some(gradient)),
            // candle requires a gradient for everything but variables.
            None if argument.is_variable() => Ok(None),
            None => argument.zeros_like().map(Some),
        }
    }
}

/// Joins all `tokens` into one, through which candle reaches `backward`.
fn join<F: Function>(mut tokens: Vec<Tensor>, backward: Backward<F>) -> Result<Tensor> {
    while tokens.len() > 1 {
        let rest = tokens.split_off(tokens.len().min(3));
        let joined = match tokens.as_slice() {
            [a, b] => a.apply_op2(b, Join)?,
            [a, b, c] => a.apply_op3(b, c, Join)?,
            _ => candle_core::bail!("two or three tokens are joined at a time"),
        };
        tokens = rest;
        tokens.push(joined);
    }
    match tokens.pop() {
        Some(token) => token.apply_op1(backward),
        None => candle_core::bail!("a function without tracked arguments has no backward pass"),
    }
}

struct Join;

impl CustomOp2 for Join {
    fn name(&self) -> &'static str {
        "join"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok(cpu_token())
    }

    fn cuda_fwd(&self, token: &CudaStorage, _: &Layout, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        cuda_token(token)
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        Ok((Some(gradient.clone()), Some(gradient.clone())))
    }
}

impl CustomOp3 for Join {
    fn name(&self) -> &'static str {
        "join"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        Ok(cpu_token())
    }

    fn cuda_fwd(
        &self,
        token: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        cuda_token(token)
    }

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

/// The operation from the token of a function's arguments to that of its result.
struct Backward<F> {
    function: F,
    /// The result's gradient.
    sum: Arc<GradientSum>,
    /// The arguments' gradients.
    sums: Vec<Arc<GradientSum>>,
    needed: Vec<bool>,
}

impl<F: Function> CustomOp1 for Backward<F> {
    fn name(&self) -> &'static str {
        self.function.name()
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok(cpu_token())
    }

    fn cuda_fwd(&self, token: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        cuda_token(token)
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, token_gradient: &Tensor) -> Result<Option<Tensor>> {
        if let Some(gradient) = self.sum.take() {
            let gradients = gradient.contiguous().and_then(|gradient| self.function.backward(&gradient, &self.needed));
            for ((sum, needed), gradient) in self.sums.iter().zip(&self.needed).zip(or_end(gradients)?) {
                if let (true, Some(gradient)) = (needed, gradient) {
                    sum.add(gradient.detach())?;
                }
            }
        }
        Ok(Some(token_gradient.clone()))
    }
}

pub(super) fn cpu_token() -> (CpuStorage, Shape) {
    (CpuStorage::F32(vec![0.0]), Shape::from(1))
}

pub(super) fn cuda_token(beside: &CudaStorage) -> Result<(CudaStorage, Shape)> {
    let shape = Shape::from(1);
    Ok((beside.device().zeros_impl(&shape, DType::F32)?, shape))
}
