//! `DataLoader`: each rank's batches, from a group.
use crate::common::Made;
use candle_core::{Device, Tensor};
use candle_ddp::data::{
    DataLoader, Dataset, DistributedSampler, LoaderOptions, Remainder, SamplerOptions, TarSample, TarShards,
    TensorDataset,
};
use candle_ddp::seed::Generator;
use candle_ddp::{Error, Result, SpawnOptions, spawn, spawn_with};
use candle_ddp_testing::tar_files::{files, shard};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;
use tempfile::tempdir;

type Indices = DataLoader<Range<usize>, Vec<usize>>;

const IN_ORDER: SamplerOptions = SamplerOptions { shuffle: false, seed: 0, remainder: Remainder::Pad };

fn options(batch_size: usize, drop_last: bool) -> LoaderOptions {
    LoaderOptions { batch_size, drop_last, ..Default::default() }
}

#[test]
fn a_group_makes_the_sampler() {
    let seen = spawn(3, |pg| {
        let sampler = SamplerOptions { seed: 5, ..Default::default() };
        let loader: Indices = DataLoader::with_collate(0..10, &pg, LoaderOptions { sampler, ..options(2, false) }, Ok)?;
        let mut expected = DistributedSampler::new(10, pg.rank(), 3, sampler)?;
        for epoch in [4, 4, 7] {
            expected.set_epoch(epoch);
            let indices: Vec<usize> = loader.epoch(epoch).collect::<Result<Vec<_>>>()?.concat();
            assert_eq!(indices, expected.iter().collect::<Vec<_>>(), "epoch {epoch}");
            assert_eq!(loader.current_epoch(), epoch + 1);
        }
        Ok(loader.epoch(0).collect::<Result<Vec<_>>>()?.concat())
    });
    let mut seen = seen.unwrap().concat();
    seen.sort();
    seen.dedup();
    assert_eq!(seen, (0..10).collect::<Vec<_>>());
}

/// As where a parameter is a `&ProcessGroup`.
#[test]
fn a_group_may_be_behind_pointers() {
    let counts = spawn(2, |pg| {
        let (borrowed, shared) = (&pg, Arc::new(pg.clone()));
        let loaders: [Result<Indices>; 3] = [
            DataLoader::with_collate(0..4, borrowed, options(1, false), Ok),
            DataLoader::with_collate(0..4, &borrowed, options(1, false), Ok),
            DataLoader::with_collate(0..4, &shared, options(1, false), Ok),
        ];
        loaders.into_iter().map(|loader| Ok(loader?.num_batches())).collect::<Result<Vec<_>>>()
    });
    assert_eq!(counts.unwrap(), [[2; 3], [2; 3]]);
}

