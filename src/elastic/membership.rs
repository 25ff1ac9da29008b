//! The processes that belong to a generation, and the group that they form.
use super::options::ElasticOptions;
use crate::deadline::deadline_after;
use crate::error::Failure;
use crate::panic::lock;
use crate::process_group::{Joining, ProcessGroup, job};
use crate::rendezvous::{
    self, AGENT_VARIABLE, BEGUN, Decision, Generations, LastWill, Meeting, Member, RunStore, Store, absent_ranks,
};
use crate::warnings::warn_aloud;
use crate::{Error, Result, thread};
use candle_ddp_env::PROCESS;
use candle_ddp_rendezvous::liveness::{HEARING, await_heard, leave_will};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The number of processes that have read the last entry of the log.
const HEARD: &str = "heard";
/// The reason for aborting a group that has not failed.
const OTHER_GENERATION: &str = "another generation has begun";

/// Who decides which processes belong to a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arbiter {
    /// `ddprun`, which replaces processes.
    Agent,
    /// The surviving ranks.
    Survivors,
    /// Nobody: torchrun restarts all of them.
    Restart,
}

/// The membership of this process in its run.
pub(super) struct Membership {
    options: ElasticOptions,
    joining: Joining,
    run: RunStore,
    /// The prefix of the log.
    prefix: String,
    log: Generations,
    arbiter: Arbiter,
    own: Member,
    min_world_size: usize,
    /// This process has not called `elastic::run` before.
    is_first_call: bool,
    /// The present generation; `None` before the first.
    generation: Option<u64>,
    members: Vec<Member>,
    /// The watch over the present group, if that was made.
    watch: Arc<Watch>,
    /// The rank because of which the last group failed, or could not be made.
    gone: Option<usize>,
    /// The last group, until the next generation is decided: no surviving rank closes its connections earlier.
    left: Option<ProcessGroup>,
    /// Tells the others when this process is gone, if they agree among themselves.
    _will: Option<LastWill>,
}

/// The wait for the entry after the present generation. It may be decided while the group is well, for example to add
/// ranks.
#[derive(Default)]
struct Watch(Mutex<Watched>);

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Watched {
    #[default]
    Waiting,
    /// Another generation has begun or the run has ended, and the group was aborted for that.
    Superseded,
    /// This process has left the group.
    Left,
}

impl Membership {
    /// Connects to the store of the run.
    pub(super) fn open(options: ElasticOptions) -> Result<Self> {
        let rank = options.init.rank;
        Self::connect(options).inspect_err(|error| job::tell_error(rank, error, Some))
    }

    fn connect(options: ElasticOptions) -> Result<Self> {
        let joining = Joining::new(&options.init)?;
        let run = RunStore::open(&options.init.rendezvous(), deadline_after(options.init.timeout))?;
        let (rank, world_size) = (run.rank(), run.world_size());
        let told = run.agent(PROCESS.text(AGENT_VARIABLE));
        let least = told.map_or(world_size, |told| told.min_world_size);
        let min_world_size = options.min_world_size.unwrap_or(least);
        if min_world_size == 0 || min_world_size > world_size {
            let reason = format!("it must be between 1 and the world size, {world_size}, but is {min_world_size}");
            return Err(Error::invalid("min_world_size", reason));
        }
        let calls = run.count_call();
        let (arbiter, prefix, incarnation) = match told {
            Some(told) => (Arbiter::Agent, Generations::agent_prefix(told.attempt), told.incarnation),
            None => {
                let arbiter = if run.launcher_hosts() { Arbiter::Restart } else { Arbiter::Survivors };
                (arbiter, format!("{}/elastic", run.prefix(calls)), 0)
            }
        };
        if calls > 0 && arbiter == Arbiter::Agent {
            let reason = "a process may call it only once: put both loops into one function";
            return Err(Error::invalid("elastic::run", reason));
        }
        let log = Generations::new(prefix.as_str(), run.store());
        if arbiter == Arbiter::Agent {
            log.announce(min_world_size)?;
        }
        let own = Member { rank, incarnation };
        let will =
            (arbiter == Arbiter::Survivors).then(|| leave_will(log.store(), rank, &will_key(rank), b"gone")).flatten();
        Ok(Self {
            options,
            joining,
            run,
            prefix,
            log,
            arbiter,
            own,
            min_world_size,
            is_first_call: calls == 0,
            generation: None,
            members: Vec::new(),
            watch: Arc::default(),
            gone: None,
            left: None,
            _will: will,
        })
    }

