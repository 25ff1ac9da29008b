//! Orders of the program's own, weighted and of batches of similar length: how ranks share them, and runs that resume in them.
use crate::ranks::{Rank, alone, spawn};
use candle_ddp_data::{
    BlockOptions, BlockShuffle, DataLoader, DistributedSampler, EpochOrder, LengthBatches, LengthOptions, LoaderGroup,
    LoaderOptions, LoaderState, Order, Remainder, SamplerOptions, WeightedSampler,
};
use candle_ddp_state::seed::Generator;
use candle_ddp_state::{Error, Result};
use std::ops::Range;
use std::sync::Arc;

type Indices = DataLoader<Range<usize>, Vec<usize>>;

/// An order of a function of the epoch.
struct Own<F>(usize, F);

impl<F: Fn(u64) -> Result<EpochOrder> + Send + Sync> Order for Own<F> {
    fn dataset_len(&self) -> usize {
        self.0
    }

    fn epoch_order(&self, _: u64, epoch: u64) -> Result<EpochOrder> {
        (self.1)(epoch)
    }
}

fn loader(order: impl Order + 'static, group: &Rank, options: LoaderOptions) -> Result<Indices> {
    DataLoader::with_order(0..order.dataset_len(), order, group, options, Ok)
}

/// Lengths from 4 to 400, most of them short.
fn lengths(samples: usize) -> Vec<usize> {
    let mut random = Generator::new(1);
    (0..samples).map(|_| (4. * 100_f64.powf(random.uniform(0., 1.).powi(2))) as usize).collect()
}

/// Every order, and the batch size with which it is read.
fn orders() -> Vec<(&'static str, usize, Arc<dyn Order>)> {
    let weights: Vec<f64> = (0..101).map(|index| (index % 7) as f64).collect();
    let own = |epoch| Ok((0..90).map(|place| (place * 13 + epoch as usize) % 101).collect());
    vec![
        ("own", 3, Arc::new(Own(101, own))),
        ("the sampler's", 2, Arc::new(DistributedSampler::new(101, 0, 1, SamplerOptions::default()).unwrap())),
        ("with replacement", 3, Arc::new(WeightedSampler::with_replacement(weights.clone(), 130).unwrap())),
        ("without replacement", 2, Arc::new(WeightedSampler::without_replacement(weights, 75).unwrap())),
        ("in blocks", 3, Arc::new(BlockShuffle::new(101, BlockOptions { block: 8, window: 3, lanes: 2 }).unwrap())),
        ("of batches", 1, Arc::new(LengthBatches::new(lengths(200), 500).unwrap())),
        ("of rows", 1, Arc::new(LengthBatches::packed(lengths(300), 500, 4).unwrap())),
    ]
}

/// What all ranks read in epoch 2: a list of batches for each rank, and the state, which must be the same on all of them.
fn read(
    order: &Arc<dyn Order>,
    ranks: usize,
    options: LoaderOptions,
    from: Option<LoaderState>,
    batches: usize,
) -> (Vec<Vec<Vec<usize>>>, LoaderState) {
    let read = spawn(ranks, |group| {
        let mut loader = loader(order.clone(), group, options)?;
        if let Some(state) = from {
            loader.resume(state)?;
        }
        let whole = loader.epoch(2);
        let (left, read) = (whole.len(), whole.take(batches).collect::<Result<Vec<_>>>()?);
        assert_eq!(read.len(), left.min(batches));
        Ok((read, loader.state()))
    });
    let (read, states): (Vec<_>, Vec<_>) = read.unwrap().into_iter().unzip();
    assert!(states.iter().all(|state| *state == states[0]), "{states:?}");
    (read, states[0])
}

fn options(batch_size: usize, num_workers: usize) -> LoaderOptions {
    let sampler = SamplerOptions { seed: 5, ..Default::default() };
    LoaderOptions { batch_size, num_workers, sampler, ..Default::default() }
}

