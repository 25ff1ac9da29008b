//! Sending metrics and other values between ranks.
use crate::common::ranks;
use candle_ddp::{Error, ReduceOp};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

#[test]
fn a_few_numbers_are_reduced_in_one_call() {
    let found = ranks(3, |pg| {
        let rank = pg.rank() as f64;
        let sums = pg.all_reduce_scalars([rank, 0.1, -2. * rank], ReduceOp::Sum)?;
        let [mean] = pg.all_reduce_scalars([rank], ReduceOp::Avg)?;
        let [least, nan] = pg.all_reduce_scalars([rank, if rank == 1. { f64::NAN } else { 0. }], ReduceOp::Min)?;
        assert!(nan.is_nan());
        let []: [f64; 0] = pg.all_reduce_scalars([], ReduceOp::Sum)?;
        Ok((sums, mean, least))
    });
    let third = 0.1 + 0.1 + 0.1;
    assert_eq!(found.unwrap(), [([3., third, -6.], 1., 0.); 3]);
    assert_eq!(ranks(1, |pg| pg.all_reduce_scalars([4.], ReduceOp::Avg)).unwrap(), [[4.]]);
}

type Metrics = BTreeMap<String, Vec<f64>>;

fn metrics(rank: usize) -> Metrics {
    // Any f64 must arrive unchanged; the text is longer on each rank.
    let values = (0..100 * rank as u64).map(|seed| f64::from_bits(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    BTreeMap::from([("Größe \"λ\"".repeat(rank), values.filter(|value| value.is_finite()).collect())])
}

#[test]
fn every_rank_gets_every_ranks_object() {
    let found = ranks(4, |pg| pg.all_gather_object(&metrics(pg.rank())));
    for objects in found.unwrap() {
        assert_eq!(objects, (0..4).map(metrics).collect::<Vec<_>>());
    }
    assert_eq!(ranks(1, |pg| pg.all_gather_object(&())).unwrap(), [[()]]);
}

#[test]
fn every_rank_gets_the_roots_object() {
    let found = ranks(3, |pg| {
        let own = metrics(pg.rank() + 1);
        let first = pg.broadcast_object((pg.rank() == 2).then_some(&own), 2)?;
        // The values of the other ranks are ignored.
        Ok((first, pg.broadcast_object(Some(&pg.rank()), 1)?, pg.broadcast_object(Some(&()), 0)?))
    });
    assert_eq!(found.unwrap(), vec![(metrics(3), 1, ()); 3]);
}

/// serde refuses a path that is no Unicode.
type Unwritable = Vec<PathBuf>;

#[test]
fn an_object_that_cannot_be_sent_is_an_error_on_all_ranks_and_does_not_end_the_group() {
    let found = ranks(2, |pg| {
        let bad = vec![PathBuf::from(OsStr::from_bytes(&[0xff]))];
        let mine = if pg.rank() == 1 { bad.clone() } else { Unwritable::default() };
        let mut errors = vec![
            pg.all_gather_object(&mine).unwrap_err(),
            pg.broadcast_object((pg.rank() == 1).then_some(&bad), 1).unwrap_err(),
            pg.broadcast_object::<u32>(None, 1).unwrap_err(),
        ];
        let long = if pg.rank() == 1 { "x".repeat(64 << 20) } else { String::new() };
        errors.push(pg.all_gather_object(&long).unwrap_err());
        errors.push(pg.broadcast_object(Some(&long), 1).unwrap_err());
        // The next call works.
        assert_eq!(pg.all_gather_object(&pg.rank())?, [0, 1]);
        Ok(errors)
    });
    let found = found.unwrap();
    let texts = [
        "path contains invalid UTF-8",
        "path contains invalid UTF-8",
        "rank 1 is the root, but has none",
        "67108869 bytes",
        "67108869",
    ];
    for (own, (other, text)) in found[1].iter().zip(found[0].iter().zip(texts)) {
        assert!(matches!(own, Error::InvalidArgument { .. }) && own.to_string().contains(text), "{own}");
        assert!(matches!(other, Error::RankFailed { rank: 1, .. }) && other.to_string().contains(text), "{other}");
    }
}

#[test]
fn an_object_of_another_type_is_an_error_on_all_ranks() {
    let found = ranks(2, |pg| {
        let error = match pg.rank() {
            0 => pg.all_gather_object(&"text".to_string()).unwrap_err(),
            _ => pg.all_gather_object(&1.5).unwrap_err(),
        };
        assert_eq!(pg.all_gather_object(&pg.rank())?, [0, 1]);
        Ok(error.to_string())
    });
    let found = found.unwrap();
    assert!(found[0].contains("the bytes from rank 1 cannot be read as"), "{}", found[0]);
    assert!(found[1].contains("the bytes from rank 0 cannot be read as"), "{}", found[1]);
}

#[test]
fn numbers_that_are_not_finite_arrive_as_they_are() {
    type Found = (f64, Option<f64>, Vec<f32>, BTreeMap<u64, f64>);
    let found = ranks(2, |pg| {
        let own: Found =
            (f64::NAN, Some(f64::NAN), vec![f32::INFINITY, f32::NAN, -0.0], [(3, f64::NEG_INFINITY)].into());
        let all = pg.all_gather_object(&own)?;
        assert_eq!(format!("{all:?}"), format!("{:?}", [&own, &own]));
        let loss = pg.broadcast_object((pg.rank() == 1).then_some(&f64::NAN), 1)?;
        // An option that is none is none.
        assert_eq!(pg.all_gather_object(&None::<f64>)?, [None, None]);
        Ok(loss.is_nan())
    });
    assert_eq!(found.unwrap(), [true; 2]);
}