    /// The rank of this process in the first generation.
    pub(super) fn rank(&self) -> usize {
        self.own.rank
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation.unwrap_or(0)
    }

    pub(super) fn starts_over(&self) -> bool {
        self.options.start_over
    }

    /// Whether processes of this run have trained before, even if none of them remains.
    pub(super) fn has_begun(&self) -> Result<bool> {
        match self.arbiter {
            Arbiter::Agent => Ok(self.run.store().check(&[BEGUN])?),
            // Without replacements, every generation has a survivor of the one before.
            Arbiter::Survivors => Ok(false),
            Arbiter::Restart => Ok(self.is_first_call && self.run.restart_count() > 0),
        }
    }

    /// Records that this process trains.
    pub(super) fn note_begun(&self) -> Result<()> {
        if self.arbiter == Arbiter::Agent { Ok(self.run.store().set(BEGUN, b"")?) } else { Ok(()) }
    }

    /// Whether another generation follows when a peer is gone.
    pub(super) fn continues(&self) -> bool {
        self.arbiter != Arbiter::Restart
    }

    /// The group of the next generation; `None` when all ranks have finished. `lost` is the reason for the end of the
    /// last one.
    pub(super) fn next(&mut self, lost: Option<&Error>) -> Result<Option<ProcessGroup>> {
        let timeout = self.options.init.timeout;
        let deadline = deadline_after(timeout);
        self.gone = lost.and_then(gone);
        let mut lost = lost.map(ToString::to_string);
        loop {
            let decision = match &lost {
                None => self.first()?,
                Some(reason) => self.after(reason, deadline).map_err(|error| with_cause(error, reason))?,
            };
            self.left = None;
            match decision {
                Decision::Done => {
                    self.hear_last()?;
                    return Ok(None);
                }
                Decision::Failed { rank, reason } => {
                    // This rank knows the reason; the others may not.
                    let _ = self.hear_last();
                    let error = Failure::PeerFailed { peer: rank, reason }.into();
                    job::tell_error(Some(self.rank()), &error, Some);
                    return Err(error);
                }
                Decision::Members(members) => self.members = members,
            }
            let rank = self.members.iter().position(|member| *member == self.own).ok_or_else(|| self.excluded())?;
            match self.meet(rank, deadline) {
                Ok(pg) => {
                    self.watch(&pg)?;
                    return Ok(Some(pg));
                }
                Err(error) => {
                    let follows = self.log.get(self.generation() + 1)?.is_some();
                    let is_lost = matches!(error, Error::Group(_)) && self.continues();
                    if !follows && !is_lost {
                        self.fail(&error.to_string());
                        let number = |rank: usize| self.members.get(rank).map(|member| member.rank);
                        job::tell_error(Some(self.rank()), &error, number);
                        let _ = self.hear_last();
                        return Err(error);
                    }
                    self.gone = gone(&error);
                    lost = Some(error.to_string());
                }
            }
        }
    }

    /// The newest generation, for a process that has not been in any.
    fn first(&mut self) -> Result<Decision> {
        self.generation = Some(0);
        let decision = self.log.decide(0, &Decision::everyone(self.run.world_size()))?;
        self.newest(decision)
    }

    /// The newest decision, starting from the present one.
    fn newest(&mut self, mut decision: Decision) -> Result<Decision> {
        while matches!(decision, Decision::Members(_)) {
            let next = self.generation() + 1;
            match self.log.get(next)? {
                Some(newer) => (self.generation, decision) = (Some(next), newer),
                None => break,
            }
        }
        Ok(decision)
    }

    /// The decision after the present generation, which ended for `reason`.
    fn after(&mut self, reason: &str, deadline: Instant) -> Result<Decision> {
        let number = self.generation() + 1;
        let decision = match self.arbiter {
            Arbiter::Survivors => self.agree(number, reason)?,
            Arbiter::Agent | Arbiter::Restart => self.await_agent(number, reason, deadline)?,
        };
        self.generation = Some(number);
        self.newest(decision)
    }

