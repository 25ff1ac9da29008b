//! A schedule that is resumed by a program which makes it with other options says so, once.
use crate::logger::{during, of_two_ranks};
use candle_ddp::Result;
use candle_ddp::checkpoint::StateDict;
use candle_ddp::optim::{
    LrScheduler, ParamsReduceLrOnPlateau, ParamsSgd, ParamsWarmupCosine, ReduceLrOnPlateau, Schedule, Sgd,
};

/// A schedule of a program's own.
struct Falling {
    steps: u64,
}

impl Schedule for Falling {
    fn name(&self) -> &'static str {
        "Falling"
    }

    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn learning_rate(&self, base: f64, step: u64) -> f64 {
        base * (1. - step as f64 / self.steps as f64)
    }
}

fn resumed<S: Schedule>(saved: S, now: S) -> Vec<String> {
    let schedule = |schedule| {
        let mut sgd = Sgd::new(Vec::<candle_core::Var>::new(), ParamsSgd { lr: 0.1, ..Default::default() })?;
        LrScheduler::new(&mut sgd, schedule)
    };
    let mut saved = schedule(saved).unwrap();
    (0..5).for_each(|_| saved.advance());
    let (state, mut now) = (saved.state_dict().unwrap(), schedule(now).unwrap());
    // Every rank of a process, and a run that is resumed several times.
    during(|| (0..2).for_each(|_| now.load_state_dict(&state).unwrap())).1
}

#[test]
fn other_options_are_told_of_once() {
    let cosine = |start_factor| ParamsWarmupCosine { total_steps: 400, start_factor, ..Default::default() };
    let told = resumed(cosine(0.25), cosine(0.5));
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(
        told[0].contains("WarmupCosine") && told[0].contains("start_factor 0.25 (the program says 0.5)"),
        "{told:?}"
    );
    assert!(!told[0].contains("total_steps"), "{told:?}");
    assert_eq!(resumed(cosine(0.75), cosine(0.75)), [""; 0]);
    let told = resumed(Falling { steps: 10 }, Falling { steps: 20 });
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].contains("[0.05] in step 5") && told[0].contains("[0.075"), "{told:?}");
    assert_eq!(resumed(Falling { steps: 30 }, Falling { steps: 30 }), [""; 0]);

    let of = |patience| ParamsReduceLrOnPlateau { patience, ..Default::default() };
    let told = of_two_ranks(|_| {
        let state = ReduceLrOnPlateau::new(of(3))?.state_dict()?;
        ReduceLrOnPlateau::new(of(4))?.load_state_dict(&state)?;
        Ok(())
    });
    assert!(told.len() == 1 && told[0].contains("patience 3 (the program says 4)"), "{told:?}");
}
