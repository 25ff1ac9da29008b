//! The order in which blocks are gathered and freed.
use super::flat::{Flat, Gathering};
use crate::ddp::buckets::plan::DDP_ORDER;
use crate::hash::content_64;
use crate::kernels::{self, Incoming};
use crate::panic::lock;
use crate::process_group::ProcessGroup;
use crate::tensor::function::{argument, is_grad_enabled};
use crate::{Error, ReduceOp, Result};
use candle_core::Tensor;
use candle_ddp_nn::Run;
use std::sync::{Arc, Mutex, Weak};

/// The reason why a rank does not reach a block in its backward pass.
const ZERO: &str = "A rank that has no data for a block, such as images, runs it on zeros and multiplies that loss by a tensor of 0, \
                    `loss.mul(&loss.zeros_like()?)?`: candle ends the graph at a product with the number 0";

/// The parameters of a block, or those outside of all blocks.
pub(crate) struct Unit {
    number: usize,
    name: String,
    flats: Vec<Flat>,
    units: Arc<Units>,
    /// The number of computations that need the parameters.
    users: Mutex<usize>,
}

/// The blocks of a model.
pub(crate) struct Units {
    reshard_after_forward: bool,
    /// The group that gathers. The buckets' group cannot, since the times at which buckets start differ between ranks.
    group: ProcessGroup,
    /// By their numbers; 0 is what is outside of blocks.
    all: Mutex<Vec<Weak<Unit>>>,
    flow: Mutex<Flow>,
}

/// The blocks of the forward pass in progress, or of the last one.
#[derive(Default)]
struct Flow {
    /// In the order of their calls.
    called: Vec<usize>,
    /// The blocks that the previous forward pass called.
    before: Vec<usize>,
    /// How many of `called` the backward pass has not reached.
    ahead: usize,
    /// The block that comes next, if the prediction is right.
    next: Option<(usize, Vec<Gathering>)>,
    /// Blocks that keep their parameters until the end of the backward pass. The model holds them: these would never end if they held it.
    kept: Vec<Weak<Unit>>,
    /// Whether a backward pass may still come for the last forward pass that made a graph.
    has_graph: bool,
    /// The comparison of the ranks' orders that is on its way.
    comparison: Option<Incoming>,
    /// Whether the comparison of `called` has begun.
    is_compared: bool,
}

/// While this lives, a block has its parameters.
pub(crate) struct Held(Arc<Unit>);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl Unit {
    pub(super) fn new(number: usize, name: &str, flats: Vec<Flat>, units: &Arc<Units>) -> Arc<Self> {
        let (name, users) = (name.to_string(), Mutex::new(0));
        let unit = Arc::new(Self { number, name, flats, units: Arc::clone(units), users });
        let mut all = lock(&units.all);
        if all.len() <= number {
            all.resize_with(number + 1, Weak::new);
        }
        all[number] = Arc::downgrade(&unit);
        unit
    }

    pub(super) fn reshards(&self) -> bool {
        self.units.reshard_after_forward
    }

    /// Gathers the parameters, unless they are there, and starts to gather the parameters of the block that should come next.
    pub(super) fn hold(self: &Arc<Self>, run: Run) -> Result<Held> {
        self.enter(run)?;
        Ok(Held(Arc::clone(self)))
    }

    /// [`hold`](Self::hold), until [`leave`](Self::leave).
    fn enter(&self, run: Run) -> Result<()> {
        let (next, ready) = {
            let mut flow = lock(&self.units.flow);
            (flow.enter(self.number, run), flow.next.take_if(|(number, _)| *number == self.number))
        };
        self.enter_ready(ready.map(|(_, gatherings)| gatherings))?;
        next.map_or(Ok(()), |next| self.units.prefetch(next)).inspect_err(|_| self.leave())
    }

    /// Gathers the parameters, unless they are there or `ready`.
    fn enter_ready(&self, ready: Option<Vec<Gathering>>) -> Result<()> {
        let mut users = lock(&self.users);
        if *users == 0 {
            let gatherings = ready.map_or_else(|| self.gather(), Ok)?;
            let mut pairs = self.flats.iter().zip(&gatherings);
            // Tensors that were filled in part must not be used.
            pairs.try_for_each(|(flat, gathering)| flat.fill(gathering)).inspect_err(|_| self.release())?;
        }
        *users += 1;
        Ok(())
    }

    fn leave(&self) {
        let mut users = lock(&self.users);
        *users -= 1;
        if *users == 0 {
            self.release();
        }
    }

    fn release(&self) {
        if let Err(error) = self.flats.iter().try_for_each(|flat| flat.release(&self.name)) {
            log::warn!("the memory of a block's parameters could not be freed: {error}");
        }
    }

    /// The same as [`hold`](Self::hold), until the end of the backward pass.
    pub(super) fn keep(self: &Arc<Self>) -> Result<()> {
        self.enter(Run::Forward)?;
        lock(&self.units.flow).kept.push(Arc::downgrade(self));
        Ok(())
    }

