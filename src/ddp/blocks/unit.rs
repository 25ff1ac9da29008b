//! The order in which blocks are gathered and freed.
use super::flat::{Flat, Gathering};
use super::sharding::Sharding;
use crate::backend::label;
use crate::hash::content_64;
use crate::kernels::{self, Incoming};
use crate::panic::lock;
use crate::process_group::ProcessGroup;
use crate::{Error, ReduceOp, Result};
use candle_core::Tensor;
use candle_ddp_nn::Run;
use std::sync::{Arc, Mutex, Weak};

/// The parameters of a block, or those outside of all blocks.
pub(crate) struct Unit {
    number: usize,
    name: String,
    flats: Vec<Flat>,
    units: Arc<Units>,
    /// How many computations need the parameters.
    users: Mutex<usize>,
}

/// The blocks of a model.
pub(crate) struct Units {
    sharding: Sharding,
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
    /// Those of the forward pass before.
    before: Vec<usize>,
    /// How many of `called` the backward pass has not reached.
    ahead: usize,
    /// The block that comes next, if the prediction is right.
    next: Option<(usize, Vec<Gathering>)>,
    /// Blocks that keep their parameters until the end of the backward pass.
    kept: Vec<Held>,
    /// The comparison of the ranks' orders that is on its way.
    comparison: Option<Incoming>,
    /// Whether that of `called` has begun.
    is_compared: bool,
}

/// While this lives, a block has its parameters.
pub(crate) struct Held(Arc<Unit>);

impl Drop for Held {
    fn drop(&mut self) {
        let mut users = lock(&self.0.users);
        *users -= 1;
        if *users == 0
            && let Err(error) = self.0.flats.iter().try_for_each(Flat::release)
        {
            log::warn!("the memory of a block's parameters could not be freed: {error}");
        }
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
        self.units.sharding.reshard_after_forward
    }

    /// Gathers the parameters, unless they are there. Starts to gather those of the block that should come next.
    pub(crate) fn hold(self: &Arc<Self>, run: Run) -> Result<Held> {
        let (next, ready) = {
            let mut flow = lock(&self.units.flow);
            (flow.enter(self.number, run), flow.next.take_if(|(number, _)| *number == self.number))
        };
        let held = self.hold_ready(ready.map(|(_, gatherings)| gatherings))?;
        if let Some(next) = next {
            self.units.prefetch(next)?;
        }
        Ok(held)
    }

    /// Gathers the parameters, unless they are there or `ready`.
    fn hold_ready(self: &Arc<Self>, ready: Option<Vec<Gathering>>) -> Result<Held> {
        let mut users = lock(&self.users);
        if *users == 0 {
            let gatherings = ready.map_or_else(|| self.gather(), Ok)?;
            self.flats.iter().zip(&gatherings).try_for_each(|(flat, gathering)| flat.fill(gathering))?;
        }
        *users += 1;
        Ok(Held(Arc::clone(self)))
    }

    /// As [`hold`](Self::hold), until the end of the backward pass.
    pub(super) fn keep(self: &Arc<Self>) -> Result<()> {
        let held = self.hold(Run::Forward)?;
        lock(&self.units.flow).kept.push(held);
        Ok(())
    }

    fn gather(&self) -> Result<Vec<Gathering>> {
        self.flats.iter().map(|flat| flat.gather(&self.units.group)).collect()
    }
}

