//! Finds which tensors of a graph belong to which DDP model: candle exposes a graph's tensors, but not its operations.
use crate::ddp::blocks::Units;
use crate::panic::lock;
use candle_core::{Tensor, TensorId};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, Weak};

/// For each tensor that represents a parameter in graphs, the models it belongs to. A variable may belong to several.
static OWNERS: LazyLock<Mutex<HashMap<TensorId, Vec<Owner>>>> = LazyLock::new(Mutex::default);

#[derive(Clone)]
struct Owner {
    model: Arc<Identity>,
    parameter: Arc<str>,
}

/// When candle made a tensor: it numbers all tensors of a process.
fn birth(tensor: &Tensor) -> u64 {
    struct Number(u64);
    impl Hasher for Number {
        fn write(&mut self, bytes: &[u8]) {
            self.0 = bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
        }

        fn write_usize(&mut self, number: usize) {
            self.0 = number as u64;
        }

        fn finish(&self) -> u64 {
            self.0
        }
    }
    let mut number = Number(0);
    tensor.id().hash(&mut number);
    number.finish()
}

/// Identifies a model in this process.
#[derive(Default)]
pub(crate) struct Identity {
    /// Number of guards that keep the model's parameters out of graphs.
    frozen: AtomicUsize,
    /// When the model was built: older tensors belong to the model itself, such as views of its parameters.
    built: AtomicU64,
    /// When the values of its parameters last changed.
    changed: AtomicU64,
    /// When they may have changed: the first forward pass after a backward pass, where nobody compares values.
    may_have_changed: AtomicU64,
    /// Whether there were averaged gradients since the last forward pass.
    has_gradients: AtomicBool,
    /// When the last backward pass passed the model's gradients on.
    backward: Mutex<Births>,
    /// Under sharding, the model's number, which is the same on all ranks, and its blocks.
    spread: OnceLock<(u64, Weak<Units>)>,
}

/// When tensors were made.
#[derive(Default)]
struct Births {
    range: Range<u64>,
    is_running: bool,
}

impl Identity {
    pub(in crate::ddp) fn freeze(&self) {
        self.frozen.fetch_add(1, Ordering::Relaxed);
    }

    pub(in crate::ddp) fn unfreeze(&self) {
        self.frozen.fetch_sub(1, Ordering::Relaxed);
    }

    pub(in crate::ddp) fn is_frozen(&self) -> bool {
        self.frozen.load(Ordering::Relaxed) > 0
    }

    /// Call once the model is built; `new` has just been made.
    pub(in crate::ddp) fn is_built(&self, new: &Tensor) {
        self.built.store(birth(new), Ordering::Relaxed);
    }

    /// Call once the model is built, if it is sharded.
    pub(in crate::ddp) fn is_spread(&self, number: u64, units: &Arc<Units>) {
        self.spread.get_or_init(|| (number, Arc::downgrade(units)));
    }

    /// Call when the parameters were updated, and so `changed`, if anybody looked; `new` has just been made.
    pub(in crate::ddp) fn is_updated(&self, changed: Option<bool>, new: &Tensor) {
        let has_gradients = self.has_gradients.swap(false, Ordering::Relaxed);
        match changed {
            Some(true) => self.changed.store(birth(new), Ordering::Relaxed),
            None if has_gradients => self.may_have_changed.store(birth(new), Ordering::Relaxed),
            Some(false) | None => {}
        }
    }

    /// Call when a backward pass has computed a gradient of a parameter; `new` has just been made.
    pub(in crate::ddp) fn has_gradient(&self, new: &Tensor) {
        let (mut backward, now) = (lock(&self.backward), birth(new));
        let from = if backward.is_running { backward.range.start } else { now };
        *backward = Births { range: from..now, is_running: true };
    }

    /// Call before tensors are made outside of a backward pass.
    pub(in crate::ddp) fn backward_is_over(&self) {
        lock(&self.backward).is_running = false;
    }

    /// Call when there are averaged gradients.
    pub(in crate::ddp) fn has_gradients(&self) {
        self.has_gradients.store(true, Ordering::Relaxed);
    }
}

/// While this lives, graphs that contain the tensor are known to use a parameter of the model.
pub(in crate::ddp) struct Registration {
    tensor: TensorId,
    model: Arc<Identity>,
}

