//! The barrier at which all ranks of a run find each other in a store.
use super::Store;
use super::plan::Origin;
use super::store::absent_ranks;
use crate::json::{decide, decode};
use crate::{Error, Result};
use candle_ddp_base::host::{boot_id, host_name};
use candle_ddp_base::text::some;
use candle_ddp_base::warnings::warn_aloud;
use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// The rank that completes the run sets this to `None`; a rank that finds that the run cannot complete sets it to the
/// reason.
const OUTCOME: &str = "outcome";
type Outcome = Option<String>;
pub(super) const ARRIVED: &str = "arrived";
const WORLD_SIZE: &str = "world_size";
/// The store's own address, reported by a rank on another host.
const STORE_ADDRESS: &str = "store_address";

fn rank_key(rank: usize) -> String {
    format!("rank/{rank}")
}

pub(super) fn host_key(rank: usize) -> String {
    format!("host/{rank}")
}

/// Where a rank finds its place on its host.
fn place_key(rank: usize) -> String {
    format!("place/{rank}")
}

/// A rank's request to join the run.
pub(super) struct Join<'a> {
    pub(super) store: &'a dyn Store,
    /// The store's name in messages.
    pub(super) name: String,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    /// The identity that the ranks of one host share; see [`host`].
    pub(super) host: String,
    /// The addresses of this rank's end and of the store's end of their connection.
    pub(super) addresses: Option<(IpAddr, IpAddr)>,
    pub(super) deadline: Instant,
    pub(super) timeout: Duration,
    /// The origin of this rank's number and the world size, if this is the first meeting of a run.
    pub(super) origin: Option<&'a Origin>,
}

/// How long ranks may be missing before the user is told.
const NOTICE: Duration = Duration::from_secs(10);
/// The number of ranks that were about to tell the user. Only the first one does.
const NOTICED: &str = "noticed";

impl Join<'_> {
    /// Waits until all ranks have arrived.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Store`] on all ranks if two processes have the same rank or if world sizes differ, and
    /// [`Error::RanksMissing`] if some have not arrived by the time-out.
    pub(super) fn run(&self) -> Result<()> {
        match self.meet() {
            Err(Error::StoreTimeout { .. }) => Err(self.incomplete()),
            result => result,
        }
    }

    fn meet(&self) -> Result<()> {
        let Self { store, rank, world_size, .. } = *self;
        if store.add(&rank_key(rank), 1)? != 1 {
            return self.give_up(format!("two processes have rank {rank}: give each process its own rank"));
        }
        let agreed = decide(store, WORLD_SIZE, &world_size)?;
        if agreed != world_size {
            return self.give_up(format!(
                "rank {rank} was started with world size {world_size}, but another rank with {agreed}: give all ranks \
                 the same world size (WORLD_SIZE, or the launcher's options)"
            ));
        }
        store.set(&host_key(rank), self.host.as_bytes())?;
        if let Some((local, server)) = self.addresses
            && !local.is_loopback()
        {
            store.set(STORE_ADDRESS, server.to_string().as_bytes())?;
        }
        let arrived = store.add(ARRIVED, 1)?;
        if usize::try_from(arrived).is_ok_and(|arrived| arrived == world_size) {
            self.publish_places()?;
            decide(store, OUTCOME, &Outcome::None)?;
        }
        let left = || self.deadline.saturating_duration_since(Instant::now());
        match store.wait(&[OUTCOME], Some(left().min(NOTICE))) {
            Err(Error::StoreTimeout { .. }) if !left().is_zero() => {
                self.say_missing()?;
                store.wait(&[OUTCOME], Some(left()))?;
            }
            result => result?,
        }
        decode::<Outcome>(OUTCOME, &store.get(OUTCOME)?)?.map_or(Ok(()), |reason| Err(self.failed(reason)))
    }

    /// Returns the address at which other ranks can reach this one: the address of its connection to the store. If that
    /// works only inside this host and there are other hosts, the store is on this host, and its address as seen from
    /// other hosts is returned.
    pub(super) fn address(&self) -> Result<Option<IpAddr>> {
        let Some((local, _)) = self.addresses else { return Ok(None) };
        if !local.is_loopback() || !self.store.check(&[STORE_ADDRESS])? {
            return Ok(Some(local));
        }
        let reported = self.store.get(STORE_ADDRESS)?;
        Ok(Some(String::from_utf8_lossy(&reported).parse().unwrap_or(local)))
    }

    /// Tells every rank its place on its host. Only the last one to arrive reads the hosts of all.
    fn publish_places(&self) -> Result<()> {
        let keys: Vec<String> = (0..self.world_size).map(host_key).collect();
        let hosts = self.store.multi_get(&keys.iter().map(String::as_str).collect::<Vec<_>>())?;
        let mut sizes = HashMap::<&[u8], usize>::new();
        let local_ranks: Vec<usize> = hosts
            .iter()
            .map(|host| {
                let size = sizes.entry(host).or_default();
                *size += 1;
                *size - 1
            })
            .collect();
        let place = |(rank, (local_rank, host)): (usize, (&usize, &Vec<u8>))| {
            (place_key(rank), format!("{local_rank} {}", sizes[host.as_slice()]))
        };
        let places: Vec<_> = local_ranks.iter().zip(&hosts).enumerate().map(place).collect();
        let pairs: Vec<_> = places.iter().map(|(key, place)| (key.as_str(), place.as_bytes())).collect();
        self.store.multi_set(&pairs)
    }

    /// Returns this rank's index among the ranks of its host, and their number.
    pub(super) fn local_place(&self) -> Result<(usize, usize)> {
        let place = self.store.get(&place_key(self.rank))?;
        let text = String::from_utf8_lossy(&place);
        let numbers = text.split_once(' ').and_then(|(rank, size)| Some((rank.parse().ok()?, size.parse().ok()?)));
        numbers.ok_or_else(|| self.failed(format!("the store holds {text:?} as its place on its host")))
    }

    fn failed(&self, reason: String) -> Error {
        Error::Store { operation: format!("rendezvous of rank {}", self.rank), store: self.name.clone(), reason }
    }

    /// Reports to the waiting ranks why this run cannot complete. Has no effect if all ranks had already arrived.
    fn give_up(&self, reason: String) -> Result<()> {
        decide(self.store, OUTCOME, &Outcome::Some(reason.clone()))?;
        Err(self.failed(reason))
    }

    /// Tells the user, on one rank, who is missing.
    fn say_missing(&self) -> Result<()> {
        let Self { store, rank, world_size, .. } = *self;
        if store.add(NOTICED, 1)? != 1 {
            return Ok(());
        }
        let missing = absent_ranks(store, 0..world_size, &rank_key)?;
        if !missing.is_empty() {
            let left = self.deadline.saturating_duration_since(Instant::now()).as_secs();
            warn_aloud(format_args!(
                "rank {rank} has waited {} s at the store {} for {} of {world_size} ranks: {}. {}It waits {left} s more",
                NOTICE.as_secs(),
                self.name,
                missing.len(),
                some(&missing.iter().map(usize::to_string).collect::<Vec<_>>()),
                self.origin(),
            ));
        }
        Ok(())
    }

    /// The origin of this rank's number and the world size, as a sentence; otherwise nothing.
    fn origin(&self) -> String {
        self.origin.map_or_else(String::new, |origin| format!("{origin}. "))
    }

    /// Returns an error that names the missing ranks, if the store still answers.
    fn incomplete(&self) -> Error {
        let Self { world_size, timeout, .. } = *self;
        let (operation, store) = (format!("rendezvous of rank {}", self.rank), self.name.clone());
        match absent_ranks(self.store, 0..world_size, &rank_key) {
            Ok(ranks) if ranks.is_empty() => {
                let reason = format!(
                    "all {world_size} ranks arrived, but the one that came last has not told the others in time: it has \
                     stopped, or lost its connection to the store. Look for the first error in the output of all ranks"
                );
                Error::StoreTimeout { operation, store, timeout, reason }
            }
            Ok(ranks) => {
                let reason = format!(
                    "{} of {world_size} ranks arrived, missing: {}. {}Check that they were started, look for the first \
                     error in their output, or give them more time (timeout)",
                    world_size - ranks.len(),
                    some(&ranks.iter().map(usize::to_string).collect::<Vec<_>>()),
                    self.origin(),
                );
                Error::RanksMissing { operation, store, timeout, ranks, reason }
            }
            Err(_) => {
                let reason = "the store does not answer, so the missing ranks are unknown. Check that the process that \
                              hosts it (rank 0, or the launcher) is running, and that its host can be reached";
                Error::StoreTimeout { operation, store, timeout, reason: reason.to_string() }
            }
        }
    }
}

