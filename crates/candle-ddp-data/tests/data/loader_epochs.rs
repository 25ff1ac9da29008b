//! When a loader enters its next epoch: loops that count their batches, and those that stop early.
use candle_ddp_data::{DataLoader, DistributedSampler, LoaderOptions, LoaderState, SamplerOptions};
use candle_ddp_state::Result;
use std::ops::Range;

type Loader = DataLoader<Range<usize>, Vec<usize>>;

/// Rank 0 of two: 5 batches of 2 samples.
const BATCHES: usize = 5;

fn loader(num_workers: usize) -> Loader {
    let sampler = DistributedSampler::new(20, 0, 2, SamplerOptions::default()).unwrap();
    let options = LoaderOptions { batch_size: 2, num_workers, ..Default::default() };
    DataLoader::from_sampler(0..20, sampler, options, Ok).unwrap()
}

type Batches = Vec<Vec<usize>>;

/// The batches of an epoch, as another loader has them.
fn epoch(number: u64) -> Batches {
    loader(0).epoch(number).collect::<Result<_>>().unwrap()
}

fn at(epoch: u64, consumed: usize) -> LoaderState {
    LoaderState { epoch, consumed, dataset_len: 20, ..Default::default() }
}

fn state(loader: &Loader) -> LoaderState {
    LoaderState { order: 0, ..loader.state() }
}

#[test]
fn loops_that_count_their_batches_enter_the_next_epoch() {
    type Read = fn(&Loader) -> Batches;
    let loops: [(&str, Read); 5] = [
        ("take", |loader| loader.iter().take(BATCHES).map(Result::unwrap).collect()),
        ("zip", |loader| loader.iter().zip(0..BATCHES).map(|(batch, _)| batch.unwrap()).collect()),
        ("zip of the numbers", |loader| (0..BATCHES).zip(loader.iter()).map(|(_, batch)| batch.unwrap()).collect()),
        ("break", |loader| {
            let mut batches = Vec::new();
            for batch in loader {
                batches.push(batch.unwrap());
                if batches.len() == BATCHES {
                    break;
                }
            }
            batches
        }),
        ("to the end", |loader| loader.iter().map(Result::unwrap).collect()),
    ];
    assert_ne!(epoch(0), epoch(1));
    for (what, read) in loops {
        for workers in [0, 2] {
            let loader = loader(workers);
            for number in 0..3 {
                assert_eq!(read(&loader), epoch(number), "{what}, epoch {number}");
                assert_eq!(state(&loader), at(number + 1, 0));
            }
        }
    }
    // An iterator that is replaced lives longer than the next one waits.
    let loader = loader(0);
    let mut batches = loader.iter();
    for number in 0..3 {
        let read: Batches = batches.by_ref().take(BATCHES).map(Result::unwrap).collect();
        assert_eq!((read, state(&loader)), (epoch(number), at(number, 20)));
        batches = loader.iter();
        assert_eq!(state(&loader), at(number + 1, 0));
    }
    // Whoever names the epoch gets it.
    let read: Batches = batches.by_ref().take(BATCHES).map(Result::unwrap).collect();
    assert_eq!(read, epoch(3));
    for _ in 0..2 {
        batches = loader.epoch(3);
        assert_eq!(batches.by_ref().take(BATCHES).collect::<Result<Batches>>().unwrap(), epoch(3));
    }
}

#[test]
fn a_stopped_loop_resumes_where_it_was() {
    for stop in 1..=BATCHES {
        let stopped = loader(2);
        let read: Batches = stopped.iter().take(stop).map(Result::unwrap).collect();
        let saved = stopped.state();
        let mut resumed = loader(0);
        resumed.resume(saved).unwrap();
        match stop {
            BATCHES => assert_eq!((resumed.current_epoch(), saved.consumed), (1, 0)),
            _ => {
                let rest: Batches = resumed.iter().map(Result::unwrap).collect();
                assert_eq!([read, rest].concat(), epoch(0));
            }
        }
        assert_eq!(resumed.iter().collect::<Result<Batches>>().unwrap(), epoch(1));
    }
    // Saved in the loop's body after the last batch: the code after the loop is still to be run.
    let stopped = loader(0);
    let mut batches = stopped.iter();
    batches.by_ref().take(BATCHES).for_each(drop);
    let saved = stopped.state();
    drop(batches);
    assert_eq!(state(&stopped), at(1, 0));
    let mut resumed = loader(0);
    resumed.resume(saved).unwrap();
    assert_eq!((resumed.current_epoch(), resumed.iter().len()), (0, 0));
    assert_eq!(resumed.iter().count(), 0);
    assert_eq!(state(&resumed), at(1, 0));
}

#[test]
fn an_old_iterator_does_not_move_the_loader() {
    for to_the_end in [false, true] {
        let read = |loader: &Loader| {
            let mut batches = loader.iter();
            batches.by_ref().take(BATCHES).for_each(drop);
            batches
        };
        let end = |mut batches: candle_ddp_data::LoaderIter<Vec<usize>>| {
            if to_the_end {
                assert!(batches.next().is_none());
            }
        };
        let mut loader = loader(0);
        let batches = read(&loader);
        loader.resume(at(7, 4)).unwrap();
        end(batches);
        assert_eq!((state(&loader), loader.iter().len()), (at(7, 4), 4));
        let batches = read(&loader);
        loader.set_epoch(3);
        end(batches);
        assert_eq!(state(&loader), at(3, 0));
        let batches = read(&loader);
        let mut others = loader.iter();
        others.next();
        end(batches);
        assert_eq!(state(&loader), at(4, 4));
    }
}
