//! Graphs that reach into an earlier step: an error that names the remedy, and no error for graphs whose parameters have not
//! changed.
use crate::common::{added_to, filled, floats, of_micro_batch, ranks, tensor, with_virtual_ranks};
use candle_core::backprop::GradStore;
use candle_core::{DType, Module, Result as CandleResult, Tensor};
use candle_ddp::nn::{self, checkpoint};
use candle_ddp::optim::{AdamW, Ema, Optimizer, ParamsAdamW};
use candle_ddp::{DdpOptions, DistributedDataParallel, Error, Precision, ProcessGroup, Result, backward_with};
use candle_nn::{Func, RNN, VarBuilder, VarMap, func, linear, rnn};

type Ddp = DistributedDataParallel<Func<'static>>;

/// A recurrent layer, candle's or ours: from a state to the next one.
fn cell(pg: &ProcessGroup, ours: bool, options: DdpOptions) -> Result<Ddp> {
    let build = |vb: VarBuilder| {
        if ours {
            let layer = nn::linear(3, 3, vb)?;
            return CandleResult::Ok(func(move |state| nn::gelu(&layer.forward(state)?)));
        }
        let layer = linear(3, 3, vb)?;
        Ok(func(move |state| layer.forward(state)?.tanh()))
    };
    Ok(filled(pg, build, options, 1)?.0)
}

fn start() -> Tensor {
    tensor(&[2, 3], 7)
}

fn is_stale<T: std::fmt::Debug>(result: &Result<T>) -> bool {
    matches!(result, Err(error @ Error::StaleGraph { parameter })
        if parameter.contains("weight") || parameter.contains("bias") && error.to_string().contains("detach()"))
}

/// Runs `check` with candle's layer and with ours. Where all ranks fail, one rank is enough: another one may already see the
/// first one's end.
fn each(world_size: usize, check: impl Fn(&Ddp, &mut AdamW) -> Result<()> + Sync) {
    for ours in [false, true] {
        ranks(world_size, |pg| {
            let ddp = cell(&pg, ours, DdpOptions::default())?;
            let mut optimizer = AdamW::new(&ddp, ParamsAdamW { lr: 0.1, ..Default::default() })?;
            check(&ddp, &mut optimizer)
        });
    }
}

fn step(ddp: &Ddp, optimizer: &mut AdamW, state: &Tensor) -> Result<Tensor> {
    let state = ddp.forward(state)?;
    let grads = ddp.backward(&state.sqr()?.mean_all()?)?;
    Optimizer::step(optimizer, &grads)?;
    Ok(state)
}

#[test]
fn a_state_that_is_not_detached_is_an_error() {
    each(1, |ddp, optimizer| {
        let state = step(ddp, optimizer, &start())?;
        assert!(is_stale(&step(ddp, optimizer, &state)));
        Ok(())
    });
    each(2, |ddp, optimizer| {
        let mut state = start();
        for _ in 0..4 {
            state = step(ddp, optimizer, &state.detach())?;
        }
        Ok(())
    });
}

/// No backward pass has seen the earlier tensor.
#[test]
fn a_tensor_that_no_backward_pass_has_seen_is_noticed() {
    each(1, |ddp, optimizer| {
        let early = ddp.forward(&start())?;
        step(ddp, optimizer, &start())?;
        let late = ddp.forward(&early)?;
        assert!(is_stale(&ddp.backward(&late.mean_all()?)));
        Ok(())
    });
}

#[test]
fn one_rank_alone_ends_all() {
    let errors = ranks(2, |pg| {
        let ddp = cell(&pg, true, DdpOptions::default())?;
        let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
        let mut state = start();
        for _ in 0..4 {
            state = match step(&ddp, &mut optimizer, &state) {
                Ok(state) if pg.rank() == 1 => state,
                Ok(state) => state.detach(),
                Err(error) => return Ok(error),
            };
        }
        panic!("no rank has noticed it")
    });
    assert!(matches!(errors[1], Error::StaleGraph { .. }), "{errors:?}");
    assert!(errors[0].to_string().contains("detach()"), "{errors:?}");
}

#[test]
fn candles_lstm_is_noticed_too() {
    ranks(1, |pg| {
        let build = |vb| rnn::lstm(3, 4, Default::default(), vb);
        let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), build)?;
        let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
        let mut state = ddp.call(|lstm| lstm.zero_state(2))?;
        let mut results = Vec::new();
        for _ in 0..2 {
            state = ddp.call(|lstm| lstm.step(&start(), &state))?;
            let grads = ddp.backward(&state.h().sqr()?.mean_all()?);
            match grads {
                Ok(grads) => Optimizer::step(&mut optimizer, &grads)?,
                Err(error) => results.push(error),
            }
        }
        assert!(matches!(&results[..], [Error::StaleGraph { .. }]), "{results:?}");
        Ok(())
    });
}

