use crate::deal::Deal;
use crate::order::Batches;
use crate::*;
use candle_core::Tensor;
use candle_ddp_state::Error;
use candle_ddp_state::Result;
use candle_ddp_state::seed::Generator;
use rayon::prelude::*;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A dataset of a function.
struct Samples<F>(usize, F);

impl<T: Send, F: Fn(usize) -> T + Send + Sync> Dataset for Samples<F> {
    type Sample = T;

    fn len(&self) -> usize {
        self.0
    }

    fn get(&self, index: usize, _: &mut Generator) -> Result<T> {
        Ok((self.1)(index))
    }
}

/// A loader of one rank, in the order of the dataset.
fn loader<D: Dataset + 'static, T: Batch + Send + 'static, C: Fn(Vec<D::Sample>) -> Result<T> + Send + Sync + 'static>(
    dataset: D,
    (num_workers, prefetch_factor, batch_size): (usize, usize, usize),
    collate: C,
) -> DataLoader<D, T>
where
    D::Sample: 'static,
{
    let options = SamplerOptions { shuffle: false, ..Default::default() };
    let sampler = DistributedSampler::new(dataset.len(), 0, 1, options).unwrap();
    let options = LoaderOptions { batch_size, num_workers, prefetch_factor, ..Default::default() };
    DataLoader::from_sampler(dataset, sampler, options, collate).unwrap()
}

