//! What optimizers do with a model's gradients. An optimizer knows the model by the mark in the store of its gradients.
use crate::hash::content_64;
use crate::panic::lock;
use candle_core::backprop::GradStore;
use candle_core::{TensorId, Var};
use std::collections::HashSet;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, Weak};

/// The models whose marks stores may have.
static MODELS: Mutex<Vec<Weak<Steps>>> = Mutex::new(Vec::new());

/// The optimizer steps of one model's parameters.
pub(crate) struct Steps {
    /// The variable under which stores have the model's mark.
    pub(super) mark: Var,
    parameters: HashSet<TensorId>,
    last: Mutex<Option<Step>>,
}

/// What must be the same on all ranks in a step, as hashes.
#[derive(Clone, Copy)]
struct Step {
    options: u64,
    numbers: u64,
}

impl Steps {
    pub(super) fn new<'a>(mark: &Var, parameters: impl Iterator<Item = &'a Var>) -> Arc<Self> {
        let (mark, parameters) = (mark.clone(), parameters.map(|var| var.id()).collect());
        let steps = Arc::new(Self { mark, parameters, last: Mutex::default() });
        let mut models = lock(&MODELS);
        models.retain(|model| model.strong_count() > 0);
        models.push(Arc::downgrade(&steps));
        steps
    }

    /// The models of which `grads` has a mark.
    pub(crate) fn of(grads: &GradStore) -> Vec<Arc<Self>> {
        let models = lock(&MODELS);
        models.iter().filter_map(Weak::upgrade).filter(|model| grads.get(&model.mark).is_some()).collect()
    }

    /// Whether the ranks average the gradients of this variable.
    pub(super) fn has(&self, var: &Var) -> bool {
        self.parameters.contains(&var.id())
    }

    /// An optimizer that has these parameters, with their options and numbers of steps, has made a step.
    ///
    /// The number is None where a step does not depend on the earlier ones.
    pub(crate) fn made<'a, R: Debug + 'a>(&self, parameters: impl Iterator<Item = (&'a R, &'a Var, Option<u64>)>) {
        let (mut all, mut numbers) = (Vec::<&R>::new(), Vec::new());
        for (options, _, number) in parameters.filter(|(_, var, _)| self.has(var)) {
            if !all.last().is_some_and(|last| std::ptr::eq(*last, options)) {
                all.push(options);
            }
            numbers.extend(number);
        }
        if !all.is_empty() {
            let options = content_64(format!("{all:?}").as_bytes());
            *lock(&self.last) = Some(Step { options, numbers: content_64(bytemuck::cast_slice(&numbers)) });
        }
    }

    /// The hashes of the last step, with names for messages.
    pub(super) fn fingerprint(&self) -> Vec<(String, u64)> {
        let Some(Step { options, numbers }) = *lock(&self.last) else { return Vec::new() };
        vec![("the optimizer's options".to_string(), options), ("the optimizer's number of steps".to_string(), numbers)]
    }

    /// From now on, the ranks need not have made the same steps.
    pub(super) fn forget(&self) {
        *lock(&self.last) = None;
    }
}
