//! Differentiable functions of any number of tensors, as `torch.autograd.Function` makes them.
//!
//! candle's own custom operations take three arguments at most, and candle adds every gradient that one returns to zeros
//! before it goes on. Between the functions of this module gradients travel beside candle's graph instead, and are not
//! touched on their way:
//!
//! ```text
//!   x ──(Lift)── token ─┐                         token of y ──(Attach)── y ── candle's operations
//!   y' (Attach) ─ token ┴──(Backward: function)──┘    └──(Backward: next function)── token ── …
//! ```
//!
//! A token is a tensor of one element that stands for a result in candle's graph, so that candle comes to a function
//! after everything that uses its result. A result's gradient is collected in a [`Slot`]: by the functions that use the
//! result, and by `Attach`, to which candle gives what its own operations add. An argument that no function of this
//! module has made is lifted: its gradient leaves the slot for candle's graph.
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, DType, Layout, Result, Shape, Storage, Tensor, TensorId,
    Var,
};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

/// A function's backward pass.
pub(crate) trait Function: Send + Sync + 'static {
    /// The function's name, for messages.
    fn name(&self) -> &'static str;

    /// The gradients of the arguments, in their order, from the result's, which is contiguous. Those that are not `needed`
    /// are not looked at.
    fn backward(&self, gradient: &Tensor, needed: &[bool]) -> Result<Vec<Option<Tensor>>>;
}

/// Makes a tensor of `storage`, which is contiguous, of shape `shape` and on the device of the arguments, whose gradient
/// goes through `function` to `arguments`.
pub(crate) fn apply(arguments: &[&Tensor], result: (Storage, Shape), function: impl Function) -> Result<Tensor> {
    let edges = arguments.iter().map(|argument| Edge::new(argument)).collect::<Result<Vec<_>>>()?;
    let tokens: Vec<Tensor> = edges.iter().filter_map(|edge| edge.token.clone()).collect();
    if tokens.is_empty() {
        return Ok(Tensor::from_storage(result.0, result.1, BackpropOp::none(), false));
    }
    let slot = Arc::new(Slot::default());
    let needed = edges.iter().map(|edge| edge.token.is_some()).collect();
    let slots = edges.into_iter().map(|edge| edge.slot).collect();
    let token = join(tokens, Backward { function, slot: Arc::clone(&slot), slots, needed })?;
    attach(result, token, slot)
}

/// [`Tensor::apply_op1`], whose gradient goes on without candle's sums.
pub(crate) fn op1(x: &Tensor, op: impl CustomOp1 + Send + Sync + 'static) -> Result<Tensor> {
    let result = {
        let (storage, layout) = x.storage_and_layout();
        match &*storage {
            Storage::Cpu(x) => op.cpu_fwd(x, layout).map(|(storage, shape)| (Storage::Cpu(storage), shape)),
            Storage::Cuda(x) => op.cuda_fwd(x, layout).map(|(storage, shape)| (Storage::Cuda(storage), shape)),
            Storage::Metal(x) => op.metal_fwd(x, layout).map(|(storage, shape)| (Storage::Metal(storage), shape)),
        }?
    };
    let (name, arg) = (op.name(), x.detach());
    operation(name, &[x], result, move |result, gradient| Ok(vec![op.bwd(&arg, result, gradient)?]))
}

/// [`Tensor::apply_op2`], whose gradients go on without candle's sums.
pub(crate) fn op2(a: &Tensor, b: &Tensor, op: impl CustomOp2 + Send + Sync + 'static) -> Result<Tensor> {
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
    operation(name, &[a, b], result, move |result, gradient| {
        let (a, b) = op.bwd(&args[0], &args[1], result, gradient)?;
        Ok(vec![a, b])
    })
}

/// [`Tensor::apply_op3`], whose gradients go on without candle's sums.
pub(crate) fn op3(a: &Tensor, b: &Tensor, c: &Tensor, op: impl CustomOp3 + Send + Sync + 'static) -> Result<Tensor> {
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
    operation(name, &[a, b, c], result, move |result, gradient| {
        let (a, b, c) = op.bwd(&args[0], &args[1], &args[2], result, gradient)?;
        Ok(vec![a, b, c])
    })
}

