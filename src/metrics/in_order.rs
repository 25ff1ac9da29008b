//! The results of all ranks in the order of the dataset.
use crate::process_group::ProcessGroup;
use crate::{Error, Result};
use candle_core::Tensor;
use std::collections::BTreeMap;

/// Returns the rows of all ranks in the order of their samples, on every rank. Row `i` of `rows`, of shape (N, …), belongs to sample
/// `indices[i]` of the dataset, as [`LoaderIter::with_indices`](crate::data::LoaderIter::with_indices) gives them. Samples that
/// come more than once, because the sampler pads, are taken once. Gradients end here.
///
/// ```
/// # use candle_core::Tensor;
/// # fn main() -> candle_ddp::Result<()> {
/// candle_ddp::spawn(2, |pg| {
///     let (indices, rows): (_, &[f32]) = if pg.rank() == 0 { ([0, 2], &[0.5, 2.5]) } else { ([1, 0], &[1.5, 0.5]) };
///     let all = candle_ddp::metrics::gather_in_order(&pg, &indices, &Tensor::new(rows, pg.device())?)?;
///     assert_eq!(all.to_vec1::<f32>()?, [0.5, 1.5, 2.5]);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// If a rank does not have an index for each row, that rank gets [`Error::InvalidArgument`], and the others get
/// [`Error::RankFailed`]. If a sample is missing, all ranks get [`Error::InvalidArgument`]. Otherwise as
/// [`all_gather_varied`](ProcessGroup::all_gather_varied).
#[track_caller]
pub fn gather_in_order(pg: &ProcessGroup, indices: &[usize], rows: &Tensor) -> Result<Tensor> {
    let fits = match rows.dims().first() == Some(&indices.len()) {
        true => Ok(()),
        false => Err(Error::invalid(
            "indices",
            format!("there must be one for each row of {:?}, not {}", rows.dims(), indices.len()),
        )),
    };
    pg.agree(fits)?;
    let all = pg.all_gather_varied(&rows.detach(), 0)?;
    let own: Vec<i64> = indices.iter().map(|index| *index as i64).collect();
    let numbers = pg.all_gather_varied(&Tensor::new(own, pg.device())?, 0)?;
    let numbers = Tensor::cat(&numbers, 0)?.to_vec1::<i64>()?;
    // The first row of each sample.
    let mut places = BTreeMap::new();
    for (row, sample) in numbers.into_iter().enumerate() {
        places.entry(sample).or_insert(row as u32);
    }
    if let Some((expected, _)) = (0i64..).zip(places.keys()).find(|(expected, sample)| expected != *sample) {
        return Err(Error::invalid("indices", format!("no rank has sample {expected}, but one has a later one")));
    }
    let places: Vec<u32> = places.into_values().collect();
    let count = places.len();
    Ok(Tensor::cat(&all, 0)?.index_select(&Tensor::from_vec(places, count, pg.device())?, 0)?)
}
