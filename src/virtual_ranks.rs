//! Virtual ranks: the micro-batches of a global batch, the ranks that compute them, and the binary tree along which their
//! gradients are added. See `docs/virtual_ranks.md`.
use crate::{Error, Result};
use std::ops::Range;
use std::sync::Arc;

/// The micro-batches of a global batch, dealt out to the ranks of a group: each rank has a contiguous block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VirtualRanks {
    count: usize,
    rank: usize,
    /// The number of each rank's first, and of all.
    starts: Arc<[usize]>,
}

/// The way of one micro-batch's gradients on the rank that computes it. A rank has a stack of sums, which lie in
/// planes: one for each maximal subtree of what it has computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Leaf {
    /// The number of sums on the stack before it.
    pub(crate) depth: usize,
    /// How many nodes of the tree it completes: that many times, the upper two sums on the stack become one.
    pub(crate) merges: usize,
    /// If the last of them is the root of the tree: the factor that makes it the mean over all micro-batches.
    pub(crate) root: Option<f64>,
}

impl VirtualRanks {
    /// Returns an error if there is a `count` that so many ranks cannot have: not a power of two, or below the number of ranks.
    pub(crate) fn check(count: Option<usize>, world_size: usize) -> Result<()> {
        let Some(count) = count else { return Ok(()) };
        if !count.is_power_of_two() {
            let reason =
                format!("it must be a power of two, such as {}, not {count}", count.max(1).next_power_of_two());
            return Err(Error::invalid("virtual_ranks", reason));
        }
        if count < world_size {
            let reason = format!(
                "it must be at least the number of ranks, {world_size}, not {count}: every rank computes one micro-batch or more. \
                 Use fewer ranks, or more virtual ranks (which is another training, with another global batch)"
            );
            return Err(Error::invalid("virtual_ranks", reason));
        }
        Ok(())
    }

    /// `count` has been [checked](Self::check). `speeds` are those of the ranks, which are finite and above 0; without them, all
    /// are equal.
    pub(crate) fn new(count: usize, rank: usize, world_size: usize, speeds: Option<&[f64]>) -> Self {
        let starts: Vec<usize> = match speeds {
            // Up to 2^32 virtual ranks on 64-bit machines; a micro-batch is at least one sample in memory.
            None => (0..=world_size).map(|rank| (rank as u128 * count as u128 / world_size as u128) as usize).collect(),
            Some(speeds) => {
                let ends = shares(count, speeds).into_iter().scan(0, |end, share| {
                    *end += share;
                    Some(*end)
                });
                [0].into_iter().chain(ends).collect()
            }
        };
        Self { count, rank, starts: starts.into() }
    }

    fn world_size(&self) -> usize {
        self.starts.len() - 1
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// The numbers of the micro-batches that rank `rank` computes.
    pub(crate) fn block(&self, rank: usize) -> Range<usize> {
        self.starts[rank]..self.starts[rank + 1]
    }

    /// The numbers of the micro-batches that this rank computes.
    pub(crate) fn own(&self) -> Range<usize> {
        self.block(self.rank)
    }

    pub(crate) fn leaf(&self, number: usize) -> Leaf {
        let first = self.own().start;
        let (depth, after) = (subtrees(first..number).len(), subtrees(first..number + 1).len());
        let has_root = (first..number + 1) == (0..self.count);
        Leaf { depth, merges: depth + 1 - after, root: has_root.then(|| self.factor()) }
    }

    /// The subtrees whose sums rank `rank` sends, by their leaves.
    pub(crate) fn subtrees(&self, rank: usize) -> Vec<Range<usize>> {
        subtrees(self.block(rank))
    }

    /// The largest number of sums that a rank sends.
    pub(crate) fn rounds(&self) -> usize {
        (0..self.world_size()).map(|rank| self.subtrees(rank).len()).max().unwrap_or(1)
    }

    /// The factor that makes the sum over all micro-batches their mean.
    pub(crate) fn factor(&self) -> f64 {
        1. / self.count as f64
    }
}

/// How many of `count` micro-batches each rank gets, at least one, so that the slowest is done as early as possible.
fn shares(count: usize, speeds: &[f64]) -> Vec<usize> {
    let mut shares = vec![1; speeds.len()];
    for _ in speeds.len()..count {
        // The next goes where it is done first.
        let end = |rank: &usize| (shares[*rank] + 1) as f64 / speeds[*rank];
        if let Some(next) = (0..speeds.len()).min_by(|a, b| end(a).total_cmp(&end(b))) {
            shares[next] += 1;
        }
    }
    shares
}

/// The maximal subtrees of a binary tree whose leaves are all in `leaves`, from left to right.
fn subtrees(leaves: Range<usize>) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let mut start = leaves.start;
    while start < leaves.end {
        let longest = 1 << (leaves.end - start).ilog2();
        let aligned = if start == 0 { longest } else { 1 << start.trailing_zeros() };
        let end = start + longest.min(aligned);
        found.push(start..end);
        start = end;
    }
    found
}

