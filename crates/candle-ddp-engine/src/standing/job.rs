//! The state that the groups of one rank's job share.
use super::deadlock::deadlock;
use super::report::{GroupReport, Making, Report, Wait};
use super::threads::{Thread, current};
use crate::call::Channel;
use crate::call_site::CallSite;
use crate::error::Failure;
use crate::panic::{lock, wait_timeout};
use crate::{Result, thread};
use candle_ddp_base::debug_fields;
use candle_ddp_base::hash::content_64;
use candle_ddp_base::text::ranks;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

/// How often a rank looks whether its threads wait.
const TICK: Duration = Duration::from_millis(500);
/// After so many ticks in one wait, the rank asks where the others stand: after two seconds, and again after three and a half, since a rank
/// whose buckets share memory is busy for three before it waits; then after five, ten, fifteen.
const FIRST: [usize; 3] = [4, 7, 10];
const OFTEN: usize = 10;

/// A group, as its job sees it.
pub(crate) trait Member: Send + Sync {
    fn world_size(&self) -> usize;

    /// Whether it has failed, or this rank leaves it.
    fn is_over(&self) -> bool;

    /// Its part of this rank's [`Report`], and the threads that have made calls there.
    fn stand(&self, id: u64, name: &str) -> (GroupReport, Vec<Arc<Thread>>);

    /// Asks all other ranks of the group where they stand; returns the answers.
    fn ask(&self) -> Vec<Vec<u8>>;

    /// Ends the group on all of its ranks.
    fn end(&self, failure: Failure);
}

/// One rank's job: its group of all ranks, and all groups that are split off from that one.
pub(crate) struct Standing {
    rank: usize,
    inner: Mutex<Inner>,
    /// Notified when the rank's last group is over.
    changed: Condvar,
    /// Held while this rank asks others.
    asking: Mutex<()>,
    /// Whether a call has returned the failure of a group.
    has_told: AtomicBool,
    /// The reason why all groups end.
    ended: OnceLock<Failure>,
}

#[derive(Default)]
struct Inner {
    groups: Vec<Listed>,
    /// Threads that have made calls in groups that are over.
    threads: Vec<Arc<Thread>>,
    /// The groups that threads make, and how many have been made.
    makings: Vec<Making>,
    made: u64,
    watch: Option<JoinHandle<()>>,
    is_over: bool,
}

#[derive(Clone)]
struct Listed {
    id: u64,
    name: Arc<str>,
    outlives: bool,
    group: Weak<dyn Member>,
}

/// A group's place in its job.
#[derive(Clone)]
pub struct Membership {
    standing: Arc<Standing>,
    /// Its way from the group of all ranks, and its ranks: the same on all of its ranks.
    path: String,
    name: String,
    ranks: Vec<usize>,
    /// The group from which it is split off.
    parent: Option<u64>,
    outlives: bool,
}

debug_fields!(Membership: path, ranks);

impl Membership {
    /// The place of a new job's group of all ranks, in which this process has rank `rank`.
    pub fn of_all(rank: usize, world_size: usize) -> Self {
        let standing = Standing {
            rank,
            inner: Mutex::default(),
            changed: Condvar::new(),
            asking: Mutex::default(),
            has_told: AtomicBool::new(false),
            ended: OnceLock::new(),
        };
        let name = "the group of all ranks".to_string();
        Self {
            standing: Arc::new(standing),
            path: String::new(),
            name,
            ranks: (0..world_size).collect(),
            parent: None,
            outlives: false,
        }
    }

    /// The place of a group that is split off from this one, or a part of it, which messages call `kind`. `key` and `ranks`,
    /// which are numbered as in the group of all ranks, are the same on all of its ranks.
    pub fn of_subgroup(&self, key: &str, kind: &str, ranks: Vec<usize>) -> Self {
        let name = match kind.ends_with(" of") && ranks == self.ranks {
            true => format!("{kind} {}", self.name),
            false => format!("{} of ranks {}", kind.trim_end_matches(" of"), self::ranks(&ranks)),
        };
        let path = format!("{}/{key}", self.path);
        Self { standing: Arc::clone(&self.standing), path, name, ranks, parent: Some(self.id()), outlives: false }
    }

    /// The same place, of a group that continues when others fail.
    #[must_use]
    pub fn outliving(self) -> Self {
        Self { outlives: true, ..self }
    }

