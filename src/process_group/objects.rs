//! Sends numbers and values of the program between ranks, such as metrics, options and decisions.
use super::{LONGEST_REPORT, ProcessGroup, report_length};
use crate::backend::{CallSite, ReduceOp, label};
use crate::cbor;
use crate::rendezvous::{decode_report, encode_report};
use crate::{Error, Result};
use candle_core::{DType, Tensor};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::panic::Location;

impl ProcessGroup {
    /// Reduces a few numbers over the ranks in one call, such as the sums and counts for metrics. Every rank must pass
    /// equally many numbers, and gets the same result.
    ///
    /// With [`ReduceOp::Avg`] the result is the mean over the ranks. If ranks have seen different numbers of samples,
    /// compute the mean over the samples as a quotient of two sums:
    ///
    /// ```
    /// use candle_ddp::ReduceOp;
    ///
    /// # fn main() -> candle_ddp::Result<()> {
    /// candle_ddp::spawn(2, |pg| {
    ///     // The sum over each rank's samples, and their number.
    ///     let (loss, samples) = if pg.rank() == 0 { (6.0, 3.0) } else { (1.0, 1.0) };
    ///     let [loss, samples] = pg.all_reduce_scalars([loss, samples], ReduceOp::Sum)?;
    ///     assert_eq!(loss / samples, 1.75);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn all_reduce_scalars<const N: usize>(&self, values: [f64; N], op: ReduceOp) -> Result<[f64; N]> {
        let tensor = Tensor::from_slice(&values, N, self.device())?;
        // `synchronize` is needed: after `all_reduce`, a GPU may still read the contents left by a failed call.
        CallSite::during(Location::caller(), || {
            label::ALL_REDUCE_SCALARS.during(|| self.all_reduce_async(&tensor, op)?.synchronize())
        })?;
        let mut reduced = values;
        reduced.copy_from_slice(&tensor.to_vec1::<f64>()?);
        Ok(reduced)
    }

    /// Returns the `object` of rank `root` on every rank; the others pass `None`. Use it for options that only one rank
    /// has read, or a decision that only one rank has made. PyTorch's `broadcast_object_list`, for one object.
    ///
    /// Objects are sent as CBOR of at most 64 MiB. Numbers arrive unchanged, including NaN and infinities.
    ///
    /// ```
    /// # fn main() -> candle_ddp::Result<()> {
    /// candle_ddp::spawn(2, |pg| {
    ///     let names = (pg.rank() == 0).then(|| vec!["cat".to_string(), "dog".to_string()]);
    ///     let names = pg.broadcast_object(names.as_ref(), 0)?;
    ///     assert_eq!(names, ["cat", "dog"]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// If `root` has no object, or one that serde cannot write or that is too large, `root` gets
    /// [`Error::InvalidArgument`], and the others get [`Error::RankFailed`]. If the bytes do not represent a `T`,
    /// every rank gets [`Error::InvalidArgument`]. Also returns errors of the group.
    #[track_caller]
    pub fn broadcast_object<T: Serialize + DeserializeOwned>(&self, object: Option<&T>, root: usize) -> Result<T> {
        let own = (self.rank() == root).then(|| {
            let object =
                object.ok_or_else(|| Error::invalid("object", format!("rank {root} is the root, but has none")));
            object.and_then(to_bytes)
        });
        let report = own.as_ref().map(|bytes| encode_report(bytes.as_deref().map_err(|error| error as _)));
        let report = report.as_deref();
        let report = CallSite::during(Location::caller(), || {
            label::BROADCAST_OBJECT.during(|| self.broadcast_bytes(report, root))
        })?;
        if let Some(own) = own {
            own?;
        }
        match decode_report(&report) {
            Ok(bytes) => from_bytes(&bytes, root),
            Err(reason) => Err(self.rank_failed(root, reason)),
        }
    }

    /// Returns every rank's `object` in rank order on every rank; sizes may differ. PyTorch's `all_gather_object`.
    /// Objects are sent as by [`broadcast_object`](Self::broadcast_object); each rank needs memory for `world_size`
    /// times the largest.
    ///
    /// ```
    /// # fn main() -> candle_ddp::Result<()> {
    /// candle_ddp::spawn(2, |pg| {
    ///     let mistakes = vec![format!("image{}.png", pg.rank()); pg.rank()];
    ///     assert_eq!(pg.all_gather_object(&mistakes)?, [vec![], vec!["image1.png".to_string()]]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// If a rank's object cannot be sent, that rank gets [`Error::InvalidArgument`], and the others get
    /// [`Error::RankFailed`]. A rank that cannot read another rank's bytes as a `T` gets [`Error::InvalidArgument`].
    /// Also returns errors of the group.
    #[track_caller]
    pub fn all_gather_object<T: Serialize + DeserializeOwned>(&self, object: &T) -> Result<Vec<T>> {
        let own = to_bytes(object);
        let reports = CallSite::during(Location::caller(), || {
            label::ALL_GATHER_OBJECT.during(|| self.gather_byte_reports(own.as_deref()))
        });
        own?;
        let reports = reports?.map_err(|(rank, reason)| self.rank_failed(rank, reason))?;
        reports.iter().enumerate().map(|(rank, bytes)| from_bytes(bytes, rank)).collect()
    }

    /// Returns the bytes of `root` on every rank.
    fn broadcast_bytes(&self, bytes: Option<&[u8]>, root: usize) -> Result<Vec<u8>> {
        let device = self.device();
        // `synchronize` is needed: after `wait`, a GPU may still read the contents left by a failed call.
        let broadcast = |tensor: &Tensor| self.broadcast_async(tensor, root)?.synchronize();
        let length = Tensor::new(&[bytes.map_or(0, |bytes| bytes.len() as i64)], device)?;
        broadcast(&length)?;
        let length = report_length(root, length.to_vec1::<i64>()?[0])?;
        let tensor = match bytes {
            Some(bytes) => Tensor::from_slice(bytes, length, device)?,
            None => Tensor::zeros(length, DType::U8, device)?,
        };
        broadcast(&tensor)?;
        Ok(tensor.to_vec1::<u8>()?)
    }
}