/// Otherwise the ranks would run out of batches at different times, or see samples twice.
#[test]
fn ranks_with_other_data_or_options_are_told_so() {
    type Case = (fn(usize) -> (usize, LoaderOptions), &'static str);
    let cases: [Case; 3] = [
        (|rank| (10 + rank, options(2, false)), "length of the dataset: 11 on rank 1"),
        (|rank| (10, options(2 + rank, false)), "batch_size: 3"),
        (
            |rank| {
                (10, LoaderOptions { sampler: SamplerOptions { seed: rank as u64, ..IN_ORDER }, ..options(2, false) })
            },
            "seed: 1",
        ),
    ];
    for (case, expected) in cases {
        let errors = spawn(2, |pg| {
            let (len, options) = case(pg.rank());
            Ok(DataLoader::with_collate(0..len, &pg, options, Ok).unwrap_err().to_string())
        });
        for error in errors.unwrap() {
            assert!(error.contains(expected), "{error}");
        }
    }
    // Every rank learns of an error on one rank.
    let errors = spawn(2, |pg| Ok(DataLoader::with_collate(0..10, &pg, options(pg.rank(), false), Ok).unwrap_err()));
    for error in errors.unwrap() {
        assert!(matches!(&error, Error::RankFailed { rank: 0, reason } if reason.contains("batch_size")), "{error}");
    }
}

fn tensors() -> (Tensor, Tensor) {
    let x = Tensor::arange(0f32, 20., &Device::Cpu).unwrap().reshape((10, 2)).unwrap();
    (x, Tensor::arange(0u32, 10, &Device::Cpu).unwrap())
}

#[test]
fn rows_of_tensors_stay_together() {
    for num_workers in [0, 2] {
        let seen = spawn(2, |pg| {
            let data = TensorDataset::new(tensors())?;
            assert_eq!(data.len(), 10);
            let loader = DataLoader::new(data, &pg, LoaderOptions { num_workers, ..options(3, false) })?;
            let mut seen = Vec::new();
            for batch in loader.epoch(1) {
                let (x, y) = batch?;
                let y = y.to_vec1::<u32>()?;
                assert_eq!(
                    x.to_vec2::<f32>()?,
                    y.iter().map(|y| vec![2. * *y as f32, 2. * *y as f32 + 1.]).collect::<Vec<_>>()
                );
                seen.extend(y);
            }
            Ok(seen)
        });
        let mut seen = seen.unwrap().concat();
        seen.sort();
        assert_eq!(seen, (0..10).collect::<Vec<_>>(), "{num_workers} workers");
    }
}

/// Indices whose sample 3 comes only when the door is open.
fn closed(door: &Arc<(Mutex<bool>, Condvar)>) -> impl Dataset<Sample = usize> + use<> {
    let door = Arc::clone(door);
    Made(8, move |index, _: &mut Generator| {
        let (door, opened) = &*door;
        if index == 3 {
            drop(opened.wait_while(door.lock().unwrap(), |is_open| !*is_open).unwrap());
        }
        Ok(index)
    })
}

#[test]
fn the_error_of_the_other_ranks_says_for_which_sample_a_rank_waits() {
    for num_workers in [0, 2] {
        let door = Arc::<(Mutex<bool>, Condvar)>::default();
        let short = SpawnOptions { world_size: 2, timeout: Duration::from_secs(4), ..Default::default() };
        let errors = spawn_with(short, |pg| {
            let timeout = Some(Duration::from_secs(300));
            let options = LoaderOptions { num_workers, timeout, sampler: IN_ORDER, ..options(2, false) };
            let loader: DataLoader<_, Vec<usize>> = DataLoader::with_collate(closed(&door), &pg, options, Ok)?;
            pg.barrier()?;
            if pg.rank() == 1 {
                // Samples 1 and 3.
                assert_eq!(loader.iter().next().unwrap()?, [1, 3]);
                return Ok(None);
            }
            let error = pg.barrier().unwrap_err();
            *door.0.lock().unwrap() = true;
            door.1.notify_all();
            Ok(Some(error.to_string()))
        });
        let expected = match num_workers {
            0 => "rank 1 has not started this collective: its last was sequence ",
            _ => "waits for a batch of its DataLoader: worker ",
        };
        let error = errors.unwrap().into_iter().flatten().next().unwrap();
        assert!(error.contains(expected) && error.contains("in Dataset::get of sample 3"), "{error}");
    }
}

#[test]
fn the_other_ranks_get_the_error_of_a_loader_whose_sample_never_comes() {
    // With the group's time-out, either the loader's error or that of the others' call comes first.
    for timeout in [Some(Duration::from_millis(200)), None] {
        let door = Arc::<(Mutex<bool>, Condvar)>::default();
        let told = Mutex::new(String::new());
        let short = SpawnOptions { world_size: 2, timeout: Duration::from_secs(4), ..Default::default() };
        let error = spawn_with(short, |pg| {
            let options = LoaderOptions { num_workers: 1, timeout, sampler: IN_ORDER, ..options(1, false) };
            let loader = DataLoader::with_collate(closed(&door), &pg, options, Ok)?;
            if pg.rank() == 1 {
                let mut batches = loader.iter();
                assert_eq!(batches.next().unwrap()?, [1]);
                return batches.next().unwrap().map(drop);
            }
            let error = pg.barrier().unwrap_err();
            *told.lock().unwrap() = error.to_string();
            Err(error)
        });
        let error = error.unwrap_err();
        let told = told.into_inner().unwrap();
        *door.0.lock().unwrap() = true;
        door.1.notify_all();
        assert!(told.contains("rank 1") && told.contains("worker 0 has been in Dataset::get of sample 3"), "{told}");
        if let Some(timeout) = timeout {
            assert!(told.contains("got no batch in 200ms"), "{told}");
            let Error::LoaderTimedOut { rank: 1, worker: 0, index: 3, timeout: after, .. } = &error else {
                panic!("{error:?}")
            };
            assert_eq!(*after, timeout);
        }
    }
}

/// Whoever opens a pipe waits for its other end.
#[test]
fn a_shard_on_a_disk_that_does_not_answer_ends_the_run_on_all_ranks() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("a.tar");
    shard(&path, &files(0..30));
    let told = Mutex::new(String::new());
    let error = spawn(2, |pg| {
        let shards = TarShards::new([&path])?;
        let options = LoaderOptions { num_workers: 2, timeout: Some(Duration::from_millis(200)), ..Default::default() };
        let loader = DataLoader::with_collate(shards, &pg, options, |samples: Vec<TarSample>| Ok(samples.len()))?;
        if pg.rank() == 0 {
            std::fs::remove_file(&path).unwrap();
            mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        }
        pg.barrier()?;
        if pg.rank() == 1 {
            return loader.iter().next().unwrap().map(drop);
        }
        let error = pg.barrier().unwrap_err();
        *told.lock().unwrap() = error.to_string();
        Err(error)
    });
    let error = error.unwrap_err();
    assert!(matches!(&error, Error::LoaderTimedOut { rank: 1, .. }), "{error:?}");
    let told = told.into_inner().unwrap();
    assert!(told.starts_with("rank 1 ended the group: ") && told.contains("in Dataset::get of sample "), "{told}");
    // The workers continue.
    drop(std::fs::File::options().read(true).write(true).open(&path).unwrap());
}