    fn id(&self) -> u64 {
        content_64(format!("{} {:?}", self.path, self.ranks).as_bytes())
    }

    /// While the result lives, the calling thread makes the group, and waits for the ranks that do not make it yet.
    pub(crate) fn make(&self) -> Option<MakingGroup<'_>> {
        let (id, parent, standing) = (self.id(), self.parent?, &*self.standing);
        let ranks = self.ranks.iter().map(|rank| *rank as u64).collect();
        let (name, thread, place) = (self.name.clone(), current(), CallSite::outermost());
        let mut inner = lock(&standing.inner);
        Thread::enter(&mut inner.threads);
        inner.made += 1;
        let number = inner.made;
        inner.makings.push(Making { id, parent, name, ranks, thread, number, place });
        Some(MakingGroup { standing, number })
    }

    /// Lists the group. The first one starts the thread that looks after them.
    pub(crate) fn enter(&self, group: Weak<dyn Member>) -> Result<()> {
        let mut inner = lock(&self.standing.inner);
        let (name, outlives) = (self.name.as_str().into(), self.outlives);
        Thread::enter(&mut inner.threads);
        inner.groups.push(Listed { id: self.id(), name, outlives, group });
        if inner.watch.is_none() && self.ranks.len() > 1 {
            inner.is_over = false;
            let standing = Arc::clone(&self.standing);
            let body = move || standing.watch();
            inner.watch = Some(thread::spawn(format!("ddp-{}-watch", self.standing.rank), body)?);
        }
        Ok(())
    }

    /// Removes the group, which this rank leaves.
    pub(crate) fn leave(&self, group: &Weak<dyn Member>, threads: Vec<Arc<Thread>>) {
        let standing = &self.standing;
        let mut inner = lock(&standing.inner);
        inner.groups.retain(|listed| !listed.group.ptr_eq(group));
        inner.threads.extend(threads.into_iter().filter(|thread| !thread.is_helper));
        inner.threads.retain(|thread| !thread.is_over());
        let watch = if inner.groups.is_empty() { inner.watch.take() } else { None };
        inner.is_over |= watch.is_some();
        drop(inner);
        standing.changed.notify_all();
        // It does not ask in a group that is over for long.
        drop(lock(&standing.asking));
        if let Some(watch) = watch
            && watch.join().is_err()
        {
            log::error!("rank {}: the thread that looks after its groups panicked", standing.rank);
        }
    }

    /// Encodes where this rank stands.
    pub(crate) fn report(&self) -> Vec<u8> {
        self.standing.report().encode()
    }

    /// Notes that a call returns a failure.
    pub(crate) fn tell(&self) {
        self.standing.has_told.store(true, Ordering::Relaxed);
    }

    pub(crate) fn has_told(&self) -> bool {
        self.standing.has_told.load(Ordering::Relaxed)
    }

    /// The reason why the group ends with all others, if it does: it may be the last one to hear of it.
    pub(crate) fn ended(&self) -> Option<Failure> {
        self.standing.ended.get().filter(|_| !self.outlives).cloned()
    }

    /// Ends all groups of this rank, the group of all ranks first, if `failure` says that ranks wait in different groups.
    pub(crate) fn pass_on(&self, failure: &Failure) {
        if failure.spans_groups() {
            self.standing.end(failure);
        }
    }
}

impl Standing {
    fn listed(&self) -> Vec<(Listed, Arc<dyn Member>)> {
        let groups = lock(&self.inner).groups.clone();
        groups.into_iter().filter_map(|listed| Some((listed.clone(), listed.group.upgrade()?))).collect()
    }

    /// Where this rank stands.
    fn report(&self) -> Report {
        let inner = lock(&self.inner);
        let (mut threads, makings) = (inner.threads.clone(), inner.makings.clone());
        drop(inner);
        let mut groups = Vec::new();
        for (listed, group) in self.listed() {
            let (report, callers) = group.stand(listed.id, &listed.name);
            groups.push(report);
            threads.extend(callers);
        }
        let living = threads.iter().filter(|thread| !thread.is_helper && !thread.is_over());
        let mut threads: Vec<u64> = living.map(|thread| thread.id).collect();
        threads.sort_unstable();
        threads.dedup();
        Report { rank: self.rank, threads, groups, makings }
    }

