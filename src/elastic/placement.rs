//! Which rank holds which shards. All ranks compute the same placement from their reports.
use std::collections::HashMap;

/// The ranks in an order in which each mirrors the one before it, and the first mirrors the last. If all hosts have
/// equally many ranks, neighbours are on different hosts, so the loss of a host loses no shard.
pub(super) fn ring(hosts: &[&str]) -> Vec<usize> {
    let mut on_host = HashMap::new();
    let mut order: Vec<(usize, usize)> = Vec::new();
    for (rank, host) in hosts.iter().enumerate() {
        let before = on_host.entry(host).or_insert(0);
        order.push((*before, rank));
        *before += 1;
    }
    order.sort_unstable();
    order.into_iter().map(|(_, rank)| rank).collect()
}

/// The rank that mirrors `rank`'s shards.
pub(super) fn mirror(ring: &[usize], rank: usize) -> usize {
    let place = ring.iter().position(|other| *other == rank).unwrap_or(0);
    ring[(place + 1) % ring.len()]
}

/// The rank whose shards `rank` mirrors.
pub(super) fn mirrored(ring: &[usize], rank: usize) -> usize {
    let place = ring.iter().position(|other| *other == rank).unwrap_or(0);
    ring[(place + ring.len() - 1) % ring.len()]
}

/// The rank that takes over a shard of another group: the one with the same number, if that group had as many ranks.
pub(super) fn owner(shard: usize, world_size: usize) -> usize {
    shard % world_size
}

/// A shard that one rank must send to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Transfer {
    pub(super) shard: usize,
    pub(super) from: usize,
    pub(super) to: usize,
}

/// How the `shards` shards of a commit get to their owners and mirrors, if each rank holds those in `held`. `Err` is a
/// shard that is lost.
pub(super) fn transfers(shards: usize, held: &[&[usize]], ring: &[usize]) -> Result<Vec<Transfer>, usize> {
    let mut transfers = Vec::new();
    for shard in 0..shards {
        let has = |rank: usize| held[rank].contains(&shard);
        let from = (0..held.len()).find(|rank| has(*rank)).ok_or(shard)?;
        let owner = owner(shard, held.len());
        let mut wanted = vec![owner, mirror(ring, owner)];
        wanted.dedup();
        transfers.extend(wanted.into_iter().filter(|to| !has(*to)).map(|to| Transfer { shard, from, to }));
    }
    Ok(transfers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_on_different_hosts_where_they_can_be() {
        assert_eq!(ring(&["a", "a", "a"]), [0, 1, 2]);
        assert_eq!(ring(&["a", "a", "b", "b"]), [0, 2, 1, 3]);
        assert_eq!(ring(&["a", "b", "c", "a", "b", "c"]), [0, 1, 2, 3, 4, 5]);
        assert_eq!(ring(&["a", "a", "b"]), [0, 2, 1]);
        for hosts in [vec!["a"], vec!["a", "b"], vec!["a", "a", "b", "b", "c", "c"]] {
            let ring = ring(&hosts);
            for rank in 0..hosts.len() {
                assert_eq!(mirrored(&ring, mirror(&ring, rank)), rank);
                assert!(hosts.len() == 1 || hosts[mirror(&ring, rank)] != hosts[rank], "{hosts:?}");
            }
        }
    }

    /// The shards that each rank of a group holds after a commit: its own, and the one that it mirrors.
    fn after_a_commit(ring: &[usize]) -> Vec<Vec<usize>> {
        (0..ring.len()).map(|rank| vec![rank, mirrored(ring, rank)]).collect()
    }

    #[test]
    fn the_death_of_one_rank_loses_nothing() {
        for world_size in 2..6 {
            let old = ring(&vec!["a"; world_size]);
            let held = after_a_commit(&old);
            for dead in 0..world_size {
                let (mut replaced, mut without) = (held.clone(), held.clone());
                replaced[dead] = Vec::new();
                without.remove(dead);
                for mut held in [replaced, without] {
                    let new = ring(&vec!["a"; held.len()]);
                    let views: Vec<&[usize]> = held.iter().map(Vec::as_slice).collect();
                    for Transfer { shard, from, to } in transfers(world_size, &views, &new).unwrap() {
                        assert!(held[from].contains(&shard) && !held[to].contains(&shard));
                        held[to].push(shard);
                    }
                    for shard in 0..world_size {
                        let owner = owner(shard, held.len());
                        assert!(held[owner].contains(&shard) && held[mirror(&new, owner)].contains(&shard));
                    }
                }
            }
        }
    }

    #[test]
    fn the_death_of_a_rank_and_its_mirror_loses_a_shard() {
        let order = ring(&["a"; 4]);
        let mut held = after_a_commit(&order);
        (held[1], held[2]) = (Vec::new(), Vec::new());
        let views: Vec<&[usize]> = held.iter().map(Vec::as_slice).collect();
        assert_eq!(transfers(4, &views, &order), Err(1));
        // Two that are not neighbours lose none.
        let mut held = after_a_commit(&order);
        (held[1], held[3]) = (Vec::new(), Vec::new());
        let views: Vec<&[usize]> = held.iter().map(Vec::as_slice).collect();
        assert_eq!(transfers(4, &views, &order).unwrap().len(), 4);
    }
}
