//! Numbers and values of the program, from rank to rank: metrics, options, decisions.
use super::{LONGEST_REPORT, ProcessGroup, report_length};
use crate::backend::{Label, ReduceOp};
use crate::rendezvous::{decode_report, encode_report};
use crate::{Error, Result};
use candle_core::{DType, Tensor};
use serde::Serialize;
use serde::de::DeserializeOwned;

impl ProcessGroup {
    /// Reduces a few numbers over the ranks in one call, such as the sums and counts that metrics are made of. Every rank
    /// calls it with as many numbers, and gets the same result.
    ///
    /// With [`ReduceOp::Avg`] it is the mean over the ranks. Where ranks have seen different numbers of samples, the mean over
    /// the samples is a quotient of two sums:
    ///
    /// ```
    /// use candle_ddp::ReduceOp;
    ///
    /// # fn main() -> candle_ddp::Result<()> {
    /// candle_ddp::spawn(2, |pg| {
    ///     // What each rank has added up over its samples, and how many they were.
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
    /// As with [`all_reduce`](Self::all_reduce).
    pub fn all_reduce_scalars<const N: usize>(&self, values: [f64; N], op: ReduceOp) -> Result<[f64; N]> {
        let tensor = Tensor::from_slice(&values, N, self.device())?;
        // Not by `all_reduce`, after which a GPU may still see what a call that failed has left.
        Label::ALL_REDUCE_SCALARS.during(|| self.all_reduce_async(&tensor, op)?.synchronize())?;
        let mut reduced = values;
        reduced.copy_from_slice(&tensor.to_vec1::<f64>()?);
        Ok(reduced)
    }

    /// Gives every rank the `object` of rank `root`, which is `None` on the others: options that one rank has read, a
    /// decision that one rank has made. PyTorch's `broadcast_object_list`, for one object.
    ///
    /// It travels as JSON, of at most 64 MiB. JSON has no NaN and no infinities: they arrive as `null`, which only an
    /// `Option` can hold.
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
    /// On every rank: when `root` has no object, or one that JSON cannot hold or that is too large (there
    /// [`Error::InvalidArgument`], elsewhere [`Error::RankFailed`]); when the text is not that of a `T`
    /// ([`Error::InvalidArgument`]); those of the group.
    pub fn broadcast_object<T: Serialize + DeserializeOwned>(&self, object: Option<&T>, root: usize) -> Result<T> {
        let own = (self.rank() == root).then(|| {
            let object =
                object.ok_or_else(|| Error::invalid("object", format!("rank {root} is the root, and has none")));
            object.and_then(to_json)
        });
        let report = own.as_ref().map(|json| encode_report(json.as_deref().map(str::as_bytes)));
        let report = report.as_deref();
        let report = Label::BROADCAST_OBJECT.during(|| self.broadcast_bytes(report, root))?;
        if let Some(own) = own {
            own?;
        }
        match decode_report(&report) {
            Ok(json) => from_json(&String::from_utf8_lossy(&json), root),
            Err(reason) => Err(Error::RankFailed { rank: root, reason }),
        }
    }

    /// Every rank's `object`, in rank order, on every rank; sizes may differ. PyTorch's `all_gather_object`. Objects travel
    /// as with [`broadcast_object`](Self::broadcast_object); each rank needs memory for `world_size` times the largest.
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
    /// On every rank: when that of a rank cannot be sent (there [`Error::InvalidArgument`], elsewhere
    /// [`Error::RankFailed`]), or the text of one is not that of a `T` ([`Error::InvalidArgument`]); those of the group.
    pub fn all_gather_object<T: Serialize + DeserializeOwned>(&self, object: &T) -> Result<Vec<T>> {
        let own = to_json(object);
        let reports = Label::ALL_GATHER_OBJECT.during(|| self.gather_reports(own.as_deref()));
        own?;
        let reports = reports?.map_err(|(rank, reason)| Error::RankFailed { rank, reason })?;
        reports.iter().enumerate().map(|(rank, json)| from_json(json, rank)).collect()
    }

    /// The bytes of `root`, which has them, on every rank.
    fn broadcast_bytes(&self, bytes: Option<&[u8]>, root: usize) -> Result<Vec<u8>> {
        let device = self.device();
        // Not by `wait`, after which a GPU may still see what a call that failed has left.
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

fn to_json(object: &impl Serialize) -> Result<String> {
    let json = serde_json::to_string(object)
        .map_err(|error| Error::invalid("object", format!("it cannot be written as JSON: {error}")))?;
    // In front of it stands a sign that it is good.
    if json.len() >= LONGEST_REPORT {
        let reason = format!(
            "it has {} bytes as JSON, and less than {LONGEST_REPORT} can be sent: send large data as tensors",
            json.len()
        );
        return Err(Error::invalid("object", reason));
    }
    Ok(json)
}

fn from_json<T: DeserializeOwned>(json: &str, rank: usize) -> Result<T> {
    serde_json::from_str(json).map_err(|error| {
        let hint = match error.to_string().contains("null") {
            true => " (JSON has no NaN and no infinities, which arrive as null: use Option, or all_reduce_scalars)",
            false => "",
        };
        Error::invalid("object", format!("what rank {rank} sent cannot be read as the type asked for: {error}{hint}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process_group::spawn;
    use candle_core::Device;

    /// Rank 1 gathers numbers of its own, in a call that looks like the first one of rank 0's: what rank 0 takes for a length
    /// must not be believed.
    #[test]
    fn an_impossible_length_is_an_error_and_no_panic() {
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
