//! `DataLoader`: the batches of an order of indices.
use candle_ddp::Error;
use candle_ddp::data::{DataLoader, DistributedSampler, LoaderOptions, SamplerOptions};

fn options(batch_size: usize, drop_last: bool) -> LoaderOptions {
    LoaderOptions { batch_size, drop_last, ..Default::default() }
}

fn batches(order: impl IntoIterator<Item = usize>, batch_size: usize, drop_last: bool) -> Vec<Vec<usize>> {
    let loader = DataLoader::new(options(batch_size, drop_last), |indices| Ok(indices.to_vec())).unwrap();
    let order: Vec<usize> = order.into_iter().collect();
    let batches: Vec<_> = loader.iter(order.iter().copied()).collect::<Result<_, _>>().unwrap();
    assert_eq!(batches.len(), loader.num_batches(order.len()));
    assert_eq!(batches.len(), loader.iter(order).len());
    batches
}

#[test]
fn the_last_batch_is_smaller_or_left_out() {
    assert_eq!(batches(0..5, 2, false), [vec![0, 1], vec![2, 3], vec![4]]);
    assert_eq!(batches(0..5, 2, true), [vec![0, 1], vec![2, 3]]);
    assert_eq!(batches(0..4, 2, false), batches(0..4, 2, true));
    assert_eq!(batches(0..3, 100, false), [vec![0, 1, 2]]);
    assert!(batches(0..0, 1, false).is_empty());
}

/// Training on nothing would end well.
#[test]
fn samples_that_make_no_batch_are_an_error() {
    let loader = DataLoader::new(options(100, true), |indices| Ok(indices.to_vec())).unwrap();
    let mut batches = loader.iter(0..3);
    assert_eq!(batches.len(), 1);
    match batches.next() {
        Some(Err(Error::InvalidArgument { argument: "batch_size", reason })) => {
            assert!(reason.contains("3 samples") && reason.contains("drop_last"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    assert!(batches.next().is_none());
    assert_eq!(loader.iter(0..0).count(), 0);
    assert_eq!(loader.iter(0..105).map(Result::unwrap).count(), 1);
}

#[test]
fn ranks_get_the_same_number_of_batches() {
    for len in 1..40 {
        let counts: Vec<usize> = (0..3)
            .map(|rank| {
                let sampler = DistributedSampler::new(len, 3, rank, SamplerOptions::default()).unwrap();
                batches(&sampler, 4, false).len()
            })
            .collect();
        assert!(counts.iter().all(|&count| count == counts[0]), "{len} samples: {counts:?}");
    }
}

#[test]
fn an_error_is_reported_in_its_place() {
    let loader = DataLoader::new(options(2, false), |indices| match indices {
        [2, 3] => Err(Error::RankOutOfRange { rank: 2, world_size: 2 }),
        indices => Ok(indices.len()),
    })
    .unwrap();
    let results: Vec<_> = loader.iter(0..5).collect();
    assert!(matches!(results[..], [Ok(2), Err(Error::RankOutOfRange { .. }), Ok(1)]), "{results:?}");
}

#[test]
fn an_empty_batch_is_refused() {
    let error = DataLoader::new(options(0, false), |_| Ok(())).err().unwrap();
    assert!(matches!(error, Error::InvalidArgument { argument: "batch_size", .. }), "{error}");
}

#[test]
fn a_closure_has_no_workers() {
    let options = LoaderOptions { num_workers: 1, ..Default::default() };
    let error = DataLoader::new(options, |_| Ok(())).err().unwrap();
    assert!(matches!(error, Error::InvalidArgument { argument: "num_workers", .. }), "{error}");
}
