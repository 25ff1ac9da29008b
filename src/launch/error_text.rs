//! Finding the failed rank in the error messages of workers.

/// Returns the failed rank if `line` is an [`Error`](crate::Error) that blames another rank.
pub(super) fn named_in(line: &str) -> Option<usize> {
    const ENDS: [&str; 4] = [" ended the group: ", " left the group ", " is gone: ", " failed: "];
    let named = ENDS.iter().filter_map(|end| {
        let (before, _) = line.split_once(end)?;
        Some((before.len(), before.rsplit_once("rank ")?.1.parse().ok()?))
    });
    // What another rank said comes behind its name, and may name further ones.
    if let Some((_, rank)) = named.min() {
        return Some(rank);
    }
    // Ranks that the others wait for, of which the first is named.
    const LISTS: [&str; 2] = [" rank(s) [", " ranks arrived, missing: "];
    if let Some((_, list)) = LISTS.iter().find_map(|list| line.split_once(list)) {
        return list.split(|character: char| !character.is_ascii_digit()).next()?.parse().ok();
    }
    let (_, reason) = line.split_once(" timed out after ")?.1.split_once(": ")?;
    reason.strip_prefix("rank ")?.split(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;
    use crate::error::Failure;

    #[test]
    fn errors_that_name_another_rank_are_recognised() {
        let call = || "all_reduce(f32[3])".to_string();
        let errors = [
            Failure::PeerGone { rank: 0, peer: 12, call: call() }.into(),
            Failure::PeerLeft { peer: 12, left_after: 5, call: call(), sequence: 6 }.into(),
            Failure::PeerFailed { peer: 12, reason: "rank 7 is gone: no".to_string() }.into(),
            Error::RankFailed { rank: 12, reason: "rank 7 ended the group: no".to_string() },
        ];
        for error in errors {
            assert_eq!(named_in(&format!("Error: {error:?}")), Some(12), "{error}");
            assert_eq!(named_in(&error.to_string()), Some(12), "{error}");
        }
        let timed_out = |reason: &str| -> Error {
            let (call, reason) = (call(), reason.to_string());
            let timeout = std::time::Duration::from_secs(5);
            Failure::TimedOut { rank: 3, call, sequence: 6, timeout, reason }.into()
        };
        let late = timed_out("rank 12 has not started this collective: its last was sequence 5, barrier()");
        assert_eq!(named_in(&format!("Error: {late:?}")), Some(12));
        let (timeout, store) = (std::time::Duration::from_secs(5), "10.0.0.1:29500".to_string());
        let connect =
            Error::Connect { rank: 3, peers: vec![12, 14], timeout, reason: "they do not answer".to_string() };
        let late = |operation: &str, reason: &str| Error::StoreTimeout {
            operation: operation.to_string(),
            store: store.clone(),
            timeout,
            reason: reason.to_string(),
        };
        for error in [
            connect,
            late("init_process_group of rank 3", "rank(s) [12] have not chosen their devices"),
            late("rendezvous of rank 3", "18 of 20 ranks arrived, missing: 12, 14. Check that they were started"),
        ] {
            assert_eq!(named_in(&format!("Error: {error:?}")), Some(12), "{error}");
        }
        for other in
            [timed_out("all ranks have started it, but ranks [1] are too slow"), Error::invalid("rank 3", "is odd")]
        {
            assert_eq!(named_in(&other.to_string()), None, "{other}");
        }
    }
}
