//! `DataLoader`: its order, its augmentation, and runs that continue where others stopped.
use candle_ddp_data::{
    DataLoader, Dataset, DistributedSampler, LoaderIter, LoaderOptions, LoaderState, Remainder, SamplerOptions,
    default_collate, randperm,
};
use candle_ddp_state::StateDict;
use candle_ddp_state::seed::Generator;
use candle_ddp_state::{Error, Result};
use proptest::prelude::*;

type Indices = DataLoader<std::ops::Range<usize>, Vec<usize>>;

/// The ranks and options of a run.
#[derive(Debug, Clone, Copy)]
struct Run {
    len: usize,
    world_size: usize,
    sampler: SamplerOptions,
    loader: LoaderOptions,
}

impl Run {
    /// The loader of a rank. Its batches are indices.
    fn loader(&self, rank: usize) -> Indices {
        let sampler = DistributedSampler::new(self.len, rank, self.world_size, self.sampler).unwrap();
        DataLoader::from_sampler(0..self.len, sampler, self.loader, Ok).unwrap()
    }

    fn loaders(&self) -> impl Iterator<Item = Indices> {
        (0..self.world_size).map(|rank| self.loader(rank))
    }

    /// How often each sample is seen in an epoch that nothing interrupts.
    fn counts(&self) -> Vec<usize> {
        let mut counts = vec![0; self.len];
        self.loaders().for_each(|loader| drop(count(&loader, usize::MAX, &mut counts)));
        counts
    }
}

/// Consumes `batches` batches, or all that remain. The iterator keeps the loader from leaving its epoch after the last one.
fn count(loader: &Indices, batches: usize, counts: &mut [usize]) -> LoaderIter<Vec<usize>> {
    let mut iter = loader.iter();
    iter.by_ref().take(batches).for_each(|batch| batch.unwrap().into_iter().for_each(|index| counts[index] += 1));
    iter
}

/// Interrupts a run after `steps` steps in epoch 3 and continues with another. Returns how many samples were consumed when it was
/// interrupted, and how often each was seen in the whole epoch.
fn interrupted(first: Run, steps: usize, second: Run) -> (usize, Vec<usize>) {
    let mut counts = vec![0; first.len];
    let mut states = Vec::new();
    for loader in first.loaders() {
        loader.set_epoch(3);
        // No more than there are, so that the loader is still in this epoch.
        let _stopped = count(&loader, steps.min(loader.num_batches()), &mut counts);
        states.push(loader.state());
    }
    assert!(states.iter().all(|state| *state == states[0]), "{states:?}");
    let dict = states[0].state_dict().unwrap();
    for mut loader in second.loaders() {
        loader.load_state_dict(&dict).unwrap();
        assert_eq!(loader.state(), states[0]);
        loader.set_epoch(3); // as a loop over epochs does
        drop(count(&loader, usize::MAX, &mut counts));
        assert_eq!(loader.state(), LoaderState { epoch: 4, consumed: 0, order: 0, ..states[0] });
    }
    (states[0].consumed, counts)
}

fn run(len: usize, world_size: usize, batch_size: usize, sampler: SamplerOptions) -> Run {
    Run { len, world_size, sampler, loader: LoaderOptions { batch_size, ..Default::default() } }
}

/// The order that all ranks share in epoch 3.
fn order(len: usize, options: SamplerOptions) -> Vec<usize> {
    if options.shuffle { randperm(len, options.seed.wrapping_add(3)).collect() } else { (0..len).collect() }
}

