//! The moment when all ranks of a run have found each other in a store.
use super::Store;
use super::store::absent_ranks;
use crate::{Error, Result};
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Set by the rank that completes the run, or by one that finds that it cannot be completed, with its reason.
const OUTCOME: &str = "outcome";
const COMPLETE: &[u8] = b"complete";
pub(super) const ARRIVED: &str = "arrived";
const WORLD_SIZE: &str = "world_size";
/// The store's own address, told by a rank on another host.
const STORE_ADDRESS: &str = "store_address";

fn rank_key(rank: usize) -> String {
    format!("rank/{rank}")
}

pub(super) fn host_key(rank: usize) -> String {
    format!("host/{rank}")
}

/// One rank's wish to take part.
pub(super) struct Join<'a> {
    pub(super) store: &'a dyn Store,
    /// What the store is called in messages.
    pub(super) name: String,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    /// What the ranks of one host have in common, see [`host`].
    pub(super) host: String,
    /// This rank's end of its connection to the store, and the store's.
    pub(super) addresses: Option<(IpAddr, IpAddr)>,
    pub(super) deadline: Instant,
    pub(super) timeout: Duration,
}

impl Join<'_> {
    /// Returns when all ranks have arrived.
    ///
    /// Fails on all ranks when two claim the same place or when they disagree on their number, and after the time-out
    /// when some do not come.
    pub(super) fn run(&self) -> Result<()> {
        match self.meet() {
            Err(Error::StoreTimeout { .. }) => Err(self.incomplete()),
            result => result,
        }
    }

    fn meet(&self) -> Result<()> {
        let Self { store, rank, world_size, .. } = *self;
        if store.add(&rank_key(rank), 1)? != 1 {
            return self.give_up(format!("two processes claim to be rank {rank}: give each its own rank"));
        }
        let agreed = store.compare_set(WORLD_SIZE, b"", world_size.to_string().as_bytes())?;
        if agreed != world_size.to_string().as_bytes() {
            let agreed = String::from_utf8_lossy(&agreed);
            return self
                .give_up(format!("rank {rank} was started with world size {world_size}, another with {agreed}"));
        }
        store.set(&host_key(rank), self.host.as_bytes())?;
        if let Some((local, server)) = self.addresses
            && !local.is_loopback()
        {
            store.set(STORE_ADDRESS, server.to_string().as_bytes())?;
        }
        let arrived = store.add(ARRIVED, 1)?;
        if usize::try_from(arrived).is_ok_and(|arrived| arrived == world_size) {
            store.compare_set(OUTCOME, b"", COMPLETE)?;
        }
        let left = self.deadline.saturating_duration_since(Instant::now());
        store.wait(&[OUTCOME], Some(left))?;
        let outcome = store.get(OUTCOME)?;
        if outcome == COMPLETE { Ok(()) } else { Err(self.failed(String::from_utf8_lossy(&outcome).into_owned())) }
    }

    /// Where other ranks can reach this one: the address by which it reached the store, or, if that is only good inside
    /// of this host and there are other hosts, the one by which they reached the store, which then is on this host.
    pub(super) fn address(&self) -> Result<Option<IpAddr>> {
        let Some((local, _)) = self.addresses else { return Ok(None) };
        if !local.is_loopback() || !self.store.check(&[STORE_ADDRESS])? {
            return Ok(Some(local));
        }
        let told = self.store.get(STORE_ADDRESS)?;
        Ok(Some(String::from_utf8_lossy(&told).parse().unwrap_or(local)))
    }

    /// This rank's place among the ranks of its host, and their number.
    pub(super) fn local_place(&self) -> Result<(usize, usize)> {
        let keys: Vec<String> = (0..self.world_size).map(host_key).collect();
        let hosts = self.store.multi_get(&keys.iter().map(String::as_str).collect::<Vec<_>>())?;
        let mine = |hosts: &[Vec<u8>]| hosts.iter().filter(|host| host.as_slice() == self.host.as_bytes()).count();
        Ok((mine(hosts.get(..self.rank).unwrap_or_default()), mine(&hosts)))
    }

    fn failed(&self, reason: String) -> Error {
        Error::Store { operation: format!("rendezvous of rank {}", self.rank), store: self.name.clone(), reason }
    }

    /// Tells the others, who would wait in vain, why; too late when all had come before.
    fn give_up(&self, reason: String) -> Result<()> {
        self.store.compare_set(OUTCOME, b"", reason.as_bytes())?;
        Err(self.failed(reason))
    }

    /// Says who is missing, if the store still answers.
    fn incomplete(&self) -> Error {
        const SHOWN: usize = 8;
        let world_size = self.world_size;
        let reason = match absent_ranks(self.store, 0..world_size, &rank_key) {
            Ok(absent) => {
                let arrived = world_size - absent.len();
                let shown: Vec<String> = absent.iter().take(SHOWN).map(usize::to_string).collect();
                let dots = if absent.len() > SHOWN { ", …" } else { "" };
                format!(
                    "{arrived} of {world_size} ranks arrived, missing: {}{dots}. Check that they were started, look for \
                     the first error in their output, or give them more time (timeout)",
                    shown.join(", ")
                )
            }
            Err(_) => {
                "the store does not answer, so that it is not known which ranks arrived. Check that the process which \
                       hosts it (rank 0, or the launcher) runs and is not stopped, and that its host can be reached"
                    .to_string()
            }
        };
        let (operation, store) = (format!("rendezvous of rank {}", self.rank), self.name.clone());
        Error::StoreTimeout { operation, store, timeout: self.timeout, reason }
    }
}