fn to_bytes(object: &impl Serialize) -> Result<Vec<u8>> {
    let bytes =
        cbor::encode(object).map_err(|reason| Error::invalid("object", format!("it cannot be written: {reason}")))?;
    // A leading mark that says the report is not an error takes one byte.
    if bytes.len() >= LONGEST_REPORT {
        let reason = format!(
            "it has {} bytes as CBOR, but must have less than {LONGEST_REPORT}: send large data as tensors",
            bytes.len()
        );
        return Err(Error::invalid("object", reason));
    }
    Ok(bytes)
}

fn from_bytes<T: DeserializeOwned>(bytes: &[u8], rank: usize) -> Result<T> {
    cbor::decode(bytes).map_err(|reason| {
        Error::invalid("object", format!("the bytes from rank {rank} cannot be read as the requested type: {reason}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process_group::spawn;
    use candle_core::Device;

    /// Rank 1 gathers its own numbers, in a call that looks like rank 0's first one: rank 0 must not trust them as a
    /// length.
    #[test]
    fn an_impossible_length_is_an_error_and_not_a_panic() {
        for number in [-1, i64::MAX, 1 << 40] {
            let error = spawn(2, |pg| {
                if pg.rank() == 0 {
                    return pg.gather_reports(Ok("")).map(drop);
                }
                let all = Tensor::zeros(2, DType::I64, &Device::Cpu)?;
                pg.all_gather(&all, &Tensor::new(&[number], &Device::Cpu)?)
            });
            let text = error.unwrap_err().to_string();
            assert!(text.starts_with(&format!("rank 1 failed: it sent {number} as the length")), "{text}");
        }
    }
}
