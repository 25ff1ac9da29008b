//! Reports that ranks exchange to agree on something.
use super::ProcessGroup;
use crate::rendezvous::{decode_reports, encode_report};
use crate::{Error, Result};
use candle_core::{DType, Tensor};
use std::fmt::Display;

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
        let lengths: Vec<usize> =
            lengths.map(|(rank, length)| report_length(rank, length, LONGEST_REPORT)).collect::<Result<_>>()?;
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let mut found: Vec<Vec<u8>> = lengths.iter().map(|_| Vec::new()).collect();
        for start in (0..longest).step_by(PART) {
            let size = PART.min(longest - start);
            let mut padded = bytes.get(start..bytes.len().min(start + size)).unwrap_or_default().to_vec();
            padded.resize(size, 0);
            let all = Tensor::zeros(world * size, DType::U8, device)?;
            all_gather(&all, &Tensor::from_vec(padded, size, device)?)?;
            let all = all.to_vec1::<u8>()?;
            for ((found, length), part) in found.iter_mut().zip(&lengths).zip(all.chunks_exact(size)) {
                found.extend(&part[..size.min(length.saturating_sub(start))]);
            }
        }
        Ok(found)
    }

    /// Returns the bytes of `root` on every rank.
    pub(super) fn broadcast_bytes(&self, bytes: Option<&[u8]>, root: usize) -> Result<Vec<u8>> {
        let device = self.device();
        // `synchronize` is needed: after `wait`, a GPU may still read the contents left by a failed call.
        let broadcast = |tensor: &Tensor| self.broadcast_async(tensor, root)?.synchronize();
        let lengths = self.gather_for_root(root, bytes.map_or(0, |bytes| bytes.len() as i64))?;
        let length = report_length(root, lengths[root], LONGEST_REPORT)?;
        let mut found = Vec::new();
        for start in (0..length).step_by(PART) {
            let size = PART.min(length - start);
            let tensor = match bytes {
                Some(bytes) => Tensor::from_slice(&bytes[start..start + size], size, device)?,
                None => Tensor::zeros(size, DType::U8, device)?,
            };
            broadcast(&tensor)?;
            found.extend(tensor.to_vec1::<u8>()?);
        }
        Ok(found)
    }

    /// Returns every rank's `number` in rank order. If ranks name different roots, or one that does not exist, every rank gets the
    /// error: in a broadcast, two roots would both send, and neither would notice the other.
    pub(super) fn gather_for_root(&self, root: usize, number: i64) -> Result<Vec<i64>> {
        let (world_size, device) = (self.world_size(), self.device());
        let all = Tensor::zeros((world_size, 2), DType::I64, device)?;
        self.all_gather_async(&all, &Tensor::new(&[[root as i64, number]], device)?)?.synchronize()?;
        let all = all.to_vec2::<i64>()?;
        same_on_all("root", &all.iter().map(|theirs| theirs[0]).collect::<Vec<_>>())?;
        match root < world_size {
            true => Ok(all.iter().map(|theirs| theirs[1]).collect()),
            false => Err(Error::RankOutOfRange { rank: root, world_size }),
        }
    }

    /// Sends bytes to rank `peer`, which must call `recv_bytes`.
    pub(super) fn send_bytes(&self, bytes: &[u8], peer: usize) -> Result<()> {
        let device = self.device();
        self.send(&Tensor::new(&[bytes.len() as i64], device)?, peer)?;
        bytes.chunks(PART).try_for_each(|part| self.send(&Tensor::from_slice(part, part.len(), device)?, peer))
    }

    /// Returns the bytes that rank `peer` sends.
    pub(super) fn recv_bytes(&self, peer: usize) -> Result<Vec<u8>> {
        let device = self.device();
        let recv = |tensor: &Tensor| self.irecv(tensor, peer)?.synchronize();
        let length = Tensor::zeros(1, DType::I64, device)?;
        recv(&length)?;
        let length = report_length(peer, length.to_vec1::<i64>()?[0], LONGEST_REPORT)?;
        let mut bytes = Vec::new();
        while bytes.len() < length {
            let part = Tensor::zeros(PART.min(length - bytes.len()), DType::U8, device)?;
            recv(&part)?;
            bytes.extend(part.to_vec1::<u8>()?);
        }
        Ok(bytes)
    }
}

/// Returns an error if an argument is not the same on all ranks. `all` has each rank's.
pub(crate) fn same_on_all<T: PartialEq + Display>(argument: &'static str, all: &[T]) -> Result<()> {
    let Some(rank) = all.iter().position(|theirs| *theirs != all[0]) else { return Ok(()) };
    let (first, other) = (&all[0], &all[rank]);
    let reason = format!("it must be the same on all ranks, but is {first} on rank 0, {other} on rank {rank}");
    Err(Error::invalid(argument, reason))
}

/// The most that is sent in one call. A rank that is in another call, and takes a number for a length, asks for no more memory than this.
const PART: usize = 64 << 20;
/// Far more than any report.
pub(super) const LONGEST_REPORT: usize = 64 << 30;

/// Checks the length that rank `rank` sent for its report, which must not exceed `longest`. If that rank is in another call that looks alike, it may be
/// any number.
pub(crate) fn report_length(rank: usize, length: i64, longest: usize) -> Result<usize> {
    usize::try_from(length).ok().filter(|length| *length <= longest).ok_or_else(|| Error::RankFailed {
        rank,
        reason: format!(
            "it sent {length} as the length of a report, which must be 0 to {longest} bytes: all ranks of a \
             group must make the same calls in the same order"
        ),
    })
}