    /// The result of a computation with the parameters, in its own memory if it is a view of one of them.
    pub(super) fn own(&self, result: Tensor) -> candle_core::Result<Tensor> {
        if self.flats.iter().any(|flat| flat.shares(&result)) {
            argument(&result).force_contiguous()
        } else {
            Ok(result)
        }
    }

    fn gather(&self) -> Result<Vec<Gathering>> {
        self.flats.iter().map(|flat| flat.gather(&self.units.group)).collect()
    }
}

impl Units {
    /// Every rank must call it.
    pub(super) fn new(group: &ProcessGroup, reshard_after_forward: bool) -> Result<Arc<Self>> {
        let group = if group.world_size() > 1 { group.gathers()? } else { group.clone() };
        Ok(Arc::new(Self { reshard_after_forward, group, all: Mutex::default(), flow: Mutex::default() }))
    }

    /// Starts to gather a block that has no parameters, unless another one is on its way.
    fn prefetch(&self, number: usize) -> Result<()> {
        let unit = lock(&self.all).get(number).and_then(Weak::upgrade);
        let Some(unit) = unit.filter(|unit| *lock(&unit.users) == 0) else { return Ok(()) };
        let mut flow = lock(&self.flow);
        if flow.next.is_none() {
            flow.next = Some((number, unit.gather()?));
        }
        Ok(())
    }

    /// Begins to compare the order of blocks, and those that the backward pass reaches, with the other ranks'. The CPU engine compares
    /// every call by itself.
    fn compare(&self, reached: &[usize]) -> Result<()> {
        if self.group.device().is_cpu() || self.group.world_size() == 1 {
            return Ok(());
        }
        let sequence = [&lock(&self.flow).called, &[usize::MAX][..], reached].concat();
        let extremes = self.extremes(&sequence)?;
        // The host reads it later, without a wait for what the GPU does then.
        let comparison = kernels::send(&extremes)?;
        let mut flow = lock(&self.flow);
        (flow.comparison, flow.is_compared) = (Some(comparison), true);
        Ok(())
    }

    /// The extremes over all ranks of a hash of `sequence`, and of its negative.
    fn extremes(&self, sequence: &[usize]) -> Result<Tensor> {
        // Exact in an f64.
        let hash = (content_64(bytemuck::cast_slice(sequence)) >> 16) as f64;
        let extremes = Tensor::new(&[hash, -hash], self.group.device())?;
        DDP_ORDER.during(|| self.group.all_reduce(&extremes, ReduceOp::Max))?;
        Ok(extremes)
    }

    /// Compares the blocks that the backward pass reaches with the other ranks', since the engine could not say why one is missing.
    fn compare_reached(&self, reached: &[usize]) -> Result<()> {
        if !self.group.device().is_cpu() || self.group.world_size() == 1 {
            return Ok(());
        }
        let extremes = self.extremes(reached)?.to_vec1::<f64>()?;
        if extremes[0] == -extremes[1] {
            return Ok(());
        }
        let line = |unit: &Arc<Unit>| match reached.contains(&unit.number) {
            true => format!("the loss depends on {}", unit.name),
            false => format!("the loss does not depend on {}", unit.name),
        };
        let report = self.units().iter().map(line).collect::<Vec<_>>().join("\n");
        let difference = DDP_ORDER.during(|| self.group.compare(Ok(report), "it could not begin its backward pass"));
        let (_, difference) = difference?.unwrap_or_default();
        let reason = format!("all ranks must gather the same blocks in a backward pass, but {difference}. {ZERO}");
        Err(Error::invalid("loss", reason))
    }

    /// Ends the comparison that has begun, as in the last backward pass, which does not wait for it.
    fn check(&self) -> Result<()> {
        let Some(comparison) = lock(&self.flow).comparison.take() else { return Ok(()) };
        let extremes = comparison.receive()?;
        if extremes[0] == -extremes[1] {
            return Ok(());
        }
        let units = self.units();
        let name = |number: &usize| units.iter().find(|unit| unit.number == *number).map(|unit| unit.name.as_str());
        let called: Vec<_> = lock(&self.flow).called.iter().filter_map(name).collect();
        let reason = format!(
            "in the last pass, ranks called their blocks in different orders, or their losses depended on different ones, and they computed \
             with the parameters of other blocks; this rank called {}: call the same blocks in the same order on all ranks, and continue \
             from a checkpoint. {ZERO}",
            called.join(", ")
        );
        Err(Error::invalid("blocks", reason))
    }

