//! Finds differences in values that must be the same on all ranks.
use super::ProcessGroup;
use crate::state::summary;
use crate::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};

impl ProcessGroup {
    /// Returns the first rank whose report differs from rank 0's, and describes the first difference. If a rank has an
    /// error instead of a report, all ranks get that error, introduced by `failed`. Every rank must call it.
    pub(crate) fn compare(
        &self,
        report: std::result::Result<String, &Error>,
        failed: &str,
    ) -> Result<Option<(usize, String)>> {
        match self.gather_reports(report.as_deref().map_err(|error| *error))? {
            Err((rank, reason)) => Err(self.rank_failed(rank, format!("{failed}: {reason}"))),
            Ok(reports) => {
                let other = reports.iter().position(|report| *report != reports[0]);
                Ok(other.map(|rank| (rank, first_difference(rank, &reports[rank], &reports[0]))))
            }
        }
    }
}

/// The hashes of the tensors of a state.
type Fingerprint = BTreeMap<String, u64>;

impl ProcessGroup {
    /// Compares the hashes of states by their names, which are the same on all ranks. Every rank must call it.
    ///
    /// # Errors
    /// Returns [`Error::PartDiffers`], on every rank, for the first state that is not the same on all ranks, and errors
    /// of the group.
    pub(crate) fn compare_states(&self, states: &[(&str, &Fingerprint)]) -> Result<()> {
        if self.world_size() == 1 || states.is_empty() {
            return Ok(());
        }
        let summaries: Vec<u64> = states.iter().map(|(_, fingerprint)| summary(fingerprint)).collect();
        let all: Vec<Vec<u64>> = self.all_gather_object(&summaries)?;
        let differs = |state: &usize| all.iter().any(|theirs| theirs.get(*state) != all[0].get(*state));
        let Some(first) = (0..states.len()).find(differs) else { return Ok(()) };
        // Which of its tensors differ is only asked now.
        let (part, own) = states[first];
        let all: Vec<Fingerprint> = self.all_gather_object(own)?;
        let ranks = (1..all.len()).filter(|rank| all[*rank] != all[0]).collect();
        let names: BTreeSet<&String> = all.iter().flat_map(BTreeMap::keys).collect();
        let differs = |name: &&&String| all.iter().any(|theirs| theirs.get(**name) != all[0].get(**name));
        let names = names.iter().filter(differs).map(|name| name.to_string()).collect();
        Err(Error::PartDiffers { part: part.to_string(), ranks, names })
    }
}

fn first_difference(rank: usize, theirs: &str, rank_0: &str) -> String {
    let (mut theirs, mut rank_0) = (theirs.lines(), rank_0.lines());
    loop {
        match (theirs.next(), rank_0.next()) {
            (Some(a), Some(b)) if a == b => {}
            (Some(a), Some(b)) => return format!("{a} on rank {rank}, {b} on rank 0"),
            (Some(a), None) => return format!("{a} on rank {rank} does not exist on rank 0"),
            (None, Some(b)) => return format!("{b} on rank 0 does not exist on rank {rank}"),
            (None, None) => return "none in the text of their reports".to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_named() {
        let rank_0 = "options: a\nparameter 0: w f32[2]\nparameter 1: b f32[2]";
        let cases = [
            ("options: b\nparameter 0: w f32[3]", "options: b on rank 3, options: a on rank 0"),
            ("options: a\nparameter 0: w f32[3]", "parameter 0: w f32[3] on rank 3, parameter 0: w f32[2] on rank 0"),
            ("options: a\nparameter 0: w f32[2]", "parameter 1: b f32[2] on rank 0 does not exist on rank 3"),
        ];
        for (theirs, expected) in cases {
            assert_eq!(first_difference(3, theirs, rank_0), expected);
        }
        let longer = format!("{rank_0}\nparameter 2: c f32[1]");
        let expected = "parameter 2: c f32[1] on rank 3 does not exist on rank 0";
        assert_eq!(first_difference(3, &longer, rank_0), expected);
    }
}
