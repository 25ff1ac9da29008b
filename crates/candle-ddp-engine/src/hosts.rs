//! The hosts of a group: which ranks share memory.
use std::collections::HashMap;

/// The hosts of a group, as one of its ranks sees them. All ranks see the same hosts and differ only in their own
/// position.
///
/// A host is a set of ranks that share memory. Hosts are ordered by their lowest ranks, and the
/// ranks of a host are in ascending order.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Hosts {
    hosts: Vec<Vec<usize>>,
    /// By rank: its host, and its number there.
    places: Vec<(usize, usize)>,
    /// This rank's host, and its number there.
    own: (usize, usize),
}

impl Hosts {
    /// The hosts of the ranks, which are on the same one if their labels are equal.
    pub(crate) fn new(rank: usize, labels: &[usize]) -> Self {
        let (mut hosts, mut places) = (Vec::<Vec<usize>>::new(), Vec::new());
        let mut numbers = HashMap::new();
        for (newcomer, label) in labels.iter().enumerate() {
            let number = *numbers.entry(label).or_insert(hosts.len());
            if number == hosts.len() {
                hosts.push(Vec::new());
            }
            places.push((number, hosts[number].len()));
            hosts[number].push(newcomer);
        }
        Self { own: places[rank], hosts, places }
    }

    /// The number of the host of `rank`, and the rank's number there.
    pub(crate) fn find(&self, rank: usize) -> (usize, usize) {
        self.places[rank]
    }

    /// The ranks of all hosts.
    pub(crate) fn all(&self) -> &[Vec<usize>] {
        &self.hosts
    }

    pub(crate) fn count(&self) -> usize {
        self.hosts.len()
    }

    /// The number of this rank's host.
    pub(crate) fn own(&self) -> usize {
        self.own.0
    }

    /// This rank's number on its host.
    pub(crate) fn index(&self) -> usize {
        self.own.1
    }

    /// The ranks of this rank's host.
    pub(crate) fn members(&self) -> &[usize] {
        &self.hosts[self.own()]
    }

    /// The number of `rank` on this rank's host, if it is there.
    pub(crate) fn member(&self, rank: usize) -> Option<usize> {
        let (host, index) = *self.places.get(rank)?;
        (host == self.own()).then_some(index)
    }

    /// The other hosts' numbers and ranks.
    pub(crate) fn others(&self) -> impl Iterator<Item = (usize, &[usize])> {
        let own = self.own();
        self.hosts
            .iter()
            .enumerate()
            .filter(move |(host, _)| *host != own)
            .map(|(host, ranks)| (host, ranks.as_slice()))
    }

    /// The ranks of other hosts whose monitors this rank's monitor knows from the start: those of a host's leader are the leaders
    /// of all others.
    pub(crate) fn contacts(&self) -> Vec<usize> {
        if self.index() == 0 { self.others().map(|(_, ranks)| ranks[0]).collect() } else { Vec::new() }
    }

    /// The ranks of `rank`'s host.
    pub(crate) fn with(&self, rank: usize) -> &[usize] {
        &self.hosts[self.places[rank].0]
    }

    /// This rank's proxies, one on each other host.
    pub(crate) fn proxies(&self) -> impl Iterator<Item = usize> {
        self.others().map(|(_, ranks)| Self::proxy(ranks, self.index()))
    }

    /// The number of ranks of other hosts with which this rank exchanges data that all ranks need.
    pub(crate) fn partners(&self) -> usize {
        self.others().map(|(_, ranks)| self.clients(ranks).count().max(1)).sum()
    }

    /// The rank of `rank`'s host, another one, that is this rank's proxy there.
    pub(crate) fn proxy_beside(&self, rank: usize) -> usize {
        Self::proxy(self.with(rank), self.index())
    }

    /// Whether this rank is the proxy of `rank`, which is on another host.
    pub(crate) fn is_proxy_of(&self, rank: usize) -> bool {
        Self::proxy(self.members(), self.places[rank].1) == self.members()[self.index()]
    }

    /// Whether no two ranks share memory.
    pub(crate) fn are_single(&self) -> bool {
        self.hosts.iter().all(|host| host.len() == 1)
    }

    /// The rank among `ranks`, which are on another host, that sends data needed by all ranks to the rank with number
    /// `index` on its own host. Hosts may have different numbers of ranks.
    pub(crate) fn proxy(ranks: &[usize], index: usize) -> usize {
        ranks[index % ranks.len()]
    }

    /// The ranks among those of another host to which this rank sends such data: those whose [`proxy`](Self::proxy) it
    /// is.
    pub(crate) fn clients<'a>(&self, ranks: &'a [usize]) -> impl Iterator<Item = usize> + use<'a> {
        let (index, count) = (self.index(), self.members().len());
        ranks.iter().enumerate().filter(move |(other, _)| other % count == index).map(|(_, rank)| *rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_in_the_order_of_their_lowest_ranks() {
        let hosts = |labels: [usize; 5]| Hosts::new(2, &labels).hosts;
        assert_eq!(hosts([7; 5]), [[0, 1, 2, 3, 4]]);
        assert_eq!(hosts([1, 0, 1, 0, 1]), [vec![0, 2, 4], vec![1, 3]]);
        assert_eq!(hosts([0, 1, 2, 3, 4]), [[0], [1], [2], [3], [4]]);
        let hosts = Hosts::new(3, &[2, 2, 3, 3, 2]);
        assert_eq!(hosts.hosts, [vec![0, 1, 4], vec![2, 3]]);
        assert_eq!((hosts.own(), hosts.index(), hosts.member(2), hosts.member(4)), (1, 1, Some(0), None));
        assert_eq!(hosts.find(4), (0, 2));
    }

    #[test]
    fn contacts_are_mutual_and_few() {
        for labels in [vec![0, 0, 0, 1, 1, 2, 0], vec![0, 1, 2], vec![0, 0, 1, 1, 2, 2]] {
            let all: Vec<Hosts> = (0..labels.len()).map(|rank| Hosts::new(rank, &labels)).collect();
            let contacts: Vec<Vec<usize>> = all.iter().map(Hosts::contacts).collect();
            for (rank, hosts) in all.iter().enumerate() {
                for other in (0..labels.len()).filter(|other| labels[*other] != labels[rank]) {
                    assert_eq!(contacts[rank].contains(&other), contacts[other].contains(&rank));
                    assert_eq!(hosts.is_proxy_of(other), all[other].proxy_beside(rank) == rank);
                }
            }
            let count = all[0].count();
            assert_eq!(contacts.iter().map(Vec::len).sum::<usize>(), count * (count - 1));
        }
        assert_eq!(Hosts::new(2, &[0, 0, 1, 1, 2, 2]).contacts(), [0, 4]);
    }

    #[test]
    fn every_rank_has_one_proxy() {
        let all: Vec<Hosts> = (0..7).map(|rank| Hosts::new(rank, &[0, 0, 0, 1, 1, 2, 0])).collect();
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
