//! Finds which tensors of a graph belong to which DDP model: candle exposes a graph's tensors, but not its operations.
use crate::panic::lock;
use candle_core::{Tensor, TensorId};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

/// For each tensor that represents a parameter in graphs, the models it belongs to. A variable may belong to several.
static OWNERS: LazyLock<Mutex<HashMap<TensorId, Vec<Owner>>>> = LazyLock::new(Mutex::default);

#[derive(Clone)]
struct Owner {
    model: Arc<Identity>,
    parameter: Arc<str>,
}

/// Identifies a model in this process.
#[derive(Default)]
pub(crate) struct Identity {
    /// Number of guards that keep the model's parameters out of graphs.
    frozen: AtomicUsize,
}

impl Identity {
    pub(super) fn freeze(&self) {
        self.frozen.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn unfreeze(&self) {
        self.frozen.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn is_frozen(&self) -> bool {
        self.frozen.load(Ordering::Relaxed) > 0
    }
}

/// While this lives, graphs that contain the tensor are known to use a parameter of the model.
pub(super) struct Registration {
    tensor: TensorId,
    model: Arc<Identity>,
}

impl Registration {
    pub(super) fn new(tensor: &Tensor, model: &Arc<Identity>, parameter: &str) -> Self {
        let owner = Owner { model: Arc::clone(model), parameter: parameter.into() };
        lock(&OWNERS).entry(tensor.id()).or_default().push(owner);
        Self { tensor: tensor.id(), model: Arc::clone(model) }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut owners = lock(&OWNERS);
        if let Some(of_tensor) = owners.get_mut(&self.tensor) {
            of_tensor.retain(|owner| !Arc::ptr_eq(&owner.model, &self.model));
            if of_tensor.is_empty() {
                owners.remove(&self.tensor);
            }
        }
    }
}

/// What candle's backward pass will visit, in its order.
pub(super) struct Graph<'a> {
    parameters: Vec<(&'a Tensor, Vec<Owner>)>,
    variables: Vec<TensorId>,
}

impl<'a> Graph<'a> {
    pub(super) fn of(loss: &'a Tensor) -> Self {
        let nodes = loss.sorted_nodes();
        let variables = nodes.iter().filter(|node| node.is_variable()).map(|node| node.id()).collect();
        let owners = lock(&OWNERS);
        let owned = |node: &'a Tensor| Some((node, owners.get(&node.id())?.clone()));
        Self { parameters: nodes.into_iter().filter_map(owned).collect(), variables }
    }

    /// The name of the first parameter that belongs to none of `models`, is not a variable in `own`, and whose model is
    /// not frozen.
    pub(super) fn foreign_parameter(&self, models: &[&Arc<Identity>], own: &HashSet<TensorId>) -> Option<&str> {
        let may_stay =
            |owner: &Owner| owner.model.is_frozen() || models.iter().any(|model| Arc::ptr_eq(model, &owner.model));
        let mut parameters = self.parameters.iter().filter(|(tensor, _)| !own.contains(&tensor.id()));
        let (_, owners) = parameters.find(|(_, owners)| !owners.iter().any(may_stay))?;
        owners.first().map(|owner| &*owner.parameter)
    }

    /// The tensors that represent parameters of frozen models only.
    pub(super) fn frozen(&self) -> impl Iterator<Item = &Tensor> {
        let frozen = |(_, owners): &&(&Tensor, Vec<Owner>)| owners.iter().all(|owner| owner.model.is_frozen());
        self.parameters.iter().filter(frozen).map(|(tensor, _)| *tensor)
    }

    /// Where the backward pass completes the parameters of `model`, as a position to compare with other models'. None
    /// if the graph uses none.
    pub(super) fn completes(&self, model: &Arc<Identity>) -> Option<usize> {
        self.parameters.iter().rposition(|(_, owners)| owners.iter().any(|owner| Arc::ptr_eq(&owner.model, model)))
    }

    /// The variables, including the loss if it is one.
    pub(super) fn variables(&self) -> impl Iterator<Item = TensorId> {
        self.variables.iter().copied()
    }
}
