//! The output streams that an option selects.
use crate::console::Target;
use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

/// A selection of a worker's two output streams, by [`Target`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Streams([bool; 2]);

impl Streams {
    pub(crate) fn has(self, target: Target) -> bool {
        self.0[target as usize]
    }

    /// Returns whether at least one stream is selected.
    pub(crate) fn any(self) -> bool {
        self.0.contains(&true)
    }
}

/// Parses torchrun's 0 (none), 1 (stdout), 2 (stderr) and 3 (both).
impl FromStr for Streams {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim() {
            "0" => Ok(Self([false, false])),
            "1" => Ok(Self([true, false])),
            "2" => Ok(Self([false, true])),
            "3" => Ok(Self([true, true])),
            _ => Err("expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or a list as in 0:1,1:3".into()),
        }
    }
}

/// A value of `--redirects` or `--tee`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct StreamSelection {
    by_local_rank: BTreeMap<usize, Streams>,
    /// Those of all other workers.
    others: Streams,
}

impl StreamSelection {
    /// Returns the selection for the worker `local_rank`.
    pub(crate) fn of(&self, local_rank: usize) -> Streams {
        self.by_local_rank.get(&local_rank).copied().unwrap_or(self.others)
    }

    /// Returns the highest local rank in the list.
    pub(crate) fn last_named(&self) -> Option<usize> {
        self.by_local_rank.keys().next_back().copied()
    }
}

impl FromStr for StreamSelection {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if !text.contains(':') {
            return Ok(Self { others: text.parse()?, ..Self::default() });
        }
        let mut by_local_rank = BTreeMap::new();
        for entry in text.split(',') {
            let wrong = || format!("{entry:?} is not LOCAL_RANK:STREAMS, as in 0:1,1:3");
            let (rank, streams) = entry.split_once(':').ok_or_else(wrong)?;
            let rank = rank.trim().parse().map_err(|_| wrong())?;
            if by_local_rank.insert(rank, streams.parse()?).is_some() {
                return Err(format!("local rank {rank} is listed twice"));
            }
        }
        Ok(Self { by_local_rank, ..Self::default() })
    }
}

/// The local ranks of `--local-ranks-filter`; all if there are none, as in torchrun.
pub(crate) type LocalRanks = BTreeSet<usize>;

pub(crate) fn parse_ranks(text: &str) -> Result<LocalRanks, String> {
    let ranks = text.split(',').map(str::trim).filter(|_| !text.trim().is_empty());
    ranks.map(|text| text.parse().map_err(|_| format!("{text:?} is not a local rank: give a list as in 0,2"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_number_for_all_or_one_for_each() {
        let [both, out] = [[true, true], [true, false]].map(Streams);
        assert_eq!("3".parse::<StreamSelection>().unwrap().of(5), both);
        let map = "0:1,2:3".parse::<StreamSelection>().unwrap();
        assert_eq!([0, 1, 2].map(|rank| map.of(rank)), [out, Streams::default(), both]);
        assert_eq!(map.last_named(), Some(2));
    }

    #[test]
    fn a_list_of_local_ranks() {
        assert_eq!(["0, 2", "", "1"].map(|text| parse_ranks(text).unwrap()), [[0, 2].into(), [].into(), [1].into()]);
        for wrong in ["0,", "a", "0:1", "-1"] {
            assert!(parse_ranks(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn invalid_forms_are_refused() {
        for wrong in ["4", "", "x", "0:1,2", "0:4", ":1", "a:1", "0:1,0:2"] {
            assert!(wrong.parse::<StreamSelection>().is_err(), "{wrong:?}");
        }
    }
}
