//! What makes ranks or numbers differ without an error.
use crate::common::tensor;
use crate::logger::of_two_ranks;
use candle_core::Tensor;
use candle_ddp::checkpoint::{Checkpointer, StateDict};
use candle_ddp::data::{DataLoader, LoaderOptions, Remainder, SamplerOptions};
use candle_ddp::nn::{Linear, linear, no_grad};
use candle_ddp::optim::{CosineAnnealingLr, Optimizer, ParamsCosineAnnealingLr, ParamsSgd, Sgd};
use candle_ddp::{DdpOptions, DistributedDataParallel, ProcessGroup, ReplicaCheck, Result};
use candle_nn::VarMap;

fn model(pg: &ProcessGroup, options: DdpOptions) -> Result<DistributedDataParallel<Linear>> {
    DistributedDataParallel::with_options(pg, &VarMap::new(), |vb| linear(3, 1, vb), options)
}

fn loss(ddp: &DistributedDataParallel<Linear>) -> Result<Tensor> {
    Ok(ddp.forward(&tensor(&[2, 3], 1))?.sqr()?.mean_all()?)
}

#[test]
fn models_that_part_are_a_warning_once_if_the_program_wants_that() {
    let found = of_two_ranks(|pg| {
        let replica_check = Some(ReplicaCheck { every: 1, warn_only: true });
        let ddp = model(&pg, DdpOptions { replica_check, ..Default::default() })?;
        let mut sgd = Sgd::new(&ddp, ParamsSgd { lr: 0.1 * (1 + pg.rank()) as f64, ..Default::default() })?;
        (0..4).try_for_each(|_| sgd.step(&ddp.backward(&loss(&ddp)?)?))
    });
    let [text] = &*found else { panic!("{found:?}") };
    assert!(text.contains("no longer the same") && text.contains("the optimizer's options"), "{text}");
}

#[test]
fn an_evaluation_that_counts_samples_twice_is_said_once() {
    // Two ranks read 7 samples and train, evaluate, or do both with the batches.
    let program = |remainder: Remainder, trains: bool, evaluates: bool| {
        of_two_ranks(move |pg| {
            let sampler = SamplerOptions { remainder, ..Default::default() };
            let loader = DataLoader::with_collate(0..7, &pg, LoaderOptions { sampler, ..Default::default() }, Ok)?;
            let ddp = model(&pg, DdpOptions::default())?;
            for _ in 0..2 {
                for batch in &loader {
                    let _: Vec<usize> = batch?;
                    if evaluates {
                        no_grad(|| loss(&ddp))?;
                    }
                    if trains {
                        Sgd::new(&ddp, ParamsSgd { lr: 0.1, ..Default::default() })?
                            .step(&ddp.backward(&loss(&ddp)?)?)?;
                    }
                }
                // Also an evaluation with data of another kind.
                no_grad(|| loss(&ddp))?;
            }
            Ok(())
        })
    };
    for (remainder, trains, evaluates) in [
        (Remainder::Pad, true, false),
        (Remainder::Pad, true, true),
        (Remainder::Drop, false, true),
        (Remainder::Uneven, false, true),
    ] {
        let found = program(remainder, trains, evaluates);
        assert!(found.is_empty(), "{remainder:?} {trains} {evaluates}: {found:?}");
    }
    let found = program(Remainder::Pad, false, true);
    let [text] = &*found else { panic!("{found:?}") };
    assert!(text.contains("1 of 7 samples came twice") && text.contains("Remainder::Uneven"), "{text}");
}

#[test]
fn a_schedule_that_is_not_saved_is_said_once() {
    let saved = |is_part: bool, has_optimizer: bool, steps: bool| {
        let folder = tempfile::tempdir().unwrap();
        of_two_ranks(move |pg| {
            let ddp = model(&pg, DdpOptions::default())?;
            let mut sgd = Sgd::new(&ddp, ParamsSgd { lr: 0.1, ..Default::default() })?;
            let options = ParamsCosineAnnealingLr { t_max: 10, ..Default::default() };
            let mut schedule = CosineAnnealingLr::new(&mut sgd, options)?;
            // That of an earlier training.
            schedule.step(&mut sgd)?;
            let mut checkpointer = Checkpointer::new(&pg, folder.path(), Default::default())?;
            let mut best = 1.0;
            for step in 1..4 {
                if steps {
                    schedule.step(&mut sgd)?;
                }
                let mut parts: Vec<(&str, &mut dyn StateDict)> = vec![("best", &mut best)];
                if is_part {
                    parts.push(("schedule", &mut schedule));
                }
                if has_optimizer {
                    parts.push(("optimizer", &mut sgd));
                }
                checkpointer.save(step, &mut parts[..])?;
            }
            checkpointer.finish()
        })
    };
    for (is_part, has_optimizer, steps) in [(true, true, true), (false, false, true), (false, true, false)] {
        let found = saved(is_part, has_optimizer, steps);
        assert!(found.is_empty(), "{is_part} {has_optimizer} {steps}: {found:?}");
    }
    let found = saved(false, true, true);
    let [text] = &*found else { panic!("{found:?}") };
    assert!(text.contains("checkpoint of step 1") && text.contains("(\"schedule\", &mut schedule)"), "{text}");
}
