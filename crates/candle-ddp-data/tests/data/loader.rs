//! `DataLoader`: batches from a sampler, and `TensorDataset`.
use candle_core::{Device, Tensor};
use candle_ddp_data::{
    DataLoader, Dataset, DistributedSampler, LoaderOptions, Remainder, SamplerOptions, TensorDataset,
};
use candle_ddp_state::seed::Generator;
use candle_ddp_state::{Error, Result};
use std::ops::Range;

type Indices = DataLoader<Range<usize>, Vec<usize>>;

const IN_ORDER: SamplerOptions = SamplerOptions { shuffle: false, seed: 0, remainder: Remainder::Pad };

fn options(batch_size: usize, drop_last: bool) -> LoaderOptions {
    LoaderOptions { batch_size, drop_last, ..Default::default() }
}

/// The loader of rank 0 of 1.
fn alone(len: usize, options: LoaderOptions) -> Result<Indices> {
    DataLoader::from_sampler(0..len, DistributedSampler::new(len, 0, 1, IN_ORDER)?, options, Ok)
}

fn batches(loader: &Indices) -> Vec<Vec<usize>> {
    let batches: Vec<_> = loader.iter().collect::<Result<_>>().unwrap();
    assert_eq!(batches.len(), loader.num_batches());
    assert_eq!(batches.len(), loader.iter().len());
    batches
}

#[test]
fn the_last_batch_is_smaller_or_left_out() {
    let batches = |len, batch_size, drop_last| batches(&alone(len, options(batch_size, drop_last)).unwrap());
    assert_eq!(batches(5, 2, false), [vec![0, 1], vec![2, 3], vec![4]]);
    assert_eq!(batches(5, 2, true), [vec![0, 1], vec![2, 3]]);
    assert_eq!(batches(4, 2, false), batches(4, 2, true));
    assert_eq!(batches(3, 100, false), [vec![0, 1, 2]]);
}

/// Training on nothing would succeed.
#[test]
fn samples_that_make_no_batch_are_an_error() {
    match alone(3, options(100, true)) {
        Err(Error::InvalidArgument { argument: "batch_size", reason }) => {
            assert!(reason.contains("3 samples") && reason.contains("drop_last"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(batches(&alone(105, options(100, true)).unwrap()).len(), 1);
}

#[test]
fn ranks_get_the_same_number_of_batches() {
    for len in 1..40 {
        let count = |rank| {
            let sampler = DistributedSampler::new(len, rank, 3, SamplerOptions::default()).unwrap();
            batches(&DataLoader::from_sampler(0..len, sampler, options(4, false), Ok).unwrap()).len()
        };
        assert!(count(0) == count(1) && count(0) == count(2), "{len} samples");
    }
}

#[test]
fn an_error_is_reported_in_its_place() {
    let sampler = DistributedSampler::new(5, 0, 1, IN_ORDER).unwrap();
    let collate = |indices: Vec<usize>| match indices[..] {
        [2, 3] => Err(Error::RankOutOfRange { rank: 2, world_size: 2 }),
        _ => Ok(indices.len()),
    };
    let loader = DataLoader::from_sampler(0..5, sampler, options(2, false), collate).unwrap();
    let results: Vec<_> = loader.iter().collect();
    assert!(matches!(results[..], [Ok(2), Err(Error::Samples { .. }), Ok(1)]), "{results:?}");
}

#[test]
fn bad_options_are_refused() {
    let refused = |options, name: &str| match alone(5, options) {
        Err(Error::InvalidArgument { argument, .. }) => assert_eq!(argument, name),
        other => panic!("{other:?}"),
    };
    refused(options(0, false), "batch_size");
    refused(LoaderOptions { num_workers: 1, prefetch_factor: 0, ..options(1, false) }, "prefetch_factor");
    // The sampler has its own.
    refused(LoaderOptions { sampler: IN_ORDER, ..options(1, false) }, "options");
}

fn tensors() -> (Tensor, Tensor) {
    let x = Tensor::arange(0f32, 20., &Device::Cpu).unwrap().reshape((10, 2)).unwrap();
    (x, Tensor::arange(0u32, 10, &Device::Cpu).unwrap())
}

#[test]
fn a_sample_is_one_row_of_each_tensor() {
    let row = TensorDataset::new(tensors()).unwrap().get(4, &mut Generator::new(0)).unwrap();
    let (x, y) = row.tensors().unwrap();
    assert_eq!((x.to_vec1::<f32>().unwrap(), y.to_scalar::<u32>().unwrap()), (vec![8., 9.], 4));
}

#[test]
fn tensors_without_common_rows_are_refused() {
    let (x, y) = tensors();
    for (tensors, expected) in [
        (vec![x.clone(), y.narrow(0, 0, 9).unwrap()], "[10, 9]"),
        (vec![x, y.get(0).unwrap()], "scalar"),
        (vec![], "at least one tensor"),
    ] {
        let error = TensorDataset::new(tensors).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
