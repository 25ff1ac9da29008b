//! The recipe in docs/checkpoints.md for runs that continue where others ended.
use crate::common::{floats, ranks};
use candle_ddp::optim::Optimizer;
include!("recipe.rs");

/// Everything, the scaler's and the schedule's states among it, as values.
fn state(training: &mut Training) -> Result<Vec<f64>> {
    let weights = training.ddp.parameters().into_iter().flat_map(|var| floats(&var)).map(f64::from);
    let mut states = vec![training.optimizer.learning_rate()];
    for (_, part) in training.parts().into_iter().skip(1) {
        let mut entries: Vec<_> = part.state_dict()?.into_iter().collect();
        entries.sort_by(|a, b| a.0.cmp(&b.0));
        for (_, tensor) in entries {
            states.extend(tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?);
        }
    }
    Ok(weights.chain(states).collect())
}

#[test]
fn a_run_that_is_resumed_ends_as_one_without_a_break() {
    let folder = tempfile::tempdir().unwrap();
    let results = ranks(2, |pg| {
        let (straight, broken) = (folder.path().join("straight"), folder.path().join("broken"));
        // The same first weights for both.
        let mut start = Training::new(&pg)?;
        for folder in [&straight, &broken] {
            Checkpointer::new(&pg, folder, CheckpointerOptions::default())?.save(0, &mut start)?;
        }
        let fresh = state(&mut start)?;
        let whole = state(&mut train(&pg, &straight, 5)?)?;
        let part = state(&mut train(&pg, &broken, 2)?)?;
        let resumed = state(&mut train(&pg, &broken, 5)?)?;
        assert!(whole != fresh && whole != part);
        assert_eq!(resumed, whole);
        Ok(resumed)
    });
    assert_eq!(results[0], results[1]);
}

#[test]
fn the_page_shows_what_is_tested_here() {
    assert!(include_str!("../../docs/checkpoints.md").contains(include_str!("recipe.rs")));
}
