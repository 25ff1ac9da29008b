//! Decides the verdict on a failure of this machine's workers.
use super::cause::{self, Cause, failed, was_done};
use super::folder::RunFolder;
use super::output::Remains;
use super::worker::{Ended, Exit, Worker};
use crate::command::Topology;
use crate::console::Target;
use crate::tail::Tail;
use crate::time;
use crate::verdict::{Evidence, How, VERDICT, Verdict, Verdicts, WorkerError, section};
use candle_ddp_base::flight_record::{FOLDER_VARIABLE, explain, read_folder};
use candle_ddp_base::host::host_name;
use candle_ddp_base::text::ranks;
use candle_ddp_env::PROCESS;
use candle_ddp_rendezvous::error::RankError;
use candle_ddp_rendezvous::milliseconds;
use signal_hook::consts::SIGKILL;
use std::fmt::Write;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// The most lines of the explanation of flight records.
const CALLS: usize = 16;

/// Judges the failures of a run, and keeps the verdicts.
pub(crate) struct Judge<'a> {
    folder: &'a RunFolder,
    pub(crate) verdicts: Verdicts,
    /// Whether this machine is one of several.
    is_linked: bool,
    since: SystemTime,
    /// How often memory had run out before the run.
    out_of_memory: Option<u64>,
}

impl<'a> Judge<'a> {
    pub(crate) fn new(folder: &'a RunFolder, run_id: &str, is_linked: bool) -> Self {
        let verdicts = Verdicts::new(folder.kept(VERDICT), run_id);
        Self { folder, verdicts, is_linked, since: SystemTime::now(), out_of_memory: out_of_memory() }
    }

    /// All that is known about workers that have ended, with their last output, if it is known.
    pub(crate) fn examine<'b>(
        &'b self,
        workers: &'b [Worker],
        remains: Option<&'b Remains>,
        topology: &'b Topology,
    ) -> Findings<'b> {
        let error = |worker: &Worker| self.folder.error(worker.restart_count, worker.local_rank);
        // Errors told by a worker that succeeded do not count.
        let errors = workers.iter().map(|worker| error(worker).filter(|_| !worker.has_succeeded())).collect();
        Findings { judge: self, workers, remains, errors, topology }
    }

    fn how(&self, exit: Exit) -> How {
        let has_grown = || self.out_of_memory.zip(out_of_memory()).is_some_and(|(before, now)| now > before);
        match exit {
            Exit::Signal(SIGKILL) if has_grown() => How::OutOfMemory,
            Exit::Signal(_) => How::Signal,
            Exit::Code(_) | Exit::NotReplaced => How::Exit,
        }
    }

    /// The explanation of this run's flight records.
    fn calls(&self) -> Vec<String> {
        let Some(folder) = PROCESS.path(FOLDER_VARIABLE) else { return Vec::new() };
        let since = self.since.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        let mut records = read_folder(&folder).unwrap_or_default();
        records.retain(|record| u128::from(record.written_ns) >= since);
        match records.as_slice() {
            [] => Vec::new(),
            records => explain(records).lines().take(CALLS).map(str::to_string).collect(),
        }
    }
}

/// Everything that is known on this machine about workers that have ended.
pub(crate) struct Findings<'a> {
    judge: &'a Judge<'a>,
    pub(crate) workers: &'a [Worker],
    remains: Option<&'a Remains>,
    /// The errors that the workers have reported.
    errors: Vec<Option<WorkerError>>,
    topology: &'a Topology,
}

