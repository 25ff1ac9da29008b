//! The recipe in docs/evaluation.md: metrics, early stopping, best and last checkpoint.
use crate::common::{assert_close, floats, ranks, var};
include!("evaluation_recipe.rs");

const PATIENCE: usize = 3;

/// A rank's history, and its weights in the end.
type Outcome = (Vec<(f64, f64)>, Vec<f32>);

fn run(world_size: usize, zero: bool, folder: &Path) -> Vec<Outcome> {
    let trained = ranks(world_size, |pg| train(&pg, folder, (500, PATIENCE, zero), validate));
    let values = |trained: Trained| (trained.history, floats(&var(&trained.varmap, "fc.weight")));
    trained.into_iter().map(values).collect()
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
        assert_eq!(history.len(), best_epoch + PATIENCE + 1);
        // The model that is returned is the best, and the last is another.
        let saved = |name: &str| floats(&checkpoint::read(folder.path().join(name)).unwrap()["fc.weight"]);
        assert_eq!(*weights, saved("best.safetensors"));
        assert_ne!(*weights, saved("last.safetensors"));
        assert!(folder.path().join("optimizer.safetensors").exists());
        // As one process on the whole batch, from the same seed.
        assert_close(&flat(history), &flat(&one.0), 1e-4, "history");
        assert_close(weights, &one.1, 1e-4, "weights");
    }
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
            let found: Vec<f64> = trained.history.iter().map(|(_, validation)| *validation).collect();
            Ok((found, floats(&var(&trained.varmap, "fc.weight"))))
        });
        assert_eq!(format!("{:?}", trained[0]), format!("{:?}", trained[1]));
        trained.into_iter().next().unwrap().0
    };
    assert_eq!(best_of(&[f64::NAN, 2., f64::NAN, 1.]).len(), 4 + PATIENCE);
    assert_eq!(best_of(&[]).len(), 1 + PATIENCE);
}

#[test]
fn the_page_shows_this_recipe() {
    assert!(include_str!("../../docs/evaluation.md").contains(include_str!("evaluation_recipe.rs")));
}
