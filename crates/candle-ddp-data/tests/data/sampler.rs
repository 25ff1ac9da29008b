//! `DistributedSampler` and `randperm` against PyTorch (crates/candle-ddp-data/tests/golden/sampler.json, written by
//! scripts/golden_sampler.py), and the properties that training relies on.
use candle_ddp_data::{DistributedSampler, Remainder, SamplerOptions, randperm};
use candle_ddp_state::Error;
use proptest::prelude::*;
use serde_json::Value;

fn golden() -> Value {
    serde_json::from_str(include_str!("../golden/sampler.json")).unwrap()
}

fn number(row: &Value, key: &str) -> usize {
    row[key].as_u64().unwrap_or_else(|| panic!("{key} of {row}")) as usize
}

fn numbers(row: &Value, key: &str) -> Vec<usize> {
    row[key].as_array().unwrap().iter().map(|value| value.as_u64().unwrap() as usize).collect()
}

/// FNV-1a over 64-bit words, as in the script.
fn fold(indices: &[usize]) -> String {
    let hash = indices
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, &index| (hash ^ index as u64).wrapping_mul(0x0100_0000_01b3));
    format!("{hash:016x}")
}

#[test]
fn indices_are_pytorchs() {
    let golden = golden();
    let rows = golden["samplers"].as_array().unwrap();
    assert!(rows.len() > 500);
    for row in rows {
        let options = SamplerOptions {
            shuffle: row["shuffle"].as_bool().unwrap(),
            seed: row["seed"].as_str().unwrap().parse().unwrap(),
            remainder: if row["drop_last"].as_bool().unwrap() { Remainder::Drop } else { Remainder::Pad },
        };
        let sampler =
            DistributedSampler::new(number(row, "n"), number(row, "rank"), number(row, "world_size"), options);
        // Where PyTorch gives every rank nothing without a word.
        let Ok(mut sampler) = sampler else {
            assert_eq!(number(row, "num_samples"), 0, "{row}");
            continue;
        };
        sampler.set_epoch(number(row, "epoch") as u64);
        assert_eq!(sampler.len(), number(row, "num_samples"), "{row}");
        assert_eq!(sampler.total_size(), number(row, "total_size"), "{row}");
        assert_eq!(sampler.is_empty(), sampler.iter().next().is_none());
        let indices: Vec<usize> = sampler.iter().collect();
        if row.get("indices").is_some() {
            assert_eq!(indices, numbers(row, "indices"), "{row}");
        } else {
            assert_eq!(indices.len(), number(row, "len"), "{row}");
            assert!(indices.starts_with(&numbers(row, "first")), "{row}");
            assert!(indices.ends_with(&numbers(row, "last")), "{row}");
            assert_eq!(fold(&indices), row["hash"], "{row}");
        }
    }
}

/// PyTorch's two ways to shuffle, at the size where it goes over from one to the other.
#[test]
#[ignore = "1 GB of memory, and minutes in a debug build: cargo test --release -p candle-ddp-data --test data -- --ignored"]
fn permutations_of_hundreds_of_millions_are_pytorchs() {
    let golden = golden();
    for row in golden["large"].as_array().unwrap() {
        let n = number(row, "n");
        let permutation: Vec<usize> = randperm(n, row["seed"].as_u64().unwrap()).collect();
        let at = |positions: &mut dyn Iterator<Item = usize>| {
            positions.map(|position| permutation[position]).collect::<Vec<_>>()
        };
        assert_eq!(at(&mut (0..8)), numbers(row, "first"));
        assert_eq!(at(&mut (n - 8..n)), numbers(row, "last"));
        assert_eq!(at(&mut numbers(row, "positions").into_iter()), numbers(row, "at"));
    }
}

#[test]
fn a_rank_outside_of_the_world_is_refused() {
    // The last two are of programs that give the number of ranks first, on two of four ranks.
    for (rank, world_size) in [(2, 2), (0, 0), (4, 0), (4, 3)] {
        match DistributedSampler::new(10, rank, world_size, SamplerOptions::default()) {
            Err(Error::InvalidArgument { argument: "rank", reason }) => {
                assert!(reason.contains("len, rank, world_size, options"), "{reason}");
            }
            other => panic!("{rank} of {world_size}: {other:?}"),
        }
    }
    let error = DistributedSampler::new(usize::MAX, 0, 2, SamplerOptions::default()).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { argument: "len", .. }), "{error}");
}

