//! How ranks learn of each other's failures before they are connected.
//!
//! A rank whose initialisation fails sets the abort key, which a thread on each rank polls. If its process dies, a
//! store server of this crate sets the key, as the rank's last will. The thread also writes this rank's heartbeat and
//! monitors the next rank's, so the store gets only a few requests per rank and second, however many ranks there are.
//! If the next rank's heartbeat stops, its process was stopped, or it died and the store knows no last wills.
use super::cancellation::{Cancellation, Reason};
use super::init_store::{InitStore, REPORTING};
use super::join::{ARRIVED, host_key};
use super::liveness::{self, HEARING, Ring, await_heard, goodbye, heartbeat, leave_will};
use super::{LastWill, PrefixStore, Store};
use crate::error::Failure;
use crate::json::{decide, encode, read};
use crate::{Error, Result};
use candle_ddp_base::debug_fields;
use candle_ddp_base::host::host_name;
use candle_ddp_base::thread;
use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The first failure.
const ABORT: &str = "init/abort";
/// The number of ranks that know of the failure.
const HEARD: &str = "init/heard";

fn heartbeat_key(rank: usize) -> String {
    format!("init/{}", liveness::heartbeat_key(rank))
}

/// The intervals of the thread.
#[derive(Clone, Copy)]
struct Pace {
    /// The interval at which the abort key is polled.
    tick: Duration,
    /// The number of ticks between heartbeats.
    ticks_per_heartbeat: u32,
    /// The number of this rank's heartbeats without one of the next rank after which that rank is considered dead.
    lost_after: u32,
}

const PACE: Pace = Pace { tick: Duration::from_millis(500), ticks_per_heartbeat: 2, lost_after: 8 };

/// The number of consecutive failed requests after which the store is considered lost.
const STORE_LOST_AFTER: u32 = 4;
/// How long the end of initialisation waits for the thread, which may be blocked in a request.
const THREAD_PATIENCE: Duration = Duration::from_secs(1);

/// Monitors the initialisation of one rank.
pub struct InitWatcher {
    store: Arc<InitStore>,
    prefix: String,
    rank: usize,
    /// Whether this process hosts the store.
    hosts: bool,
    /// Whether this rank has been counted in `HEARD`.
    heard: Arc<AtomicBool>,
    thread: Option<Thread>,
    will: Option<LastWill>,
}

debug_fields!(InitWatcher: prefix, rank, hosts);

struct Thread {
    stop: Sender<()>,
    ended: Receiver<()>,
    handle: JoinHandle<()>,
}

impl InitWatcher {
    /// Creates a watcher that uses the keys of `store` under `prefix`; `hosts` says whether this process hosts the
    /// store.
    pub(super) fn new(store: Arc<InitStore>, prefix: &str, rank: usize, hosts: bool) -> Self {
        Self { store, prefix: prefix.to_string(), rank, hosts, heard: Arc::default(), thread: None, will: None }
    }

    /// Starts the thread. Once the key `superseded` is set, in the store without the prefix, another initialisation
    /// takes the place of this one, which then ends on all ranks.
    pub(super) fn start(&mut self, world_size: usize, superseded: Option<String>) -> Result<()> {
        self.start_at(PACE, world_size, superseded)
    }

    fn start_at(&mut self, pace: Pace, world_size: usize, superseded: Option<String>) -> Result<()> {
        let Some(store) = self.store.in_init().filter(|_| world_size > 1) else { return Ok(()) };
        let superseded = superseded.map(|key| (Arc::clone(&store), key));
        let keys = PrefixStore::new(self.prefix.as_str(), store);
        keys.set(&heartbeat_key(self.rank), &heartbeat(0))?;
        self.write_will(&keys);
        let ((stop, stopped), (end, ended)) = (channel(), channel());
        let (store, heard, rank) = (Arc::clone(&self.store), Arc::clone(&self.heard), self.rank);
        let body = move || {
            let _end = end;
            let cancellation = &store.cancellation;
            let ring = Ring::new(rank, world_size);
            Poller { keys, superseded, cancellation, heard: &heard, rank, pace, heartbeats: 0, ring }.run(&stopped);
        };
        let handle = thread::spawn(format!("ddp-{rank}-init"), body)?;
        self.thread = Some(Thread { stop, ended, handle });
        Ok(())
    }

