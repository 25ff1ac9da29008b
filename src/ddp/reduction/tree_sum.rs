//! The sum of several tensors along a binary tree.
use crate::kernels::Assignment;
use crate::tensor::borrow::{slice, slice_mut};
use crate::tensor::{Element, copy, dispatch, vectorise};
use crate::virtual_ranks::{VirtualRanks, are_siblings};
use crate::{Error, Result};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, InplaceOp2, Layout, Tensor, WithDType};
use std::ops::Range;

/// The elements that are added at a time, few enough for the processor's first cache.
const PIECE: usize = 1024;

/// How to add the sums of all ranks' subtrees: a program for a machine with a stack of tensors.
#[derive(Clone, Debug)]
pub(super) struct TreeSum(Vec<Op>);

#[derive(Clone, Copy, Debug)]
enum Op {
    /// Puts a tensor on the stack: this rank's own, or else the one at this place among those that were received.
    Push(Option<usize>),
    /// The upper two tensors become their sum, times the factor.
    Add(f64),
}

impl TreeSum {
    /// The sum on the rank `rank`. The others' sums in the first places of their stacks are received in rank order, then those of
    /// all ranks in the second places, and so on.
    pub(super) fn new(ranks: &VirtualRanks, rank: usize, world_size: usize) -> Result<Self> {
        let mut ops = Vec::new();
        let mut stack: Vec<Range<usize>> = Vec::new();
        for of in 0..world_size {
            for (round, leaves) in ranks.subtrees(of).into_iter().enumerate() {
                let place = round * world_size + of;
                // This rank's own first sum is not received.
                ops.push(Op::Push((place != rank).then(|| place - usize::from(place > rank))));
                stack.push(leaves);
                while let [.., left, right] = &stack[..]
                    && are_siblings(left, right)
                {
                    let node = left.start..right.end;
                    ops.push(Op::Add(if node.len() == ranks.count() { ranks.factor() } else { 1. }));
                    stack.truncate(stack.len() - 2);
                    stack.push(node);
                }
            }
        }
        match &stack[..] {
            [root] if root.len() == ranks.count() => Ok(Self(ops)),
            _ => Err(Error::invalid("virtual_ranks", "the ranks' subtrees do not make one tree")),
        }
    }

    /// `own`, which holds this rank's first sum, becomes the mean over all micro-batches. `received` are the others, in one
    /// flat tensor.
    pub(super) fn run(&self, own: &Tensor, received: &Tensor) -> Result<()> {
        if own.device().is_cpu() {
            return Ok(own.inplace_op2(received, self)?);
        }
        let elements = own.elem_count();
        let mut stack: Vec<(Tensor, bool)> = Vec::new();
        for op in &self.0 {
            match *op {
                Op::Push(None) => stack.push((own.clone(), true)),
                Op::Push(Some(place)) => stack.push((received.narrow(0, place * elements, elements)?, false)),
                Op::Add(factor) => {
                    let (Some((b, is_b)), Some((a, is_a))) = (stack.pop(), stack.pop()) else { break };
                    // The order of two addends does not matter. So the sum ends in `own`, and is not copied there.
                    let (destination, source) = if is_b { (b, a) } else { (a, b) };
                    copy::assign(&[Assignment {
                        destination: &destination,
                        source: &source,
                        factor,
                        accumulate: true,
                    }])?;
                    stack.push((destination, is_a || is_b));
                }
            }
        }
        Ok(())
    }

