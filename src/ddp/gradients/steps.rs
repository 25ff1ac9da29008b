//! The models whose gradients are in a store, as optimizers, scalers and clipping see them. The mark of a model in the store identifies it.
use crate::Result;
use crate::ddp::gradients::verdict::Verdict;
use crate::ddp::model::parameter::{Buffer, Variables};
use crate::ddp::reducer::Reducer;
use crate::hash::content_64;
use crate::panic::lock;
use candle_core::backprop::GradStore;
use candle_core::{TensorId, Var};
use std::collections::HashSet;
use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// The models whose marks stores may have.
static MODELS: Mutex<Vec<Weak<Steps>>> = Mutex::new(Vec::new());

/// The optimizer steps of one model's parameters.
pub(crate) struct Steps {
    /// The variable under which stores have the model's mark.
    pub(crate) mark: Var,
    averaged: HashSet<TensorId>,
    /// Each rank has other gradients of these.
    ignored: HashSet<TensorId>,
    /// All variables that may have gradients in the store.
    named: Vec<(String, Var)>,
    /// The reducer of a sharded model's gradients.
    sharded_by: Option<Arc<Reducer>>,
    last: Mutex<Option<Step>>,
    is_left_out: AtomicBool,
    /// The verdict on the last step, if the host does not know it yet.
    late: Mutex<Option<Arc<Verdict>>>,
    /// How many parameters the last step has updated by optimizers that can leave out a step by themselves.
    judged: AtomicUsize,
}

/// Hashes of everything that must be the same on all ranks in a step.
#[derive(Clone, Copy)]
struct Step {
    options: u64,
    numbers: u64,
}

impl Steps {
    pub(in crate::ddp) fn new(mark: &Var, variables: &Variables, sharded_by: Option<Arc<Reducer>>) -> Arc<Self> {
        let ignored = || variables.ignored.iter().map(|Buffer { name, var }| (name, var));
        let steps = Arc::new(Self {
            mark: mark.clone(),
            averaged: variables.named_parameters().map(|(_, var)| var.id()).collect(),
            ignored: ignored().map(|(_, var)| var.id()).collect(),
            named: variables
                .named_parameters()
                .chain(ignored())
                .map(|(name, var)| (name.clone(), var.clone()))
                .collect(),
            sharded_by,
            last: Mutex::default(),
            is_left_out: AtomicBool::new(false),
            late: Mutex::default(),
            judged: AtomicUsize::new(0),
        });
        let mut models = lock(&MODELS);
        models.retain(|model| model.strong_count() > 0);
        models.push(Arc::downgrade(&steps));
        steps
    }

    /// The models that have a mark in `grads`.
    pub(crate) fn of(grads: &GradStore) -> Vec<Arc<Self>> {
        let models = lock(&MODELS);
        models.iter().filter_map(Weak::upgrade).filter(|model| grads.get(&model.mark).is_some()).collect()
    }

    /// The newest sharded model that has one of these variables as a parameter.
    pub(crate) fn sharded<'a>(vars: impl IntoIterator<Item = &'a Var>) -> Option<Arc<Self>> {
        let models: Vec<_> = lock(&MODELS).iter().rev().filter_map(Weak::upgrade).collect();
        let mut sharded = models.iter().filter(|model| model.sharded_by.is_some()).peekable();
        sharded.peek()?;
        let vars: HashSet<_> = vars.into_iter().map(|var| var.id()).collect();
        sharded.find(|model| model.averaged.iter().any(|id| vars.contains(id))).cloned()
    }

    pub(crate) fn sharded_by(&self) -> Option<&Arc<Reducer>> {
        self.sharded_by.as_ref()
    }

    /// The parameters whose gradients the ranks average, in the order of registration.
    pub(crate) fn averaged(&self) -> impl Iterator<Item = (&String, &Var)> {
        self.named().filter(|(_, var)| self.has(var))
    }

    /// Whether the ranks average the gradients of this variable.
    pub(crate) fn has(&self, var: &Var) -> bool {
        self.averaged.contains(&var.id())
    }

    /// The variables of the model that may have gradients in the store, with their names.
    pub(crate) fn named(&self) -> impl Iterator<Item = (&String, &Var)> {
        self.named.iter().map(|(name, var)| (name, var))
    }

    /// Which variables have gradients that differ between the ranks, since one of the `models` ignores them.
    pub(crate) fn are_ignored(models: &[Arc<Self>]) -> impl Fn(&Var) -> bool {
        move |var| models.iter().any(|model| model.ignored.contains(&var.id()))
    }

    /// All ranks leave out the step with the gradients in the store.
    pub(crate) fn leave_out(&self) {
        self.is_left_out.store(true, Ordering::Relaxed);
    }

    /// All ranks leave out the step with the gradients in the store if the verdict is bad.
    pub(crate) fn leave_out_if_bad(&self, verdict: &Arc<Verdict>) {
        *lock(&self.late) = Some(Arc::clone(verdict));
    }

    /// The verdict on the last step, if the host does not know it yet.
    pub(crate) fn late(&self) -> Option<Arc<Verdict>> {
        lock(&self.late).clone()
    }

    /// Whether optimizers that can leave out a step by themselves have made one with all gradients since the last call.
    pub(in crate::ddp) fn take_judged(&self) -> bool {
        self.judged.swap(0, Ordering::Relaxed) >= self.averaged.len()
    }

    /// Whether a step was left out since the last call.
    pub(in crate::ddp) fn take_left_out(&self) -> Result<bool> {
        let late = lock(&self.late).take();
        let is_late = late.map_or(Ok(false), |verdict| verdict.is_bad())?;
        Ok(self.is_left_out.swap(false, Ordering::Relaxed) || is_late)
    }

    /// An optimizer that has these parameters, with their options and numbers of steps, has made a step.
    ///
    /// The number is None where a step does not depend on the earlier ones. `judges`: the optimizer could have left it out by itself.
    pub(crate) fn made<'a, R: Debug + 'a>(
        &self,
        parameters: impl Iterator<Item = (&'a R, &'a Var, Option<u64>)>,
        judges: bool,
    ) {
        let (mut all, mut numbers) = (Vec::<&R>::new(), Vec::new());
        for (options, _, number) in parameters.filter(|(_, var, _)| self.has(var)) {
            self.judged.fetch_add(usize::from(judges), Ordering::Relaxed);
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
    pub(in crate::ddp) fn fingerprint(&self) -> Vec<(String, u64)> {
        let Some(Step { options, numbers }) = *lock(&self.last) else { return Vec::new() };
        vec![("the optimizer's options".to_string(), options), ("the optimizer's number of steps".to_string(), numbers)]
    }

    /// From now on, the ranks need not have made the same steps.
    pub(in crate::ddp) fn forget(&self) {
        *lock(&self.last) = None;
    }
}