#[test]
fn runs_resume_with_other_ranks_in_every_order() {
    for (name, batch_size, order) in orders() {
        // One rank that reads place by place has the order itself: samples, or whole batches.
        let places = read(&order, 1, options(1, 0), None, usize::MAX).0.remove(0);
        for (before, after, num_workers) in [(1, 3, 0), (4, 2, 3), (3, 3, 2), (2, 5, 0)] {
            let what = format!("{name}, {before} → {after} ranks, {num_workers} workers");
            let options = options(batch_size, num_workers);
            let (first, state) = read(&order, before, options, None, 4);
            let consumed = 4 * before * batch_size;
            assert_eq!(state.consumed, places[..consumed].concat().len(), "{what}");
            let (rest, _) = read(&order, after, options, Some(state), usize::MAX);
            // Rank r has every `ranks`-th place from r on, and the head once more where places are missing.
            let share = |ranks: usize, from: usize, to: usize, rank: usize| -> Vec<usize> {
                let places = (from + rank..to).step_by(ranks).map(|place| &places[place % places.len()]);
                places.flatten().copied().collect()
            };
            for (rank, first) in first.iter().enumerate() {
                assert_eq!(first.concat(), share(before, 0, consumed, rank), "{what}, rank {rank}");
            }
            let end = consumed + (places.len() - consumed).next_multiple_of(after);
            for (rank, rest) in rest.iter().enumerate() {
                assert_eq!(rest.concat(), share(after, consumed, end, rank), "{what}, rank {rank}");
            }
        }
    }
}

#[test]
fn other_orders_refuse_the_state() {
    let weights = |first| [&[first][..], &[1.; 100]].concat();
    let weighted = |first| WeightedSampler::with_replacement(weights(first), 100).unwrap();
    let lengths_of = |first: usize| [&[first][..], &lengths(200)].concat();
    let batches = |first, most| LengthBatches::new(lengths_of(first), most).unwrap();
    let rows = |first, window| LengthBatches::packed(lengths_of(first), 500, window).unwrap();
    let sampler = |shuffle| {
        let options = SamplerOptions { shuffle, ..Default::default() };
        DistributedSampler::new(50, 0, 1, options).unwrap()
    };
    let cases: Vec<[Arc<dyn Order>; 2]> = vec![
        [Arc::new(weighted(1.)), Arc::new(weighted(2.))],
        [Arc::new(weighted(1.)), Arc::new(WeightedSampler::without_replacement(weights(1.), 100).unwrap())],
        [Arc::new(batches(40, 500)), Arc::new(batches(40, 450))],
        [Arc::new(batches(40, 500)), Arc::new(batches(400, 500))],
        [Arc::new(rows(40, 8)), Arc::new(rows(40, 7))],
        [Arc::new(rows(40, 8)), Arc::new(rows(400, 8))],
        [Arc::new(sampler(true)), Arc::new(sampler(false))],
    ];
    for [before, after] in cases {
        let (_, state) = read(&before, 2, options(1, 0), None, 3);
        let errors = spawn(3, |group| {
            let mut loader = loader(after.clone(), group, options(1, 0))?;
            let error = loader.resume(state).unwrap_err();
            assert_eq!((loader.current_epoch(), loader.state().consumed), (0, 0));
            // Between two epochs everything may change, and nothing is compared where the order is not known.
            loader.resume(LoaderState { consumed: 0, ..state })?;
            Ok(error.to_string())
        });
        for error in errors.unwrap() {
            assert!(error.contains("must continue with the same order"), "{error}");
        }
    }
    // No batch of this order ends there.
    let order: Arc<dyn Order> = Arc::new(Own(6, |_| Ok(EpochOrder::of_batches([vec![0, 1], vec![2, 3, 4], vec![5]]))));
    let (_, state) = read(&order, 1, options(1, 0), None, 2);
    assert_eq!(state.consumed, 5);
    for (consumed, fits) in [(1, false), (2, true), (4, false), (6, true), (7, false)] {
        let state = LoaderState { consumed, order: 0, ..state };
        let resumed = loader(order.clone(), &alone(), options(1, 0)).unwrap().resume(state);
        assert_eq!(resumed.is_ok(), fits, "{consumed}");
    }
}

/// How often each sample is drawn in epochs 0 to `epochs - 1`, by its place in the order.
fn drawn(sampler: &WeightedSampler, epochs: u64) -> Vec<Vec<usize>> {
    let order: Arc<dyn Order> = Arc::new(sampler.clone());
    let loader = loader(order, &alone(), options(usize::MAX, 0)).unwrap();
    (0..epochs).map(|epoch| loader.epoch(epoch).collect::<Result<Vec<_>>>().unwrap().concat()).collect()
}

/// Whether `hits` of `draws` are what independent draws with this probability give, to within five standard deviations.
fn assert_share(hits: usize, draws: usize, probability: f64, what: &str) {
    let (mean, draws) = (probability * draws as f64, draws as f64);
    let deviation = (draws * probability * (1. - probability)).sqrt();
    assert!((hits as f64 - mean).abs() <= 5. * deviation, "{what}: {hits} of {draws}, not about {mean} ± {deviation}");
}