impl Findings<'_> {
    /// The verdict, if any worker has failed, and the index of the worker that is its evidence. Worker `first` was the first to fail.
    pub(crate) fn verdict(&self, first: Option<usize>) -> Option<(usize, Verdict)> {
        let first = first.or_else(|| cause::first(self.workers))?;
        let cause = cause::cause(self.workers, first, &self.errors, self.topology);
        Some((cause.worker, self.on(cause, first)?))
    }

    /// The verdict on a single worker, without which the others continue.
    pub(crate) fn on_one(&self) -> Option<Verdict> {
        self.on(Cause { worker: 0, elsewhere: None, told_by: None }, 0)
    }

    fn on(&self, cause: Cause, first: usize) -> Option<Verdict> {
        let worker = self.workers.get(cause.worker)?;
        // The worker that caused the failure may not have failed itself.
        let ended = [Some(worker), self.workers.get(first)].into_iter().flatten().filter(|worker| failed(worker));
        let code = ended.filter_map(|worker| worker.ended).map(|ended| ended.how.code()).next().unwrap_or(1);
        let (how, text) = self.end(worker, cause);
        let evidence = self.evidence(cause.worker, worker, &text);
        let told = |worker: usize| self.errors.get(worker)?.as_ref()?.told.as_ref();
        let blamed_by = cause.told_by.and_then(told);
        let by_others = Verdict {
            at: milliseconds(worker.ended.map_or_else(SystemTime::now, |ended| ended.at)),
            cause: told(cause.worker).or(blamed_by).map(|told| told.variant.clone()),
            told_by: blamed_by.map(|told| told.rank),
            code,
            evidence,
            ..Verdict::default()
        };
        Some(match cause.elsewhere {
            Some(rank) => {
                let node = self.topology.layout.node_of(rank);
                let has_left = blamed_by.is_some_and(RankError::says_left);
                let (how, what) = match has_left {
                    true => (How::Left, "left before the others had finished"),
                    false => (How::Unknown, "failed first"),
                };
                let by = worker.rank;
                let text = format!(
                    "rank {rank} {what}, according to the error of rank {by}: see the output of ddprun on node {}",
                    node.unwrap_or_default()
                );
                Verdict { rank: Some(rank), node, how, told_by: Some(by), text, ..by_others }
            }
            None => {
                let exit = worker.ended.filter(|ended| !ended.asked_to_exit).map(|ended| ended.how);
                let (exit, signal) = exit.map_or((None, None), Exit::numbers);
                let (node, host) = (Some(self.topology.node_rank), Some(host_name()));
                Verdict { rank: Some(worker.rank), node, host, how, exit, signal, text, ..by_others }
            }
        })
    }

    /// How a worker has ended, and in a sentence.
    fn end(&self, worker: &Worker, cause: Cause) -> (How, String) {
        let who = format!("rank {}{}", worker.rank, self.place());
        let is_one_of_many = self.workers.len() > 1 || self.topology.layout.nodes() > 1;
        let first = if is_one_of_many && cause.elsewhere.is_none() { " first" } else { "" };
        match worker.ended {
            Some(Ended { how, .. }) if failed(worker) => {
                (self.judge.how(how), format!("{who} failed{first}: it {how}"))
            }
            Some(Ended { how, .. }) if was_done(worker) => {
                (How::Left, format!("{who} ended while the other ranks needed it: it {how}"))
            }
            Some(Ended { how, .. }) => {
                (How::Hang, format!("{who} made the other ranks fail: it {how} after ddprun asked it to exit"))
            }
            None => (How::Hang, format!("{who} made the other ranks fail: it could not be killed")),
        }
    }

    /// The machine in messages, if there are several.
    pub(crate) fn place(&self) -> String {
        match self.judge.is_linked {
            true => format!(" on host {} (node {})", host_name(), self.topology.node_rank),
            false => String::new(),
        }
    }

    fn evidence(&self, index: usize, worker: &Worker, text: &str) -> Evidence {
        let mut process = text.to_string();
        if let Some(Ended { after, at, .. }) = worker.ended {
            let _ = write!(process, ", {:.1} s after the start, at {}", after.as_secs_f64(), time::readable(at));
        }
        let _ = write!(process, " (local rank {}, pid {})", worker.local_rank, worker.pid);
        let tail = self.last_words(worker);
        Evidence {
            process,
            error: self.error(index).map(|error| error.message.clone()),
            printed: tail.and_then(Tail::earlier_error).map(str::to_string),
            lines: tail.map(Tail::lines),
            files: self.judge.folder.files(worker.restart_count, worker.local_rank),
            calls: self.judge.calls(),
        }
    }

    /// The error that a worker has reported.
    fn error(&self, index: usize) -> Option<&WorkerError> {
        self.errors.get(index)?.as_ref()
    }

    /// The first error that a worker has reported.
    pub(crate) fn any_error(&self) -> Option<&WorkerError> {
        self.errors.iter().flatten().next()
    }

    /// Describes how the workers other than `first` ended. Those that ended in the same way share a line.
    pub(crate) fn others(&self, first: Option<usize>) -> String {
        let mut groups: Vec<(String, Vec<usize>)> = Vec::new();
        let ended = first.and_then(|first| self.workers.get(first)).and_then(|worker| worker.ended);
        for (index, other) in self.workers.iter().enumerate().filter(|(index, _)| Some(*index) != first) {
            let mut end = match other.ended {
                None => format!("could not be killed (pid {})", other.pid),
                Some(Ended { how: Exit::Code(0), after, .. }) if ended.is_none_or(|ended| after >= ended.after) => {
                    continue;
                }
                Some(Ended { how, asked_to_exit: false, .. }) => format!("{how} by itself"),
                Some(Ended { how, .. }) => format!("{how} after ddprun asked it to exit"),
            };
            self.describe_error(index, other, &mut end);
            match groups.iter_mut().find(|(known, _)| *known == end) {
                Some((_, ranks)) => ranks.push(other.rank),
                None => groups.push((end, vec![other.rank])),
            }
        }
        let mut text = String::new();
        for (end, those) in groups {
            let _ = match those.as_slice() {
                [rank] => write!(text, "\n  rank {rank} {end}"),
                those => write!(text, "\n  ranks {}: each {end}", ranks(those)),
            };
        }
        text
    }

    /// Adds to `text` the error of a worker other than the first.
    fn describe_error(&self, index: usize, worker: &Worker, text: &mut String) {
        let error = self.error(index);
        if let Some(culprit) = error.and_then(WorkerError::culprit) {
            // The worker has printed the error, which says no more than that.
            let _ = write!(text, " because of rank {culprit}");
        } else if let Some(error) = error {
            section(text, "with the error:", error.message.lines());
        } else if let Some(tail) = self.last_words(worker).filter(|_| failed(worker)) {
            match (tail.earlier_error(), tail.lines().last()) {
                (Some(error), _) => section(text, "its last error:", error.lines()),
                (None, Some(last)) => section(text, "its last line:", std::iter::once(last.as_str())),
                (None, None) => {}
            }
        }
    }

    /// Returns the last lines of a worker's stderr or, if there are none, of its stdout or the combined stream.
    fn last_words(&self, worker: &Worker) -> Option<&Tail> {
        let own = self.remains?.iter().filter(|(local_rank, ..)| *local_rank == worker.local_rank);
        let written = own.filter(|(.., tail)| !tail.lines().is_empty());
        written.min_by_key(|(_, target, _)| *target == Target::Stdout).map(|(.., tail)| tail)
    }
}

/// How often the kernel has killed a process of this one's control group because memory had run out.
fn out_of_memory() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let group = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let events = Path::new("/sys/fs/cgroup").join(group).join("memory.events");
    kills(&std::fs::read_to_string(events).ok()?)
}

fn kills(events: &str) -> Option<u64> {
    events.lines().find_map(|line| line.strip_prefix("oom_kill "))?.trim().parse().ok()
}

#[cfg(test)]
#[test]
fn the_kernels_count_of_kills_is_read() {
    assert_eq!(kills("low 0\nhigh 0\nmax 31\noom 4\noom_kill 2\noom_group_kill 1\n"), Some(2));
    assert_eq!(kills("low 0\n"), None);
}
