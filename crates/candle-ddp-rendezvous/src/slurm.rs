//! Parsing Slurm's variables: node lists, task counts, and a port that all ranks can derive.

/// Returns the first node of a list: `node003` for `node[003-005,9],gpu-a`; leading zeros are kept. Returns `None` if
/// the list is empty or its brackets do not match.
pub(super) fn first_node(list: &str) -> Option<String> {
    let mut node = String::new();
    let mut rest = list.trim();
    loop {
        let end = rest.find(['[', ',', ']']).unwrap_or(rest.len());
        let (text, tail) = rest.split_at(end);
        node.push_str(text);
        let Some(tail) = tail.strip_prefix('[') else {
            // A comma ends the first node; an unmatched closing bracket is an error.
            return (!node.is_empty() && !tail.starts_with(']')).then_some(node);
        };
        let (ranges, tail) = tail.split_once(']')?;
        let first = ranges.split([',', '-']).next()?;
        if first.is_empty() || !first.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        node.push_str(first);
        rest = tail;
    }
}

/// Returns the number of tasks on node `node` of a list such as `2(x3),1`, which means three nodes with 2 tasks and one
/// with 1. Without a node, returns the number common to all nodes. Returns `None` if the list does not say, or is
/// invalid.
pub(super) fn tasks_on_node(list: &str, node: Option<usize>) -> Option<usize> {
    let mut nodes: usize = 0;
    let mut common = None;
    for part in list.trim().split(',') {
        let (tasks, repeat) = match part.split_once("(x") {
            Some((tasks, repeat)) => (tasks, repeat.strip_suffix(')')?.parse().ok()?),
            None => (part, 1),
        };
        let tasks: usize = tasks.parse().ok()?;
        nodes = nodes.checked_add(repeat)?;
        match node {
            Some(node) if node < nodes => return Some(tasks),
            Some(_) => {}
            None if common.is_none_or(|common| common == tasks) => common = Some(tasks),
            None => return None,
        }
    }
    common
}

/// Derives the same port on every rank of a job step, below the ephemeral range of the system (from 32768).
pub(super) fn port(job: u64, step: u64) -> u16 {
    // Steps of one job, and neighbouring jobs, may share their first node; the factor 61 gives both different ports.
    let offset = (job % 20_000 * 61 + step % 20_000) % 20_000;
    10_000 + u16::try_from(offset).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_nodes() {
        for (list, node) in [
            ("node[003-005,9],gpu-a", Some("node003")),
            ("gpu-a,node[003-005,9]", Some("gpu-a")),
            ("node[9,1-3]", Some("node9")),
            ("rack[2-3]n[01-16]-ib,x", Some("rack2n01-ib")),
            ("gpu-a", Some("gpu-a")),
            ("c[07]", Some("c07")),
            ("", None),
            (",a", None),
            ("node[", None),
            ("node[]", None),
            ("node[a-b]", None),
            ("node3]", None),
        ] {
            assert_eq!(first_node(list).as_deref(), node, "{list}");
        }
    }

    #[test]
    fn task_counts() {
        let list = "2(x3),1";
        assert_eq!([0, 2, 3].map(|node| tasks_on_node(list, Some(node))), [Some(2), Some(2), Some(1)]);
        assert_eq!(tasks_on_node(list, Some(4)), None);
        assert_eq!(tasks_on_node(list, None), None);
        assert_eq!(tasks_on_node("4(x2),4", None), Some(4));
        assert_eq!(tasks_on_node("8", None), Some(8));
        for broken in ["", "x", "2(x", "2(x3", "2(xa)", "2(x18446744073709551615),2(x18446744073709551615)"] {
            assert_eq!(tasks_on_node(broken, None), None, "{broken}");
        }
    }

    #[test]
    fn ports_stay_in_their_range() {
        for (job, step) in [(0, 0), (u64::MAX, u64::MAX), (123_456, 7), (19_999, 19_999)] {
            assert!((10_000..30_000).contains(&port(job, step)));
        }
        assert_ne!(port(5, 0), port(5, 1));
        assert_ne!(port(5, 1), port(6, 0));
    }
}
