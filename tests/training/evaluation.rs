//! The recipe in docs/evaluation.md: metrics, early stopping, best and last checkpoint.
use crate::common::{assert_close, floats, ranks, var};
use candle_ddp::checkpoint;
include!("evaluation_recipe.rs");

const PATIENCE: u64 = 3;

/// A rank's history, and its weights in the end.
type Outcome = (Vec<(f64, f64)>, Vec<f32>);

fn run(world_size: usize, zero: bool, folder: &Path) -> Vec<Outcome> {
    let trained = ranks(world_size, |pg| train(&pg, folder, (500, PATIENCE, zero), validate));
    trained.into_iter().map(|trained| (trained.history.0, floats(&var(&trained.varmap, "fc.weight")))).collect()
}

#[test]
fn the_recipe_stops_early_with_the_best_model_on_all_ranks() {
    let folder = || tempfile::tempdir().unwrap();
    let (alone, whole, zero) = (folder(), folder(), folder());
    let one = run(1, false, alone.path()).remove(0);
    let flat =
        |history: &[(f64, f64)]| -> Vec<f32> { history.iter().flat_map(|(a, b)| [*a as f32, *b as f32]).collect() };
    for (found, folder) in [(run(2, false, whole.path()), &whole), (run(2, true, zero.path()), &zero)] {
        assert_eq!(found[0], found[1]);
        let (history, weights) = &found[0];
        let best = history.iter().map(|(_, validation)| *validation).fold(f64::INFINITY, f64::min);
        let best_epoch = history.iter().position(|(_, validation)| *validation == best).unwrap();
        assert!((5..490).contains(&best_epoch), "{best_epoch}: {history:?}");
        assert_eq!(history.len(), best_epoch + PATIENCE as usize + 1);
        // The model that is returned is the best, and the last is another.
        let saved = |epoch: usize| {
            let file = folder.path().join(format!("step-{:08}/model.safetensors", epoch + 1));
            floats(&checkpoint::read(file).unwrap()["fc.weight"])
        };
        assert_eq!(*weights, saved(best_epoch));
        assert_ne!(*weights, saved(history.len() - 1));
        // As one process on the whole batch, from the same seed.
        assert_close(&flat(history), &flat(&one.0), 1e-4, "history");
        assert_close(weights, &one.1, 1e-4, "weights");
    }
}

/// The best loss, its epoch and the optimizer are those of before, so that the run ends after the same epoch with the same bits.
#[test]
fn the_recipe_resumes_with_its_patience() {
    let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let whole = run(2, true, whole.path());
    let before_the_end = whole[0].0.len() as u64 - 2;
    for epochs in [4, before_the_end] {
        ranks(2, |pg| train(&pg, parts.path(), (epochs, PATIENCE, true), validate));
    }
    assert_eq!(run(2, true, parts.path()), whole);
    // A run that has ended stays as it is.
    assert_eq!(run(2, true, parts.path()), whole);
}

/// A NaN loss is never the best one, except in the first epoch.
#[test]
fn the_recipe_goes_on_after_a_loss_that_is_not_a_number() {
    let best_of = |losses: &'static [f64]| {
        let folder = tempfile::tempdir().unwrap();
        let trained = ranks(2, |pg| {
            let epoch = std::cell::Cell::new(0);
            let scripted = |_: &_| {
                epoch.set(epoch.get() + 1);
                Ok(losses.get(epoch.get() - 1).copied().unwrap_or(f64::NAN))
            };
            let trained = train(&pg, folder.path(), (10, PATIENCE, false), scripted)?;
            let found: Vec<f64> = trained.history.0.iter().map(|(_, validation)| *validation).collect();
            Ok((found, floats(&var(&trained.varmap, "fc.weight"))))
        });
        assert_eq!(format!("{:?}", trained[0]), format!("{:?}", trained[1]));
        trained.into_iter().next().unwrap().0
    };
    assert_eq!(best_of(&[f64::NAN, 2., f64::NAN, 1.]).len(), 4 + PATIENCE as usize);
    assert_eq!(best_of(&[]).len(), 1 + PATIENCE as usize);
}

#[test]
fn the_page_shows_this_recipe() {
    assert!(include_str!("../../docs/evaluation.md").contains(include_str!("evaluation_recipe.rs")));
}
