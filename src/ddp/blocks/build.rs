//! How a model of blocks is built: block by block, so that no rank ever has all of it.
use super::flat::Flat;
use super::unit::{Unit, Units};
use crate::backend;
use crate::ddp::buckets::groups::Groups;
use crate::ddp::model::sharding::DDP_NEW;
use crate::error::describe;
use crate::panic::lock;
use crate::tensor::hold;
use crate::{Error, Result};
use candle_core::{DType, Tensor, Var};
use candle_ddp_nn::keeping_frozen;
use candle_nn::VarMap;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

thread_local! {
    /// The construction of a sharded model on this thread.
    static CURRENT: RefCell<Option<Construction>> = const { RefCell::new(None) };
}

/// A sharded model that is being built.
#[derive(Clone)]
pub(crate) struct Construction {
    groups: Groups,
    varmap: VarMap,
    units: Arc<Units>,
    state: Arc<Mutex<State>>,
}

/// The blocks of a model that is built.
pub(crate) struct Blocks {
    pub(in crate::ddp) units: Arc<Units>,
    /// The parameters outside of blocks. Each block holds its own.
    _root: Arc<Unit>,
    /// The block of each variable.
    pub(in crate::ddp) owners: HashMap<String, usize>,
}

#[derive(Default)]
struct State {
    /// The parameters that were requested outside of blocks.
    outside: Vec<Requested>,
    /// The block that is being built, with its name.
    block: Option<(String, Vec<Requested>)>,
    blocks: usize,
    /// The block of each variable.
    owners: HashMap<String, usize>,
    /// Whether all ranks know already that there will be no model.
    failed: bool,
}

/// A tensor that the model has requested.
struct Requested {
    name: String,
    kind: Kind,
    /// The tensors that the model holds.
    tensor: Tensor,
    /// Its first value, in the dtype of this rank's piece.
    value: Tensor,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Parameter,
    Frozen,
    /// Frozen, and not in the VarMap.
    Base,
}

impl Requested {
    fn kind(&self) -> (Kind, DType, DType) {
        (self.kind, self.value.dtype(), self.tensor.dtype())
    }
}

impl Construction {
    /// Every rank must call it.
    pub(in crate::ddp) fn new(groups: &Groups, varmap: &VarMap, reshard_after_forward: bool) -> Result<Self> {
        let units = Units::new(groups.within(), reshard_after_forward)?;
        Ok(Self { groups: groups.clone(), varmap: varmap.clone(), units, state: Arc::default() })
    }

    /// The construction of a sharded model on this thread.
    pub(super) fn current() -> Option<Self> {
        CURRENT.with_borrow(Clone::clone)
    }

    /// Builds the model: `build` may call [`block`](super::block).
    pub(in crate::ddp) fn during<T>(&self, build: impl FnOnce() -> T) -> T {
        /// Restores the enclosing construction, even if `build` panics.
        struct Scope(Option<Construction>);
        impl Drop for Scope {
            fn drop(&mut self) {
                CURRENT.set(self.0.take());
            }
        }
        let _scope = Scope(CURRENT.replace(Some(self.clone())));
        let this = self.clone();
        keeping_frozen(Rc::new(move |name, tensor| this.keep(name, tensor)), build)
    }

    /// The model has requested the variable `name`, and holds `tensor`. The variable leaves the VarMap when its block is complete.
    pub(in crate::ddp) fn request(&self, name: &str, is_trained: bool, tensor: &Tensor, var: Var) {
        let state = &mut *lock(&self.state);
        let (number, requested) = match &mut state.block {
            Some((_, requested)) => (state.blocks + 1, requested),
            None => (0, &mut state.outside),
        };
        state.owners.insert(name.to_string(), number);
        let (kind, value) = (if is_trained { Kind::Parameter } else { Kind::Frozen }, var.into_inner());
        requested.push(Requested { name: name.to_string(), kind, tensor: tensor.clone(), value });
    }

    /// Takes over a frozen tensor that is no variable, such as one of a file, and returns what the model holds instead. What is outside of
    /// blocks would exist for a whole step anyway, and stays as it is.
    fn keep(&self, name: &str, tensor: &Tensor) -> candle_core::Result<Tensor> {
        let mut state = lock(&self.state);
        let Some((_, requested)) = &mut state.block else { return Ok(tensor.clone()) };
        let is_variable = requested.iter().any(|known| hold::shares(&known.tensor, tensor))
            || lock(self.varmap.data()).values().any(|var| hold::shares(var, tensor));
        if is_variable || !tensor.dtype().is_float() || !backend::takes(tensor.dtype()) {
            return Ok(tensor.clone());
        }
        // Others may use its memory.
        let tensor = tensor.force_contiguous()?;
        let value = tensor.clone();
        requested.push(Requested { name: name.to_string(), kind: Kind::Base, tensor: tensor.clone(), value });
        Ok(tensor)
    }