/// As with PyTorch's `retain_graph`: without a step in between, a graph may span several forward passes.
#[test]
fn a_graph_without_a_step_in_between_is_right() {
    each(2, |ddp, optimizer| {
        for _ in 0..3 {
            let first = ddp.forward(&start())?;
            {
                let _guard = ddp.no_sync();
                ddp.backward(&first.mean_all()?)?;
            }
            // An evaluation in between changes nothing.
            ddp.forward(&tensor(&[5, 3], 2))?;
            let second = ddp.forward(&first)?;
            let mut grads = ddp.backward(&second.mean_all()?)?;
            grads = backward_with(&first.sqr()?.mean_all()?, &[ddp], added_to(&mut grads))?;
            let mut ema = Ema::new(ddp, 0.9)?;
            ema.update()?;
            Optimizer::step(optimizer, &grads)?;
            ema.apply()?;
            ddp.forward(&start())?;
            ema.restore()?;
        }
        Ok(())
    });
}

#[test]
fn averages_that_were_applied_for_an_evaluation_are_noticed() {
    each(1, |ddp, optimizer| {
        let mut ema = Ema::new(ddp, 0.9)?;
        ema.update()?;
        step(ddp, optimizer, &start())?;
        let state = ddp.forward(&start())?;
        ema.apply()?;
        ddp.forward(&start())?;
        assert!(is_stale(&ddp.backward(&state.mean_all()?)));
        ema.restore()
    });
}

/// A view that the model makes of a parameter while it is built follows the parameter.
#[test]
fn views_from_the_construction_are_the_models_own() {
    ranks(2, |pg| {
        let build = |vb: VarBuilder| vb.get((2, 3), "weight")?.reshape((3, 2));
        let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), build)?;
        let mut optimizer = AdamW::new(&ddp, ParamsAdamW { lr: 0.1, ..Default::default() })?;
        for _ in 0..3 {
            let y = ddp.call(|view| tensor(&[4, 3], 3).matmul(view))?;
            let grads = ddp.backward(&(y - 1.0)?.sqr()?.mean_all()?)?;
            Optimizer::step(&mut optimizer, &grads)?;
        }
        Ok(())
    });
}

#[test]
fn recomputed_functions_and_micro_batches_are_fresh() {
    with_virtual_ranks(4, 2, |pg| {
        let build = |vb: VarBuilder| Ok::<_, candle_core::Error>(std::sync::Arc::new(nn::linear(3, 3, vb)?));
        let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), build)?;
        let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
        for _ in 0..3 {
            let mut grads = GradStore::default();
            for number in ddp.micro_batches().unwrap() {
                let y = ddp.call(|layer| {
                    let layer = std::sync::Arc::clone(layer);
                    checkpoint(&[&start()], move |x| layer.forward(&x[0]))
                })?;
                grads = backward_with(&y.sqr()?.mean_all()?, &[&ddp], of_micro_batch(number))?;
            }
            Optimizer::step(&mut optimizer, &grads)?;
        }
        Ok(())
    })
    .unwrap();
}

/// The discriminator's old judgement of a generator that has not changed is stale once it has forgotten it.
#[test]
fn a_judgement_from_before_a_step_of_the_judge_is_noticed() {
    ranks(1, |pg| {
        let model = || DistributedDataParallel::new(&pg, &VarMap::new(), |vb| linear(3, 3, vb));
        let (g, d) = (model()?, model()?);
        let mut of_d = AdamW::new(&d, ParamsAdamW { lr: 0.1, ..Default::default() })?;
        let fake = g.forward(&start())?;
        let old = d.forward(&fake)?;
        let grads = d.backward(&d.forward(&fake.detach())?.sqr()?.mean_all()?)?;
        Optimizer::step(&mut of_d, &grads)?;
        let new = d.forward(&fake.detach())?;
        let _frozen = d.freeze();
        let result = g.backward(&(old + new)?.mean_all()?);
        assert!(is_stale(&result), "{result:?}");
        Ok(())
    });
}

/// 16-bit replicas follow f32 masters.
#[test]
fn mixed_precision_is_compared_in_the_replicas_dtype() {
    ranks(1, |pg| {
        let precision = Precision::Half { param_dtype: DType::BF16, buffer_dtype: None };
        let ddp = cell(&pg, true, DdpOptions { precision, ..Default::default() })?;
        let mut optimizer = AdamW::new(&ddp, ParamsAdamW { lr: 0.1, ..Default::default() })?;
        let state = step(&ddp, &mut optimizer, &start().to_dtype(DType::BF16)?)?;
        assert!(is_stale(&step(&ddp, &mut optimizer, &state)));
        assert_eq!(floats(&state).len(), 6);
        Ok(())
    });
}
