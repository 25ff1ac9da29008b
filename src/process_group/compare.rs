//! Finds differences in values that must be the same on all ranks.
use super::ProcessGroup;
use crate::state::summary;
use crate::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};

impl ProcessGroup {
    /// Returns the first rank whose report differs from most ranks' reports, and describes the first difference. If a rank has an
    /// error instead of a report, all ranks get that error, introduced by `failed`. Every rank must call it.
    pub(crate) fn compare(
        &self,
        report: std::result::Result<String, &Error>,
        failed: &str,
    ) -> Result<Option<(usize, String)>> {
        match self.gather_reports(report.as_deref().map_err(|error| *error))? {
            Err((rank, reason)) => Err(self.rank_failed(rank, format!("{failed}: {reason}"))),
            Ok(reports) => {
                let usual = majority(&reports).unwrap_or(0);
                let other = reports.iter().position(|report| *report != reports[usual]);
                Ok(other.map(|rank| (rank, first_difference([rank, usual], [&reports[rank], &reports[usual]]))))
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
        let usual = &all[majority(&all).unwrap_or(0)];
        // Of two ranks, nobody knows which is right.
        let ranks = (0..all.len()).filter(|rank| all.len() == 2 || all[*rank] != *usual).collect();
        let names: BTreeSet<&String> = all.iter().flat_map(BTreeMap::keys).collect();
        let differs = |name: &&&String| all.iter().any(|theirs| theirs.get(**name) != all[0].get(**name));
        let names = names.iter().filter(differs).map(|name| name.to_string()).collect();
        Err(self.note(Error::PartDiffers { part: part.to_string(), ranks, names }))
    }
}

/// The first rank whose value more than half of the ranks have.
fn majority<T: PartialEq>(all: &[T]) -> Option<usize> {
    // Only this one can be it: every other value is outvoted by different ones.
    let (mut candidate, mut votes) = (0, 0);
    for (rank, value) in all.iter().enumerate() {
        if votes == 0 {
            candidate = rank;
        }
        votes = if *value == all[candidate] { votes + 1 } else { votes - 1 };
    }
    let value = all.get(candidate)?;
    let count = all.iter().filter(|other| *other == value).count();
    (2 * count > all.len()).then(|| all.iter().position(|other| other == value)).flatten()
}

fn first_difference([rank, usual]: [usize; 2], [theirs, usuals]: [&str; 2]) -> String {
    let (mut theirs, mut usuals) = (theirs.lines(), usuals.lines());
    loop {
        match (theirs.next(), usuals.next()) {
            (Some(a), Some(b)) if a == b => {}
            (Some(a), Some(b)) => return format!("{a} on rank {rank}, {b} on rank {usual}"),
            (Some(a), None) => return format!("{a} on rank {rank} does not exist on rank {usual}"),
            (None, Some(b)) => return format!("{b} on rank {usual} does not exist on rank {rank}"),
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
            assert_eq!(first_difference([3, 0], [theirs, rank_0]), expected);
        }
        let longer = format!("{rank_0}\nparameter 2: c f32[1]");
        let expected = "parameter 2: c f32[1] on rank 3 does not exist on rank 0";
        assert_eq!(first_difference([3, 0], [&longer, rank_0]), expected);
    }

    #[test]
    fn a_value_of_more_than_half_of_the_ranks_is_the_usual_one() {
        let cases: [(&[u8], _); 8] = [
            (&[], None),
            (&[7], Some(0)),
            (&[7, 7], Some(0)),
            (&[7, 8], None),
            (&[7, 8, 8], Some(1)),
            (&[7, 8, 9], None),
            (&[7, 8, 7, 8], None),
            (&[7, 8, 9, 8, 8], Some(1)),
        ];
        for (all, expected) in cases {
            assert_eq!(majority(all), expected, "{all:?}");
        }
    }
}