#[test]
fn samples_are_drawn_as_their_weights_say() {
    // In any unit, also tiny ones, and with zeros at either end.
    for unit in [1., 1e-300, 1e300] {
        let weights = [0., 1., 2., 0., 3., 4., 0.];
        let sampler = WeightedSampler::with_replacement(weights.map(|weight| weight * unit), 20_000).unwrap();
        let drawn = drawn(&sampler, 5).concat();
        for (index, weight) in weights.iter().enumerate() {
            let hits = drawn.iter().filter(|drawn| **drawn == index).count();
            assert_share(hits, drawn.len(), weight / 10., &format!("sample {index}"));
        }
        // Pairs of neighbours are independent: no rank and no batch is special.
        let pairs = drawn.chunks(2).filter(|pair| *pair == [5, 4]).count();
        assert_share(pairs, drawn.len() / 2, 0.4 * 0.3, "pairs");
    }
}

/// The probabilities of drawing first i and then j of weights w, which PyTorch's `multinomial` has: w_i w_j / (1 - w_i).
#[test]
fn draws_without_replacement_are_of_those_that_are_left() {
    let weights = [0.1, 0.2, 0., 0.7];
    let sampler = WeightedSampler::without_replacement(weights, 2).unwrap();
    let drawn = drawn(&sampler, 5_000);
    for (i, first) in weights.iter().enumerate() {
        for (j, second) in weights.iter().enumerate().filter(|(j, _)| *j != i) {
            let hits = drawn.iter().filter(|pair| pair[..] == [i, j]).count();
            assert_share(hits, drawn.len(), first * second / (1. - first), &format!("{i}, then {j}"));
        }
    }
}

#[test]
fn draws_without_replacement_go_to_one_rank_each() {
    let weights: Vec<f64> = (0..50).map(|index| f64::from(index % 3)).collect();
    let order: Arc<dyn Order> = Arc::new(WeightedSampler::without_replacement(weights, 33).unwrap());
    let (ranks, _) = read(&order, 3, options(4, 2), None, usize::MAX);
    let mut seen = ranks.into_iter().flatten().flatten().collect::<Vec<_>>();
    seen.sort_unstable();
    // All whose weight is not 0.
    assert!(seen.into_iter().eq((0..50).filter(|index| index % 3 > 0)));
}

#[test]
fn bad_weights_and_lengths_are_refused() {
    let refused = |result: Result<&str>, name: &str, text: &str| match result {
        Err(Error::InvalidArgument { argument, reason }) => {
            assert!(argument == name && reason.contains(text), "{argument}: {reason}");
        }
        other => panic!("{name}: {other:?}"),
    };
    let with = |weights: &[f64], count| WeightedSampler::with_replacement(weights, count).map(|_| "");
    let without = |weights: &[f64], count| WeightedSampler::without_replacement(weights, count).map(|_| "");
    for make in [with, without] {
        refused(make(&[1., f64::NAN], 1), "weights", "sample 1 is NaN");
        refused(make(&[-1., 2.], 1), "weights", "sample 0 is -1");
        refused(make(&[1., f64::INFINITY], 1), "weights", "inf");
        refused(make(&[0., -0.], 1), "weights", "all 2 are 0");
        refused(make(&[], 1), "weights", "all 0 are 0");
        refused(make(&[1.], 0), "num_samples", "at least 1");
    }
    refused(with(&[f64::MAX, f64::MAX], 1), "weights", "overflows");
    refused(without(&[1., 0., 2.], 3), "num_samples", "only 2 of 3");
    without(&[f64::MAX, f64::MAX], 2).unwrap();

    let batches =
        |lengths: &[usize], options| LengthBatches::with_options(lengths.iter().copied(), 10, options).map(|_| "");
    let options = LengthOptions::default();
    refused(batches(&[3, 11], options), "lengths", "sample 1 is 11");
    refused(batches(&[0, 1], options), "lengths", "sample 0 is 0");
    refused(batches(&[], options), "lengths", "at least one");
    refused(batches(&[1], LengthOptions { max_samples: 0, ..options }), "max_samples", "at least 1");
    refused(batches(&[1], LengthOptions { noise: f64::NAN, ..options }), "noise", "NaN");
    refused(batches(&[1], LengthOptions { noise: -1., ..options }), "noise", "-1");
}