    fn apply<T: Element>(&self, own: &mut [T], received: &[T]) {
        let elements = own.len();
        let depth = self.0.iter().scan(0usize, |depth, op| {
            *depth = if matches!(op, Op::Push(_)) { *depth + 1 } else { *depth - 1 };
            Some(*depth)
        });
        let depth = depth.max().unwrap_or(0);
        // What was put on the stack, read where it is; None for a sum, of which `sums` has a piece.
        let mut stack: Vec<Option<Option<usize>>> = Vec::with_capacity(depth);
        let mut sums = vec![T::from_f64(0.); PIECE * depth];
        vectorise!(|| {
            for start in (0..elements).step_by(PIECE) {
                let now = start..elements.min(start + PIECE);
                let length = now.len();
                let source = |place: Option<usize>| match place {
                    None => &own[now.clone()],
                    Some(place) => &received[place * elements + start..][..length],
                };
                for op in &self.0 {
                    match *op {
                        Op::Push(place) => stack.push(Some(place)),
                        Op::Add(factor) => {
                            let (Some(b), Some(a)) = (stack.pop(), stack.pop()) else { break };
                            let (below, top) = sums.split_at_mut((stack.len() + 1) * PIECE);
                            let sum = &mut below[stack.len() * PIECE..][..length];
                            let b = match b {
                                Some(place) => source(place),
                                None => &top[..length],
                            };
                            let factor = T::Real::from_f64(factor);
                            // As in a copy that accumulates.
                            let add = |a: T, b: T| T::narrow((a.widen() + b.widen()) * factor);
                            match a.map(source) {
                                Some(a) => {
                                    sum.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum = add(*a, *b))
                                }
                                None => sum.iter_mut().zip(b).for_each(|(sum, b)| *sum = add(*sum, *b)),
                            }
                            stack.push(None);
                        }
                    }
                }
                if let Some(None) = stack.pop() {
                    own[now].copy_from_slice(&sums[..length]);
                }
            }
        });
    }
}

impl InplaceOp2 for TreeSum {
    fn name(&self) -> &'static str {
        "tree-sum"
    }

    fn cpu_fwd(
        &self,
        own: &mut CpuStorage,
        own_layout: &Layout,
        received: &CpuStorage,
        layout: &Layout,
    ) -> candle_core::Result<()> {
        dispatch!(own.dtype(), self.name(), T => {
            let (own, received) = (slice_mut::<T>(own, own_layout)?, slice::<T>(received, layout)?);
            self.apply(own, received);
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    /// Both ways of adding give the bits of the same additions one by one.
    #[test]
    fn sums_are_added_along_the_tree() {
        let ranks = VirtualRanks::new(8, 1, 3, None); // 0..2, 2..5, 5..8
        let elements = 2500;
        let values = |place: usize| (0..elements).map(move |i| ((place * 7919 + i * 104_729) % 1000) as f32 / 7. - 60.);
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let all: Vec<f32> = (0..6).flat_map(values).collect();
            let all = Tensor::from_vec(all, 6 * elements, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            let part = |place: usize| all.narrow(0, place * elements, elements).unwrap().copy().unwrap();
            let own = part(1);
            let received = Tensor::cat(&[0, 2, 3, 4, 5].map(part), 0).unwrap();
            TreeSum::new(&ranks, 1, 3).unwrap().run(&own, &received).unwrap();
            let add = |a: &Tensor, b: &Tensor| {
                let (a, b) = (a.to_dtype(DType::F64).unwrap(), b.to_dtype(DType::F64).unwrap());
                let sum = (a + b).unwrap();
                // Sums of f32 are rounded once, and so are those of 16 bits.
                if dtype == DType::F64 { sum } else { sum.to_dtype(DType::F32).unwrap().to_dtype(dtype).unwrap() }
            };
            // Rank 0: 0..2. Rank 1: 2..4, 4..5. Rank 2: 5..6, 6..8.
            let [a, b, c, d, e] = [part(0), part(1), part(4), part(2), part(5)];
            let root = add(&add(&a, &b), &add(&add(&c, &d), &e));
            let expected = (root.to_dtype(DType::F64).unwrap() / 8.).unwrap().to_dtype(dtype).unwrap();
            let bits = |t: &Tensor| t.to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
            assert_eq!(bits(&own), bits(&expected), "{dtype:?}");
        }
    }
}
