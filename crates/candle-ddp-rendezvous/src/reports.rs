//! Small reports that all ranks exchange while a group is made. A report says what a rank is or has, or which error
//! keeps it from taking part. So all ranks come to the same conclusion.
use super::Store;
use super::store::absent_ranks;
use crate::{Error, Result};
use candle_ddp_base::debug_fields;
use std::fmt::Display;
use std::time::Duration;

const GOOD: u8 = b'+';
const BAD: u8 = b'-';

/// All ranks' reports, in rank order; or the first rank that reported an error, and the error's text.
pub type Reports = std::result::Result<Vec<Vec<u8>>, (usize, String)>;

/// Encodes a rank's report, or its error, for the other ranks.
pub fn encode_report(report: std::result::Result<&[u8], &dyn Display>) -> Vec<u8> {
    let (sign, body) = match report {
        Ok(report) => (GOOD, report.to_vec()),
        Err(error) => (BAD, error.to_string().into_bytes()),
    };
    [&[sign], body.as_slice()].concat()
}

/// Decodes what [`encode_report`] made: a rank's report, or the text of its error.
pub fn decode_report(encoded: &[u8]) -> std::result::Result<Vec<u8>, String> {
    match encoded.split_first() {
        Some((&GOOD, report)) => Ok(report.to_vec()),
        Some((&BAD, reason)) => Err(String::from_utf8_lossy(reason).into_owned()),
        _ => Err("it runs another version of candle-ddp: use the same version on all ranks".to_string()),
    }
}

/// Decodes the reports of all ranks, in rank order.
pub fn decode_reports(encoded: Vec<Vec<u8>>) -> Reports {
    let decode = |(rank, report): (usize, Vec<u8>)| decode_report(&report).map_err(|reason| (rank, reason));
    encoded.into_iter().enumerate().map(decode).collect()
}

/// One exchange of reports through a store.
pub struct StoreReports<'a> {
    /// Where the reports are exchanged.
    pub store: &'a dyn Store,
    /// What the reports are about: the first part of their keys.
    pub topic: &'static str,
    /// This rank.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
}

debug_fields!(StoreReports<'_>: topic, rank, world_size);

impl StoreReports<'_> {
    /// The key of the report of `rank`.
    pub fn key(&self, rank: usize) -> String {
        format!("{}/{rank}", self.topic)
    }

    /// Publishes this rank's report to the other ranks.
    pub fn tell(&self, report: std::result::Result<&[u8], &dyn Display>) -> Result<()> {
        self.store.set(&self.key(self.rank), &encode_report(report))
    }

    /// Waits until all ranks have reported, at most for `timeout` (`None`: the store's own), and returns their reports.
    /// If some have not, `missing` makes the error from these ranks and from the store's time-out.
    pub fn hear<E: From<Error>>(
        &self,
        timeout: Option<Duration>,
        missing: impl FnOnce(Vec<usize>, Error) -> E,
    ) -> Result<Reports, E> {
        let keys: Vec<String> = (0..self.world_size).map(|rank| self.key(rank)).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        match self.store.wait(&keys, timeout) {
            Err(late @ Error::StoreTimeout { .. }) => {
                match absent_ranks(self.store, 0..self.world_size, &|rank| self.key(rank)) {
                    // The last ones came in this moment.
                    Ok(absent) if absent.is_empty() => Ok(decode_reports(self.store.multi_get(&keys)?)),
                    Ok(absent) => Err(missing(absent, late)),
                    Err(_) => Err(late.into()),
                }
            }
            Err(error) => Err(error.into()),
            Ok(()) => Ok(decode_reports(self.store.multi_get(&keys)?)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HashStore;

    fn exchange(store: &HashStore, rank: usize) -> StoreReports<'_> {
        StoreReports { store, topic: "test", rank, world_size: 3 }
    }

    #[test]
    fn all_ranks_hear_all_reports_or_the_first_error() {
        let store = HashStore::new(Duration::from_millis(20));
        exchange(&store, 1).tell(Ok(b"one")).unwrap();
        let missing = |absent, _| Error::invalid("ranks", format!("{absent:?}"));
        assert_eq!(exchange(&store, 1).hear(None, missing).unwrap_err().to_string(), "ranks: [0, 2]");
        exchange(&store, 0).tell(Ok(b"")).unwrap();
        exchange(&store, 2).tell(Ok(b"two")).unwrap();
        let reports = exchange(&store, 0).hear(None, missing).unwrap();
        assert_eq!(reports.unwrap(), [b"".as_slice(), b"one", b"two"]);
        exchange(&store, 1).tell(Err(&Error::invalid("device", "no GPU"))).unwrap();
        exchange(&store, 2).tell(Err(&Error::invalid("device", "no driver"))).unwrap();
        let reports = exchange(&store, 0).hear(None, missing).unwrap();
        assert_eq!(reports.unwrap_err(), (1, "device: no GPU".to_string()));
        store.set("test/0", b"strange").unwrap();
        let (rank, reason) = exchange(&store, 0).hear(None, missing).unwrap().unwrap_err();
        assert!(rank == 0 && reason.contains("another version"), "{reason}");
    }
}
