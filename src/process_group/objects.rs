//! Sends numbers and values of the program between ranks, such as metrics, options and decisions.
use super::ProcessGroup;
use super::reports::LONGEST_REPORT;
use crate::backend::{CallSite, Purpose, ReduceOp};
use crate::cbor;
use crate::rendezvous::{decode_report, encode_report};
use crate::{Error, Result};
use candle_core::Tensor;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::panic::Location;

static BROADCAST_OBJECT: Purpose = Purpose::of("broadcast_object");
static ALL_GATHER_OBJECT: Purpose = Purpose::of("all_gather_object");
static GATHER_OBJECT: Purpose = Purpose::of("gather_object");
static SCATTER_OBJECT: Purpose = Purpose::of("scatter_object");
static SEND_OBJECT: Purpose = Purpose::of("send_object");
static ALL_REDUCE_SCALARS: Purpose = Purpose::of("all_reduce_scalars");

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
            ALL_REDUCE_SCALARS.during(|| self.all_reduce_async(&tensor, op)?.synchronize())
        })?;
        let mut reduced = values;
        reduced.copy_from_slice(&tensor.to_vec1::<f64>()?);
        Ok(reduced)
    }

    /// Returns the `object` of rank `root` on every rank; the others pass `None`. Use it for options that only one rank
    /// has read, or a decision that only one rank has made. PyTorch's `broadcast_object_list`, for one object.
    ///
    /// Objects are sent as CBOR, large ones in parts of 64 MiB. Numbers arrive unchanged, including NaN and infinities.
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
    /// [`Error::InvalidArgument`], and the others get [`Error::RankFailed`]. If the bytes do not represent a `T`, or ranks
    /// name different roots, every rank gets [`Error::InvalidArgument`]. Also returns errors of the group.
    #[track_caller]
    pub fn broadcast_object<T: Serialize + DeserializeOwned>(&self, object: Option<&T>, root: usize) -> Result<T> {
        let own = (self.rank() == root).then(|| {
            let object =
                object.ok_or_else(|| Error::invalid("object", format!("rank {root} is the root, but has none")));
            object.and_then(to_bytes)
        });
        let report = own.as_ref().map(|bytes| encode_report(bytes.as_deref().map_err(|error| error as _)));
        let report = report.as_deref();
        let report =
            CallSite::during(Location::caller(), || BROADCAST_OBJECT.during(|| self.broadcast_bytes(report, root)))?;
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
            ALL_GATHER_OBJECT.during(|| self.gather_byte_reports(own.as_deref()))
        });
        own?;
        let reports = reports?.map_err(|(rank, reason)| self.rank_failed(rank, reason))?;
        reports.iter().enumerate().map(|(rank, bytes)| from_bytes(bytes, rank)).collect()
    }

    /// Returns every rank's `object` in rank order on rank `root`, and `None` on the others; sizes may differ. PyTorch's
    /// `gather_object`. Objects are sent as by [`broadcast_object`](Self::broadcast_object); only `root` needs memory for all.
    ///
    /// ```
    /// # fn main() -> candle_ddp::Result<()> {
    /// candle_ddp::spawn(2, |pg| {
    ///     let all = pg.gather_object(&format!("rank {}", pg.rank()), 0)?;
    ///     assert_eq!(all, (pg.rank() == 0).then(|| vec!["rank 0".to_string(), "rank 1".to_string()]));
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// If a rank's object cannot be sent, that rank gets [`Error::InvalidArgument`], and the others get [`Error::RankFailed`]. If
    /// `root` cannot read a rank's bytes as a `T`, only `root` gets [`Error::InvalidArgument`]; if ranks name different roots, every
    /// rank gets it. Also returns errors of the group.
    #[track_caller]
    pub fn gather_object<T: Serialize + DeserializeOwned>(&self, object: &T, root: usize) -> Result<Option<Vec<T>>> {
        let gather = || {
            let own = self.agree_with_root(root, to_bytes(object))?;
            if self.rank() != root {
                return self.send_bytes(&own, root).map(|()| None);
            }
            let all = (0..self.world_size()).map(|rank| match rank == root {
                true => from_bytes(&own, rank),
                false => from_bytes(&self.recv_bytes(rank)?, rank),
            });
            // All are received, also after one that cannot be read.
            let all: Vec<Result<T>> = all.collect();
            all.into_iter().collect::<Result<_>>().map(Some)
        };
        CallSite::during(Location::caller(), || GATHER_OBJECT.during(gather))
    }

    /// Returns `objects[rank]` of rank `root` on each rank; the others pass `None`. PyTorch's `scatter_object_list`. Objects are
    /// sent as by [`broadcast_object`](Self::broadcast_object), each only to its rank.
    ///
    /// ```
    /// # fn main() -> candle_ddp::Result<()> {
    /// candle_ddp::spawn(2, |pg| {
    ///     let files = (pg.rank() == 0).then(|| vec!["first.txt".to_string(), "second.txt".to_string()]);
    ///     let own = pg.scatter_object(files.as_deref(), 0)?;
    ///     assert_eq!(own, ["first.txt", "second.txt"][pg.rank()]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// If `root` does not have an object for each rank, or one that cannot be sent, `root` gets [`Error::InvalidArgument`], and the
    /// others get [`Error::RankFailed`]. A rank that cannot read its bytes as a `T` gets [`Error::InvalidArgument`]; if ranks name
    /// different roots, every rank gets it. Also returns errors of the group.
    #[track_caller]
    pub fn scatter_object<T: Serialize + DeserializeOwned>(&self, objects: Option<&[T]>, root: usize) -> Result<T> {
        let own = (self.rank() == root).then(|| {
            let (has, world) = (objects.map_or(0, <[T]>::len), self.world_size());
            if has != world {
                let reason = format!("rank {root} is the root, so it must have {world}, one for each rank, not {has}");
                return Err(Error::invalid("objects", reason));
            }
            objects.into_iter().flatten().map(to_bytes).collect::<Result<Vec<_>>>()
        });
        let scatter = || {
            let Some(own) = self.agree_with_root(root, own.transpose())? else {
                return from_bytes(&self.recv_bytes(root)?, root);
            };
            let mut others = own.iter().enumerate().filter(|(rank, _)| *rank != root);
            others.try_for_each(|(rank, bytes)| self.send_bytes(bytes, rank))?;
            from_bytes(&own[root], root)
        };
        CallSite::during(Location::caller(), || SCATTER_OBJECT.during(scatter))
    }

    /// Sends an object to rank `peer`, which must call [`recv_object`](Self::recv_object): PyTorch's `send_object_list`, for one
    /// object, which is sent as by [`broadcast_object`](Self::broadcast_object).
    ///
    /// ```
    /// # fn main() -> candle_ddp::Result<()> {
    /// candle_ddp::spawn(2, |pg| {
    ///     match pg.rank() {
    ///         0 => pg.send_object(&("epoch", 3), 1)?,
    ///         _ => assert_eq!(pg.recv_object::<(String, u32)>(0)?, ("epoch".to_string(), 3)),
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for an object that cannot be sent, on `peer` too, and errors of the group.
    #[track_caller]
    pub fn send_object<T: Serialize>(&self, object: &T, peer: usize) -> Result<()> {
        let own = to_bytes(object);
        let report = encode_report(own.as_deref().map_err(|error| error as _));
        CallSite::during(Location::caller(), || SEND_OBJECT.during(|| self.send_bytes(&report, peer)))?;
        own.map(drop)
    }

    /// Returns the object that rank `peer` sends with [`send_object`](Self::send_object).
    ///
    /// # Errors
    /// Returns [`Error::RankFailed`] if `peer` has an object that cannot be sent, [`Error::InvalidArgument`] if its bytes cannot be
    /// read as a `T`, and errors of the group.
    #[track_caller]
    pub fn recv_object<T: DeserializeOwned>(&self, peer: usize) -> Result<T> {
        let recv = || SEND_OBJECT.during(|| self.recv_bytes(peer));
        let report = CallSite::during(Location::caller(), recv)?;
        from_bytes(&decode_report(&report).map_err(|reason| self.rank_failed(peer, reason))?, peer)
    }

    /// As [`agree`](Self::agree), for ranks that name a root, and learn if others name another one.
    fn agree_with_root<T>(&self, root: usize, result: Result<T>) -> Result<T> {
        self.gather_for_root(root, 0)?;
        self.agree(result)
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
    use candle_core::{DType, Device};

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