#[test]
fn batches_of_similar_length_are_full_and_all_ranks_have_as_many() {
    let (lengths, most) = (lengths(3000), 2000);
    let order: Arc<dyn Order> = Arc::new(LengthBatches::new(lengths.clone(), most).unwrap());
    let tokens = |batch: &[usize]| batch.iter().map(|index| lengths[*index]).max().unwrap() * batch.len();
    let (ranks, state) = read(&order, 3, options(1, 0), None, usize::MAX);
    let steps = ranks[0].len();
    assert!(ranks.iter().all(|batches| batches.len() == steps));
    // It is the beginning of the next epoch.
    assert_eq!((state.epoch, state.consumed), (3, 0));
    let mut seen = vec![0; 3000];
    let (mut padded, mut slack) = (0, 0);
    for step in 0..steps {
        let of_ranks: Vec<usize> = ranks.iter().map(|batches| tokens(&batches[step])).collect();
        let largest = of_ranks.iter().max().unwrap();
        assert!(*largest <= most);
        padded += of_ranks.iter().sum::<usize>();
        slack += of_ranks.iter().map(|tokens| largest - tokens).sum::<usize>();
        ranks.iter().for_each(|batches| batches[step].iter().for_each(|index| seen[*index] += 1));
    }
    let real: usize = seen.iter().zip(&lengths).map(|(times, length)| times * length).sum();
    assert!(padded - real < padded / 10, "{} of {padded} tokens are padding", padded - real);
    assert!(slack < padded / 10, "{slack} of {padded} tokens are waited for");
    // The ranks' batches are whole, and fewer than there are ranks are there twice.
    let twice: Vec<usize> = (0..3000).filter(|index| seen[*index] != 1).collect();
    assert!(twice.iter().all(|index| seen[*index] == 2));
    let heads: Vec<usize> = ranks.iter().take(2).flat_map(|batches| batches[0].clone()).collect();
    assert!(twice.iter().all(|index| heads.contains(index)));

    let epoch = |options, epoch| {
        let order = LengthBatches::with_options(lengths.clone(), most, options).unwrap();
        let loader = loader(order, &alone(), LoaderOptions::default()).unwrap();
        let mut batches: Vec<Vec<usize>> = loader.epoch(epoch).collect::<Result<_>>().unwrap();
        batches.iter_mut().for_each(|batch| batch.sort_unstable());
        batches
    };
    let [first, second] = [0, 1].map(|number| epoch(LengthOptions::default(), number));
    let same = first.iter().filter(|batch| second.contains(batch)).count();
    assert!(same < first.len() / 10, "{same} of {} batches are in both epochs", first.len());
    assert!(epoch(LengthOptions { max_samples: 7, noise: 0. }, 0).iter().all(|batch| batch.len() <= 7));
}

#[test]
fn what_remains_may_be_dropped_or_uneven() {
    let order: Arc<dyn Order> = Arc::new(Own(9, |_| Ok(EpochOrder::of_batches([vec![0, 1], vec![2], vec![3, 4, 5]]))));
    let read = |remainder| {
        let sampler = SamplerOptions { remainder, ..Default::default() };
        read(&order, 2, LoaderOptions { sampler, ..Default::default() }, None, usize::MAX).0
    };
    assert_eq!(read(Remainder::Pad), [[vec![0, 1], vec![3, 4, 5]], [vec![2], vec![0, 1]]]);
    assert_eq!(read(Remainder::Drop), [[vec![0, 1]], [vec![2]]]);
    assert_eq!(read(Remainder::Uneven), [vec![vec![0, 1], vec![3, 4, 5]], vec![vec![2]]]);
}

#[test]
fn a_batch_that_is_padding_has_no_indices() {
    let order: Arc<dyn Order> = Arc::new(Own(9, |_| Ok(EpochOrder::of_batches([vec![0, 1], vec![2], vec![3, 4, 5]]))));
    let read = spawn(2, |group| {
        let loader = loader(order.clone(), group, LoaderOptions::default())?;
        loader.iter().with_indices().map(|batch| Ok(batch?.0)).collect::<Result<Vec<_>>>()
    });
    assert_eq!(read.unwrap(), [[vec![0, 1], vec![3, 4, 5]], [vec![2], vec![]]]);
}

/// The error of every rank.
fn refused(make: impl Fn(usize) -> (Arc<dyn Order>, LoaderOptions) + Sync) -> Vec<Error> {
    let errors = spawn(2, |group| {
        let (order, options) = make(group.rank());
        Ok(DataLoader::with_order(0..10, order, group, options, Ok).map(|_: Indices| ()).unwrap_err())
    });
    errors.unwrap()
}

