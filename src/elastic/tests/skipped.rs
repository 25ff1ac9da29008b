//! Steps that were left out are counted over generations.
use super::shards::generation;
use super::{Training, state};
use crate::elastic::State;
use crate::process_group::ProcessGroup;
use crate::state::StateDict;
use crate::{DdpOptions, DistributedDataParallel, OnNonFinite, Result};
use candle_core::{Device, Module, Tensor};
use candle_nn::VarBuilder;

struct Scale(Tensor);

impl Module for Scale {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        x * &self.0
    }
}

/// Trains to commit `until`. The gradients of steps 2 to 5 are not finite. At first, `skipped` steps are known.
fn train(until: u64, skipped: u64) -> impl Fn(&ProcessGroup, &mut State<Training>) -> Result<()> + Sync {
    move |pg, state| {
        let build = |vb: VarBuilder| Ok::<_, candle_core::Error>(Scale(vb.get(2, "w")?));
        let on_non_finite = Some(OnNonFinite::Skip { at_most: 3 });
        // A model whose steps are all made comes first.
        let other = candle_nn::VarMap::new();
        let _other = DistributedDataParallel::new(pg, &other, build)?;
        let options = DdpOptions { on_non_finite, ..Default::default() };
        let ddp = DistributedDataParallel::with_options(pg, &state.varmap, build, options)?;
        assert_eq!(ddp.skipped_steps(), skipped);
        while state.commits() < until {
            let step = state.commits() + 1;
            let x = if (2..=5).contains(&step) && pg.rank() == 1 { f32::NAN } else { 1. };
            ddp.backward(&ddp.forward(&Tensor::full(x, 2, &Device::Cpu)?)?.sum_all()?)?;
            state.commit()?;
        }
        assert_eq!(ddp.skipped_steps(), until.saturating_sub(1).min(4));
        Ok(())
    }
}

#[test]
fn a_row_of_skipped_steps_goes_on_when_a_rank_is_replaced() {
    let new = || (0..3).map(|_| None).collect();
    let is_fourth = |errors: &[Option<String>]| {
        assert!(errors.iter().all(|error| error.as_ref().is_some_and(|error| error.contains("4 "))), "{errors:?}");
    };
    let (_, calm) = generation(new(), train(6, 0));
    is_fourth(&calm);
    let (mut states, errors) = generation(new(), train(3, 0));
    assert_eq!(errors, [None, None, None]);
    states[1] = None;
    let (_, errors) = generation(states, train(6, 2));
    assert_eq!(errors, calm);
    // A checkpoint of the run knows it, too.
    let (states, _) = generation(new(), train(4, 0));
    let mut loaded = state(7.);
    loaded.load_state_dict(&states[0].as_ref().unwrap().state_dict().unwrap()).unwrap();
    let (_, errors) = generation(vec![None, Some(loaded), None], train(6, 3));
    assert_eq!(errors, calm);
}