#[test]
fn nothing_grows_with_the_dataset_when_it_is_not_shuffled() {
    // As a list, these indices would take exabytes.
    let options = SamplerOptions { shuffle: false, remainder: Remainder::Drop, ..Default::default() };
    let sampler = DistributedSampler::new(usize::MAX, 1, 2, options).unwrap();
    assert_eq!(sampler.len(), usize::MAX / 2);
    assert_eq!(sampler.iter().take(3).collect::<Vec<_>>(), [1, 3, 5]);
}

fn rank_indices(len: usize, world_size: usize, options: SamplerOptions, epoch: u64) -> Vec<Vec<usize>> {
    (0..world_size)
        .map(|rank| {
            let mut sampler = DistributedSampler::new(len, rank, world_size, options).unwrap();
            sampler.set_epoch(epoch);
            assert_eq!(sampler.iter().len(), sampler.len());
            sampler.iter().collect()
        })
        .collect()
}

proptest! {
    #[test]
    fn ranks_share_the_dataset_fairly(
        len in 1_usize..200, world_size in 1_usize..12, shuffle: bool, drop_last: bool, seed: u64, epoch in 0_u64..9,
    ) {
        prop_assume!(!drop_last || len >= world_size);
        let remainder = if drop_last { Remainder::Drop } else { Remainder::Pad };
        let options = SamplerOptions { shuffle, seed, remainder };
        let ranks = rank_indices(len, world_size, options, epoch);
        let samples = if drop_last { len / world_size } else { len.div_ceil(world_size) };
        prop_assert!(ranks.iter().all(|indices| indices.len() == samples));

        let mut counts = vec![0; len];
        ranks.iter().flatten().for_each(|&index| counts[index] += 1);
        let padded = samples * world_size;
        if drop_last {
            prop_assert_eq!(counts.iter().filter(|&&count| count == 1).count(), padded);
            prop_assert_eq!(counts.iter().filter(|&&count| count == 0).count(), len - padded);
        } else {
            // Every sample as often as its neighbours, or once more for those at the head of the order.
            prop_assert!(len == 0 || counts.iter().all(|&count| (padded / len..=padded.div_ceil(len)).contains(&count)));
        }
    }

    #[test]
    fn without_its_padding_every_sample_is_seen_once(
        len in 1_usize..200, world_size in 1_usize..12, shuffle: bool, seed: u64,
    ) {
        let options = SamplerOptions { shuffle, seed, remainder: Remainder::Uneven };
        let mut seen = Vec::new();
        for rank in 0..world_size {
                let sampler = DistributedSampler::new(len, rank, world_size, options).unwrap();
                prop_assert!((len / world_size..=len.div_ceil(world_size)).contains(&sampler.len()));
                prop_assert_eq!((sampler.iter().len(), sampler.total_size()), (sampler.len(), len));
                let padded = DistributedSampler::new(len, rank, world_size, SamplerOptions { remainder: Remainder::Pad, ..options });
                prop_assert!(padded.unwrap().iter().take(sampler.len()).eq(sampler.iter()));
                seen.extend(sampler.iter());
        }
        seen.sort_unstable();
        prop_assert!(seen.into_iter().eq(0..len));
    }

    #[test]
    fn epochs_differ_and_repeat(len in 50_usize..200, world_size in 1_usize..5, seed: u64, epoch in 0_u64..9) {
        let options = SamplerOptions { seed, ..Default::default() };
        let once = rank_indices(len, world_size, options, epoch);
        prop_assert_eq!(&once, &rank_indices(len, world_size, options, epoch));
        prop_assert_ne!(&once, &rank_indices(len, world_size, options, epoch + 1));
        // An epoch is nothing but a step of the seed.
        let shifted = SamplerOptions { seed: seed.wrapping_add(epoch), ..options };
        prop_assert_eq!(&once, &rank_indices(len, world_size, shifted, 0));
    }

    #[test]
    fn randperm_permutes(n in 0_usize..3000, seed: u64) {
        let permutation = randperm(n, seed);
        prop_assert_eq!(permutation.len(), n);
        let mut indices: Vec<usize> = permutation.clone().collect();
        indices.sort_unstable();
        prop_assert!(indices.into_iter().eq(0..n));
        prop_assert!(permutation.eq(randperm(n, seed & u64::from(u32::MAX))));
    }
}