#[test]
fn orders_that_do_not_fit_are_errors_on_every_rank() {
    let order = |len, indices: &[usize]| -> Arc<dyn Order> {
        let indices = indices.to_vec();
        Arc::new(Own(len, move |_| Ok(indices.iter().copied().collect())))
    };
    let of_batches = |batches: &'static [&[usize]]| -> Arc<dyn Order> {
        Arc::new(Own(10, |_| Ok(EpochOrder::of_batches(batches.iter().map(|batch| batch.iter().copied())))))
    };
    let good = || order(10, &[3, 1, 4]);
    let failing: Arc<dyn Order> = Arc::new(Own(10, |_| Err(Error::RankOutOfRange { rank: 7, world_size: 7 })));
    let defaults = LoaderOptions::default();
    let unshuffled = SamplerOptions { shuffle: false, ..Default::default() };
    let drop = SamplerOptions { remainder: Remainder::Drop, ..Default::default() };
    // On rank 1 alone, and every rank learns of it.
    let cases: Vec<(Arc<dyn Order>, LoaderOptions, &str)> = vec![
        (order(11, &[3]), defaults, "order: it must be for this dataset of 10 samples, and is for 11"),
        (order(10, &[3, 10, 4]), defaults, "order: its indices must be below 10"),
        (order(10, &[]), defaults, "order: an epoch must have at least one sample"),
        (of_batches(&[&[1, 2], &[], &[3]]), defaults, "batch 1 has none"),
        (of_batches(&[]), defaults, "order: an epoch must have at least one sample"),
        (of_batches(&[&[1]]), LoaderOptions { batch_size: 2, ..defaults }, "the order makes the batches itself"),
        (of_batches(&[&[1]]), LoaderOptions { drop_last: true, ..defaults }, "the order makes the batches itself"),
        (
            order(10, &[3]),
            LoaderOptions { sampler: drop, ..defaults },
            "would drop the whole epoch, which has 1 sample",
        ),
        (good(), LoaderOptions { batch_size: 9, drop_last: true, ..defaults }, "drop_last leaves no batch"),
        (good(), LoaderOptions { sampler: unshuffled, ..defaults }, "shuffle is up to the order"),
        (good(), LoaderOptions { batch_size: 0, ..defaults }, "batch_size: it must be at least 1"),
        (failing, defaults, "rank 7"),
    ];
    for (bad, options, expected) in cases {
        for error in refused(|rank| if rank == 0 { (good(), defaults) } else { (bad.clone(), options) }) {
            assert!(matches!(&error, Error::RankFailed { rank: 1, reason } if reason.contains(expected)), "{error}");
        }
    }
    // Ranks whose orders differ would read samples twice, and others never.
    for error in refused(|rank| (order(10, &[3, 1, rank]), defaults)) {
        let text = error.to_string();
        assert!(matches!(error, Error::Mismatch { rank: 1, .. }) && text.contains("hash of the order"), "{text}");
    }
}

#[test]
fn an_epoch_that_cannot_be_made_is_an_error_in_its_place() {
    let results = spawn(2, |group| {
        let order = Own(10, |epoch| match epoch {
            1 => Ok((0..11).collect()),
            2 => Err(Error::RankOutOfRange { rank: 7, world_size: 7 }),
            // Ever more samples.
            epoch => Ok((0..2 + epoch as usize).collect()),
        });
        let loader = loader(order, group, LoaderOptions { batch_size: 2, ..Default::default() })?;
        let counts: Vec<usize> = (0..4).map(|epoch| loader.epoch(epoch).len()).collect();
        let errors: Vec<String> = [1, 2]
            .into_iter()
            .flat_map(|epoch| loader.epoch(epoch))
            .map(|batch| batch.unwrap_err().to_string())
            .collect();
        loader.set_epoch(2);
        assert_eq!(loader.num_batches(), 0);
        loader.set_epoch(8);
        assert_eq!((loader.num_batches(), loader.epoch(0).flatten().count()), (3, 1));
        Ok((counts, errors))
    });
    for (counts, errors) in results.unwrap() {
        assert_eq!(counts, [1, 1, 1, 2]);
        assert!(errors.len() == 2 && errors[0].contains("below 10") && errors[1].contains("rank 7"), "{errors:?}");
    }
}
