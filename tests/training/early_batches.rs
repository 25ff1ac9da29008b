//! Loops that draw the next batch before they have used the current one, as the recipe in docs/data.md has them.
use crate::common::{going_on, ranks};
use candle_core::{Device, Tensor};
use candle_ddp::Result;
use candle_ddp::data::{DataLoader, LoaderOptions, TensorDataset};

type Loader = DataLoader<TensorDataset<Tensor>, Tensor>;

/// The samples that a run trains with up to step `last`, drawing early. `own` saves the loader instead of the state from
/// before the early batch.
fn run(
    pg: &candle_ddp::ProcessGroup,
    folder: &std::path::Path,
    last: u64,
    workers: usize,
    own: bool,
) -> Result<Vec<f32>> {
    let samples = TensorDataset::new(Tensor::arange(0f32, 24., &Device::Cpu)?)?;
    let options = LoaderOptions { batch_size: 2, num_workers: workers, ..Default::default() };
    let mut loader: Loader = DataLoader::new(samples, pg, options)?;
    let mut checkpointer = going_on(pg, folder)?;
    let mut step = checkpointer.load_latest(("loader", &mut loader))?.unwrap_or(0);
    let mut used_samples = Vec::new();
    let mut batches = loader.iter();
    let mut next = batches.next();
    while let Some(batch) = next {
        let mut used = loader.state();
        next = batches.next();
        used_samples.extend(batch?.to_vec1::<f32>()?);
        step += 1;
        if step == last {
            match own {
                true => checkpointer.save(step, ("loader", &mut loader))?,
                false => checkpointer.save(step, ("loader", &mut used))?,
            };
            checkpointer.finish()?;
            break;
        }
    }
    Ok(used_samples)
}

#[test]
fn the_state_from_before_an_early_batch_leaves_nothing_out() {
    for workers in [0, 2] {
        for own in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let seen = ranks(2, |pg| {
                let first = run(&pg, folder.path(), 2, workers, own)?;
                Ok([first, run(&pg, folder.path(), 100, workers, own)?].concat())
            });
            let mut seen = seen.concat();
            seen.sort_by(f32::total_cmp);
            // The loader's own state is one batch ahead: on each rank, two samples are left out.
            let all: Vec<f32> = (0..24).map(|sample| sample as f32).collect();
            assert_eq!(seen.len(), if own { 20 } else { 24 }, "{workers} workers");
            assert!(own || seen == all, "{seen:?}");
        }
    }
}