/// This host: its name, which containers have of their own, and its last start.
pub(crate) fn host() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    format!("{} {}", rustix::system::uname().nodename().to_string_lossy(), boot.trim())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::HashStore;

    const TIMEOUT: Duration = Duration::from_secs(20);

    /// What `local_place` and `address` say on ranks with these hosts and addresses.
    fn meet(ranks: &[(&str, Option<(&str, &str)>)]) -> Vec<((usize, usize), Option<String>)> {
        let store = HashStore::new(TIMEOUT);
        let meet = |rank: usize, host: &str, addresses: Option<(&str, &str)>| {
            let addresses = addresses.map(|(local, server)| (local.parse().unwrap(), server.parse().unwrap()));
            let join = Join {
                store: &store,
                name: String::new(),
                rank,
                world_size: ranks.len(),
                host: host.to_string(),
                addresses,
                deadline: Instant::now() + TIMEOUT,
                timeout: TIMEOUT,
            };
            join.run().unwrap();
            (join.local_place().unwrap(), join.address().unwrap().map(|address| address.to_string()))
        };
        std::thread::scope(|scope| {
            let start = |(rank, (host, addresses)): (usize, &(_, _))| {
                let (host, addresses) = (*host, *addresses);
                scope.spawn(move || meet(rank, host, addresses))
            };
            let threads: Vec<_> = ranks.iter().enumerate().map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn places_on_hosts() {
        let places = |hosts: &[&'static str]| {
            let ranks: Vec<_> = hosts.iter().map(|host| (*host, None)).collect();
            meet(&ranks).into_iter().map(|met| met.0).collect::<Vec<_>>()
        };
        assert_eq!(places(&["a"]), [(0, 1)]);
        assert_eq!(places(&["a", "a", "b", "b", "b"]), [(0, 2), (1, 2), (0, 3), (1, 3), (2, 3)]);
        assert_eq!(places(&["a", "b", "a"]), [(0, 2), (0, 1), (1, 2)]);
    }

    #[test]
    fn addresses_are_good_on_other_hosts() {
        let inside = Some(("127.0.0.1", "127.0.1.1"));
        let addresses = |ranks: &[(&str, Option<(&str, &str)>)]| {
            meet(ranks).into_iter().map(|met| met.1.unwrap_or_default()).collect::<Vec<_>>()
        };
        assert_eq!(addresses(&[("a", inside), ("a", inside)]), ["127.0.0.1", "127.0.0.1"]);
        let other = Some(("10.0.0.2", "10.0.0.1"));
        assert_eq!(addresses(&[("a", inside), ("b", other), ("a", inside)]), ["10.0.0.1", "10.0.0.2", "10.0.0.1"]);
        assert_eq!(addresses(&[("a", None), ("b", None)]), ["", ""]);
    }
}
