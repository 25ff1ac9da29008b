//! The state of one backward pass.
pub(in crate::ddp) mod announce;
pub(in crate::ddp) mod backward;
pub(in crate::ddp) mod checks;
pub(in crate::ddp) mod graph;
pub(in crate::ddp) mod guards;
pub(in crate::ddp) mod ignored;
pub(in crate::ddp) mod join;
pub(in crate::ddp) mod micro_batch;
pub(in crate::ddp) mod options;
pub(in crate::ddp) mod order;
pub(in crate::ddp) mod parts;
pub(in crate::ddp) mod settle;

use crate::ddp::gradients::scaled;
use crate::ddp::model::DistributedModel;
use crate::ddp::pass::graph::Graph;
use crate::ddp::pass::options::Backward;
use crate::ddp::pass::order::Member;
use crate::ddp::reducer::{Part, Reducer};
use crate::ddp::watch::non_finite::{Findings, OnNonFinite};
use crate::panic::{lock, panic_message};
use crate::process_group::{Active, Kind};
use crate::rendezvous::count_step;
use crate::tensor::function;
use crate::{Error, Result};
use candle_core::Tensor;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

/// One backward pass. When it is dropped, nothing of it is left in the reducers; if it has not succeeded, their
/// accumulated gradients are gone too.
pub(in crate::ddp) struct Pass<'a> {
    /// In the order in which their buckets are sent.
    pub(in crate::ddp) models: Vec<Member<'a>>,
    /// The tensors that candle visits. None on a rank without inputs, which takes part with zeros.
    pub(in crate::ddp) graph: Option<Graph<'a>>,
    /// This rank's count, if the pass is weighted.
    pub(in crate::ddp) count: Option<f64>,
    /// Under virtual ranks, the number of the micro-batch.
    pub(in crate::ddp) micro_batch: Option<usize>,
    /// Whether the gradients are added to others.
    is_added: bool,
    /// This rank's loss, if it is not finite and that counts.
    pub(in crate::ddp) loss: Option<f64>,
    /// The ranks that have inputs. None outside of a join, where all have.
    active: Option<Active>,
    /// The reducers in which this pass has begun.
    begun: Vec<&'a Reducer>,
    has_succeeded: bool,
    /// Sums of gradients outside candle's graph.
    _sums: function::Pass,
}