    fn await_agent(&self, number: u64, reason: &str, deadline: Instant) -> Result<Decision> {
        let left = deadline.saturating_duration_since(Instant::now());
        let key = Generations::key(number);
        match self.log.store().wait(&[&key], Some(left)) {
            Err(rendezvous::Error::StoreTimeout { store, timeout, .. }) => {
                let reason = format!(
                    "the last group has failed ({reason}), but no process has ended since, so ddprun has replaced \
                     none. Look for one that is stopped, or cannot be reached"
                );
                let operation = format!("waiting for generation {number} on rank {}", self.own.rank);
                Err(rendezvous::Error::StoreTimeout { operation, store, timeout, reason }.into())
            }
            Err(error) => Err(error.into()),
            Ok(()) => self.log.get(number)?.ok_or_else(|| self.excluded()),
        }
    }

    /// The members among `absent` whose processes are known to have ended, from their connections or their last wills.
    fn gone_of(&self, absent: &[usize]) -> Result<Vec<usize>> {
        let mut known = self.left.as_ref().map(ProcessGroup::gone).unwrap_or_default();
        known.extend(self.gone);
        let mut gone = Vec::new();
        for index in absent.iter().copied() {
            if known.contains(&index) || self.log.store().check(&[&will_key(self.members[index].rank)])? {
                gone.push(index);
            }
        }
        Ok(gone)
    }

    /// Agrees with the other surviving ranks. Waits for those that are not known to be gone, and leaves time for the
    /// meeting that follows.
    fn agree(&self, number: u64, reason: &str) -> Result<Decision> {
        const POLL: Duration = Duration::from_millis(20);
        let keys = self.log.store();
        let arrived = |index: usize| format!("{}/arrived/{index}", Generations::prefix_of(number));
        let own = self.members.iter().position(|member| *member == self.own).ok_or_else(|| self.excluded())?;
        keys.set(&arrived(own), b"")?;
        let last_call = deadline_after(self.options.last_call_timeout.min(self.options.init.timeout / 2));
        loop {
            if let Some(decision) = self.log.get(number)? {
                return Ok(decision);
            }
            let absent = absent_ranks(keys, 0..self.members.len(), &arrived)?;
            let gone = self.gone_of(&absent)?;
            if Instant::now() < last_call && gone.len() < absent.len() {
                std::thread::sleep(POLL);
                continue;
            }
            let present: Vec<Member> = (0..self.members.len())
                .filter(|index| !absent.contains(index))
                .map(|index| self.members[index])
                .collect();
            let (left, min_world_size) = (present.len(), self.min_world_size);
            if left >= min_world_size {
                return Ok(self.log.decide(number, &Decision::Members(present))?);
            }
            let rank = self.members[gone.first().or(absent.first()).copied().unwrap_or(own)].rank;
            let reason = format!(
                "{reason}. The {left} remaining rank(s) are fewer than min_world_size ({min_world_size}), and nothing \
                 here replaces a process: start the program with ddprun --max-restarts, or lower min_world_size"
            );
            return Ok(self.log.decide(number, &Decision::Failed { rank, reason })?);
        }
    }

    /// Meets the other members of the present generation.
    fn meet(&mut self, rank: usize, deadline: Instant) -> Result<ProcessGroup> {
        let number = self.generation();
        let (met, watcher) = self.run.meet(Meeting {
            prefix: format!("{}/{}", self.prefix, Generations::prefix_of(number)),
            rank,
            world_size: self.members.len(),
            is_whole: self.members.len() == self.run.world_size(),
            deadline,
            generation: Some(number),
            superseded: Some(format!("{}/{}", self.prefix, Generations::key(number + 1))),
        })?;
        let ranks = self.members.iter().map(|member| member.rank).collect();
        let pg = self.joining.join(met, watcher, ranks)?;
        // The tensors of this process stay where they are.
        self.joining.keep_device(pg.device());
        Ok(pg)
    }

    /// Aborts the group when the launcher has begun another generation or ended the run: the group may be well, or may
    /// learn later that a rank is gone.
    fn watch(&mut self, pg: &ProcessGroup) -> Result<()> {
        self.watch = Arc::default();
        if self.arbiter != Arbiter::Agent {
            return Ok(());
        }
        let (watch, log, next, group) =
            (Arc::clone(&self.watch), self.log.clone(), self.generation() + 1, pg.downgrade());
        let work = move || {
            let waited = log.store().wait(&[&Generations::key(next)], Some(Duration::MAX));
            let reason = match waited.and_then(|()| log.get(next)) {
                Ok(Some(Decision::Members(_))) => OTHER_GENERATION.to_string(),
                Ok(Some(Decision::Failed { rank, reason })) => format!("rank {rank} has ended the run: {reason}"),
                _ => return,
            };
            let mut watched = lock(&watch.0);
            if *watched == Watched::Waiting {
                *watched = Watched::Superseded;
                if let Some(pg) = group.upgrade() {
                    pg.supersede(&reason);
                }
            }
        };
        Ok(thread::spawn("candle-ddp-generation", work).map(drop)?)
    }