impl Units {
    /// Every rank must call it.
    pub(super) fn new(group: &ProcessGroup, sharding: Sharding) -> Result<Arc<Self>> {
        let group = if group.world_size() > 1 { group.companion()? } else { group.clone() };
        Ok(Arc::new(Self { sharding, group, all: Mutex::default(), flow: Mutex::default() }))
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

    /// Begins to compare the order of blocks with the other ranks'. The CPU engine compares every call by itself.
    fn compare(&self) -> Result<()> {
        let device = self.group.device();
        if device.is_cpu() || self.group.world_size() == 1 {
            return Ok(());
        }
        // Exact in an f64.
        let hash = (content_64(bytemuck::cast_slice(&lock(&self.flow).called)) >> 16) as f64;
        let extremes = Tensor::new(&[hash, -hash], device)?;
        label::DDP_ORDER.during(|| self.group.all_reduce(&extremes, ReduceOp::Max))?;
        // The host reads it later, without a wait for what the GPU does then.
        let comparison = kernels::send(&extremes)?;
        let mut flow = lock(&self.flow);
        (flow.comparison, flow.is_compared) = (Some(comparison), true);
        Ok(())
    }

    /// Ends the comparison that has begun, as in the last backward pass, which does not wait for it.
    fn check(&self) -> Result<()> {
        let Some(comparison) = lock(&self.flow).comparison.take() else { return Ok(()) };
        let extremes = comparison.receive()?;
        if extremes[0] == -extremes[1] {
            return Ok(());
        }
        let units: Vec<_> = lock(&self.all).iter().filter_map(Weak::upgrade).collect();
        let name = |number: &usize| units.iter().find(|unit| unit.number == *number).map(|unit| unit.name.as_str());
        let called: Vec<_> = lock(&self.flow).called.iter().filter_map(name).collect();
        let reason = format!(
            "in the last pass, ranks called their blocks in different orders, and computed with the parameters of other blocks; this rank \
             called {}: call the same blocks in the same order on all ranks, and continue from a checkpoint",
            called.join(", ")
        );
        Err(Error::invalid("blocks", reason))
    }

    /// Call at the beginning of a forward pass: values may have changed.
    pub(crate) fn begin_forward(&self) -> Result<()> {
        self.check()?;
        // After a pass without a backward pass, as in an evaluation, it has not begun.
        if lock(&self.flow).needs_comparison() {
            self.compare()?;
            self.check()?;
        }
        let kept = {
            let mut flow = lock(&self.flow);
            flow.before = std::mem::take(&mut flow.called);
            (flow.ahead, flow.next, flow.is_compared) = (0, None, false);
            std::mem::take(&mut flow.kept)
        };
        drop(kept);
        self.root().map_or(Ok(()), |root| root.keep())
    }

    /// The bytes of the whole parameters that exist at a time.
    pub(crate) fn bytes(&self) -> usize {
        let units: Vec<_> = lock(&self.all).iter().filter_map(Weak::upgrade).collect();
        let of = |unit: &Arc<Unit>| unit.flats.iter().map(Flat::bytes).sum::<usize>();
        let mut blocks: Vec<usize> = units.iter().filter(|unit| unit.number > 0).map(of).collect();
        blocks.sort_unstable_by_key(|bytes| std::cmp::Reverse(*bytes));
        // One computes, and the next one is on its way.
        let at_once = if self.sharding.reshard_after_forward { 2 } else { blocks.len() };
        units.iter().filter(|unit| unit.number == 0).map(of).chain(blocks.into_iter().take(at_once)).sum()
    }

    /// Whether the backward pass through blocks gathers them again.
    pub(crate) fn gathers_again(&self) -> bool {
        self.sharding.reshard_after_forward && self.group.world_size() > 1 && lock(&self.all).len() > 1
    }

    fn root(&self) -> Option<Arc<Unit>> {
        lock(&self.all).first().and_then(Weak::upgrade)
    }

    /// Call at the beginning of a backward pass, which may be the second one after a forward pass. Gathers the parameters that its graph
    /// does not gather itself, unless they are there, until [`end`](Self::end).
    pub(crate) fn begin_backward(&self) -> Result<()> {
        self.check()?;
        self.compare()?;
        let units: Vec<_> = match self.sharding.reshard_after_forward {
            true => self.root().into_iter().collect(),
            false => lock(&self.all).iter().filter_map(Weak::upgrade).collect(),
        };
        for unit in units.iter().filter(|unit| *lock(&unit.users) == 0) {
            let held = unit.hold_ready(None)?;
            lock(&self.flow).kept.push(held);
        }
        Ok(())
    }

    /// Call at the end of a backward pass, and of a forward pass without one.
    pub(crate) fn end(&self) {
        let (next, kept) = {
            let mut flow = lock(&self.flow);
            (flow.next.take(), std::mem::take(&mut flow.kept))
        };
        drop((next, kept));
    }
}

impl Flow {
    fn needs_comparison(&self) -> bool {
        !self.is_compared && !self.called.is_empty()
    }

    /// A block begins to compute. Returns the one that should be next.
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
