//! The operands of a call: the memory of its tensors.
use crate::call::{Call, Element};
use crate::memory::{Locking, Memory, Region};
use crate::operation::Operation;
use crate::reduce_op::ReduceOp;
use std::ops::Range;

/// Some bytes of a [`Memory`].
#[derive(Clone, Copy)]
pub struct Slice<'a> {
    memory: &'a dyn Memory,
    start: usize,
    end: usize,
}

impl<'a> Slice<'a> {
    /// The bytes `range` of `memory`.
    #[inline]
    pub fn new(memory: &'a dyn Memory, range: Range<usize>) -> Self {
        Self { memory, start: range.start, end: range.end }
    }

    pub(crate) fn region(self, locking: Locking<'a>) -> Region<'a> {
        Region::new(self.memory, self.start..self.end, locking)
    }
}

impl std::fmt::Debug for Slice<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} at {:#x}", self.start..self.end, self.memory.address())
    }
}

/// The bytes of a call. A call whose operands are not those that its [`Call`] describes fails, and ends the group.
#[derive(Clone, Copy, Debug, Default)]
pub struct Operands<'a> {
    /// The memory that the call changes; for a call on one tensor that is not a [send](crate::Operation::Send), its tensor.
    pub output: Option<Slice<'a>>,
    /// The memory that the call only reads.
    pub input: Option<Slice<'a>>,
}

impl Operands<'_> {
    /// Checks that `call` makes sense on rank `rank` of `world_size`, and that the operands have the lengths that it says.
    pub(crate) fn check(&self, call: &Call, rank: usize, world_size: usize) -> Result<(), String> {
        let lengths = [self.output, self.input].map(|slice| slice.map(|slice| slice.end.saturating_sub(slice.start)));
        let one = (call.count as usize).saturating_mul(call.element.map_or(0, Element::size));
        let expected = call.operation.extents().map(|extent| extent.of(one, world_size, call.root == Some(rank)));
        let lacks_own = call.operation == Operation::AllToAll && lengths == [Some(one - one / world_size), Some(one)];
        let is_missing =
            |(length, expected): (&Option<usize>, &Option<usize>)| expected.is_some() && length != expected;
        if call.root.is_some_and(|root| root >= world_size) {
            return Err(format!("its root is not one of {world_size} ranks"));
        }
        if call.operation == Operation::AllToAll && !call.count.is_multiple_of(world_size as u64) {
            return Err(format!("its {} elements cannot be split into {world_size} equal parts", call.count));
        }
        if call.reduction == Some(ReduceOp::Avg) && !call.element.is_some_and(Element::is_float) {
            return Err("only floating-point numbers are averaged".to_string());
        }
        if !lacks_own && lengths.iter().zip(&expected).any(is_missing) {
            return Err(format!("its output and input must have {expected:?} bytes, not {lengths:?}"));
        }
        Ok(())
    }
}

/// The tensors of a call that is queued. Dropping it releases them.
pub trait Tensors: Send {
    /// Calls `work` with the tensors' bytes.
    fn with(&self, work: &mut dyn FnMut(Operands));
}