#[test]
fn runs_go_on_with_another_number_of_ranks() {
    for (before, after) in [(1, 3), (4, 2)] {
        for shuffle in [true, false] {
            let sampler = SamplerOptions { shuffle, seed: 7, ..Default::default() };
            // 12 samples were consumed: a multiple of either number of ranks.
            let (first, second) = (run(50, before, 12 / before, sampler), run(50, after, 5, sampler));
            let (consumed, counts) = interrupted(first, 1, second);
            assert_eq!(consumed, 12);
            // 50 samples are 51 on three ranks: that padding is the same as well.
            let whole = &order(50, sampler);
            let mut expected = vec![1; 50];
            whole[..50_usize.next_multiple_of(after) - 50].iter().for_each(|index| expected[*index] += 1);
            assert_eq!(counts, expected, "{before} → {after} ranks, shuffle {shuffle}");

            let sampler = SamplerOptions { remainder: Remainder::Drop, ..sampler };
            let (_, counts) = interrupted(Run { sampler, ..first }, 1, Run { sampler, ..second });
            let mut expected = vec![1; 50];
            whole[50 / after * after..].iter().for_each(|index| expected[*index] = 0);
            assert_eq!(counts, expected, "{before} → {after} ranks, shuffle {shuffle}, drop_last");
        }
    }
}

proptest! {
    #[test]
    fn an_interruption_changes_nothing(
        len in 1_usize..80, ranks in (1_usize..6, 1_usize..6), batch_sizes in (1_usize..9, 1_usize..9), steps in 0_usize..12,
        shuffle: bool, remainder in prop_oneof![Just(Remainder::Pad), Just(Remainder::Drop), Just(Remainder::Uneven)], seed: u64,
    ) {
        let drop_last = remainder == Remainder::Drop;
        let padding = remainder == Remainder::Pad;
        prop_assume!(!drop_last || len >= ranks.0.max(ranks.1));
        let sampler = SamplerOptions { shuffle, seed, remainder };
        let (first, second) = (run(len, ranks.0, batch_sizes.0, sampler), run(len, ranks.1, batch_sizes.1, sampler));
        // Without padding, ranks may end at different times: stop before.
        let steps = if remainder != Remainder::Uneven { steps } else { steps.min(len / ranks.0 / batch_sizes.0) };
        let (consumed, counts) = interrupted(first, steps, second);
        let order = order(len, sampler);

        // The head may be padding and the tail dropped: in either case fewer samples than ranks. Samples in between appear once.
        let left = len - consumed;
        let padded = if drop_last || !padding { 0 } else { left.next_multiple_of(ranks.1) - left };
        let first_padding = if consumed < len || drop_last { 0 } else { len.next_multiple_of(ranks.0) - len };
        let dropped = if drop_last { left % ranks.1 } else { 0 };
        let mut expected = vec![1; len];
        for place in (0..padded).chain(0..if padding { first_padding } else { 0 }) {
            expected[order[place % len]] += 1;
        }
        order[len - dropped..].iter().for_each(|index| expected[*index] = 0);
        prop_assert_eq!(&counts, &expected);
        if consumed % ranks.1 == 0 && consumed < len {
            prop_assert_eq!(counts.iter().sum::<usize>(), second.counts().iter().sum::<usize>());
        }
    }

    #[test]
    fn the_same_run_goes_on_with_the_same_batches(
        len in 1_usize..80, world_size in 1_usize..6, batch_size in 1_usize..9, steps in 0_usize..12, drop_last: bool, seed: u64,
    ) {
        prop_assume!(!drop_last || len.div_ceil(world_size) >= batch_size);
        let mut run = run(len, world_size, batch_size, SamplerOptions { seed, ..Default::default() });
        run.loader.drop_last = drop_last;
        for rank in 0..world_size {
            let (straight, stopped, mut resumed) = (run.loader(rank), run.loader(rank), run.loader(rank));
            let whole: Vec<_> = straight.iter().map(Result::unwrap).collect();
            prop_assert_eq!(whole.len(), straight.num_batches());
            let mut batches = stopped.iter();
            let part: Vec<_> = batches.by_ref().take(steps.min(whole.len())).map(Result::unwrap).collect();
            resumed.resume(stopped.state()).unwrap();
            prop_assert_eq!(resumed.iter().len(), whole.len() - part.len());
            let rest: Vec<_> = resumed.iter().map(Result::unwrap).collect();
            prop_assert_eq!([part, rest].concat(), whole);
        }
    }
}

