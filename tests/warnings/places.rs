//! Loops of different ranks that run into each other. Nothing else tells the calls of two loops from each other, and the places
//! from which they come are no proof: a rank that has run out of batches may send zeros from another line.
use crate::logger::of_two_ranks;
use candle_core::{Device, Tensor};
use candle_ddp::{ProcessGroup, ReduceOp, Result};

/// The work of each rank.
type Work = fn(&ProcessGroup) -> Result<()>;

/// The warnings about places while two ranks run `work`.
fn warnings(work: Work) -> Vec<String> {
    let mut warnings = of_two_ranks(|pg| work(&pg));
    warnings.retain(|text| text.contains("was taken together"));
    warnings
}

fn add(pg: &ProcessGroup) -> Result<()> {
    pg.all_reduce_scalars([1.0], ReduceOp::Sum).map(drop)
}

/// Two loops, one after the other, of these numbers of turns on the two ranks.
fn two_loops(pg: &ProcessGroup, first: [usize; 2], second: [usize; 2]) -> Result<()> {
    for _ in 0..first[pg.rank()] {
        pg.all_reduce_scalars([1.0], ReduceOp::Sum)?;
    }
    for _ in 0..second[pg.rank()] {
        pg.all_reduce_scalars([1.0], ReduceOp::Sum)?;
    }
    Ok(())
}

#[test]
fn loops_that_run_into_each_other_are_noticed() {
    let cases: [(&str, Work); 4] = [
        ("rank 1 has fewer turns in the first loop", |pg| two_loops(pg, [3, 2], [3, 4])),
        ("rank 0 has", |pg| two_loops(pg, [1, 5], [6, 2])),
        ("a rank has none at all", |pg| two_loops(pg, [2, 0], [2, 4])),
        ("objects", |pg| {
            for turn in 0..2 + pg.rank() {
                pg.all_gather_object(&turn)?;
            }
            for turn in 0..2 - pg.rank() {
                pg.all_gather_object(&turn)?;
            }
            Ok(())
        }),
    ];
    for (case, work) in cases {
        let warnings = warnings(work);
        // Once for each rank that has been at both places.
        assert!((1..=2).contains(&warnings.len()), "{case}: {warnings:#?}");
        let text = &warnings[0];
        assert!(text.matches("places.rs:").count() == 4 && text.contains("make one call after it"), "{case}: {text}");
    }
}

#[test]
fn calls_from_different_places_are_fine() {
    let cases: [(&str, Work); 6] = [
        ("equal turns", |pg| two_loops(pg, [3, 3], [2, 2])),
        ("one loop with a helper function", |pg| {
            (0..3).try_for_each(|_| add(pg))?;
            (0..3).try_for_each(|_| add(pg))
        }),
        ("roles of ranks", |pg| {
            for _ in 0..5 {
                if pg.rank() == 0 {
                    pg.all_reduce_scalars([1.0], ReduceOp::Sum)?;
                } else {
                    pg.all_reduce_scalars([0.0], ReduceOp::Sum)?;
                }
            }
            Ok(())
        }),
        ("a root that changes", |pg| {
            let tensor = Tensor::new(&[1f32], &Device::Cpu)?;
            for root in [0, 1, 0, 1] {
                if pg.rank() == root {
                    pg.broadcast(&tensor, root)?;
                } else {
                    pg.broadcast_async(&tensor, root)?.wait()?;
                }
            }
            Ok(())
        }),
        ("messages", |pg| {
            let tensor = Tensor::new(&[1f32], &Device::Cpu)?;
            for turn in 0..4 {
                if turn % 2 == pg.rank() { pg.send(&tensor, 1 - pg.rank())? } else { pg.recv(&tensor, 1 - pg.rank())? }
            }
            Ok(())
        }),
        ("barriers", |pg| {
            (0..3 + pg.rank()).try_for_each(|_| pg.barrier())?;
            (0..3 - pg.rank()).try_for_each(|_| pg.barrier())
        }),
    ];
    for (case, work) in cases {
        assert_eq!(warnings(work), Vec::<String>::new(), "{case}");
    }
}
