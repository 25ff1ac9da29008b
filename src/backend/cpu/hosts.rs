//! The hosts of a group: which ranks share memory.

/// The hosts of a group, as one of its ranks sees them. All ranks see the same hosts and differ only in their own
/// position.
///
/// A host is a set of ranks that can all map each other's memory. Hosts are ordered by their lowest ranks, and the
/// ranks of a host are in ascending order.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Hosts {
    hosts: Vec<Vec<usize>>,
    /// This rank's host, and its number there.
    own: (usize, usize),
}

impl Hosts {
    /// Derives the hosts from `maps(a, b)`, which says whether rank `a` maps the memory of rank `b` and is known to all ranks.
    /// Two ranks of which one does not map the other's memory are on different hosts.
    pub(super) fn new(rank: usize, world_size: usize, maps: impl Fn(usize, usize) -> bool) -> Self {
        let mut hosts: Vec<Vec<usize>> = Vec::new();
        for newcomer in 0..world_size {
            let fits = |host: &&mut Vec<usize>| host.iter().all(|rank| maps(*rank, newcomer) && maps(newcomer, *rank));
            match hosts.iter_mut().find(fits) {
                Some(host) => host.push(newcomer),
                None => hosts.push(vec![newcomer]),
            }
        }
        let mut result = Self { hosts, own: (0, 0) };
        result.own = result.find(rank);
        result
    }

    /// The number of the host of `rank`, and the rank's number there.
    pub(super) fn find(&self, rank: usize) -> (usize, usize) {
        let find = |host: &Vec<usize>| host.iter().position(|member| *member == rank);
        let found = self.hosts.iter().enumerate().find_map(|(number, host)| Some((number, find(host)?)));
        // Every rank of the world is on a host.
        found.unwrap_or_default()
    }

    /// The ranks of all hosts.
    pub(super) fn all(&self) -> &[Vec<usize>] {
        &self.hosts
    }

    pub(super) fn count(&self) -> usize {
        self.hosts.len()
    }

    /// The number of this rank's host.
    pub(super) fn own(&self) -> usize {
        self.own.0
    }

    /// This rank's number on its host.
    pub(super) fn index(&self) -> usize {
        self.own.1
    }

    /// The ranks of this rank's host.
    pub(super) fn members(&self) -> &[usize] {
        &self.hosts[self.own()]
    }

    /// The number of `rank` on this rank's host, if it is there.
    pub(super) fn member(&self, rank: usize) -> Option<usize> {
        self.members().iter().position(|member| *member == rank)
    }

    /// The other hosts' numbers and ranks.
    pub(super) fn others(&self) -> impl Iterator<Item = (usize, &[usize])> {
        let own = self.own();
        self.hosts
            .iter()
            .enumerate()
            .filter(move |(host, _)| *host != own)
            .map(|(host, ranks)| (host, ranks.as_slice()))
    }

    /// Whether no two ranks share memory.
    pub(super) fn are_single(&self) -> bool {
        self.hosts.iter().all(|host| host.len() == 1)
    }

    /// The rank among `ranks`, those of another host, that sends data needed by all ranks to the rank with number
    /// `index` on its own host. Hosts may have different numbers of ranks.
    pub(super) fn proxy(ranks: &[usize], index: usize) -> usize {
        ranks[index % ranks.len()]
    }

    /// The ranks among those of another host to which this rank sends such data: those whose [`proxy`](Self::proxy) it
    /// is.
    pub(super) fn clients<'a>(&self, ranks: &'a [usize]) -> impl Iterator<Item = usize> + use<'a> {
        let (index, count) = (self.index(), self.members().len());
        ranks.iter().enumerate().filter(move |(other, _)| other % count == index).map(|(_, rank)| *rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_ranks_that_all_map_each_other() {
        let hosts = |label: fn(usize) -> usize| Hosts::new(2, 5, move |a, b| label(a) == label(b)).hosts;
        assert_eq!(hosts(|_| 0), [[0, 1, 2, 3, 4]]);
        assert_eq!(hosts(|rank| rank % 2), [vec![0, 2, 4], vec![1, 3]]);
        assert_eq!(hosts(|rank| rank), [[0], [1], [2], [3], [4]]);
        // Rank 3 maps the memory of rank 0, but not the other way round; rank 2 maps all but that of rank 1.
        let hosts = Hosts::new(3, 5, |a, b| (a, b) != (0, 3) && (a, b) != (2, 1));
        assert_eq!(hosts.hosts, [vec![0, 1, 4], vec![2, 3]]);
        assert_eq!((hosts.own(), hosts.index(), hosts.member(2), hosts.member(4)), (1, 1, Some(0), None));
    }

    #[test]
    fn every_rank_has_one_proxy() {
        let label = |rank: usize| [0, 0, 0, 1, 1, 2, 0][rank];
        let all: Vec<Hosts> = (0..7).map(|rank| Hosts::new(rank, 7, |a, b| label(a) == label(b))).collect();
        for (rank, hosts) in all.iter().enumerate() {
            for (_, ranks) in hosts.others() {
                let server = Hosts::proxy(ranks, hosts.index());
                for (other, hosts) in all.iter().enumerate().filter(|(other, _)| ranks.contains(other)) {
                    let serves = hosts.clients(all[rank].members()).any(|clients| clients == rank);
                    assert_eq!(serves, other == server, "rank {other} and rank {rank}");
                }
            }
        }
    }
}