/// Returns an id of this host: its name, which is different in each container, and its boot id.
pub fn host() -> String {
    format!("{} {}", host_name(), boot_id())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HashStore;

    const TIMEOUT: Duration = Duration::from_secs(120);

    /// Returns the results of `local_place` and `address` on ranks with these hosts and addresses.
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
                origin: None,
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
    fn local_ranks() {
        let places = |hosts: &[&'static str]| {
            let ranks: Vec<_> = hosts.iter().map(|host| (*host, None)).collect();
            meet(&ranks).into_iter().map(|met| met.0).collect::<Vec<_>>()
        };
        assert_eq!(places(&["a"]), [(0, 1)]);
        assert_eq!(places(&["a", "a", "b", "b", "b"]), [(0, 2), (1, 2), (0, 3), (1, 3), (2, 3)]);
        assert_eq!(places(&["a", "b", "a"]), [(0, 2), (0, 1), (1, 2)]);
    }

    /// It arrived, and was stopped before it could say that all are there.
    #[test]
    fn a_rank_that_stops_after_its_arrival_is_not_missing() {
        let store = HashStore::new(TIMEOUT);
        store.set(&rank_key(1), b"1").unwrap();
        let timeout = Duration::from_secs(1);
        let join = Join {
            store: &store,
            name: "node0:1".to_string(),
            rank: 0,
            world_size: 2,
            host: "a".to_string(),
            addresses: None,
            deadline: Instant::now() + timeout,
            timeout,
            origin: None,
        };
        let error = join.run().unwrap_err();
        assert!(matches!(error, Error::StoreTimeout { .. }), "{error}");
        let expected =
            "rendezvous of rank 0 timed out after 1s on the store node0:1: all 2 ranks arrived, but the one that";
        assert!(error.to_string().starts_with(expected), "{error}");
    }

    #[test]
    fn addresses_work_on_other_hosts() {
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
