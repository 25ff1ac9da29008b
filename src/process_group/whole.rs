//! How a part of a group that the program does not know tells its failures: as the group of all ranks would.
//!
//! The engine also follows who waits for whom (`candle_ddp_engine::standing`), but only to find ranks of which none can continue, and
//! only while they wait. Here, a call has timed out because some rank computes, or is stopped, so others may follow. Ranks give up one after
//! another, and one that has given up waits no more: so each leaves in the store for whom it has waited, whatever engine made its
//! group. Without that, a rank that is in no part with the late one would accuse one that has only waited for it.
use crate::backend::Communicator;
use crate::error::{Failure, ranks};
use crate::panic::lock;
use crate::rendezvous::{PrefixStore, Store};
use crate::{Result, thread};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

/// How long a rank waits for a better reason than the one that it knows. A rank whose program fails leaves the part first, and a rank
/// that waits for a stopped process asks that process for three seconds.
const PATIENCE: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(5);

/// The whole group, a part of whose ranks form this one.
#[derive(Clone)]
pub(super) struct Whole {
    communicator: Weak<dyn Communicator>,
    global_ranks: Vec<usize>,
    /// Where ranks say for whom they wait.
    store: Arc<PrefixStore>,
    /// The failure that the part's calls return once it has failed.
    told: Arc<OnceLock<Failure>>,
}

impl Whole {
    pub(super) fn new(communicator: &Arc<dyn Communicator>, global_ranks: &[usize], store: &Arc<dyn Store>) -> Self {
        let store = Arc::new(PrefixStore::new("waits", Arc::clone(store)));
        let (communicator, global_ranks) = (Arc::downgrade(communicator), global_ranks.to_vec());
        Self { communicator, global_ranks, store, told: Arc::default() }
    }

    /// The failure that a call returns for the `failure` of a part of the ranks `members`, of which this one is `own`, all numbered as in the group of
    /// all ranks. If the whole group has failed, that is the reason; it may take a moment until this rank knows.
    pub(super) fn tell(&self, failure: Failure, own: usize, members: &[usize]) -> Failure {
        if let Some(told) = self.told.get() {
            return told.clone();
        }
        let asked = match &failure {
            Failure::TimedOut { waiting_for, .. } if !waiting_for.is_empty() => self.ask(own, waiting_for),
            _ => None,
        };
        let may_follow = match &failure {
            Failure::PeerLeft { .. } => true,
            Failure::PeerFailed { peer, .. } => *peer != own,
            _ => asked.is_some(),
        };
        let reason = self.failure_within(if may_follow { PATIENCE } else { Duration::ZERO });
        let culprits = asked.and_then(|asked| lock(&asked).take());
        self.told.get_or_init(|| reason.unwrap_or_else(|| blaming(failure, culprits, members))).clone()
    }

    /// The whole group's failure, for which it waits at most so long.
    fn failure_within(&self, patience: Duration) -> Option<Failure> {
        let deadline = Instant::now() + patience;
        loop {
            let communicator = self.communicator.upgrade()?;
            let failure = communicator.failure();
            if let Some(failure) = failure.as_ref().and_then(|error| error.failure()) {
                return failure.renumbered(|rank| self.global_ranks.get(rank).copied());
            }
            drop(communicator);
            if Instant::now() >= deadline {
                return None;
            }
            std::thread::sleep(POLL);
        }
    }

    /// Says that this rank waits for others, and learns from them for whom they wait: in the end, for ranks that wait for nobody. The store
    /// may be in a process that is stopped, so nobody waits for its answer.
    fn ask(&self, own: usize, waiting_for: &[usize]) -> Option<Arc<Mutex<Option<BTreeSet<usize>>>>> {
        let answer = Arc::new(Mutex::new(None));
        let (store, asked, waiting_for) = (Arc::clone(&self.store), Arc::downgrade(&answer), waiting_for.to_vec());
        let work = move || -> Result<()> {
            store.set(&own.to_string(), &serde_json::to_vec(&waiting_for).unwrap_or_default())?;
            while let Some(answer) = asked.upgrade() {
                let culprits = culprits(&store, own, &waiting_for)?;
                *lock(&answer) = Some(culprits);
                drop(answer);
                std::thread::sleep(20 * POLL);
            }
            Ok(())
        };
        thread::spawn("candle-ddp-waits", work).ok()?;
        Some(answer)
    }
}

/// The ranks for which `own` waits in the end: directly, or because others wait for them.
fn culprits(store: &PrefixStore, own: usize, waiting_for: &[usize]) -> Result<BTreeSet<usize>> {
    let (mut seen, mut found) = (BTreeSet::from([own]), BTreeSet::new());
    let mut open = waiting_for.to_vec();
    while let Some(rank) = open.pop() {
        let key = rank.to_string();
        if !seen.insert(rank) {
            continue;
        }
        match store.check(&[&key])? {
            true => open.extend(serde_json::from_slice::<Vec<usize>>(&store.get(&key)?).unwrap_or_default()),
            false => {
                found.insert(rank);
            }
        }
    }
    Ok(found)
}

/// The text of a time-out in a part names ranks by their numbers there.
fn blaming(mut failure: Failure, culprits: Option<BTreeSet<usize>>, members: &[usize]) -> Failure {
    if let Failure::TimedOut { waiting_for, reason, .. } = &mut failure
        && !waiting_for.is_empty()
    {
        let missing = ranks(waiting_for);
        let culprits: Vec<usize> = culprits.into_iter().flatten().collect();
        let chain = match culprits.is_empty() || culprits == *waiting_for {
            true => String::new(),
            false => format!(" and wait for {}", ranks(&culprits)),
        };
        *reason = format!(
            "of the ranks {} of its group, {missing} are missing{chain}. Numbered from 0 in that group: {reason}",
            ranks(members)
        );
        if !culprits.is_empty() {
            *waiting_for = culprits;
        }
    }
    failure
}