    /// Call at the beginning of a forward pass: values may have changed.
    pub(crate) fn begin_forward(&self) -> Result<()> {
        self.check()?;
        // After a pass without a backward pass, as in an evaluation, it has not begun.
        if lock(&self.flow).needs_comparison() {
            self.compare(&[])?;
            self.check()?;
        }
        {
            let mut flow = lock(&self.flow);
            flow.before = std::mem::take(&mut flow.called);
            (flow.ahead, flow.is_compared) = (0, false);
            flow.has_graph |= is_grad_enabled();
        }
        self.leave_kept();
        self.root().map_or(Ok(()), |root| root.keep())
    }

    /// Call at the end of a forward pass.
    pub(crate) fn end_forward(&self) {
        let has_graph = {
            let mut flow = lock(&self.flow);
            flow.next = None;
            flow.has_graph
        };
        // The backward pass needs the parameters outside of blocks, even if it belongs to an earlier forward pass.
        if !has_graph {
            self.leave_kept();
        }
    }

    /// Copies `result` if it is a view of a parameter outside of blocks.
    pub(crate) fn own(&self, result: Tensor) -> candle_core::Result<Tensor> {
        match self.root() {
            Some(root) => root.own(result),
            None => Ok(result),
        }
    }

    /// The bytes of the whole parameters that exist at a time.
    pub(crate) fn bytes(&self) -> usize {
        let units = self.units();
        let of = |unit: &Arc<Unit>| unit.flats.iter().map(Flat::bytes).sum::<usize>();
        let mut blocks: Vec<usize> = units.iter().filter(|unit| unit.number > 0).map(of).collect();
        blocks.sort_unstable_by_key(|bytes| std::cmp::Reverse(*bytes));
        // One computes, and the next one is on its way.
        let at_once = if self.reshard_after_forward { 2 } else { blocks.len() };
        units.iter().filter(|unit| unit.number == 0).map(of).chain(blocks.into_iter().take(at_once)).sum()
    }

    /// Whether the backward pass through blocks gathers them again.
    pub(crate) fn gathers_again(&self) -> bool {
        self.reshard_after_forward && self.group.world_size() > 1 && lock(&self.all).len() > 1
    }

    fn root(&self) -> Option<Arc<Unit>> {
        lock(&self.all).first().and_then(Weak::upgrade)
    }

    /// Call at the beginning of a backward pass, which may be the second one after a forward pass, and reaches these blocks. Gathers the
    /// parameters that its graph does not gather itself, unless they are there, until [`end`](Self::end).
    pub(crate) fn begin_backward(&self, reached: &[usize]) -> Result<()> {
        self.check()?;
        if self.reshard_after_forward {
            self.compare_reached(reached)?;
            self.compare(reached)?;
        } else {
            // Nothing is gathered again.
            self.compare(&[])?;
        }
        for unit in self.not_in_graph() {
            unit.enter_ready(None)?;
            lock(&self.flow).kept.push(Arc::downgrade(&unit));
        }
        Ok(())
    }

    /// Holds the parameters that the graph of another model's backward pass does not gather itself.
    pub(crate) fn hold_for_backward(&self) -> Result<Vec<Held>> {
        let hold = |unit: Arc<Unit>| unit.enter_ready(None).map(|()| Held(unit));
        self.not_in_graph().into_iter().map(hold).collect()
    }

    /// The blocks that no graph gathers.
    fn not_in_graph(&self) -> Vec<Arc<Unit>> {
        match self.reshard_after_forward {
            true => self.root().into_iter().collect(),
            false => self.units(),
        }
    }

    fn units(&self) -> Vec<Arc<Unit>> {
        lock(&self.all).iter().filter_map(Weak::upgrade).collect()
    }

    /// Call at the end of a backward pass.
    pub(crate) fn end(&self) {
        lock(&self.flow).has_graph = false;
        self.leave_kept();
    }

    /// Frees what was kept, and what was gathered ahead.
    fn leave_kept(&self) {
        let (next, kept) = {
            let mut flow = lock(&self.flow);
            (flow.next.take(), std::mem::take(&mut flow.kept))
        };
        drop(next);
        kept.iter().filter_map(Weak::upgrade).for_each(|unit| unit.leave());
    }
}

impl Flow {
    fn needs_comparison(&self) -> bool {
        !self.is_compared && !self.called.is_empty()
    }

    /// A block begins to compute. Returns the block that should be next.
    fn enter(&mut self, number: usize, run: Run) -> Option<usize> {
        if number == 0 {
            return (run == Run::Forward).then(|| self.before.first().copied().unwrap_or(1));
        }
        match run {
            Run::Forward => {
                let at = self.called.len();
                self.called.push(number);
                self.ahead = self.called.len();
                match self.before.get(at) {
                    Some(same) if *same == number => self.before.get(at + 1).copied(),
                    Some(_) => None,
                    None => Some(number + 1),
                }
            }
            Run::Backward => {
                self.ahead = self.called[..self.ahead].iter().rposition(|called| *called == number)?;
                self.called[..self.ahead].last().copied()
            }
        }
    }
}