    /// Whether the present group was aborted because another generation follows, or the run has ended.
    pub(super) fn is_superseded(&self) -> bool {
        *lock(&self.watch.0) == Watched::Superseded
    }

    /// Waits until all ranks have finished, and returns whether they have; false if the group fails first.
    pub(super) fn finish(&self, pg: &ProcessGroup) -> Result<bool> {
        if self.arbiter == Arbiter::Restart {
            // The launcher does not know that it would have to restart the others.
            return Ok(true);
        }
        // On a GPU, a failed collective may only show now.
        if let Err(error) = pg.settle() {
            return if pg.failure().is_some() { Ok(false) } else { Err(error) };
        }
        let next = self.generation() + 1;
        let key = format!("{}/finished", Generations::prefix_of(self.generation()));
        let finished = self.log.store().add(&key, 1)?;
        if usize::try_from(finished).is_ok_and(|finished| finished == pg.world_size()) {
            self.log.decide(next, &Decision::Done)?;
        }
        let failed = || pg.failure().map_or(Ok(()), |error| Err(error.into()));
        let waited = self.log.store().wait_cancellable(&[&Generations::key(next)], Some(Duration::MAX), &failed);
        match self.log.get(next)? {
            Some(Decision::Done) => self.hear_last().map(|()| true),
            Some(_) => Ok(false),
            None if pg.failure().is_some() => Ok(false),
            None => Ok(waited.map(|()| false)?),
        }
    }

    /// Reads the last entry of the log. The process that hosts the store waits a moment until the others have read it,
    /// since the store ends with it.
    pub(super) fn hear_last(&self) -> Result<()> {
        let store = self.log.store();
        store.add(HEARD, 1)?;
        if !self.run.hosts() {
            return Ok(());
        }
        Ok(await_heard(Instant::now() + HEARING, || Ok(store.add(HEARD, 0)? as usize >= self.members.len()))?)
    }

    /// Ends the run because of this process.
    pub(super) fn fail(&self, reason: &str) {
        // The group gets the reason directly from this rank.
        *lock(&self.watch.0) = Watched::Left;
        let decision = Decision::Failed { rank: self.own.rank, reason: reason.to_string() };
        let mut number = self.generation() + 1;
        // If the others have already continued, they learn of it in their next generation.
        while let Ok(Decision::Members(_)) = self.log.decide(number, &decision) {
            number += 1;
        }
    }

    /// Leaves the group of a generation that has ended.
    pub(super) fn leave(&mut self, pg: ProcessGroup) {
        *lock(&self.watch.0) = Watched::Left;
        pg.survives_failure();
        // If this rank has learned of the end from the log alone, it waits for nobody. A group that the program has kept ends too.
        pg.supersede(OTHER_GENERATION);
        if pg.handles() > 1 {
            warn_aloud(format_args!(
                "rank {}: the program has kept {} handle(s) to the group of generation {}, which has ended: drop \
                 DistributedDataParallel and everything else made with it before the training function returns",
                self.own.rank,
                pg.handles() - 1,
                self.generation()
            ));
        }
        self.left = Some(pg).filter(|_| self.arbiter == Arbiter::Survivors);
    }

    fn excluded(&self) -> Error {
        let rank = self.own.rank;
        Error::RankFailed {
            rank,
            reason: format!(
                "the other ranks continued without this process (generation {}): it was late, or considered dead",
                self.generation()
            ),
        }
    }
}

/// Set when the process with this rank is gone.
fn will_key(rank: usize) -> String {
    format!("gone/{rank}")
}

/// Adds to an error of the store the failure after which the store was needed.
fn with_cause(error: Error, lost: &str) -> Error {
    match error {
        Error::Rendezvous(rendezvous::Error::Store { operation, store, reason }) => rendezvous::Error::Store {
            operation,
            store,
            reason: format!("{reason}. The store was needed because the last group had failed: {lost}"),
        }
        .into(),
        error => error,
    }
}

/// The rank that is known to be gone.
fn gone(failure: &Error) -> Option<usize> {
    match failure {
        Error::Group(Failure::PeerGone { peer, .. } | Failure::PeerFailed { peer, .. }) => Some(*peer),
        _ => None,
    }
}
