//! Batches with the indices of their samples.
use candle_core::{DType, Device, Tensor};
use candle_ddp::data::{DataLoader, LoaderOptions, Remainder, SamplerOptions, TensorDataset};
use candle_ddp::{ProcessGroup, Result};

const SAMPLES: usize = 21;

/// A loader of samples whose values are their indices.
fn loader(
    pg: &ProcessGroup,
    remainder: Remainder,
    num_workers: usize,
) -> Result<DataLoader<TensorDataset<Tensor>, Tensor>> {
    let data = TensorDataset::new(Tensor::arange(0f32, SAMPLES as f32, &Device::Cpu)?)?;
    let sampler = SamplerOptions { shuffle: true, seed: 3, remainder };
    DataLoader::new(data, pg, LoaderOptions { batch_size: 4, num_workers, sampler, ..Default::default() })
}

/// The indices of all ranks' samples, after the first `skipped` batches of each rank.
fn indices(ranks: usize, remainder: Remainder, num_workers: usize, skipped: usize) -> (Vec<usize>, usize) {
    let all = crate::common::ranks(ranks, |pg| {
        let loader = loader(&pg, remainder, num_workers)?;
        let (mut all, mut padding) = (Vec::new(), 0);
        let mut batches = loader.iter();
        for batch in batches.by_ref().take(skipped) {
            batch?;
        }
        let batches = batches.with_indices();
        let expected = batches.len();
        let mut count = 0;
        for batch in batches {
            let (indices, values) = batch?;
            let values: Vec<f32> = values.to_dtype(DType::F32)?.to_vec1()?;
            let own: Vec<f32> = indices.iter().map(|index| *index as f32).collect();
            assert_eq!(values[..own.len()], own);
            padding += values.len() - own.len();
            all.extend(indices);
            count += 1;
        }
        assert_eq!(count, expected);
        Ok((all, padding))
    });
    let padding = all.iter().map(|(_, padding)| padding).sum();
    let mut indices: Vec<usize> = all.into_iter().flat_map(|(indices, _)| indices).collect();
    indices.sort_unstable();
    (indices, padding)
}

#[test]
fn every_sample_has_its_index_and_padding_has_none() {
    for ranks in 1..=4 {
        for num_workers in [0, 2] {
            let whole: Vec<usize> = (0..SAMPLES).collect();
            let expected = (whole.clone(), SAMPLES.next_multiple_of(ranks) - SAMPLES);
            assert_eq!(indices(ranks, Remainder::Pad, num_workers, 0), expected, "{ranks} ranks");
            assert_eq!(indices(ranks, Remainder::Uneven, num_workers, 0), (whole, 0), "{ranks} ranks");
            let (dropped, padding) = indices(ranks, Remainder::Drop, num_workers, 0);
            assert_eq!((dropped.len(), padding), (SAMPLES / ranks * ranks, 0), "{ranks} ranks");
            let (rest, _) = indices(ranks, Remainder::Uneven, num_workers, 1);
            assert_eq!(rest.len(), SAMPLES - 4 * ranks, "{ranks} ranks");
        }
    }
}
