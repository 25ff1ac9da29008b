//! The processes of a run: the workers and all their descendants, even detached ones.
use rustix::process::{Pid, Signal, getpid, kill_process_group, set_child_subreaper};
use std::collections::{HashMap, HashSet};

/// A descendant of this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: Pid,
    parent: Option<Pid>,
    /// `None` for a process group of another container.
    group: Option<Pid>,
    name: String,
}

impl std::fmt::Display for Process {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} (pid {})", self.name, self.pid)
    }
}

/// Finds the processes of the run.
///
/// This process is the subreaper of its descendants: when a parent ends, its children become children of this process.
/// So every descendant stays visible, and without children there are no descendants.
#[derive(Debug)]
pub(crate) struct Descendants {
    own: Pid,
    own_group: Option<Pid>,
    /// Children that this process had before the run, for example because a shell replaced itself with ddprun by
    /// `exec`.
    earlier: Vec<Pid>,
}

impl Descendants {
    /// Makes this process the subreaper. Processes that already descend from it do not belong to the run.
    pub(crate) fn adopt() -> Self {
        let own = getpid();
        let own_group = read(own.as_raw_nonzero().get()).and_then(|process| process.group);
        // They may be in any group: a child of the shell that became ddprun may be about to start its own session.
        let mut descendants = Self { own, own_group: None, earlier: Vec::new() };
        descendants.earlier = descendants.list().into_iter().map(|process| process.pid).collect();
        descendants.own_group = own_group;
        // If this fails, orphans become children of the init process and survive the run.
        let _ = set_child_subreaper(Some(descendants.own));
        descendants
    }

    /// Forgets a child that has ended, because its pid may be reused.
    pub(crate) fn forget(&mut self, pid: Pid) {
        self.earlier.retain(|&earlier| earlier != pid);
    }

    /// Returns the current processes of the run.
    pub(crate) fn list(&self) -> Vec<Process> {
        let mut children: HashMap<Pid, Vec<Process>> = HashMap::new();
        for process in std::fs::read_dir("/proc")
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| read(entry.file_name().to_str()?.parse().ok()?))
        {
            if let Some(parent) = process.parent {
                children.entry(parent).or_default().push(process);
            }
        }
        let mut found: Vec<Process> = Vec::new();
        let mut parents = vec![self.own];
        while let Some(parent) = parents.pop() {
            // Workers lead their own process groups, so a process in this process's group does not descend from a
            // worker.
            let of_the_run = |process: &Process| {
                process.group.is_some() && process.group != self.own_group && !self.earlier.contains(&process.pid)
            };
            let next: Vec<Process> = children.remove(&parent).into_iter().flatten().filter(of_the_run).collect();
            parents.extend(next.iter().map(|process| process.pid));
            found.extend(next);
        }
        found
    }

    /// Sends `signal` to the process groups of `leaders` and to the remaining processes of the run.
    ///
    /// Parents come before their children. A worker that waits for its children would otherwise see them end first, and
    /// exit as if it had finished its work.
    ///
    /// Signals go to process groups, because then no process that is just being forked escapes. Only processes of the
    /// run create these groups, so no other process is affected.
    pub(crate) fn signal(&self, signal: Signal, leaders: impl Iterator<Item = Pid>) {
        let groups = leaders.chain(self.list().into_iter().filter_map(|process| process.group));
        let mut signalled = HashSet::new();
        // For `kill`, the group of process 1 would mean all processes.
        for group in groups.filter(|group| !group.is_init()) {
            if signalled.insert(group) {
                // The group may have ended in the meantime.
                let _ = kill_process_group(group, signal);
            }
        }
    }
}

fn read(pid: i32) -> Option<Process> {
    parse(&String::from_utf8_lossy(&std::fs::read(format!("/proc/{pid}/stat")).ok()?))
}

/// Parses a line of /proc/PID/stat: `PID (NAME) STATE PARENT GROUP …`. The name may contain any character.
fn parse(stat: &str) -> Option<Process> {
    let (before, after) = stat.rsplit_once(") ")?;
    let (number, name) = before.split_once(" (")?;
    // 0 is not a pid; a process that is being removed has 0 and -1.
    let pid = |field: &str| field.parse().ok().map(|pid: i32| Pid::from_raw(pid.max(0)));
    let mut fields = after.split(' ').skip(1).map(pid);
    let (parent, group) = (fields.next()??, fields.next()??);
    Some(Process { pid: Pid::from_raw(number.parse().ok()?)?, parent, group, name: name.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_may_contain_anything() {
        let pid = |number| Pid::from_raw(number).unwrap();
        let expected =
            Process { pid: pid(12), parent: Pid::from_raw(3), group: Pid::from_raw(4), name: "a) S (1 b".into() };
        assert_eq!(parse("12 (a) S (1 b) S 3 4 5 0 -1"), Some(expected));
        let expected = Process { pid: pid(1), parent: None, group: None, name: "init".into() };
        assert_eq!(parse("1 (init) S 0 0 0 0 -1"), Some(expected));
        // A process that is being removed is in no group.
        let expected = Process { pid: pid(7), parent: None, group: None, name: "gone".into() };
        assert_eq!(parse("7 (gone) X 0 -1 -1 0 -1"), Some(expected));
        assert_eq!(parse(""), None);
    }
}
