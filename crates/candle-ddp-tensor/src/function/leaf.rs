//! Copies of variables whose gradients go to hooks.
use super::pass::{GradientSum, or_end};
use super::token::{Edge, attach, cpu_token, cuda_token};
use crate::memory_format::MemoryFormat;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Result, Shape, Storage, Tensor, TensorId, Var};
use parking_lot::Mutex;
use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, LazyLock, OnceLock, Weak};

/// Creates a tensor of `result`, a copy of `var`, and its token. In each backward pass that reaches it, its complete
/// gradient is passed to `hook` once and is not stored for `var`.
pub fn leaf(
    var: &Var,
    result: (Storage, Shape),
    hook: impl Fn(&Tensor) -> Result<()> + Send + Sync + 'static,
) -> Result<(Tensor, Tensor)> {
    let sum = Arc::new(GradientSum::default());
    let listed = Arc::new(OnceLock::new());
    let token = var.apply_op1(Leaf { sum: Arc::clone(&sum), hook, _listed: Arc::clone(&listed) })?;
    LEAVES.lock().insert(token.id(), (Arc::downgrade(&sum), var.id()));
    let _ = listed.set(Listed(token.id()));
    Ok((attach(MemoryFormat::Contiguous, result, token.clone(), sum)?, token))
}

/// The operation from a variable to the token of its copy.
struct Leaf<H> {
    sum: Arc<GradientSum>,
    hook: H,
    /// Lives as long as the token.
    _listed: Arc<OnceLock<Listed>>,
}

/// For each token of a copy, the copy's gradient sum and the variable.
type Copies = HashMap<TensorId, (Weak<GradientSum>, TensorId)>;

/// All existing copies of variables.
static LEAVES: LazyLock<Mutex<Copies>> = LazyLock::new(Mutex::default);

/// Keeps a token listed in [`LEAVES`].
struct Listed(TensorId);

impl Drop for Listed {
    fn drop(&mut self) {
        LEAVES.lock().remove(&self.0);
    }
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
        // The gradient is complete only when the enclosing backward pass reaches this.
        if is_rerun() {
            return Ok(None);
        }
        if let Some(gradient) = self.sum.take() {
            or_end((self.hook)(&gradient))?;
        }
        Ok(None)
    }
}

/// The variables and copies of variables from which a tensor was computed.
#[derive(Debug)]
pub struct Leaves {
    pub(super) variables: Vec<Tensor>,
    pub(super) copies: Vec<Edge>,
}

impl Leaves {
    /// Returns the leaves of `result`.
    pub fn of(result: &Tensor) -> Self {
        let nodes = result.sorted_nodes();
        let (mut copies, mut copied) = (Vec::new(), HashSet::new());
        for node in &nodes {
            let leaf = LEAVES.lock().get(&node.id()).cloned();
            if let Some((sum, variable)) = leaf
                && let Some(sum) = sum.upgrade()
            {
                copies.push(Edge::to((*node).clone(), sum));
                copied.insert(variable);
            }
        }
        let variables = nodes.into_iter().filter(|node| node.is_variable() && !copied.contains(&node.id()));
        Self { variables: variables.cloned().collect(), copies }
    }
}

thread_local! {
    /// Number of nested backward passes of recomputed functions on this thread.
    static RERUNS: Cell<usize> = const { Cell::new(0) };
}

/// Whether the backward pass on this thread belongs to a recomputed function, and so is part of another one.
fn is_rerun() -> bool {
    RERUNS.get() > 0
}

/// Marks the backward pass of a recomputed function while it lives.
pub(super) struct Rerun;

impl Rerun {
    pub(super) fn begin() -> Self {
        RERUNS.set(RERUNS.get() + 1);
        Self
    }
}

impl Drop for Rerun {
    fn drop(&mut self) {
        RERUNS.set(RERUNS.get() - 1);
    }
}
