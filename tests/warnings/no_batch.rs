//! A loader says on which rank an epoch has no batch while other ranks have some.
use crate::common::{ranks, tensor};
use crate::logger::during;
use candle_ddp::ProcessGroup;
use candle_ddp::data::{DataLoader, LoaderOptions, Remainder, SamplerOptions, TensorDataset};

#[test]
fn a_rank_without_a_batch_is_named() {
    let warnings = |world_size: usize, samples: usize| {
        let program = |pg: ProcessGroup| {
            let sampler = SamplerOptions { remainder: Remainder::Uneven, ..Default::default() };
            let options = LoaderOptions { batch_size: 3, drop_last: true, sampler, ..Default::default() };
            let loader = DataLoader::new(TensorDataset::new(tensor(&[samples, 2], 1))?, &pg, options)?;
            Ok(loader.num_batches())
        };
        during(|| ranks(world_size, program))
    };
    let (batches, said) = warnings(2, 5);
    assert_eq!(batches, [1, 0]);
    let text = "rank 1 has no batch in an epoch, but others have: its part of the dataset is 2 of 5 samples";
    assert!(said.len() == 1 && said[0].contains(text) && said[0].contains("batch_size 3 with drop_last"), "{said:?}");
    assert_eq!(warnings(2, 6), (vec![1, 1], vec![]));
    let (batches, said) = warnings(3, 7);
    assert_eq!(batches, [1, 0, 0]);
    assert!(said.len() == 1 && said[0].starts_with("each of the ranks 1 to 2 has no batch"), "{said:?}");
}
