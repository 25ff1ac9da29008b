//! Detects whether the program still holds the gradients of a backward pass, which candle's `GradStore` cannot tell:
//! the store gets an additional tensor, the mark, whose operation holds a reference.
pub(crate) mod left_out;
pub(crate) mod scaled;
pub(crate) mod steps;
pub(crate) mod verdict;

use crate::ddp::model::parameter::Variables;
use crate::ddp::reducer::Reducer;
use crate::{Error, Result};
use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Device, Layout, Shape, Tensor, TensorId, Var};
use std::sync::{Arc, Weak};
use steps::Steps;

/// Creates a model's marks and finds them in stores.
pub(super) struct Marks {
    /// The variable under which marks are stored; it is not a parameter.
    key: Var,
    /// The last mark of averaged gradients.
    last: Option<(TensorId, Weak<()>)>,
    /// The optimizers' steps with the gradients.
    pub(super) steps: Arc<Steps>,
}

/// The kind of a model's gradients in a store.
#[derive(Clone, Copy)]
enum Kind {
    /// Means over the ranks. The optimizer of a sharded model keeps them, and the store has none of them.
    Averaged = 1,
    /// This rank's sums of a pass under `no_sync`. A sharded model's store has none.
    Local = 2,
    /// None, after a micro-batch that is not this rank's last of a step.
    Unfinished = 3,
}

impl Marks {
    /// `sharded_by` reduces the gradients, of a model that is sharded.
    pub(super) fn new(variables: &Variables, sharded_by: Option<Arc<Reducer>>) -> Result<Self> {
        let key = Var::zeros((), DType::F32, &Device::Cpu)?;
        let steps = Steps::new(&key, variables, sharded_by);
        Ok(Self { key, last: None, steps })
    }

    /// Marks `grads` as the holder of the averaged gradients of the pass that has just ended.
    pub(super) fn put_averaged(&mut self, grads: &mut GradStore) -> Result<()> {
        let held = Arc::new(());
        let weak = Arc::downgrade(&held);
        let mark = self.key.apply_op1(Mark { kind: Kind::Averaged, _held: held })?;
        self.last = Some((mark.id(), weak));
        grads.insert(&self.key, mark);
        Ok(())
    }

    /// Marks `grads` as the holder of sums that are not averaged yet, or, after the pass `of_micro_batch`, of nothing.
    pub(super) fn put_local(&self, grads: &mut GradStore, of_micro_batch: bool) -> Result<()> {
        let kind = if of_micro_batch { Kind::Unfinished } else { Kind::Local };
        let mark = self.key.apply_op1(Mark { kind, _held: Arc::default() })?;
        grads.insert(&self.key, mark);
        Ok(())
    }

    /// A mark for averaged gradients that have their own memory.
    pub(super) fn of_sums(&self) -> Result<Tensor> {
        Ok(self.key.apply_op1(Mark { kind: Kind::Averaged, _held: Arc::default() })?)
    }

    pub(super) fn take(&self, grads: &mut GradStore) -> Option<Tensor> {
        grads.remove(&self.key)
    }

    pub(super) fn put_back(&self, grads: &mut GradStore, mark: Option<Tensor>) {
        if let Some(mark) = mark {
            grads.insert(&self.key, mark);
        }
    }

    /// Whether a store with the averaged gradients of the last pass still exists.
    pub(super) fn is_last_held(&self) -> bool {
        self.last.as_ref().is_some_and(|(_, held)| held.strong_count() > 0)
    }

    /// Whether `grads` is that store.
    pub(super) fn has_last(&self, grads: &GradStore) -> bool {
        grads.get(&self.key).is_some_and(|mark| self.last.as_ref().is_some_and(|(last, _)| mark.id() == *last))
    }

    pub(super) fn has_local(&self, grads: &GradStore) -> bool {
        is_of(grads, &self.key, Kind::Local)
    }
}

/// Whether the mark that `grads` has under `key` is one of this `kind`.
fn is_of(grads: &GradStore, key: &Var, kind: Kind) -> bool {
    grads.get(key).is_some_and(|mark| mark.elem_count() == kind as usize)
}

/// The name of the first of `vars` whose gradient the optimizer of a sharded model keeps, so that `grads` does not have it.
pub(crate) fn first_kept<'a>(grads: &GradStore, vars: impl Iterator<Item = &'a Var>) -> Option<String> {
    let models: Vec<_> = Steps::of(grads).into_iter().filter(|model| model.sharded_by().is_some()).collect();
    let name = |var: &Var| {
        let model = models.iter().find(|model| model.has(var))?;
        model.named().find(|(_, own)| own.id() == var.id()).map(|(name, _)| name.clone())
    };
    vars.filter(|_| !models.is_empty()).find_map(name)
}

/// Refuses sums of a pass under `no_sync`, and the store of a step's earlier micro-batch, before an optimizer's step on these parameters.
pub(crate) fn check_averaged<'a>(
    grads: &GradStore,
    parameters: impl Iterator<Item = (&'a String, &'a Var)>,
) -> Result<()> {
    let is = |model: &Arc<Steps>, kind| is_of(grads, &model.mark, kind);
    let mut models = Steps::of(grads);
    models.retain(|model| is(model, Kind::Local) || is(model, Kind::Unfinished));
    for (name, var) in parameters.filter(|_| !models.is_empty()) {
        match models.iter().find(|model| model.has(var)) {
            Some(model) if is(model, Kind::Unfinished) => {
                let reason = "its gradient comes with this rank's last micro-batch of the step: make the step with what backward_with \
                              returns for that one, `if micro_batch.is_last`";
                return Err(Error::parameter(name, reason));
            }
            Some(model) if model.sharded_by().is_some() || grads.get(var).is_some() => return Err(own_gradient(name)),
            _ => {}
        }
    }
    Ok(())
}

/// The error of a step with a gradient that was not averaged.
pub(crate) fn own_gradient(parameter: &str) -> Error {
    let reason = "its gradient is a sum of passes under no_sync, and the next synchronised pass averages that sum with its own: make \
                  the step with the gradients of that pass, `ddp.backward(&loss)` outside of no_sync";
    Error::parameter(parameter, reason)
}

/// The operation of a mark. A mark contains zeros, so that summing all tensors of a store is still right.
struct Mark {
    kind: Kind,
    _held: Arc<()>,
}

impl CustomOp1 for Mark {
    fn name(&self) -> &'static str {
        "ddp-gradients"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let elements = self.kind as usize;
        Ok((CpuStorage::F32(vec![0.; elements]), Shape::from(elements)))
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        candle_core::bail!("marks are on the CPU")
    }
}
