//! Reports that ranks exchange to agree on something.
use super::ProcessGroup;
use crate::rendezvous::{decode_reports, encode_report};
use crate::{Error, Result};
use candle_core::{DType, Tensor};

/// Every rank's report in rank order, or the first rank that has an error instead, and the error's text.
type Reports<T> = std::result::Result<Vec<T>, (usize, String)>;

impl ProcessGroup {
    /// Returns this rank's `result` or, if another rank has an error, that error as [`Error::RankFailed`]. Every rank
    /// must call it.
    pub(crate) fn agree<T>(&self, result: Result<T>) -> Result<T> {
        let reports = self.gather_reports(result.as_ref().map(|_| ""));
        let value = result?;
        match reports? {
            Ok(_) => Ok(value),
            Err((rank, reason)) => Err(self.rank_failed(rank, reason)),
        }
    }

    /// Returns every rank's report in rank order, or the first rank that has an error instead, and the error's text.
    /// Every rank must call it.
    pub(crate) fn gather_reports(&self, report: std::result::Result<&str, &Error>) -> Result<Reports<String>> {
        let reports = self.gather_byte_reports(report.map(str::as_bytes))?;
        let text = |report: Vec<u8>| String::from_utf8_lossy(&report).into_owned();
        Ok(reports.map(|reports| reports.into_iter().map(text).collect()))
    }

    /// Like [`gather_reports`](Self::gather_reports), for reports that are not text.
    pub(super) fn gather_byte_reports(&self, report: std::result::Result<&[u8], &Error>) -> Result<Reports<Vec<u8>>> {
        Ok(decode_reports(self.all_gather_bytes(&encode_report(report.map_err(|error| error as _)))?))
    }

    /// Returns every rank's bytes in rank order; they may differ in length.
    pub(crate) fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let (world, device) = (self.world_size(), self.device());
        // After `wait` alone, a GPU might still read the contents left by a failed call.
        let all_gather = |output: &Tensor, input: &Tensor| self.all_gather_async(output, input)?.synchronize();
        let lengths = Tensor::zeros(world, DType::I64, device)?;
        all_gather(&lengths, &Tensor::new(&[bytes.len() as i64], device)?)?;
        let lengths = lengths.to_vec1::<i64>()?.into_iter().enumerate();
        let lengths: Vec<usize> = lengths.map(|(rank, length)| report_length(rank, length)).collect::<Result<_>>()?;
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let mut padded = bytes.to_vec();
        padded.resize(longest, 0);
        let all = Tensor::zeros(world * longest, DType::U8, device)?;
        all_gather(&all, &Tensor::from_vec(padded, longest, device)?)?;
        let all = all.to_vec1::<u8>()?;
        Ok(lengths.iter().enumerate().map(|(rank, length)| all[rank * longest..][..*length].to_vec()).collect())
    }
}

/// Far more than the report of any model.
pub(crate) const LONGEST_REPORT: usize = 64 << 20;

/// Checks the length that rank `rank` sent for its report. If that rank is in another call that looks alike, it may be
/// any number.
pub(crate) fn report_length(rank: usize, length: i64) -> Result<usize> {
    usize::try_from(length).ok().filter(|length| *length <= LONGEST_REPORT).ok_or_else(|| Error::RankFailed {
        rank,
        reason: format!(
            "it sent {length} as the length of a report, which must be 0 to {LONGEST_REPORT} bytes: all ranks of a \
             group must make the same calls in the same order"
        ),
    })
}
