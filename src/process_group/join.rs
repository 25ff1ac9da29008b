//! How ranks with inputs announce their next collectives to ranks that have run out.
use super::ProcessGroup;
use crate::backend::Purpose;
use crate::panic::lock;
use crate::{Error, Result};
use candle_core::{DType, Tensor};
use std::sync::{Arc, Mutex};

static JOIN: Purpose = Purpose::of("ddp.join (call no collectives inside)");

/// An operation of a training step that needs all ranks, including those that have no inputs left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// A backward pass that sends gradients: bit `i` stands for the `i`-th model of the join.
    Backward { models: u64, kind: Kind },
    /// `Optimizer::step` of a sharded model
    Step,
    /// `Optimizer::clip_grad_norm` of a sharded model
    ClipGradNorm,
    /// `GradScaler::unscale`
    Unscale,
}

/// The ways in which a backward pass reduces its gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kind {
    /// Otherwise its gradients accumulate, under `no_sync`.
    pub(crate) synchronises: bool,
    /// Its gradients are added to the previous pass's.
    pub(crate) adds_up: bool,
    /// Its gradients are divided by a count.
    pub(crate) is_weighted: bool,
}

/// The ranks that take part in an operation with their own inputs, in order: at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Active {
    ranks: Vec<usize>,
    divisor: usize,
}

/// A join that a group is in.
#[derive(Debug)]
pub(crate) struct Join {
    /// The numbers of its models.
    pub(crate) models: Vec<u64>,
    divide_by_active: bool,
    throw_on_early_termination: bool,
    /// The ranks that were active in the last operation. Before the first, all are.
    last: Mutex<Active>,
    /// The first rank without inputs, once it has ended the loops of all ranks.
    exhausted: Mutex<Option<usize>>,
}

/// Ends the join of its group when it is dropped.
pub(crate) struct JoinGuard {
    group: ProcessGroup,
    pub(crate) join: Arc<Join>,
}

impl Operation {
    const NOTHING: i64 = 0;
    /// The number of models that fit into a code together with the kind of the operation.
    pub(crate) const MODELS: usize = 57;

    fn encode(self) -> i64 {
        match self {
            Self::Backward { models, kind: Kind { synchronises, adds_up, is_weighted } } => {
                let flags = [synchronises, adds_up, is_weighted].map(i64::from);
                1 + (flags[0] << 3) + (flags[1] << 4) + (flags[2] << 5) + ((models as i64) << 6)
            }
            Self::Step => 2,
            Self::ClipGradNorm => 3,
            Self::Unscale => 4,
        }
    }

    fn decode(code: i64) -> Option<Self> {
        match (code & 7, code >> 3) {
            (1, rest) => {
                let [synchronises, adds_up, is_weighted] = [0, 1, 2].map(|bit| rest >> bit & 1 == 1);
                let kind = Kind { synchronises, adds_up, is_weighted };
                Some(Self::Backward { models: rest as u64 >> 3, kind })
            }
            (2, 0) => Some(Self::Step),
            (3, 0) => Some(Self::ClipGradNorm),
            (4, 0) => Some(Self::Unscale),
            _ => None,
        }
    }
}

impl Active {
    /// Returns all ranks, as outside of a join.
    pub(crate) fn all(world_size: usize) -> Self {
        Self { ranks: (0..world_size).collect(), divisor: world_size }
    }

    /// Returns the rank whose values the others take over.
    pub(crate) fn root(&self) -> usize {
        self.ranks.first().copied().unwrap_or(0)
    }

    pub(crate) fn count(&self) -> usize {
        self.ranks.len()
    }

    /// Returns the number by which sums of gradients are divided.
    pub(crate) fn divisor(&self) -> usize {
        self.divisor
    }
}

impl Join {
    /// Returns the ranks that were active in the last operation.
    pub(crate) fn last(&self) -> Active {
        lock(&self.last).clone()
    }

    /// Whether a rank without inputs has ended the loops of all.
    pub(crate) fn was_terminated(&self) -> bool {
        lock(&self.exhausted).is_some()
    }
}

