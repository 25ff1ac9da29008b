//! `TarShards` and `BlockShuffle` under a `DataLoader`.
use crate::ranks::{alone, spawn};
use candle_ddp_data::{
    BlockOptions, BlockShuffle, DataLoader, LoaderOptions, LoaderState, Order, TarSample, TarShards,
};
use candle_ddp_state::{Error, Result};
use candle_ddp_testing::tar_files::{files, shard};
use std::collections::HashSet;
use std::sync::Arc;
use tempfile::tempdir;

#[test]
fn a_loader_says_which_sample_cannot_be_read_and_from_which_shard() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("a.tar");
    shard(&path, &files(0..30));
    let shards = TarShards::new([&path]).unwrap();
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(20);
    std::fs::File::options().write(true).open(&path).unwrap().set_modified(later).unwrap();
    let collate = |samples: Vec<TarSample>| Ok(samples.len());
    let options = LoaderOptions { num_workers: 2, ..Default::default() };
    let loader = DataLoader::with_collate(shards, &alone(), options, collate).unwrap();
    let error = loader.iter().next().unwrap().unwrap_err().to_string();
    assert!(error.contains("of the dataset") && error.contains(&path.display().to_string()), "{error}");
}

#[test]
fn runs_resume_in_the_middle_of_shards() {
    let folder = tempdir().unwrap();
    for number in 0..5 {
        shard(&folder.path().join(format!("{number}.tar")), &files(20 * number..20 * (number + 1)));
    }
    let run = |ranks, state: Option<LoaderState>, batches| {
        let read = spawn(ranks, |group| {
            let shards = TarShards::in_folder(folder.path())?;
            let order = BlockShuffle::new(shards.num_samples(), BlockOptions { block: 7, window: 3, lanes: 2 })?;
            let collate = |samples: Vec<TarSample>| {
                let content = samples.iter().map(|sample| sample.get("txt").map(|text| text.to_vec()));
                Ok(content.map(|text| String::from_utf8(text.unwrap()).unwrap()).collect())
            };
            let options = LoaderOptions { batch_size: 5, num_workers: 2, ..Default::default() };
            let mut loader: DataLoader<_, Vec<String>> =
                DataLoader::with_order(shards, order, group, options, collate)?;
            if let Some(state) = state {
                loader.resume(state)?;
            }
            let read = loader.iter().take(batches).collect::<Result<Vec<_>>>()?.concat();
            Ok((read, loader.state()))
        });
        let (read, states): (Vec<_>, Vec<_>) = read.unwrap().into_iter().unzip();
        (read.concat(), states[0])
    };
    let (mut seen, state) = run(4, None, 2);
    assert_eq!((seen.len(), state.consumed), (40, 40));
    seen.extend(run(3, Some(state), usize::MAX).0);
    seen.sort();
    seen.dedup();
    assert!(seen.into_iter().eq((0..100).map(|number| format!("content of {number:05}"))));
}

#[test]
fn blocks_are_shuffled_and_mixed_within_their_window() {
    let read = |len, ranks, options, epoch| {
        let order: Arc<dyn Order> = Arc::new(BlockShuffle::new(len, options).unwrap());
        let read = spawn(ranks, |group| {
            let loader = DataLoader::with_order(0..len, order.clone(), group, LoaderOptions::default(), Ok)?;
            Ok(loader.epoch(epoch).collect::<Result<Vec<Vec<usize>>>>()?.concat())
        });
        read.unwrap()
    };
    let options = BlockOptions { block: 10, window: 3, lanes: 1 };
    let epochs = [0, 1].map(|epoch| read(1003, 1, options, epoch).remove(0));
    assert_ne!(epochs[0], epochs[1]);
    for order in &epochs {
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..1003));
        // A window has the samples of three blocks, and they are mixed.
        for window in order.chunks(30).take(20) {
            let blocks: HashSet<usize> = window.iter().map(|index| index / 10).collect();
            // The block at the end of the dataset is shorter, and shifts those after it.
            assert!((3..=6).contains(&blocks.len()), "{blocks:?}");
            assert!(window.windows(2).any(|pair| pair[0] / 10 != pair[1] / 10 && pair[0] + 1 != pair[1]));
        }
        let first: HashSet<usize> = order[..300].iter().map(|index| index / 10).collect();
        assert!(first.iter().any(|block| *block > 60) && first.iter().any(|block| *block < 40));
    }
    // With a lane for each rank, no block goes to two ranks.
    let ranks = read(960, 3, BlockOptions { lanes: 6, ..options }, 0);
    let blocks: Vec<HashSet<usize>> =
        ranks.iter().map(|indices| indices.iter().map(|index| index / 10).collect()).collect();
    assert!(
        blocks[0].is_disjoint(&blocks[1]) && blocks[0].is_disjoint(&blocks[2]) && blocks[1].is_disjoint(&blocks[2])
    );
    // More lanes than blocks, and a block and a window larger than the dataset.
    let mut all = read(7, 1, BlockOptions { block: usize::MAX, window: 2, lanes: 9 }, 0).remove(0);
    all.sort_unstable();
    assert!(all.into_iter().eq(0..7));
    for bad in [
        BlockShuffle::new(0, options),
        BlockShuffle::new(1, BlockOptions { block: 0, ..options }),
        BlockShuffle::new(1, BlockOptions { window: 0, ..options }),
        BlockShuffle::new(1, BlockOptions { lanes: 0, ..options }),
    ] {
        assert!(matches!(bad, Err(Error::InvalidArgument { .. })), "{bad:?}");
    }
}
