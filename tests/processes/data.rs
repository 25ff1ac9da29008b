//! Processes under the real launcher that are killed in the middle of an epoch, and others that continue.
//!
//! The processes are this test binary itself.
use crate::common::launch_test;
use candle_ddp::checkpoint::StateDict;
use candle_ddp::data::{
    BlockOptions, BlockShuffle, DataLoader, Dataset, LengthBatches, LoaderOptions, SamplerOptions, TarShards,
    WeightedSampler,
};
use candle_ddp::seed::Generator;
use candle_ddp::{InitOptions, ProcessGroup, Result, init_process_group};
use candle_ddp_testing::tar_files::{files, shard};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

/// The variable that names the folder of the run.
const FOLDER: &str = "CANDLE_DDP_TEST_DATA_FOLDER";
/// The variable that says after how many steps the ranks are killed.
const KILLED_AFTER: &str = "CANDLE_DDP_TEST_DATA_KILLED_AFTER";
/// The variable that names the order, one of `ORDERS`.
const ORDER: &str = "CANDLE_DDP_TEST_DATA_ORDER";
const ORDERS: [&str; 4] = ["sampler", "weighted", "lengths", "shards"];
/// The folder of the shards in that of the run.
const SHARDS: &str = "shards.d";
const SAMPLES: usize = 101;

/// The indices, or the samples of shards with their numbers as keys.
struct Slow(Option<TarShards>);

impl Dataset for Slow {
    type Sample = usize;

    fn len(&self) -> usize {
        SAMPLES
    }

    fn get(&self, index: usize, random: &mut Generator) -> Result<usize> {
        std::thread::sleep(std::time::Duration::from_micros(random.below(2000)));
        // Workers must leave rayon's threads, of which ddprun sets the number, to training.
        assert_eq!(rayon::current_num_threads(), 1);
        match &self.0 {
            Some(shards) => Ok(shards.get(index, random)?.key().parse().unwrap()),
            None => Ok(index),
        }
    }
}

/// The entry point of ranks.
#[test]
#[ignore = "started by other tests"]
fn rank_of_another_test() {
    rank(Path::new(&std::env::var_os(FOLDER).unwrap())).unwrap();
}

/// Reads an epoch, and after every step writes down the samples it has consumed and saves its position.
fn rank(folder: &Path) -> Result<()> {
    let pg = init_process_group(InitOptions::default())?;
    let order = std::env::var(ORDER).unwrap();
    let mut loader = loader(&pg, folder, &order, if order == "lengths" { 1 } else { 3 })?;
    let state = folder.join("loader.safetensors");
    if state.exists() {
        loader.load(&state)?;
    }
    let killed_after: usize = std::env::var(KILLED_AFTER).map_or(usize::MAX, |steps| steps.parse().unwrap());
    let consumed = folder.join(format!("{}-of-{}", pg.rank(), pg.world_size()));
    let mut consumed = OpenOptions::new().create(true).append(true).open(consumed).unwrap();
    for (step, batch) in loader.iter().enumerate() {
        for index in batch? {
            writeln!(consumed, "{index}").unwrap();
        }
        pg.barrier()?;
        if pg.rank() == 0 {
            loader.save(&state)?;
        }
        pg.barrier()?;
        if step + 1 == killed_after {
            // All at once, with samples read ahead.
            let me = rustix::process::getpid();
            rustix::process::kill_process(me, rustix::process::Signal::KILL).unwrap();
        }
    }
    assert_eq!(loader.current_epoch(), 1);
    Ok(())
}

fn loader(pg: &ProcessGroup, folder: &Path, order: &str, batch_size: usize) -> Result<DataLoader<Slow, Vec<usize>>> {
    let sampler = SamplerOptions { seed: 3, ..Default::default() };
    let options = LoaderOptions { batch_size, num_workers: 3, sampler, ..Default::default() };
    match order {
        "weighted" => {
            let weights: Vec<f64> = (1..=SAMPLES).map(|index| index as f64).collect();
            let order = WeightedSampler::without_replacement(weights, SAMPLES)?;
            DataLoader::with_order(Slow(None), order, pg, options, Ok)
        }
        "lengths" => {
            let order = LengthBatches::new((0..SAMPLES).map(|index| 1 + index % 30), 50)?;
            DataLoader::with_order(Slow(None), order, pg, options, Ok)
        }
        "shards" => {
            // All ranks make the indices at once.
            let shards = TarShards::in_folder(folder.join(SHARDS))?;
            let order = BlockShuffle::new(shards.len(), BlockOptions { block: 9, window: 2, lanes: 3 })?;
            DataLoader::with_order(Slow(Some(shards)), order, pg, options, Ok)
        }
        _ => DataLoader::with_collate(Slow(None), pg, options, Ok),
    }
}

fn run(folder: &Path, order: &str, ranks: usize, killed_after: Option<usize>) -> bool {
    let mut command = launch_test(module_path!(), ranks, &["--standalone"]);
    command.env(FOLDER, folder).env(ORDER, order).envs(killed_after.map(|steps| (KILLED_AFTER, steps.to_string())));
    command.output().unwrap().status.success()
}

#[test]
fn killed_runs_go_on_with_other_numbers_of_ranks() {
    for (order, (before, after)) in ORDERS.into_iter().flat_map(|order| [(order, (1, 3)), (order, (4, 2))]) {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join(SHARDS)).unwrap();
        for first in (0..SAMPLES).step_by(20) {
            let path = folder.path().join(SHARDS).join(format!("{first:05}.tar"));
            shard(&path, &files(first..SAMPLES.min(first + 20)));
        }
        assert!(!run(folder.path(), order, before, Some(4)), "{before} ranks were not killed");
        assert!(run(folder.path(), order, after, None), "{after} ranks do not continue");
        let mut counts = vec![0; SAMPLES];
        for file in std::fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().path()) {
            if file.extension().is_none() {
                let consumed = std::fs::read_to_string(file).unwrap();
                consumed.lines().for_each(|index| counts[index.parse::<usize>().unwrap()] += 1);
            }
        }
        // The order itself: samples, or batches.
        let places =
            candle_ddp::spawn(1, |pg| loader(&pg, folder.path(), order, 1)?.iter().collect::<Result<Vec<_>>>());
        let places = places.unwrap().remove(0);
        // What is left after the kill is padded to a multiple of the ranks, from the head of the order.
        let left = places.len() - 4 * before * if order == "lengths" { 1 } else { 3 };
        let mut expected = vec![1; SAMPLES];
        let padding = left.next_multiple_of(after) - left;
        places[..padding].concat().into_iter().for_each(|index| expected[index] += 1);
        assert_eq!(counts, expected, "{order}: {before} → {after} ranks");
    }
}
