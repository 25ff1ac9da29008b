//! A sharded model that its ranks, which are processes, save to one file until they are killed.
//!
//! The processes are this test binary itself.
use crate::common::{sharded, start_ranks};
use candle_ddp::nn::{Linear, linear_no_bias};
use candle_ddp::seed::Generator;
use candle_ddp::{
    Block, DistributedDataParallel, InitOptions, ProcessGroup, Result, block, checkpoint, init_process_group,
};
use candle_nn::{VarBuilder, VarMap};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// The folder of the file.
const FOLDER: &str = "CANDLE_DDP_TEST_SHARDED_SAVE";
const RANKS: usize = 3;

/// Weights, each of which is sent in a part.
fn weights(vb: VarBuilder) -> candle_core::Result<Vec<Block<Linear>>> {
    (0..20).map(|index: usize| block(vb.pp(index), |vb| linear_no_bias(64, 256, vb))).collect()
}

/// The entry point of ranks.
#[test]
#[ignore = "started by other tests"]
fn rank_of_another_test() {
    let folder = std::env::var_os(FOLDER).unwrap();
    let init_method = std::env::var("INIT_METHOD").unwrap();
    let timeout = Duration::from_secs(120);
    let pg = init_process_group(InitOptions { timeout, init_method, ..Default::default() }).unwrap();
    pg.abort_on_error(|| save_until_killed(&pg, Path::new(&folder))).unwrap();
}

fn save_until_killed(pg: &ProcessGroup, folder: &Path) -> Result<()> {
    let varmap = VarMap::new();
    let _ddp = DistributedDataParallel::with_options(pg, &varmap, weights, sharded())?;
    let vars: Vec<_> = varmap.data().lock().unwrap().values().cloned().collect();
    let first = step_of(&folder.join("model")).map_or(1, |step| step + 1);
    let progress = File::create(folder.join(format!("progress{}", pg.rank()))).unwrap();
    progress.write_all_at(&(first - 1).to_le_bytes(), 0).unwrap();
    for step in first.. {
        vars.iter().try_for_each(|var| var.set(&var.zeros_like()?.affine(1., step as f64)?))?;
        checkpoint::save_distributed(pg, &varmap, folder.join("model"))?;
        progress.write_all_at(&step.to_le_bytes(), 0).unwrap();
    }
    Ok(())
}

/// The step of a file, all elements of which must have it.
fn step_of(file: &Path) -> Option<u64> {
    if !file.exists() {
        return None;
    }
    let mut steps = Vec::new();
    for tensor in checkpoint::read(file).unwrap().values() {
        let flat = tensor.flatten_all().unwrap();
        steps.extend([flat.min(0), flat.max(0)].map(|value| value.unwrap().to_scalar::<f32>().unwrap()));
    }
    assert_eq!(steps.len(), 40);
    steps.dedup();
    assert_eq!(steps.len(), 1, "a mixture: {steps:?}");
    Some(steps[0] as u64)
}

/// Kills one rank or all ranks at random moments; the file is always that of one save. On a busy machine, few saves end before their
/// ranks do, so it continues until one has ended and one was interrupted.
#[test]
fn killed_ranks_leave_a_whole_file() {
    let folder = tempfile::tempdir().unwrap();
    let progress = |rank: usize| folder.path().join(format!("progress{rank}"));
    let mut random = Generator::new(u64::from(std::process::id()));
    let (mut last, mut interrupted, mut kills) = (0, 0, 0);
    while kills < 12 || (last == 0 || interrupted == 0) && kills < 120 {
        kills += 1;
        (0..RANKS).for_each(|rank| drop(fs::remove_file(progress(rank))));
        let mut ranks = start_ranks(module_path!(), RANKS, &[(FOLDER, folder.path().display().to_string())]);
        let told = |rank: usize| fs::read(progress(rank)).ok()?.try_into().ok().map(u64::from_le_bytes);
        let deadline = Instant::now() + Duration::from_secs(180);
        while !(0..RANKS).all(|rank| told(rank).is_some()) {
            assert!(Instant::now() < deadline, "the ranks did not start");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(random.below(150_000)));
        let victim = random.below(RANKS as u64 + 1) as usize;
        for (rank, child) in ranks.iter_mut().enumerate() {
            if victim == RANKS || victim == rank {
                child.kill().unwrap();
            }
        }
        while !ranks.iter_mut().all(|child| child.try_wait().unwrap().is_some()) {
            assert!(Instant::now() < deadline, "a rank continues without the others");
            std::thread::sleep(Duration::from_millis(1));
        }
        let done = (0..RANKS).filter_map(told).max().unwrap();
        let step = step_of(&folder.path().join("model")).unwrap_or(0);
        assert!(step >= done && step >= last, "step {step} is there; {done} was saved, and {last} before");
        // A killed rank 0 leaves what it was writing; the next save removes that.
        let names = folder.path().read_dir().unwrap().map(|entry| entry.unwrap().file_name());
        let left = names.filter(|name| name.to_str().unwrap().ends_with(".tmp")).count();
        assert!(left <= 1, "{left} temporary files");
        interrupted += left;
        last = step;
    }
    assert!(last > 0 && interrupted > 0, "step {last} was saved, and {interrupted} of {kills} saves were interrupted");
    println!("{kills} kills, {interrupted} in a save of rank 0, step {last}");
}