    /// Asks the store to report this rank's failure to the others if its process ends without reporting it.
    fn write_will(&mut self, keys: &PrefixStore) {
        let reason = format!(
            "its process on host {} ended during initialisation (its connection to the store closed). Look for the first \
             error in its output",
            host_name()
        );
        let failure = Failure::PeerFailed { peer: self.rank, reason };
        self.will = leave_will(keys, self.rank, ABORT, &encode(&failure));
    }

    /// Returns the deadline of initialisation.
    pub fn deadline(&self) -> Instant {
        self.store.deadline
    }

    /// Returns the failure of another rank or of the store as an error.
    pub fn check(&self) -> Result<()> {
        self.store.cancellation.check()
    }

    /// Ends monitoring with the `result` of initialisation. An error is reported to the other ranks; `failure` is the group's
    /// failure in it, if there is one.
    pub fn conclude<T, E: Display>(
        mut self,
        result: Result<T, E>,
        failure: fn(&E) -> Option<&Failure>,
    ) -> Result<T, E> {
        self.end_thread();
        self.withdraw();
        match &result {
            Ok(_) => self.store.lift_limits(),
            Err(error) => match failure(error) {
                Some(Failure::PeerGone { rank, peer, .. }) => {
                    self.report(*peer, format!("it is gone: its connection to rank {rank} closed"));
                }
                _ => self.report(self.rank, format!("{error} (on host {})", host_name())),
            },
        }
        result
    }

    fn withdraw(&mut self) {
        if let Some(will) = self.will.take() {
            will.withdraw();
        }
    }

    fn end_thread(&mut self) {
        let Some(Thread { stop, ended, handle }) = self.thread.take() else { return };
        drop(stop);
        if let Err(RecvTimeoutError::Disconnected) = ended.recv_timeout(THREAD_PATIENCE)
            && handle.join().is_err()
        {
            log::error!("rank {}: the thread that monitors initialisation panicked", self.rank);
        }
    }

    /// Reports to the other ranks that `peer` failed, unless another failure was reported first.
    fn report(&self, peer: usize, reason: String) {
        let report = || -> Result<()> {
            let end = match self.hosts {
                true => Instant::now() + HEARING,
                false => self.store.deadline.min(Instant::now()) + REPORTING,
            };
            let keys = PrefixStore::new(self.prefix.as_str(), self.store.limited(end));
            decide(&keys, ABORT, &Failure::PeerFailed { peer, reason })?;
            count(&keys, &self.heard)?;
            if !self.hosts {
                return Ok(());
            }
            await_heard(end, || Ok(keys.add(HEARD, 0)? >= keys.add(&in_join(ARRIVED), 0)?))
        };
        if let Err(error) = report() {
            log::debug!("rank {}: cannot report the failure to the other ranks: {error}", self.rank);
        }
    }
}

impl Drop for InitWatcher {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.end_thread();
            self.withdraw();
            if std::thread::panicking() {
                self.report(self.rank, format!("it panicked during initialisation (on host {})", host_name()));
            }
        }
    }
}

fn in_join(key: &str) -> String {
    format!("join/{key}")
}

/// Counts this rank, once, among those that know of the failure.
fn count(keys: &dyn Store, heard: &AtomicBool) -> Result<()> {
    if !heard.swap(true, Ordering::Relaxed) {
        keys.add(HEARD, 1)?;
    }
    Ok(())
}

/// The data of the thread.
struct Poller<'a> {
    keys: PrefixStore,
    /// The key that ends this initialisation.
    superseded: Option<(Arc<dyn Store>, String)>,
    cancellation: &'a Cancellation,
    heard: &'a AtomicBool,
    rank: usize,
    pace: Pace,
    /// The number of heartbeats of this rank.
    heartbeats: u64,
    ring: Ring,
}