/// Waits until something has happened, and fails if it never does.
fn wait_for(what: &str, happened: impl Fn() -> bool) {
    let start = Instant::now();
    while !happened() {
        assert!(start.elapsed() < Duration::from_secs(60), "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_slow_sample_holds_up_nothing_within_the_read_ahead() {
    // Three workers, two batches each, four samples a batch.
    const WINDOW: usize = 3 * 2 * 4;
    let read = Arc::new(AtomicUsize::new(0));
    let dataset = Samples(100, {
        let read = read.clone();
        move |index| {
            if index == 0 {
                wait_for("the rest of the read-ahead", || read.load(Ordering::SeqCst) == WINDOW - 1);
            }
            read.fetch_add(1, Ordering::SeqCst);
            index
        }
    });
    let loader = loader(dataset, (3, 2, 4), Ok);
    let batches = loader.iter().collect::<Result<Vec<_>>>().unwrap();
    assert!(batches.concat().into_iter().eq(0..100));
}

#[test]
fn the_read_ahead_is_bounded() {
    let delivered = Arc::new(AtomicUsize::new(0));
    let dataset = Samples(103, {
        let delivered = delivered.clone();
        // Becomes an error in the place of the batch.
        move |index| assert!(index < (delivered.load(Ordering::SeqCst) + 2 * 3) * 5, "{index} is too early")
    });
    let loader = loader(dataset, (2, 3, 5), |samples| Ok(samples.len()));
    let mut batches = loader.iter();
    wait_for("the read-ahead", || true);
    for number in 0..21 {
        // Workers have all the time to read too much.
        std::thread::sleep(Duration::from_millis(5));
        delivered.fetch_add(1, Ordering::SeqCst);
        assert_eq!(batches.next().unwrap().unwrap(), if number < 20 { 5 } else { 3 });
    }
    assert!(batches.next().is_none() && batches.next().is_none());
}

#[test]
fn dropping_the_iterator_waits_for_nobody_and_ends_the_workers() {
    let (go_on, reading) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let token = Arc::new(());
    let dataset = Samples(1000, {
        let (go_on, reading, token) = (go_on.clone(), reading.clone(), token.clone());
        move |index| {
            let _held = &token;
            if index >= 8 {
                reading.fetch_add(1, Ordering::SeqCst);
                wait_for("the end of the test", || go_on.load(Ordering::SeqCst));
            }
            index
        }
    });
    let loader = loader(dataset, (4, 2, 2), Ok);
    let mut batches = loader.iter();
    assert_eq!(batches.next().unwrap().unwrap(), [0, 1]);
    wait_for("busy workers", || reading.load(Ordering::SeqCst) == 4);
    // Returns, although no worker can end.
    drop(batches);
    assert_eq!(loader.state().consumed, 2);
    drop(loader);
    assert!(Arc::strong_count(&token) > 1);
    go_on.store(true, Ordering::SeqCst);
    wait_for("the end of the workers", || Arc::strong_count(&token) == 1);
    assert_eq!(reading.load(Ordering::SeqCst), 4, "a worker has read on");
}

/// A sample that keeps a token.
struct Held {
    _token: Arc<()>,
}

impl Batch for Held {
    fn map_tensors(self, _: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(self)
    }
}

#[test]
fn workers_that_wait_for_room_end_as_well() {
    let token = Arc::new(());
    let held = token.clone();
    let loader = loader(Samples(1000, move |_| Held { _token: held.clone() }), (3, 1, 1), Ok);
    let batches = loader.iter();
    let ready = batches.len();
    assert_eq!(ready, 1000);
    wait_for("the read-ahead", || Arc::strong_count(&token) == 2 + 3);
    drop(batches);
    drop(loader);
    wait_for("the end of the workers", || Arc::strong_count(&token) == 1);
}

#[test]
fn errors_and_panics_name_the_sample() {
    for num_workers in [0, 3] {
        struct Broken;
        impl Dataset for Broken {
            type Sample = usize;
            fn len(&self) -> usize {
                40
            }
            fn get(&self, index: usize, _: &mut Generator) -> Result<usize> {
                match index {
                    9 => Err(Error::invalid("image", "it is corrupt")),
                    // Later than 9 in the same batch: the first one is reported, whoever was quicker.
                    10 => Err(Error::invalid("image", "it is late")),
                    21 => panic!("on purpose"),
                    index => Ok(index),
                }
            }
        }
        let collate = |samples: Vec<usize>| match samples[0] {
            28 => Err(Error::invalid("shape", "they differ")),
            32 => panic!("on purpose, too"),
            first => Ok(first),
        };
        let loader = loader(Broken, (num_workers, 2, 4), collate);
        let results: Vec<_> = loader.iter().map(|batch| batch.map_err(|error| error.to_string())).collect();
        let expected: [Result<usize, &str>; 10] = [
            Ok(0),
            Ok(4),
            Err("sample 9 of the dataset: image: it is corrupt"),
            Ok(12),
            Ok(16),
            Err("sample 21 of the dataset: it panicked: on purpose"),
            Ok(24),
            Err("the batch of the samples 28, 29, 30, 31: shape: they differ"),
            Err("the batch of the samples 32, 33, 34, 35: it panicked: on purpose, too"),
            Ok(36),
        ];
        assert_eq!(results, expected.map(|result| result.map_err(str::to_string)));
        assert_eq!(loader.current_epoch(), 1);
    }
}

#[test]
fn workers_do_not_compute_on_the_threads_of_training() {
    let threads = Arc::new(Mutex::new(HashSet::new()));
    let dataset = Samples(8, {
        let threads = threads.clone();
        move |_| {
            let me = std::thread::current();
            assert!(me.name().unwrap().starts_with("data-worker-"), "{me:?}");
            assert_eq!(rayon::current_num_threads(), 1);
            (0..100).into_par_iter().for_each(|_| assert_eq!(std::thread::current().id(), me.id()));
            threads.lock().unwrap().insert(me.id());
        }
    });
    let loader = loader(dataset, (2, 2, 1), Ok);
    assert_eq!(loader.iter().collect::<Result<Vec<_>>>().unwrap().len(), 8);
    assert!(threads.lock().unwrap().len() <= 2);
}

#[test]
fn batches_are_made_by_workers_and_wait_for_delivery() {
    let dataset = Samples(6, |index| index);
    let order = Arc::new((0..6).collect::<EpochOrder>());
    let deal = Deal::new(0, 1, Remainder::Pad).unwrap();
    let options = LoaderOptions { batch_size: 4, num_workers: 1, ..Default::default() };
    let order = Batches::new(order, 0, &deal, options);
    let collate = |samples: Vec<usize>| Ok((samples, std::thread::current().id()));
    let recipe = super::Recipe { dataset: Arc::new(dataset), collate, seed: 0, epoch: 0, rank: 0 };
    let mut workers = super::Workers::start(recipe, order, options).unwrap();
    for expected in [vec![0, 1, 2, 3], vec![4, 5]] {
        wait_for("a batch", || workers.is_ready());
        let (batch, thread) = workers.next().unwrap().unwrap();
        assert_eq!(batch, expected);
        assert_ne!(thread, std::thread::current().id());
    }
    assert!(!workers.is_ready() && workers.next().is_none());
}

#[test]
fn what_a_late_batch_waits_for_is_known() {
    let go_on = Arc::new(AtomicBool::new(false));
    let dataset = Samples(100, {
        let go_on = go_on.clone();
        move |index| {
            if [4, 6].contains(&index) {
                wait_for("the end of the test", || go_on.load(Ordering::SeqCst));
            }
            index
        }
    });
    let order = Arc::new((0..100).collect::<EpochOrder>());
    let deal = Deal::new(0, 1, Remainder::Pad).unwrap();
    let options = LoaderOptions { batch_size: 4, num_workers: 3, ..Default::default() };
    let order = Batches::new(order, 0, &deal, options);
    let recipe = super::Recipe { dataset: Arc::new(dataset), collate: Ok, seed: 0, epoch: 0, rank: 0 };
    let mut workers = super::Workers::start(recipe, order, options).unwrap();
    assert_eq!(workers.next().unwrap().unwrap(), [0, 1, 2, 3]);
    let activity = || workers.0.window.lock().unwrap().activity();
    wait_for("both samples", || {
        let text = activity();
        [4, 6].iter().all(|index| text.contains(&format!("has been in Dataset::get of sample {index} for ")))
    });
    go_on.store(true, Ordering::SeqCst);
    assert_eq!(workers.next().unwrap().unwrap(), [4, 5, 6, 7]);
}

/// A door at which workers wait, and the names of those that are there.
#[derive(Default)]
struct Door {
    waiting: Mutex<Vec<String>>,
    open: AtomicBool,
}

impl Door {
    fn pass(&self) {
        self.waiting.lock().unwrap().push(std::thread::current().name().unwrap().to_string());
        while !self.open.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn a_worker_that_does_not_come_back_costs_its_batch_and_not_those_of_the_others() {
    for in_collate in [false, true] {
        let (door, made) = (Arc::new(Door::default()), Arc::new(AtomicUsize::new(0)));
        let get = {
            let door = door.clone();
            move |index| {
                if index == 4 && !in_collate {
                    door.pass();
                }
                index
            }
        };
        let collate = {
            let (door, made) = (door.clone(), made.clone());
            move |samples: Vec<usize>| {
                if samples[0] == 4 && in_collate {
                    door.pass();
                }
                made.fetch_add(1, Ordering::SeqCst);
                Ok(samples)
            }
        };
        let options = SamplerOptions { shuffle: false, ..Default::default() };
        let sampler = DistributedSampler::new(8, 0, 1, options).unwrap();
        let timeout = Duration::from_millis(200);
        let (num_workers, prefetch_factor) = (2, 4);
        let options =
            LoaderOptions { batch_size: 2, num_workers, prefetch_factor, timeout: Some(timeout), ..Default::default() };
        let loader = DataLoader::from_sampler(Samples(8, get), sampler, options, collate).unwrap();
        let mut batches = loader.iter();
        wait_for("the batches of the other worker", || made.load(Ordering::SeqCst) == 3);
        wait_for("the stuck worker", || !door.waiting.lock().unwrap().is_empty());
        let mut next = || batches.next().unwrap();
        assert_eq!([next().unwrap(), next().unwrap()], [[0, 1], [2, 3]]);
        let error = next().unwrap_err();
        let Error::LoaderTimedOut { rank: 0, worker, index, timeout: after, activity } = &error else {
            panic!("{error:?}")
        };
        let name = door.waiting.lock().unwrap()[0].clone();
        assert_eq!((format!("data-worker-{worker}"), *after), (name, timeout));
        if in_collate {
            assert!([4, 5].contains(index) && activity.contains("has been making the batch of sample"), "{error}");
        } else {
            assert!(*index == 4 && activity.contains("has been in Dataset::get of sample 4 for "), "{error}");
        }
        assert_eq!(next().unwrap(), [6, 7]);
        assert!(batches.next().is_none());
        // Returns, although a worker cannot end.
        drop((batches, loader));
        assert!(Arc::strong_count(&door) > 1);
        door.open.store(true, Ordering::SeqCst);
        wait_for("the end of the workers", || Arc::strong_count(&door) == 1);
    }
}

#[test]
fn each_batch_is_an_error_while_all_workers_are_stuck_and_then_they_go_on() {
    let door = Arc::new(Door::default());
    let inside = door.clone();
    let get = move |index| {
        if index == 0 {
            inside.pass();
        }
        index
    };
    let order = Arc::new((0..5).collect::<EpochOrder>());
    let deal = Deal::new(0, 1, Remainder::Pad).unwrap();
    let options = LoaderOptions { num_workers: 1, timeout: Some(Duration::from_millis(20)), ..Default::default() };
    let order = Batches::new(order, 0, &deal, options);
    let recipe = super::Recipe { dataset: Arc::new(Samples(5, get)), collate: Ok, seed: 0, epoch: 0, rank: 0 };
    let mut workers = super::Workers::start(recipe, order, options).unwrap();
    for _ in 0..4 {
        let error = workers.next().unwrap().unwrap_err();
        assert!(matches!(error, Error::LoaderTimedOut { worker: 0, index: 0, .. }), "{error}");
    }
    door.open.store(true, Ordering::SeqCst);
    // The worker may need longer than the time-out to continue.
    wait_for("the last batch", || workers.is_ready());
    assert_eq!(workers.next().unwrap().unwrap(), [4]);
    assert!(workers.next().is_none());
}
