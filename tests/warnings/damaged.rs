//! A run that continues from an older checkpoint, since the newest is damaged, says so once, on rank 0.
use crate::common::{going_on, ranks};
use crate::logger::{during, of_two_ranks};
use candle_ddp::ProcessGroup;
use candle_ddp::checkpoint::{Checkpointer, CheckpointerOptions};
use std::path::Path;

/// The warnings of two ranks that load the newest checkpoint, and its step.
fn load(folder: &Path) -> (Vec<String>, Option<u64>) {
    let program = |pg: ProcessGroup| {
        let mut checkpointer = going_on(&pg, folder)?;
        let mut best = 0f64;
        let step = checkpointer.load_latest(("best", &mut best))?;
        // It is known to be damaged by now.
        checkpointer.load_latest(("best", &mut best))?;
        checkpointer.steps()?;
        Ok(step)
    };
    let (steps, told) = during(|| ranks(2, program));
    (told, steps[1])
}

#[test]
fn a_checkpoint_that_is_passed_over_is_told_of_once() {
    let folder = tempfile::tempdir().unwrap();
    let told = of_two_ranks(|pg| {
        let options = CheckpointerOptions { keep: 9, ..Default::default() };
        let mut checkpointer = Checkpointer::new(&pg, folder.path(), options)?;
        (1..=3).try_for_each(|step| checkpointer.save(step, ("best", &mut (step as f64))).map(drop))?;
        checkpointer.finish()
    });
    assert_eq!(told, [""; 0]);
    assert_eq!(load(folder.path()), (vec![], Some(3)));
    // A bit of the value, and an index.
    let file = folder.path().join("step-00000003/best.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let last = bytes.len() - 3;
    bytes[last] ^= 16;
    std::fs::write(&file, bytes).unwrap();
    std::fs::write(folder.path().join("step-00000002/checkpoint.json"), "{").unwrap();
    let (told, step) = load(folder.path());
    assert_eq!((told.len(), step), (2, Some(1)), "{told:?}");
    let one =
        |words: [&str; 2]| assert!(told.iter().any(|text| words.iter().all(|word| text.contains(word))), "{told:?}");
    one([
        "step-00000003 is damaged and skipped: on rank 0",
        "best.safetensors is damaged: its tensors do not have the hash",
    ]);
    one(["step-00000002 is damaged and skipped", "its checkpoint.json is damaged"]);
}