    /// The body of the thread that looks after the groups.
    fn watch(&self) {
        let (mut seen, mut ticks, mut due) = (None, 0, FIRST[0]);
        loop {
            let mut inner = lock(&self.inner);
            if !inner.is_over {
                inner = wait_timeout(&self.changed, inner, TICK);
            }
            if inner.is_over {
                return;
            }
            drop(inner);
            let now = held_up(&self.report());
            if now.is_none() || now != seen {
                (seen, ticks, due) = (now, 0, FIRST[0]);
                continue;
            }
            ticks += 1;
            if ticks == due {
                due = FIRST.into_iter().find(|due| *due > ticks).unwrap_or(ticks + OFTEN);
                if let Some(failure) = self.ask() {
                    self.end(&failure);
                }
            }
        }
    }

    /// Asks where all ranks stand. Returns why they cannot continue, if they cannot.
    fn ask(&self) -> Option<Failure> {
        let _asking = lock(&self.asking);
        let groups = self.listed().into_iter().map(|(_, group)| group).filter(|group| !group.is_over());
        // The first one is the group of all ranks, while the program has it.
        let largest = groups.reduce(|a, b| if b.world_size() > a.world_size() { b } else { a })?;
        let look = || {
            let mut reports: Vec<Report> = largest.ask().iter().filter_map(|answer| Report::decode(answer)).collect();
            reports.push(self.report());
            reports.sort_by_key(|report| report.rank);
            reports
        };
        let first = look();
        let mut second = look();
        second.retain(|report| first.contains(report));
        deadlock(&second)
    }

    /// Ends all groups.
    fn end(&self, failure: &Failure) {
        if self.ended.set(failure.clone()).is_err() {
            return;
        }
        for (_, group) in self.listed().into_iter().filter(|(listed, _)| !listed.outlives) {
            group.end(failure.clone());
        }
    }
}

/// The obstacles of a program: the number of the first call that its stream waits for, or its threads' waits for calls, each with the group,
/// and the numbers of the groups that they make.
type HeldUp = (u64, Vec<(u64, Wait)>, Vec<u64>);

/// The obstacles of the program, if its stream waits or all of its threads do.
fn held_up(report: &Report) -> Option<HeldUp> {
    let on_stream = report.groups.iter().flat_map(|group| &group.stream_waits).map(|wait| wait.number);
    if let Some(first) = on_stream.min() {
        return Some((first, Vec::new(), Vec::new()));
    }
    let is_known = |thread: &u64| report.threads.contains(thread);
    let all = report.groups.iter().flat_map(|group| group.waits.iter().map(|wait| (group.id, *wait)));
    let waits: Vec<_> = all.filter(|(_, wait)| is_known(&wait.thread)).collect();
    let makings: Vec<_> = report.makings.iter().filter(|making| is_known(&making.thread)).collect();
    let does_wait = |thread: &u64| {
        waits.iter().any(|(_, wait)| wait.thread == *thread) || makings.iter().any(|making| making.thread == *thread)
    };
    let all_wait = !report.threads.is_empty() && report.threads.iter().all(does_wait);
    let numbers = makings.iter().map(|making| making.number).collect();
    all_wait.then_some((0, waits, numbers))
}

/// A group that a thread makes.
pub(crate) struct MakingGroup<'a> {
    standing: &'a Standing,
    number: u64,
}

impl Drop for MakingGroup<'_> {
    fn drop(&mut self) {
        lock(&self.standing.inner).makings.retain(|making| making.number != self.number);
    }
}

/// While this lives, the calling thread waits for a call.
#[derive(Debug)]
#[must_use]
pub struct Waiting<'a> {
    waits: &'a Mutex<Vec<Wait>>,
    wait: Wait,
}

impl<'a> Waiting<'a> {
    /// See [`Wait`] for `is_held`.
    pub(crate) fn new(waits: &'a Mutex<Vec<Wait>>, channel: Channel, sequence: u64, is_held: bool) -> Self {
        let wait = Wait { thread: current(), channel, sequence, place: CallSite::outermost(), is_held };
        lock(waits).push(wait);
        Self { waits, wait }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut waits = lock(self.waits);
        if let Some(at) = waits.iter().position(|wait| *wait == self.wait) {
            waits.swap_remove(at);
        }
    }
}
