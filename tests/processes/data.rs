//! Processes under the real launcher that are killed in the middle of an epoch, and others that continue.
//!
//! The processes are this test binary itself.
use crate::common::test_arguments;
use candle_ddp::checkpoint::StateDict;
use candle_ddp::data::{DataLoader, Dataset, LoaderOptions, SamplerOptions, randperm};
use candle_ddp::seed::Generator;
use candle_ddp::{InitOptions, Result, init_process_group};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::process::Command;

/// The variable that names the folder of the run.
const FOLDER: &str = "CANDLE_DDP_TEST_DATA_FOLDER";
/// The variable that says after how many steps the ranks are killed.
const KILLED_AFTER: &str = "CANDLE_DDP_TEST_DATA_KILLED_AFTER";
const SAMPLES: usize = 101;

struct Slow;

impl Dataset for Slow {
    type Sample = usize;

    fn len(&self) -> usize {
        SAMPLES
    }

    fn get(&self, index: usize, random: &mut Generator) -> Result<usize> {
        std::thread::sleep(std::time::Duration::from_micros(random.below(2000)));
        // Workers must leave rayon's threads, of which ddprun sets the number, to training.
        assert_eq!(rayon::current_num_threads(), 1);
        Ok(index)
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
    let sampler = SamplerOptions { seed: 3, ..Default::default() };
    let options = LoaderOptions { batch_size: 3, num_workers: 3, sampler, ..Default::default() };
    let mut loader = DataLoader::with_collate(Slow, &pg, options, Ok)?;
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

fn run(folder: &Path, ranks: usize, killed_after: Option<usize>) -> bool {
    let mut command = Command::new(crate::common::ddprun());
    command.args(["--standalone", "--nproc-per-node", &ranks.to_string()]).arg(std::env::current_exe().unwrap());
    command.args(test_arguments(module_path!(), "rank_of_another_test")).env(FOLDER, folder);
    if let Some(steps) = killed_after {
        command.env(KILLED_AFTER, steps.to_string());
    }
    command.output().unwrap().status.success()
}

#[test]
fn killed_runs_go_on_with_other_numbers_of_ranks() {
    for (before, after) in [(1, 3), (4, 2)] {
        let folder = tempfile::tempdir().unwrap();
        assert!(!run(folder.path(), before, Some(4)), "{before} ranks were not killed");
        assert!(run(folder.path(), after, None), "{after} ranks do not continue");
        let mut counts = vec![0; SAMPLES];
        for file in std::fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().path()) {
            if file.extension().is_none() {
                let consumed = std::fs::read_to_string(file).unwrap();
                consumed.lines().for_each(|index| counts[index.parse::<usize>().unwrap()] += 1);
            }
        }
        // The remaining samples after the kill are padded to a multiple of the ranks, from the head of the order.
        let left = SAMPLES - 4 * 3 * before;
        let mut expected = vec![1; SAMPLES];
        let padding = left.next_multiple_of(after) - left;
        randperm(SAMPLES, 3).iter().take(padding).for_each(|index| expected[index] += 1);
        assert_eq!(counts, expected, "{before} → {after} ranks");
    }
}