impl Poller<'_> {
    fn run(mut self, stopped: &Receiver<()>) {
        let mut failures = 0;
        for tick in 1.. {
            match stopped.recv_timeout(self.pace.tick) {
                Err(RecvTimeoutError::Timeout) => {}
                _ => break,
            }
            match self.look(tick) {
                Ok(true) => break,
                Ok(false) => failures = 0,
                Err(Error::Store { operation, store, reason }) => {
                    failures += 1;
                    if failures == STORE_LOST_AFTER {
                        self.cancellation.cancel(Reason::StoreLost { operation, store, reason });
                        break;
                    }
                }
                // This includes time-outs; callers that wait for the store have their own deadline.
                Err(error) => log::debug!("rank {}: polling the store during initialisation: {error}", self.rank),
            }
        }
        if let Err(error) = self.finish() {
            log::debug!("rank {}: sending the last heartbeat of initialisation: {error}", self.rank);
        }
    }

    /// Does what is due at a tick. Returns whether the initialisation has ended for this rank.
    fn look(&mut self, tick: u32) -> Result<bool> {
        if self.check_abort()? || self.check_superseded()? {
            return Ok(true);
        }
        if !tick.is_multiple_of(self.pace.ticks_per_heartbeat) {
            return Ok(false);
        }
        self.heartbeats += 1;
        self.keys.set(&heartbeat_key(self.rank), &heartbeat(self.heartbeats))?;
        self.watch()
    }

    fn finish(&self) -> Result<()> {
        self.keys.set(&heartbeat_key(self.rank), &goodbye(b""))
    }

    /// Returns whether a rank has failed.
    fn check_abort(&self) -> Result<bool> {
        let Some(failure) = read(&self.keys, ABORT)? else { return Ok(false) };
        self.cancel(failure)?;
        Ok(true)
    }

    fn check_superseded(&self) -> Result<bool> {
        let Some((store, key)) = &self.superseded else { return Ok(false) };
        let is_superseded = store.check(&[key])?;
        if is_superseded {
            self.cancellation.cancel(Reason::Superseded { key: key.clone() });
        }
        Ok(is_superseded)
    }

    fn cancel(&self, failure: Failure) -> Result<()> {
        self.cancellation.cancel(Reason::Failed(failure));
        count(&self.keys, self.heard)
    }

    /// Checks the heartbeat of the rank that this one watches. Returns whether that rank is lost, which is then reported to all
    /// ranks.
    fn watch(&mut self) -> Result<bool> {
        let Some(peer) = self.ring.watched() else { return Ok(false) };
        let key = heartbeat_key(peer);
        if !self.ring.has_begun() && !self.keys.check(&[&key])? {
            return Ok(false);
        }
        let missed = self.ring.saw(&self.keys.get(&key)?);
        if missed < self.pace.lost_after {
            return Ok(false);
        }
        let seconds = (self.pace.tick * self.pace.ticks_per_heartbeat * missed).as_secs_f64();
        let reason = format!(
            "it gave no sign of life for {seconds} s during initialisation, according to rank {}: its process{} died or is \
             stopped. Look for the first error in its output",
            self.rank,
            self.host_of(peer)
        );
        self.cancel(decide(&self.keys, ABORT, &Failure::PeerFailed { peer, reason })?)?;
        Ok(true)
    }

    /// Returns ` on host NAME`, if the rank has reported its host.
    fn host_of(&self, peer: usize) -> String {
        let key = in_join(&host_key(peer));
        let found = self.keys.check(&[&key]).ok().filter(|found| *found).and_then(|_| self.keys.get(&key).ok());
        let host = String::from_utf8_lossy(&found.unwrap_or_default()).into_owned();
        host.split(' ')
            .next()
            .filter(|name| !name.is_empty())
            .map_or_else(String::new, |name| format!(" on host {name}"))
    }
}

#[cfg(test)]
mod tests;
