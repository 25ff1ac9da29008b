//! The processes of a run: the workers, and all that they have started, however it detached itself.
use rustix::process::{Pid, Signal, getpid, kill_process_group, set_child_subreaper};
use std::collections::{HashMap, HashSet};

/// A process below this one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Process {
    pub(super) pid: Pid,
    parent: Option<Pid>,
    /// `None` for a group of another container.
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
/// This process is the reaper of its descendants: those whose parent has ended become its children. So none is lost
/// sight of, and when there are no children there are no descendants either.
#[derive(Debug)]
pub(super) struct Descendants {
    own: Pid,
    own_group: Option<Pid>,
    /// Children that this process had before the run, as a shell's that has started ddprun with `exec`.
    earlier: Vec<Pid>,
}

impl Descendants {
    /// From now on orphans become children of this process. Whatever descends from it already is not of the run.
    pub(super) fn adopt() -> Self {
        let own = getpid();
        let own_group = read(own.as_raw_nonzero().get()).and_then(|process| process.group);
        let mut descendants = Self { own, own_group, earlier: Vec::new() };
        descendants.earlier = descendants.list().into_iter().map(|process| process.pid).collect();
        // Without it orphans go to the system's first process: they survive the run.
        let _ = set_child_subreaper(Some(descendants.own));
        descendants
    }

    /// Takes note of the end of a child: its number may be given to another process.
    pub(super) fn forget(&mut self, pid: Pid) {
        self.earlier.retain(|&earlier| earlier != pid);
    }

    /// The processes of the run that are there now.
    pub(super) fn list(&self) -> Vec<Process> {
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
            // Workers lead process groups of their own, so a process in ours is no descendant of theirs.
            let of_the_run = |process: &Process| {
                process.group.is_some() && process.group != self.own_group && !self.earlier.contains(&process.pid)
            };
            let next: Vec<Process> = children.remove(&parent).into_iter().flatten().filter(of_the_run).collect();
            parents.extend(next.iter().map(|process| process.pid));
            found.extend(next);
        }
        found
    }

    /// Sends `signal` to the processes of the run, and to the process groups that `leaders` lead.
    ///
    /// By process group, since the kernel lets no process that is being forked escape then. The groups are those that
    /// processes of the run have made, so nobody else is in them.
    pub(super) fn signal(&self, signal: Signal, leaders: impl Iterator<Item = Pid>) {
        let groups: HashSet<Pid> = self.list().into_iter().filter_map(|process| process.group).chain(leaders).collect();
        // `kill` takes the group of the first process for all processes there are.
        for group in groups.into_iter().filter(|group| !group.is_init()) {
            // It may have ended just now.
            let _ = kill_process_group(group, signal);
        }
    }
}

fn read(pid: i32) -> Option<Process> {
    parse(&String::from_utf8_lossy(&std::fs::read(format!("/proc/{pid}/stat")).ok()?))
}

/// Reads a line of /proc/PID/stat: `PID (NAME) STATE PARENT GROUP …`. The name may contain anything.
fn parse(stat: &str) -> Option<Process> {
    let (before, after) = stat.rsplit_once(") ")?;
    let (pid, name) = before.split_once(" (")?;
    // 0 is nobody.
    let mut fields = after.split(' ').skip(1).map(|field| field.parse().map(Pid::from_raw).ok());
    let (parent, group) = (fields.next()??, fields.next()??);
    Some(Process { pid: Pid::from_raw(pid.parse().ok()?)?, parent, group, name: name.to_owned() })
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
        assert_eq!(parse(""), None);
    }
}