impl<'a> Pass<'a> {
    /// A backward pass from `loss`. Of a step's micro-batches under virtual ranks, the last one on this rank sends what they have
    /// added up to.
    pub(in crate::ddp) fn new(loss: &'a Tensor, models: &[&'a DistributedModel], options: &Backward) -> Self {
        let Backward { count, micro_batch, into } = options;
        let is_last =
            |core: &DistributedModel, number| core.reducer.micro_batches().is_some_and(|own| number + 1 == own.end);
        let member = |core: &&'a DistributedModel| Member {
            core,
            synchronises: micro_batch.map_or_else(|| core.synchronises(), |number| is_last(core, number)),
            adds_up: into.as_ref().is_some_and(|kept| core.marks().has_last(kept)),
        };
        let mut pass = Self::of(models.iter().map(member).collect(), Some(Graph::of(loss)), *count, None);
        (pass.micro_batch, pass.is_added) = (*micro_batch, into.is_some());
        pass
    }

    /// The pass of the `active` ranks, in which this one takes part with zeros.
    pub(in crate::ddp) fn shadow(models: &[&'a DistributedModel], kind: Kind, active: &Active) -> Self {
        let Kind { synchronises, adds_up, is_weighted } = kind;
        let member = |core: &&'a DistributedModel| Member { core, synchronises, adds_up };
        let count = is_weighted.then_some(0.);
        Self::of(models.iter().map(member).collect(), None, count, Some(active.clone()))
    }

    fn of(models: Vec<Member<'a>>, graph: Option<Graph<'a>>, count: Option<f64>, active: Option<Active>) -> Self {
        let (micro_batch, is_added, begun, has_succeeded) = (None, false, Vec::new(), false);
        let (loss, _sums) = (None, function::Pass::begin());
        Self { models, graph, count, micro_batch, is_added, loss, active, begun, has_succeeded, _sums }
    }

    /// The models whose gradients are for a step.
    pub(in crate::ddp) fn synchronised(&self) -> impl Iterator<Item = &'a DistributedModel> {
        self.models.iter().filter(|model| model.synchronises).map(|model| model.core)
    }

    /// Whether some ranks may have no inputs.
    pub(in crate::ddp) fn is_joined(&self) -> bool {
        self.active.is_some()
    }

    /// The rank whose values the others take over.
    pub(in crate::ddp) fn root(&self) -> usize {
        self.active.as_ref().map_or(0, Active::root)
    }

    /// Tells ranks without inputs that this pass comes next.
    pub(in crate::ddp) fn announce(&mut self) -> Result<()> {
        self.active = announce::announce(&self.models, self.count.is_some())?;
        if self.active.is_some() {
            // Ranks without inputs know no other order.
            self.models.sort_by_key(|model| announce::place(model.core));
        }
        Ok(())
    }

    /// Runs `work` with the models in the order in which all ranks send their buckets. If it fails, the group ends.
    pub(in crate::ddp) fn run<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.models = order::agree(&self.models, self.graph.as_ref(), self.root())?;
        // An operation of the model may panic.
        let result = catch_unwind(AssertUnwindSafe(|| work(self)));
        self.has_succeeded = matches!(result, Ok(Ok(_)));
        match &result {
            Ok(Ok(_)) if self.synchronised().next().is_some() => count_step(),
            // All ranks have this error, after their last collective.
            Ok(
                Ok(_)
                | Err(
                    Error::UnusedParameters { rank: None, .. } | Error::NothingCounted { .. } | Error::NonFinite { .. },
                ),
            ) => {}
            Ok(Err(error)) => self.abort(&format!("backward failed: {error}")),
            Err(panic) => self.abort(&format!("backward failed: {}", panic_message(&**panic))),
        }
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Begins the pass in the reducers.
    pub(in crate::ddp) fn begin(&mut self) -> Result<()> {
        self.models.iter().try_for_each(|model| model.core.settle_late())?;
        let mut successor = None;
        for member in self.models.iter().rev() {
            let (Member { core, synchronises, adds_up }, sends) = (*member, member.sends());
            let reducer = &core.reducer;
            let of_all = || Active::all(core.group().world_size());
            reducer.begin(Part {
                synchronises,
                findings: self.findings(core),
                adds_up,
                leaf: self.micro_batch.and_then(|number| reducer.leaf(number)),
                count: self.count,
                total: None,
                is_held: core.marks().is_last_held(),
                active: self.active.clone().unwrap_or_else(of_all),
                successor: if sends { successor.replace(Arc::clone(reducer)) } else { None },
                is_open: false,
                next: 0,
                arrived: Vec::new(),
                used: Vec::new(),
            })?;
            self.begun.push(reducer);
        }
        self.begun.iter().try_for_each(|reducer| reducer.prepare_for_backward())?;
        successor.map_or(Ok(()), |first| first.open())
    }

    /// The things that the reducer of `model` is to look for.
    fn findings(&self, model: &DistributedModel) -> Findings {
        let policy = model.options.policy();
        // A rank without inputs knows nothing of the others' losses.
        if !policy.is_on() || self.graph.as_ref().is_none_or(|graph| graph.variables().any(scaled::is_key)) {
            return Findings::default();
        }
        // Which rank it was is only asked if there are too many such steps.
        let looks_before = policy == OnNonFinite::Stop || lock(&model.skipped).in_a_row > 0;
        let is_judged = model.synchronises() && model.marks().steps.take_judged();
        let is_alone = self.models.len() == 1 && !self.is_added && self.micro_batch.is_none();
        let is_plain = is_alone && self.count.is_none() && !self.is_joined() && !model.ignores;
        let may_be_late = is_judged
            && is_plain
            && !looks_before
            && model.variables.buffers.is_empty()
            && *lock(&model.first) == Some(true);
        Findings { looks: true, looks_before, loss: self.loss, may_be_late, ..Findings::default() }
    }

    /// Ends the groups whose other ranks wait for this one, now or, for the sum of its micro-batches, later. In a world of
    /// one, the program may try again, with a smaller batch for example.
    pub(in crate::ddp) fn abort(&self, reason: &str) {
        let models = self.models.iter().filter(|model| model.sends() || self.micro_batch.is_some());
        let groups = models.map(|model| model.core.group());
        groups.filter(|group| group.world_size() > 1).for_each(|group| group.abort(reason));
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        let end = if self.has_succeeded { Reducer::end } else { Reducer::discard };
        self.begun.iter().for_each(|reducer| end(reducer));
    }
}