impl ProcessGroup {
    /// Begins a join of the models with these numbers. Every rank must give the same.
    pub(crate) fn begin_join(
        &self,
        models: Vec<u64>,
        divide_by_active: bool,
        throw_on_early_termination: bool,
    ) -> Result<JoinGuard> {
        let mut current = lock(&self.0.join);
        if current.is_some() {
            let reason = "its group is already in a join: give all models to one, `candle_ddp::join(&[&a, &b], …)`";
            return Err(Error::invalid("join", reason));
        }
        let (last, exhausted) = (Mutex::new(Active::all(self.world_size())), Mutex::default());
        let join = Arc::new(Join { models, divide_by_active, throw_on_early_termination, last, exhausted });
        *current = Some(Arc::clone(&join));
        Ok(JoinGuard { group: self.clone(), join })
    }

    /// Returns the join that this group is in.
    pub(crate) fn current_join(&self) -> Option<Arc<Join>> {
        lock(&self.0.join).clone()
    }

    /// Announces this rank's next operation to the ranks that have no inputs left, and returns which ranks still have
    /// some; outside a join, nothing is sent. A rank calls it before each operation.
    ///
    /// # Errors
    /// Returns [`Error::InputsExhausted`] if that ends the loops of all ranks.
    pub(crate) fn announce(&self, operation: Operation) -> Result<Option<Active>> {
        let Some(join) = self.current_join() else { return Ok(None) };
        Ok(self.exchange(&join, Some(operation))?.map(|(_, active)| active))
    }

    /// Returns the next operation of the ranks that still have inputs, for a rank that has none; `None` if no rank has
    /// any.
    ///
    /// # Errors
    /// Returns the errors of [`announce`](Self::announce).
    pub(crate) fn await_announcement(&self, join: &Join) -> Result<Option<(Operation, Active)>> {
        self.exchange(join, None)
    }

    fn exchange(&self, join: &Join, own: Option<Operation>) -> Result<Option<(Operation, Active)>> {
        let device = self.device();
        let all = Tensor::zeros(self.world_size(), DType::I64, device)?;
        let own = Tensor::new(&[own.map_or(Operation::NOTHING, Operation::encode)], device)?;
        JOIN.during(|| self.all_gather_async(&all, &own)?.synchronize())?;
        let codes = all.to_vec1::<i64>()?;
        let (active, exhausted): (Vec<usize>, Vec<usize>) =
            (0..codes.len()).partition(|rank| codes[*rank] != Operation::NOTHING);
        // Ranks that do different things learn of it in the following collectives.
        let Some(&root) = active.first() else { return Ok(None) };
        let operation = Operation::decode(codes[root]).ok_or_else(|| Error::RankFailed {
            rank: root,
            reason: format!("it announced the unknown operation {}: run the same candle-ddp on all ranks", codes[root]),
        })?;
        if let (true, Some(&rank)) = (join.throw_on_early_termination, exhausted.first()) {
            *lock(&join.exhausted) = Some(rank);
            return Err(Error::InputsExhausted { rank });
        }
        let divisor = if join.divide_by_active { active.len() } else { self.world_size() };
        let active = Active { ranks: active, divisor };
        *lock(&join.last) = active.clone();
        Ok(Some((operation, active)))
    }
}

impl Drop for JoinGuard {
    fn drop(&mut self) {
        *lock(&self.group.0.join) = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_can_be_encoded_and_decoded() {
        let models = (1 << Operation::MODELS) - 1;
        let backward = |models, synchronises, adds_up, is_weighted| Operation::Backward {
            models,
            kind: Kind { synchronises, adds_up, is_weighted },
        };
        for operation in [
            backward(1, true, false, false),
            backward(models, false, true, false),
            backward(models, true, false, true),
            Operation::Step,
            Operation::ClipGradNorm,
            Operation::Unscale,
        ] {
            let code = operation.encode();
            assert!(code > Operation::NOTHING && Operation::decode(code) == Some(operation), "{operation:?}");
        }
        assert_eq!([0, 10, 7].map(Operation::decode), [None; 3]);
    }
}