/// Each sample is its index and a random number.
struct Augmented;

impl Dataset for Augmented {
    type Sample = (u32, i64);

    fn len(&self) -> usize {
        40
    }

    fn get(&self, index: usize, random: &mut Generator) -> Result<(u32, i64)> {
        // Some take longer than others.
        if index.is_multiple_of(7) {
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        Ok((index as u32, random.next_u64() as i64))
    }
}

/// The batches of three epochs.
fn augmented(rank: usize, num_workers: usize, seed: u64) -> Vec<Vec<(u32, i64)>> {
    let options = SamplerOptions { seed, ..Default::default() };
    let sampler = DistributedSampler::new(40, rank, 2, options).unwrap();
    let options = LoaderOptions { batch_size: 3, num_workers, ..Default::default() };
    let loader = DataLoader::from_sampler(Augmented, sampler, options, default_collate).unwrap();
    let mut epochs = Vec::new();
    while loader.current_epoch() < 3 {
        let mut samples = Vec::new();
        for batch in &loader {
            let (indices, numbers) = batch.unwrap();
            samples.extend(indices.to_vec1().unwrap().into_iter().zip(numbers.to_vec1().unwrap()));
        }
        epochs.push(samples);
    }
    epochs
}

#[test]
fn augmentation_does_not_depend_on_the_workers() {
    for rank in 0..2 {
        let expected = augmented(rank, 0, 5);
        for workers in [1, 2, 5] {
            assert_eq!(augmented(rank, workers, 5), expected, "rank {rank}, {workers} workers");
        }
        for (epoch, samples) in expected.iter().enumerate() {
            assert_eq!(samples.len(), 20);
            for (index, number) in samples {
                let mut random = Generator::for_sample(5, epoch as u64, *index as usize, rank);
                assert_eq!(*number, random.next_u64() as i64);
            }
        }
    }
}

#[test]
fn every_epoch_and_rank_and_seed_draws_other_numbers() {
    let mut numbers: Vec<i64> = Vec::new();
    for (rank, seed) in [(0, 5), (1, 5), (0, 6)] {
        numbers.extend(augmented(rank, 2, seed).concat().iter().map(|(_, number)| number));
    }
    let count = numbers.len();
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!((count, numbers.len()), (9 * 20, 9 * 20));
}

#[test]
fn what_was_read_ahead_is_not_consumed() {
    let sampler = DistributedSampler::new(40, 0, 2, SamplerOptions::default()).unwrap();
    let options = LoaderOptions { batch_size: 3, num_workers: 2, prefetch_factor: 4, ..Default::default() };
    let loader = DataLoader::from_sampler(Augmented, sampler, options, default_collate).unwrap();
    let at = |epoch, consumed| LoaderState { seed: 0, epoch, consumed, dataset_len: 40, order: 0 };
    let mut batches = loader.iter();
    assert_eq!(loader.state(), at(0, 0));
    for consumed in [6, 12, 18, 24, 30, 36, 40] {
        batches.next().unwrap().unwrap();
        assert_ne!(loader.state().order, 0);
        assert_eq!(LoaderState { order: 0, ..loader.state() }, at(0, consumed));
    }
    // The epoch is over when the loop is, so that a resumed run executes the code after the loop exactly once.
    assert!(batches.next().is_none());
    assert_eq!(loader.state(), at(1, 0));
    assert!(batches.next().is_none());
    assert_eq!(loader.state(), at(1, 0));
}

#[test]
fn a_resumed_run_has_the_seed_of_the_run_before() {
    let before = run(12, 1, 2, SamplerOptions { seed: 8, ..Default::default() }).loader(0);
    let mut after = run(12, 1, 2, SamplerOptions { seed: 9, ..Default::default() }).loader(0);
    before.iter().take(2).for_each(drop);
    after.resume(before.state()).unwrap();
    assert_eq!(after.state().seed, 8);
    let whole: Vec<_> = before.iter().map(Result::unwrap).collect();
    assert_eq!(after.iter().map(Result::unwrap).collect::<Vec<_>>(), whole[2..]);
}

#[test]
fn a_run_that_was_stopped_after_the_last_batch_ends_its_epoch() {
    let mut loader = run(12, 2, 3, SamplerOptions::default()).loader(0);
    loader.resume(LoaderState { epoch: 5, consumed: 12, ..loader.state() }).unwrap();
    assert_eq!((loader.current_epoch(), loader.iter().len()), (5, 0));
    assert!(loader.iter().next().is_none());
    assert_eq!((loader.current_epoch(), loader.iter().len()), (6, 2));
}

#[test]
fn a_loop_that_is_left_early_begins_the_epoch_anew() {
    let mut loader = run(12, 1, 2, SamplerOptions::default()).loader(0);
    let first: Vec<_> = loader.iter().take(2).map(Result::unwrap).collect();
    assert_eq!(loader.state().consumed, 4);
    assert_eq!(loader.iter().take(2).map(Result::unwrap).collect::<Vec<_>>(), first);
    // But a resumed run continues, however often it is asked for its length, and in the same epoch only.
    loader.resume(loader.state()).unwrap();
    loader.set_epoch(0);
    assert_eq!([loader.iter().len(), loader.iter().len()], [4, 4]);
    assert_eq!(loader.state().consumed, 4);
    assert_ne!(loader.iter().next().unwrap().unwrap(), first[0]);
    assert_eq!(loader.iter().len(), 6);
    loader.resume(loader.state()).unwrap();
    loader.set_epoch(1);
    assert_eq!((loader.state().consumed, loader.iter().len()), (0, 6));
}

#[test]
fn an_iterator_that_was_made_before_a_resume_is_an_error() {
    for num_workers in [0, 2] {
        let mut run = run(12, 1, 2, SamplerOptions::default());
        run.loader.num_workers = num_workers;
        let all: Vec<_> = run.loader(0).iter().map(Result::unwrap).collect();
        let mut loader = run.loader(0);
        let (mut unused, mut begun) = (loader.iter(), loader.iter());
        begun.next().unwrap().unwrap();
        loader.resume(LoaderState { consumed: 4, ..loader.state() }).unwrap();
        for early in [&mut unused, &mut begun] {
            let error = early.next().unwrap().unwrap_err().to_string();
            assert!(error.contains("make the iterator after load_latest"), "{error}");
            assert!(early.next().is_none() && early.len() == 0);
        }
        drop((unused, begun));
        assert_eq!(loader.state().consumed, 4);
        assert_eq!(loader.iter().map(Result::unwrap).collect::<Vec<_>>(), all[2..]);
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let sampler = |len| DistributedSampler::new(len, 0, 1, SamplerOptions::default()).unwrap();
    let new = |len, options| DataLoader::from_sampler(0..40, sampler(len), options, Ok).map(|_| ());
    let refused = |argument: &str, result: Result<()>| match result {
        Err(Error::InvalidArgument { argument: found, .. }) => assert_eq!(found, argument),
        other => panic!("{argument}: {other:?}"),
    };
    let options = LoaderOptions::default();
    refused("sampler", new(41, options));
    refused("batch_size", new(40, LoaderOptions { batch_size: 0, ..options }));
    refused("prefetch_factor", new(40, LoaderOptions { num_workers: 1, prefetch_factor: 0, ..options }));
    refused("prefetch_factor", new(40, LoaderOptions { num_workers: usize::MAX, ..options }));
    new(40, LoaderOptions { prefetch_factor: 0, ..options }).unwrap();

    let mut loader = run(12, 1, 2, SamplerOptions { seed: u64::MAX, ..Default::default() }).loader(0);
    loader.iter().take(3).for_each(drop);
    let before = loader.state();
    refused("state", loader.resume(LoaderState { consumed: 13, ..before }));
    assert!(matches!(loader.load_state_dict(&Default::default()), Err(Error::Parameter { .. })));
    assert_eq!(loader.state(), before);
    let mut copy = LoaderState::default();
    copy.load_state_dict(&before.state_dict().unwrap()).unwrap();
    assert_eq!(copy, LoaderState { seed: u64::MAX, epoch: 0, consumed: 6, dataset_len: 12, order: before.order });
}

#[test]
fn a_loader_without_a_batch_is_refused() {
    let new = |len, world_size, rank, sampler, loader| {
        let sampler = DistributedSampler::new(len, rank, world_size, sampler)?;
        DataLoader::from_sampler(0..len, sampler, loader, Ok)
    };
    let reason = |result: Result<Indices>| match result {
        Err(Error::InvalidArgument { argument, reason }) => format!("{argument}: {reason}"),
        Err(other) => panic!("{other:?}"),
        Ok(loader) => panic!("{} batches", loader.num_batches()),
    };
    let sampler = SamplerOptions::default();
    let loader = LoaderOptions { batch_size: 8, drop_last: true, ..Default::default() };
    // Each of the two ranks has seven samples.
    for rank in 0..2 {
        let found = reason(new(13, 2, rank, sampler, loader));
        assert!(
            found.starts_with("batch_size: ") && found.contains("7 samples") && found.contains("drop_last"),
            "{found}"
        );
        new(15, 2, rank, sampler, loader).unwrap();
    }
    new(13, 2, 0, sampler, LoaderOptions { drop_last: false, ..loader }).unwrap();
    // Nothing at all, and fewer samples than ranks.
    let found = reason(new(0, 2, 0, sampler, LoaderOptions::default()));
    assert!(found.starts_with("len: ") && found.contains("empty"), "{found}");
    let found =
        reason(new(1, 2, 0, SamplerOptions { remainder: Remainder::Drop, ..sampler }, LoaderOptions::default()));
    assert!(found.starts_with("remainder: ") && found.contains("1 sample"), "{found}");
    // An evaluation may leave ranks without samples, and those with fewer than others without a batch.
    let evaluation = SamplerOptions { shuffle: false, remainder: Remainder::Uneven, ..sampler };
    let counts = |len, loader| (0..3).map(move |rank| new(len, 3, rank, evaluation, loader).unwrap().iter().count());
    assert_eq!(counts(2, LoaderOptions::default()).collect::<Vec<_>>(), [1, 1, 0]);
    assert_eq!(counts(23, loader).collect::<Vec<_>>(), [1, 1, 0]);
}

#[test]
fn the_state_of_a_run_with_another_dataset_is_refused() {
    let loader = |len| run(len, 2, 2, SamplerOptions::default()).loader(0);
    let first = loader(12);
    first.iter().take(2).for_each(drop);
    let error = loader(20).load_state_dict(&first.state_dict().unwrap()).unwrap_err().to_string();
    assert!(error.contains("12 samples") && error.contains("20"), "{error}");
    // Between two epochs, a dataset may grow.
    first.iter().for_each(drop);
    let mut grown = loader(20);
    grown.load_state_dict(&first.state_dict().unwrap()).unwrap();
    assert_eq!((grown.current_epoch(), grown.iter().len()), (1, 5));
}

/// With one sample more on the first ranks, the last batches differ in length.
#[test]
fn all_ranks_have_the_same_state_without_padding_too() {
    let evaluation = SamplerOptions { shuffle: false, remainder: Remainder::Uneven, ..Default::default() };
    let uneven = run(10, 4, 3, evaluation);
    let states: Vec<_> = (0..4)
        .map(|rank| {
            let loader = uneven.loader(rank);
            let mut batches = loader.iter();
            assert!(batches.next().is_some());
            loader.state()
        })
        .collect();
    assert!(states.iter().all(|state| *state == states[0] && state.consumed == 10), "{states:?}");
}