impl Registration {
    pub(in crate::ddp) fn new(tensor: &Tensor, model: &Arc<Identity>, parameter: &str) -> Self {
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

/// A parameter that a graph reaches from before its values changed.
pub(in crate::ddp) struct Stale {
    pub(in crate::ddp) parameter: String,
    /// Whether the values have changed for certain.
    pub(in crate::ddp) is_certain: bool,
}

/// The nodes that candle's backward pass will visit, in its order.
pub(in crate::ddp) struct Graph<'a> {
    nodes: Vec<&'a Tensor>,
    parameters: Vec<(&'a Tensor, Vec<Owner>)>,
    variables: Vec<TensorId>,
}

impl<'a> Graph<'a> {
    pub(in crate::ddp) fn of(loss: &'a Tensor) -> Self {
        let nodes = loss.sorted_nodes();
        let variables = nodes.iter().filter(|node| node.is_variable()).map(|node| node.id()).collect();
        let owners = lock(&OWNERS);
        let owned = |node: &'a Tensor| Some((node, owners.get(&node.id())?.clone()));
        let parameters = nodes.iter().copied().filter_map(owned).collect();
        Self { nodes, parameters, variables }
    }

    /// A parameter that the graph uses in a tensor which was computed before the parameter changed. Its replica has new values
    /// now, with which the backward pass would compute wrong gradients.
    pub(in crate::ddp) fn stale(&self) -> Option<Stale> {
        let mut models: Vec<&Arc<Identity>> = Vec::new();
        for owner in self.parameters.iter().flat_map(|(_, owners)| owners) {
            if !models.iter().any(|model| Arc::ptr_eq(model, &owner.model)) {
                models.push(&owner.model);
            }
        }
        let find = |time: fn(&Identity) -> &AtomicU64, is_certain| {
            let used = |model: &&Arc<Identity>| self.used_within(model, 0..time(model).load(Ordering::Relaxed));
            let parameter = models.iter().find_map(used)?.to_string();
            Some(Stale { parameter, is_certain })
        };
        find(|model| &model.changed, true).or_else(|| find(|model| &model.may_have_changed, false))
    }

    /// A parameter of `model` that the graph uses in a gradient of the last backward pass. candle multiplies by tensors of the first
    /// graph to compute gradients, so that the gradients of its own operations depend on them.
    pub(in crate::ddp) fn used_in_gradient(&self, model: &Arc<Identity>) -> Option<&str> {
        let range = lock(&model.backward).range.clone();
        self.used_within(model, range)
    }

    /// A parameter of `model` from which a tensor was computed after the model was built and within `time`.
    fn used_within(&self, model: &Arc<Identity>, time: Range<u64>) -> Option<&str> {
        let built = model.built.load(Ordering::Relaxed);
        let time = time.start.max(built + 1)..time.end;
        let is_between = |node: &&&Tensor| !node.is_variable() && time.contains(&birth(node));
        let mut known = HashSet::new();
        for node in self.nodes.iter().filter(is_between) {
            if known.contains(&node.id()) {
                continue;
            }
            // Rare: in most programs, all tensors are younger.
            let before: HashSet<TensorId> = node.sorted_nodes().iter().map(|node| node.id()).collect();
            let parameters = self.parameters.iter().filter(|(tensor, _)| before.contains(&tensor.id()));
            let mut owners = parameters.flat_map(|(_, owners)| owners);
            if let Some(owner) = owners.find(|owner| Arc::ptr_eq(&owner.model, model)) {
                return Some(&owner.parameter);
            }
            known.extend(before);
        }
        None
    }

    /// The name of the first parameter that belongs to none of `models`, is not a variable in `own`, and whose model is
    /// not frozen.
    pub(in crate::ddp) fn foreign_parameter(&self, models: &[&Arc<Identity>], own: &HashSet<TensorId>) -> Option<&str> {
        let may_stay =
            |owner: &Owner| owner.model.is_frozen() || models.iter().any(|model| Arc::ptr_eq(model, &owner.model));
        let mut parameters = self.parameters.iter().filter(|(tensor, _)| !own.contains(&tensor.id()));
        let (_, owners) = parameters.find(|(_, owners)| !owners.iter().any(may_stay))?;
        owners.first().map(|owner| &*owner.parameter)
    }

    /// The tensors that represent parameters of frozen models only.
    pub(in crate::ddp) fn frozen(&self) -> impl Iterator<Item = &Tensor> {
        let frozen = |(_, owners): &&(&Tensor, Vec<Owner>)| owners.iter().all(|owner| owner.model.is_frozen());
        self.parameters.iter().filter(frozen).map(|(tensor, _)| *tensor)
    }

    /// Where the backward pass completes the parameters of `model`, as a position to compare with other models'. None
    /// if the graph uses none.
    pub(in crate::ddp) fn completes(&self, model: &Arc<Identity>) -> Option<usize> {
        self.parameters.iter().rposition(|(_, owners)| owners.iter().any(|owner| Arc::ptr_eq(&owner.model, model)))
    }

    /// The sharded models other than `models` whose parameters the graph uses, in an order that is the same on all ranks.
    pub(in crate::ddp) fn other_sharded(&self, models: &[&Arc<Identity>]) -> Vec<Arc<Units>> {
        let owners = self.parameters.iter().flat_map(|(_, owners)| owners);
        let others = owners.filter(|owner| !models.iter().any(|model| Arc::ptr_eq(model, &owner.model)));
        let mut others: Vec<_> = others.filter_map(|owner| owner.model.spread.get()).collect();
        others.sort_by_key(|(number, _)| *number);
        others.dedup_by(|(_, a), (_, b)| a.ptr_eq(b));
        others.into_iter().filter_map(|(_, units)| units.upgrade()).collect()
    }

    /// The blocks of `model` whose parameters the graph uses, in ascending order of their numbers, which `owners` has for each parameter. 0
    /// is none.
    pub(in crate::ddp) fn blocks(&self, model: &Arc<Identity>, owners: &HashMap<String, usize>) -> Vec<usize> {
        let used = self.parameters.iter().flat_map(|(_, owners)| owners);
        let used = used.filter(|owner| Arc::ptr_eq(&owner.model, model));
        let numbers: BTreeSet<usize> = used.filter_map(|owner| owners.get(&*owner.parameter).copied()).collect();
        numbers.into_iter().filter(|number| *number > 0).collect()
    }

    /// The variables, including the loss if it is one.
    pub(in crate::ddp) fn variables(&self) -> impl Iterator<Item = TensorId> {
        self.variables.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device, Var};

    /// candle promises no order of its numbers.
    #[test]
    fn later_tensors_have_larger_numbers() {
        let var = Var::zeros(2, DType::F32, &Device::Cpu).unwrap();
        let mut last = birth(&var);
        for _ in 0..100 {
            let (detached, sum) = (var.as_detached_tensor(), (var.as_tensor() + 1.0).unwrap());
            assert!(birth(&detached) > last && birth(&sum) > birth(&detached));
            last = birth(&sum);
        }
    }
}