/// Whether `left` and `right` are the children of one node.
pub(crate) fn are_siblings(left: &Range<usize>, right: &Range<usize>) -> bool {
    left.end == right.start && left.len() == right.len() && left.start.is_multiple_of(2 * left.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_all_micro_batches_and_differ_by_one() {
        for (count, world_size) in [(1, 1), (8, 3), (16, 16), (16, 5), (16, 7), (16, 12), (1024, 1000)] {
            let ranks = |rank| VirtualRanks::new(count, rank, world_size, None);
            let blocks: Vec<_> = (0..world_size).map(|rank| ranks(rank).own()).collect();
            assert_eq!(blocks.iter().flat_map(Clone::clone).collect::<Vec<_>>(), (0..count).collect::<Vec<_>>());
            assert!(blocks.iter().all(|block| [count / world_size, count.div_ceil(world_size)].contains(&block.len())));
        }
    }

    #[test]
    fn a_fast_rank_gets_more() {
        let blocks = |count, speeds: &[f64]| {
            let ranks = VirtualRanks::new(count, 0, speeds.len(), Some(speeds));
            (0..speeds.len()).map(|rank| ranks.block(rank)).collect::<Vec<_>>()
        };
        assert_eq!(blocks(16, &[1., 1.]), [0..8, 8..16]);
        assert_eq!(blocks(16, &[1., 0.5]), [0..11, 11..16]);
        assert_eq!(blocks(8, &[1., 3., 0.001]), [0..2, 2..7, 7..8]);
        assert_eq!(blocks(4, &[1e-300, 1., 1e300, 5.]), [0..1, 1..2, 2..3, 3..4]);
        // No other shares are done earlier.
        let speeds = [3.1, 1.7, 0.9];
        let time = |shares: &[usize]| shares.iter().zip(speeds).map(|(n, speed)| *n as f64 / speed).fold(0., f64::max);
        let best = (1..15).flat_map(|a| (1..16 - a).map(move |b| [a, b, 16 - a - b])).map(|shares| time(&shares));
        assert_eq!(time(&shares(16, &speeds)), best.fold(f64::INFINITY, f64::min));
    }

    #[test]
    fn a_power_of_two_of_micro_batches_per_rank_is_one_subtree() {
        for world_size in [1, 2, 4, 8, 16] {
            let ranks = VirtualRanks::new(16, 0, world_size, None);
            assert_eq!(ranks.rounds(), 1);
        }
        // As docs/virtual_ranks.md says.
        let rounds = |world_size| VirtualRanks::new(16, 0, world_size, None).rounds();
        assert_eq!([3, 5, 6, 7, 12].map(rounds), [3, 2, 2, 2, 1]);
        let ranks = VirtualRanks::new(16, 1, 3, None);
        assert_eq!(ranks.own(), 5..10);
        assert_eq!(ranks.subtrees(1), [5..6, 6..8, 8..10]);
        assert_eq!(ranks.rounds(), 3);
    }

    /// A stack of nodes, to which each micro-batch is added as its leaf says.
    #[test]
    fn leaves_build_the_same_tree_on_any_number_of_ranks() {
        let join = |left: &String, right: &String| format!("({left} {right})");
        let tree = |world_size: usize| {
            let mut all: Vec<(Range<usize>, String)> = Vec::new();
            for rank in 0..world_size {
                let ranks = VirtualRanks::new(16, rank, world_size, None);
                let mut stack: Vec<String> = Vec::new();
                for number in ranks.own() {
                    let leaf = ranks.leaf(number);
                    assert_eq!(stack.len(), leaf.depth, "{number} on rank {rank} of {world_size}");
                    stack.push(number.to_string());
                    for _ in 0..leaf.merges {
                        let right = stack.pop().unwrap();
                        let left = stack.pop().unwrap();
                        stack.push(join(&left, &right));
                    }
                    assert_eq!(leaf.root.is_some(), world_size == 1 && number == 15);
                }
                assert_eq!(stack.len(), ranks.subtrees(rank).len());
                all.extend(ranks.subtrees(rank).into_iter().zip(stack));
            }
            let mut stack: Vec<(Range<usize>, String)> = Vec::new();
            for node in all {
                stack.push(node);
                while let [.., (a, left), (b, right)] = &stack[..]
                    && are_siblings(a, b)
                {
                    let node = (a.start..b.end, join(left, right));
                    stack.truncate(stack.len() - 2);
                    stack.push(node);
                }
            }
            assert_eq!(stack.len(), 1);
            stack.remove(0)
        };
        let (leaves, one) = tree(1);
        assert_eq!(leaves, 0..16);
        assert!(one.starts_with("((((0 1) (2 3)) ((4 5) (6 7)))"), "{one}");
        (2..=16).for_each(|world_size| assert_eq!(tree(world_size).1, one, "{world_size}"));
    }

    #[test]
    fn other_numbers_are_refused() {
        for (count, world_size) in [(0, 1), (3, 1), (12, 4), (8, 9), (1, 2)] {
            assert!(matches!(VirtualRanks::check(Some(count), world_size), Err(Error::InvalidArgument { .. })));
        }
    }
}
