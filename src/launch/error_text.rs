//! What the errors of workers say of other ranks.

/// The rank that failed, if `line` is one of the [`Error`](crate::Error)s that say that another rank did.
pub(super) fn named_in(line: &str) -> Option<usize> {
    const ENDS: [&str; 3] = [" ended the group: ", " left the group ", " is gone: "];
    if let Some(before) = ENDS.iter().find_map(|end| Some(line.split_once(end)?.0)) {
        return before.rsplit_once("rank ")?.1.parse().ok();
    }
    let (_, reason) = line.split_once(" timed out after ")?.1.split_once(": ")?;
    reason.strip_prefix("rank ")?.split(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    #[test]
    fn errors_that_name_another_rank_are_known() {
        let call = || "all_reduce(f32[3])".to_string();
        let errors = [
            Error::PeerGone { rank: 0, peer: 12, call: call() },
            Error::PeerLeft { peer: 12, left_after: 5, call: call(), sequence: 6 },
            Error::PeerFailed { peer: 12, reason: "rank 7 is gone: no".to_string() },
        ];
        for error in errors {
            assert_eq!(named_in(&format!("Error: {error}")), Some(12), "{error}");
        }
        let timed_out = |reason: &str| Error::CollectiveTimeout {
            rank: 3,
            call: call(),
            sequence: 6,
            timeout: std::time::Duration::from_secs(5),
            reason: reason.to_string(),
        };
        let late = timed_out("rank 12 has not started this collective: its last was sequence 5, barrier()");
        assert_eq!(named_in(&late.to_string()), Some(12));
        for other in
            [timed_out("all ranks have started it, but ranks [1] are too slow"), Error::invalid("rank 3", "is odd")]
        {
            assert_eq!(named_in(&other.to_string()), None, "{other}");
        }
    }
}