    /// Checks that a variable that is requested again belongs to the block that is being built.
    pub(in crate::ddp) fn check_again(&self, name: &str) -> Result<()> {
        let state = lock(&self.state);
        let here = if state.block.is_some() { state.blocks + 1 } else { 0 };
        match state.owners.get(name) {
            Some(owner) if *owner != here => Err(Error::parameter(
                name,
                "it is requested in a block and outside of it, but exists only while its own block computes: request tied weights in \
                 one block, or all outside of blocks",
            )),
            _ => Ok(()),
        }
    }

    pub(super) fn open(&self, name: String) -> candle_core::Result<()> {
        let mut state = lock(&self.state);
        if let Some((outer, _)) = &state.block {
            let reason = format!("{name} is a block within the block {outer}: only one of the two can be one");
            return Err(Error::invalid("block", reason).into());
        }
        state.block = Some((name, Vec::new()));
        Ok(())
    }

    pub(super) fn close(&self) -> candle_core::Result<Option<Arc<Unit>>> {
        let (name, requested, number) = {
            let mut state = lock(&self.state);
            let (name, requested) = state.block.take().unwrap_or_default();
            if requested.is_empty() {
                return Ok(None);
            }
            state.blocks += 1;
            (name, requested, state.blocks)
        };
        Ok(Some(self.spread(number, &format!("block {name}"), requested)?))
    }

    /// Completes the model.
    pub(in crate::ddp) fn finish(&self) -> Result<Blocks> {
        let requested = std::mem::take(&mut lock(&self.state).outside);
        let root = self.spread(0, "the parameters outside of blocks", requested)?;
        let owners = std::mem::take(&mut lock(&self.state).owners);
        Ok(Blocks { units: Arc::clone(&self.units), _root: root, owners })
    }

    /// Whether all ranks know already that there will be no model.
    pub(in crate::ddp) fn has_failed(&self) -> bool {
        lock(&self.state).failed
    }

    /// Leaves each rank with its part of the variables, of rank 0's values.
    fn spread(&self, number: usize, name: &str, requested: Vec<Requested>) -> Result<Arc<Unit>> {
        let spread = self.try_spread(number, name, requested);
        lock(&self.state).failed |= spread.is_err();
        spread
    }

    fn check(&self, Requested { name, value, .. }: &Requested) -> Result<()> {
        if !value.device().same_device(self.groups.main().device()) {
            let reason = "a sharded model must be on the device of its group: build it with the VarBuilder as it is";
            return Err(Error::parameter(name, reason));
        }
        if !value.dtype().is_float() || !backend::takes(value.dtype()) {
            let reason =
                format!("its dtype must be f32, f64, f16 or bf16 under sharding, not {}", value.dtype().as_str());
            return Err(Error::parameter(name, reason));
        }
        Ok(())
    }

    fn try_spread(&self, number: usize, name: &str, requested: Vec<Requested>) -> Result<Arc<Unit>> {
        let checked = requested.iter().try_for_each(|requested| self.check(requested));
        let report = checked.as_ref().map(|()| report(name, &requested));
        let compared = DDP_NEW.during(|| self.groups.main().compare(report, "it could not build its model"));
        checked?;
        if let Some((rank, difference)) = compared? {
            return Err(Error::Mismatch { what: "model", rank, difference });
        }
        let mut kinds = Vec::new();
        for requested in &requested {
            if !kinds.contains(&requested.kind()) {
                kinds.push(requested.kind());
            }
        }
        let mut flats = Vec::new();
        for kind in kinds {
            let of_kind = || requested.iter().filter(|requested| requested.kind() == kind);
            let tensors: Vec<_> = of_kind().map(|own| (own.tensor.clone(), own.value.clone())).collect();
            let scattered = DDP_NEW.during(|| Flat::scatter(&self.groups, name, &tensors));
            let (flat, pieces) =
                scattered.inspect_err(|error| self.groups.main().abort(&format!("{name}: {error}")))?;
            flats.push(flat);
            for (own, piece) in of_kind().zip(pieces).filter(|(own, _)| own.kind != Kind::Base) {
                lock(self.varmap.data()).insert(own.name.clone(), piece);
            }
        }
        Ok(Unit::new(number, name, flats, &self.units))
    }
}

/// The facts on which ranks must agree.
fn report(name: &str, requested: &[Requested]) -> String {
    let mut lines = vec![name.to_string()];
    lines.extend(requested.iter().map(|Requested { name, kind, tensor, value }| {
        let kind = if *kind == Kind::Parameter { "parameter" } else { "frozen" };
        format!("{kind} {name} {} held as {}", describe(value.dtype(), tensor.shape()), tensor.dtype().as_str())
    }));
    lines.join("\n")
}