/// A tensor of `result`, whose gradient goes through `backward`, which gets the result and its gradient, to `arguments`.
pub(crate) fn operation(
    name: &'static str,
    arguments: &[&Tensor],
    result: (Storage, Shape),
    backward: impl Fn(&Tensor, &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
) -> Result<Tensor> {
    let own = Arc::new(OnceLock::<Tensor>::new());
    let result = {
        let own = Arc::clone(&own);
        let backward = move |gradient: &Tensor| match own.get() {
            Some(result) => backward(result, gradient),
            None => candle_core::bail!("{name}: its backward pass runs before its result is there"),
        };
        apply(arguments, result, Op { name, backward })?
    };
    let _ = own.set(result.detach());
    Ok(result)
}

/// A backward pass that is a closure.
struct Op<B> {
    name: &'static str,
    backward: B,
}

impl<B: Fn(&Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static> Function for Op<B> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn backward(&self, gradient: &Tensor, _: &[bool]) -> Result<Vec<Option<Tensor>>> {
        (self.backward)(gradient)
    }
}

/// A tensor of `result`, a copy of `var`, whose complete gradient is given to `hook` once in each backward pass that comes
/// to it, and is not stored for `var`; and its token.
pub(crate) fn leaf(
    var: &Var,
    result: (Storage, Shape),
    hook: impl Fn(&Tensor) -> Result<()> + Send + Sync + 'static,
) -> Result<(Tensor, Tensor)> {
    let slot = Arc::new(Slot::default());
    let token = var.apply_op1(Leaf { slot: Arc::clone(&slot), hook })?;
    Ok((attach(result, token.clone(), slot)?, token))
}

/// Where the gradient of a result is summed up until the function that made the result needs it.
#[derive(Default)]
struct Slot(Mutex<Option<Tensor>>);

impl Slot {
    fn add(&self, gradient: Tensor) -> Result<()> {
        let mut slot = lock(&self.0);
        let sum = match slot.take() {
            Some(sum) => sum.add(&gradient)?,
            None => gradient,
        };
        *slot = Some(sum);
        Ok(())
    }

    fn take(&self) -> Option<Tensor> {
        lock(&self.0).take()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is known of a result of this module, as long as it lives.
struct Node {
    id: TensorId,
    token: Tensor,
    slot: Arc<Slot>,
}

/// The results of this module, since candle does not tell by which operation a tensor was made.
static NODES: LazyLock<Mutex<HashMap<TensorId, Weak<Node>>>> = LazyLock::new(Mutex::default);

impl Drop for Node {
    fn drop(&mut self) {
        lock(&NODES).remove(&self.id);
    }
}

/// How a gradient comes to an argument.
struct Edge {
    /// Where it is left; nobody takes it if there is no token.
    slot: Arc<Slot>,
    /// None if candle does not track the argument.
    token: Option<Tensor>,
}

impl Edge {
    fn new(argument: &Tensor) -> Result<Self> {
        if !argument.track_op() || !argument.dtype().is_float() {
            return Ok(Self { slot: Arc::default(), token: None });
        }
        // Bound first: the node may be the last one, whose drop locks the nodes.
        let node = lock(&NODES).get(&argument.id()).cloned();
        if let Some(node) = node.and_then(|node| node.upgrade()) {
            return Ok(Self { slot: Arc::clone(&node.slot), token: Some(node.token.clone()) });
        }
        let slot = Arc::new(Slot::default());
        let token = argument.apply_op1(Lift(Arc::clone(&slot)))?;
        Ok(Self { slot, token: Some(token) })
    }
}

/// Makes of `result` the tensor that `token` stands for.
fn attach(result: (Storage, Shape), token: Tensor, slot: Arc<Slot>) -> Result<Tensor> {
    let node = Arc::new(Mutex::new(None));
    let attach = Attach { result: Mutex::new(Some(result)), slot: Arc::clone(&slot), _node: Arc::clone(&node) };
    let result = token.apply_op1(attach)?;
    let known = Arc::new(Node { id: result.id(), token, slot });
    lock(&NODES).insert(result.id(), Arc::downgrade(&known));
    *lock(&node) = Some(known);
    Ok(result)
}

/// From a token to the result that it stands for.
struct Attach {
    /// Taken by the forward pass, which runs once.
    result: Mutex<Option<(Storage, Shape)>>,
    slot: Arc<Slot>,
    /// Lives as long as the result does.
    _node: Arc<Mutex<Option<Arc<Node>>>>,
}

impl CustomOp1 for Attach {
    fn name(&self) -> &'static str {
        "attach"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        match lock(&self.result).take() {
            Some((Storage::Cpu(storage), shape)) => Ok((storage, shape)),
            _ => candle_core::bail!("a function's result and its arguments are on different devices"),
        }
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        match lock(&self.result).take() {
            Some((Storage::Cuda(storage), shape)) => Ok((storage, shape)),
            _ => candle_core::bail!("a function's result and its arguments are on different devices"),
        }
    }

    /// candle's own operations used the result as well.
    fn bwd(&self, token: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.slot.add(gradient.clone())?;
        token.zeros_like().map(Some)
    }
}

/// From an argument that no function has made to its token.
struct Lift(Arc<Slot>);

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
            // candle wants one for everything but variables.
            None if argument.is_variable() => Ok(None),
            None => argument.zeros_like().map(Some),
        }
    }
}

/// From a variable to the token of its copy.
struct Leaf<H> {
    slot: Arc<Slot>,
    hook: H,
}

impl<H: Fn(&Tensor) -> Result<()> + Send + Sync> CustomOp1 for Leaf<H> {
    fn name(&self) -> &'static str {
        "leaf"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok(cpu_token())
    }

    fn cuda_fwd(&self, var: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        cuda_token(var)
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        if let Some(gradient) = self.slot.take() {
            (self.hook)(&gradient)?;
        }
        Ok(None)
    }
}

/// One token for all of `tokens`, through which candle comes to `backward`.
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

/// From the token of a function's arguments to that of its result.
struct Backward<F> {
    function: F,
    /// Of the result.
    slot: Arc<Slot>,
    /// Of the arguments.
    slots: Vec<Arc<Slot>>,
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
        if let Some(gradient) = self.slot.take() {
            let gradients = self.function.backward(&gradient.contiguous()?, &self.needed)?;
            for ((slot, needed), gradient) in self.slots.iter().zip(&self.needed).zip(gradients) {
                if let (true, Some(gradient)) = (needed, gradient) {
                    slot.add(gradient.detach())?;
                }
            }
        }
        Ok(Some(token_gradient.clone()))
    }
}

fn cpu_token() -> (CpuStorage, Shape) {
    (CpuStorage::F32(vec![0.0]), Shape::from(1))
}

fn cuda_token(beside: &CudaStorage) -> Result<(CudaStorage, Shape)> {
    let shape = Shape::from(1);
    Ok((beside.device().zeros_impl(&shape, DType::F32)?, shape))
}
