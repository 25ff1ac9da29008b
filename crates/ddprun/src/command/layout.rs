//! The ranks of a run and their nodes, which may have different numbers of workers.
use candle_ddp_base::MOST_RANKS;
use serde::{Deserialize, Serialize};
use std::iter::repeat_n;
use std::ops::Range;

/// The number of workers of each node, by node rank: groups of nodes with equal numbers, so that it is small however many nodes
/// there are. Ranks are given out in order of the nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Layout(Vec<(usize, usize)>);

impl Layout {
    /// `nodes` nodes with `workers` workers each.
    pub(crate) fn even(nodes: usize, workers: usize) -> Self {
        Self(vec![(nodes, workers)])
    }

    /// Adds a node.
    pub(crate) fn push(&mut self, workers: usize) {
        match self.0.last_mut() {
            Some((nodes, of_each)) if *of_each == workers => *nodes += 1,
            _ => self.0.push((1, workers)),
        }
    }

    fn workers(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().flat_map(|(nodes, workers)| repeat_n(*workers, *nodes))
    }

    /// Whether a run can be like that: another program may have written it.
    pub(crate) fn is_possible(&self) -> bool {
        let add = |ranks: usize, (nodes, workers): &(usize, usize)| {
            nodes.checked_mul(*workers)?.checked_add(ranks).filter(|ranks| *workers > 0 && *ranks <= MOST_RANKS)
        };
        self.0.iter().try_fold(0, add).is_some()
    }

    pub(crate) fn nodes(&self) -> usize {
        self.0.iter().map(|(nodes, _)| nodes).sum()
    }

    pub(crate) fn world_size(&self) -> usize {
        self.0.iter().map(|(nodes, workers)| nodes.saturating_mul(*workers)).sum()
    }

    /// The ranks of a node; none if there is no such node.
    pub(crate) fn ranks(&self, node_rank: usize) -> Range<usize> {
        let first = self.workers().take(node_rank).sum();
        first..first + self.workers().nth(node_rank).unwrap_or(0)
    }

    /// The node of a rank, if there is one.
    pub(crate) fn node_of(&self, rank: usize) -> Option<usize> {
        let mut end = 0;
        self.workers().position(|workers| {
            end += workers;
            rank < end
        })
    }

    /// The smallest number of ranks that so many of the nodes have.
    pub(crate) fn least(&self, nodes: usize) -> usize {
        let mut workers: Vec<usize> = self.workers().collect();
        workers.sort_unstable();
        workers.into_iter().take(nodes).sum()
    }
}

/// The ranks of the run, and those on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Topology {
    /// Before the nodes have met, all are taken to have as many workers as this one.
    pub(crate) layout: Layout,
    /// Rank of this machine.
    pub(crate) node_rank: usize,
}

impl Topology {
    /// Returns the number of workers in the run.
    pub(crate) fn world_size(&self) -> usize {
        self.layout.world_size()
    }

    /// Returns the number of workers on this machine.
    pub(crate) fn local_world_size(&self) -> usize {
        self.layout.ranks(self.node_rank).len()
    }

    /// Returns the global rank of the worker with this `local_rank`.
    pub(crate) fn rank(&self, local_rank: usize) -> usize {
        self.layout.ranks(self.node_rank).start + local_rank
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_given_out_in_order_of_the_nodes() {
        let mut layout = Layout::even(2, 3);
        [3, 1, 2].into_iter().for_each(|workers| layout.push(workers));
        assert_eq!(layout, Layout(vec![(3, 3), (1, 1), (1, 2)]));
        assert_eq!((layout.nodes(), layout.world_size(), layout.least(3)), (5, 12, 6));
        assert_eq!([0, 2, 3, 4, 5].map(|node| layout.ranks(node)), [0..3, 6..9, 9..10, 10..12, 12..12]);
        let nodes = [0, 2, 3, 8, 9, 10, 11, 12].map(|rank| layout.node_of(rank));
        assert_eq!(nodes, [Some(0), Some(0), Some(1), Some(2), Some(3), Some(4), Some(4), None]);
        let topology = Topology { layout, node_rank: 3 };
        assert_eq!((topology.world_size(), topology.local_world_size(), topology.rank(0)), (12, 1, 9));
    }

    #[test]
    fn no_run_has_absurd_numbers() {
        for (groups, is_possible) in [
            (vec![(2, 4), (1, 1)], true),
            (vec![], true),
            (vec![(usize::MAX, 1)], false),
            (vec![(3, usize::MAX)], false),
            (vec![(usize::MAX, 0)], false),
            (vec![(1, MOST_RANKS), (1, 1)], false),
        ] {
            assert_eq!(Layout(groups.clone()).is_possible(), is_possible, "{groups:?}");
        }
    }
}
