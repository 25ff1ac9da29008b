//! Ranks with different numbers of batches: `join` trains the same weights as one process that sees the same batches.
use crate::common::{
    added_to, assert_close, assert_error, floats, golden_json, pure, ranks, sharding, sine, tensor, tiny, try_ranks,
};
use candle_core::{DType, Device, Module, Tensor, Var};
use candle_ddp::amp::{GradScaler, GradScalerOptions};
use candle_ddp::comm_hook::{AllReduce, PowerSgd, PowerSgdOptions};
use candle_ddp::nn::sync_batch_norm;
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW, ParamsSgd, Sgd, ZeroRedundancyOptimizer};
use candle_ddp::{
    Backward, DdpOptions, DistributedDataParallel, Error, Failure, JoinOptions, Precision, ProcessGroup, ReduceOp,
    Result, Sharding, backward_with, join,
};
use candle_nn::{BatchNormConfig, Linear, ModuleT, VarBuilder, VarMap, linear};
use std::sync::atomic::{AtomicUsize, Ordering};

const NAMES: [&str; 4] = ["a.weight", "a.bias", "b.weight", "b.bias"];

/// The model of `scripts/golden_join.py`.
struct Net {
    a: Linear,
    b: Linear,
    batches: Var,
}

impl Net {
    fn new(vb: VarBuilder) -> candle_core::Result<Self> {
        let batches = Var::from_tensor(&vb.get(1, "num_batches_tracked")?)?;
        Ok(Self { a: linear(3, 4, vb.pp("a"))?, b: linear(4, 2, vb.pp("b"))?, batches })
    }
}

impl Module for Net {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let first = x.flatten_all()?.narrow(0, 0, 1)?;
        self.batches.set(&(self.batches.as_detached_tensor() + first.detach())?)?;
        self.b.forward(&self.a.forward(x)?.tanh()?)
    }
}

type Ddp = DistributedDataParallel<Net>;

fn batch(rank: usize, step: usize) -> (Tensor, Tensor) {
    (sine(&[6, 3], 10 * rank + step), sine(&[6, 2], 100 + 10 * rank + step))
}

fn set_weights(varmap: &VarMap) {
    let vars = varmap.data().lock().unwrap();
    for (seed, name) in NAMES.iter().enumerate() {
        vars[*name].set(&sine(vars[*name].dims(), seed)).unwrap();
    }
    if let Some(buffer) = vars.get("num_batches_tracked") {
        buffer.set(&buffer.zeros_like().unwrap()).unwrap();
    }
}

fn wrap(pg: &ProcessGroup) -> Result<(VarMap, Ddp)> {
    wrap_with(pg, Sharding::Off)
}

fn wrap_with(pg: &ProcessGroup, sharding: Sharding) -> Result<(VarMap, Ddp)> {
    let varmap = VarMap::new();
    // A bucket for each parameter.
    let options = DdpOptions { sharding, precision: Precision::Pure(DType::F64), ..tiny() };
    let ddp = DistributedDataParallel::with_options(pg, &varmap, Net::new, options)?;
    set_weights(&varmap);
    Ok((varmap, ddp))
}

fn loss(ddp: &Ddp, rank: usize, step: usize) -> Result<Tensor> {
    let (x, y) = batch(rank, step);
    Ok((ddp.forward(&x)? - y)?.sqr()?.mean_all()?)
}

fn weights(varmap: &VarMap) -> Vec<f32> {
    let vars = varmap.data().lock().unwrap();
    let names = NAMES.iter().chain(&["num_batches_tracked"]);
    names.filter_map(|name| vars.get(*name)).flat_map(|var| floats(var)).collect()
}

fn sgd(ddp: &Ddp) -> Result<Sgd> {
    Sgd::new(ddp, ParamsSgd { lr: 0.25, ..Default::default() })
}

/// The weights after one process has trained on the batches of all ranks. `update` is given the mean gradients.
fn single(batches: &[usize], divide_by_active: bool, params: ParamsAdamW, adam: bool) -> Vec<f32> {
    let varmap = VarMap::new();
    let net = Net::new(VarBuilder::from_varmap(&varmap, DType::F64, &Device::Cpu)).unwrap();
    set_weights(&varmap);
    let named: Vec<(String, Var)> =
        NAMES.iter().map(|name| (name.to_string(), varmap.data().lock().unwrap()[*name].clone())).collect();
    let mut adamw = AdamW::new(named.clone(), params).unwrap();
    let mut sgd = Sgd::new(named, ParamsSgd { lr: 0.25, ..Default::default() }).unwrap();
    for step in 0..*batches.iter().max().unwrap() {
        let active: Vec<usize> = (0..batches.len()).filter(|rank| batches[*rank] > step).collect();
        let losses = active.iter().map(|rank| {
            let (x, y) = batch(*rank, step);
            let y_hat = net.b.forward(&net.a.forward(&x)?.tanh()?)?;
            (y_hat - y)?.sqr()?.mean_all()
        });
        let losses: Vec<Tensor> = losses.collect::<candle_core::Result<_>>().unwrap();
        let sum = Tensor::stack(&losses, 0).unwrap().sum_all().unwrap();
        let divisor = if divide_by_active { active.len() } else { batches.len() };
        let grads = (sum / divisor as f64).unwrap().backward().unwrap();
        if adam { adamw.step(&grads) } else { sgd.step(&grads) }.unwrap();
        // The buffers of the lowest rank that has inputs.
        let (x, _) = batch(active[0], step);
        let first = x.flatten_all().unwrap().narrow(0, 0, 1).unwrap();
        net.batches.set(&(net.batches.as_detached_tensor() + first).unwrap()).unwrap();
    }
    weights(&varmap)
}

/// Makes so many steps on this rank's batches.
fn steps(ddp: &Ddp, optimizer: &mut dyn Optimizer, count: usize) -> Result<()> {
    let rank = ddp.process_group().rank();
    (0..count).try_for_each(|step| optimizer.step(&ddp.backward(&loss(ddp, rank, step)?)?))
}

fn options(divide_by_initial_world_size: bool) -> JoinOptions {
    JoinOptions { divide_by_initial_world_size, ..Default::default() }
}

#[track_caller]
fn assert_all(results: &[Vec<f32>], expected: &[f32], what: &str) {
    for (rank, result) in results.iter().enumerate() {
        assert_eq!(result, &results[0], "{what}: rank {rank} differs from rank 0");
        assert_close(result, expected, 1e-6, &format!("{what}, rank {rank}"));
    }
}

#[test]
fn uneven_inputs_train_as_in_one_process() {
    for batches in [&[5, 3][..], &[1, 4], &[0, 3], &[3, 3], &[2, 4, 1], &[0, 0, 2], &[0, 0]] {
        for divides_by_all in [true, false] {
            let results = ranks(batches.len(), |pg| {
                let (varmap, ddp) = wrap(&pg)?;
                let mut optimizer = sgd(&ddp)?;
                let own = batches[pg.rank()];
                let joined =
                    ddp.join(options(divides_by_all), || steps(&ddp, &mut optimizer, own).map(|()| pg.rank()))?;
                let longest = *batches.iter().max().unwrap();
                assert_eq!(joined.value, pg.rank());
                assert_eq!(joined.was_uneven, batches.iter().any(|count| *count < longest), "{batches:?}");
                assert_eq!(Some(joined.last), batches.iter().position(|count| *count == longest), "{batches:?}");
                Ok(weights(&varmap))
            });
            let expected = single(batches, !divides_by_all, ParamsAdamW::default(), false);
            assert_all(&results, &expected, &format!("{batches:?}, {divides_by_all}"));
        }
    }
}

#[test]
fn what_pytorch_trains_comes_out() {
    for case in golden_json("join.json").as_array().unwrap() {
        let batches: Vec<usize> = serde_json::from_value(case["batches"].clone()).unwrap();
        let results = ranks(batches.len(), |pg| {
            let (varmap, ddp) = wrap(&pg)?;
            let mut optimizer = sgd(&ddp)?;
            let options = options(case["divide_by_initial_world_size"].as_bool().unwrap());
            ddp.join(options, || steps(&ddp, &mut optimizer, batches[pg.rank()]))?;
            let mut weights = weights(&varmap);
            // PyTorch takes buffers from the highest rank with inputs, in the forward pass.
            weights.pop();
            Ok(weights)
        });
        let state = &case["state"];
        let expected: Vec<f32> = NAMES
            .iter()
            .flat_map(|name| state[name].as_array().unwrap().iter().map(|value| value.as_f64().unwrap() as f32))
            .collect();
        assert_all(&results, &expected, &batches.iter().map(usize::to_string).collect::<Vec<_>>().join(" "));
    }
}

#[test]
fn optimizers_with_states_are_brought_up_to_date() {
    let batches = [4, 1, 2];
    let params = ParamsAdamW { lr: 0.05, ..Default::default() };
    let results = ranks(3, |pg| {
        let (varmap, ddp) = wrap(&pg)?;
        let mut optimizer = AdamW::new(&ddp, params.clone())?;
        let mut scaler =
            GradScaler::new(&pg, &ddp, GradScalerOptions { growth_interval: 2, init_scale: 8., ..Default::default() })?;
        let joined = ddp.join(JoinOptions::default(), || {
            for step in 0..batches[pg.rank()] {
                let mut grads = ddp.backward(&scaler.scale(&loss(&ddp, pg.rank(), step)?)?)?;
                scaler.step(&mut optimizer, &mut grads)?;
                scaler.update()?;
            }
            Ok(())
        })?;
        let after = weights(&varmap);
        joined.sync(&mut optimizer)?;
        joined.sync(&mut scaler)?;
        assert_eq!(scaler.current_scale(), 32.);
        // Without its moments, a rank would diverge from here.
        let grads = ddp.backward(&loss(&ddp, pg.rank(), 9)?)?;
        optimizer.step(&grads)?;
        Ok((after, weights(&varmap)))
    });
    let (after, later): (Vec<_>, Vec<_>) = results.into_iter().unzip();
    assert_all(&after, &single(&batches, false, params, true), "after the join");
    assert!(later.iter().all(|weights| *weights == later[0]));
}

/// Makes so many steps in a join of AdamW, or of its sharded twin.
fn join_steps(
    ddp: &Ddp,
    count: usize,
    zero: bool,
    mut step: impl FnMut(&mut dyn Optimizer, usize) -> Result<()>,
) -> Result<()> {
    let params = ParamsAdamW { lr: 0.05, ..Default::default() };
    if zero {
        let mut optimizer = ZeroRedundancyOptimizer::new(ddp, params)?;
        optimizer
            .join(ddp, JoinOptions::default(), |optimizer| (0..count).try_for_each(|number| step(optimizer, number)))?;
    } else {
        let mut optimizer = AdamW::new(ddp, params)?;
        ddp.join(JoinOptions::default(), || (0..count).try_for_each(|number| step(&mut optimizer, number)))?;
    }
    Ok(())
}

#[test]
fn zero_steps_on_ranks_without_inputs() {
    for (batches, with_state) in [(&[1, 3][..], None), (&[2, 0, 4], None), (&[2, 0, 4, 1], Some(2))] {
        for two_losses in [false, true] {
            let train = |sharding: Sharding| {
                ranks(batches.len(), move |pg| {
                    let (varmap, ddp) = wrap_with(&pg, sharding)?;
                    let scaling = GradScalerOptions { enabled: two_losses, ..Default::default() };
                    let mut scaler = GradScaler::new(&pg, &ddp, scaling)?;
                    let step_of = |optimizer: &mut dyn Optimizer, step: usize| {
                        let mut grads = ddp.backward(&scaler.scale(&loss(&ddp, pg.rank(), step)?)?)?;
                        if two_losses {
                            let second = scaler.scale(&loss(&ddp, pg.rank(), 20 + step)?)?;
                            backward_with(&second, &[&ddp], added_to(&mut grads))?;
                        } else {
                            optimizer.set_learning_rates(&[0.05 / (step + 1) as f64])?;
                            optimizer.clip_grad_norm(&mut grads, 0.1)?;
                        }
                        scaler.step(optimizer, &mut grads)?;
                        scaler.update()
                    };
                    join_steps(&ddp, batches[pg.rank()], sharding != Sharding::Off, step_of)?;
                    Ok(weights(&varmap))
                })
            };
            let sharded = train(Sharding::Optimizer { ranks: with_state });
            assert_all(&sharded, &train(Sharding::Off)[0], &format!("{batches:?}, two losses: {two_losses}"));
        }
    }
}

#[test]
fn zero_outside_of_its_join_is_an_error() {
    let error = try_ranks(2, |pg| {
        let (_, ddp) = wrap_with(&pg, sharding(true))?;
        let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, ParamsAdamW::default())?;
        ddp.join(JoinOptions::default(), || steps(&ddp, &mut optimizer, pg.rank()))
    });
    assert_error(error, &["optimizer.join(&ddp, options, |optimizer| …)"]);
}

#[test]
fn hooks_and_accumulated_gradients_join() {
    let batches = [4, 1, 2];
    let train = |hook: Option<bool>| {
        ranks(3, move |pg| {
            let (varmap, ddp) = wrap(&pg)?;
            match hook {
                Some(true) => ddp.register_comm_hook(AllReduce::default())?,
                Some(false) => ddp.register_comm_hook(PowerSgd::new(PowerSgdOptions {
                    start_iter: 2,
                    min_compression_rate: 0.1,
                    ..Default::default()
                })?)?,
                None => {}
            }
            let mut optimizer = sgd(&ddp)?;
            ddp.join(JoinOptions::default(), || {
                for step in 0..batches[pg.rank()] {
                    {
                        let _guard = ddp.no_sync();
                        ddp.backward(&loss(&ddp, pg.rank(), 30 + step)?)?;
                    }
                    let grads = ddp.backward(&loss(&ddp, pg.rank(), step)?)?;
                    optimizer.step(&grads)?;
                }
                Ok(())
            })?;
            Ok(weights(&varmap))
        })
    };
    let plain = train(None);
    assert_all(&train(Some(true)), &plain[0], "the all-reduce hook");
    let compressed = train(Some(false));
    assert!(
        compressed.iter().all(|weights| *weights == compressed[0] && weights.iter().all(|value| value.is_finite()))
    );
}

#[test]
fn what_was_accumulated_when_the_inputs_ended_counts() {
    let accumulate = |pg: &ProcessGroup, ddp: &Ddp| -> Result<()> {
        let _guard = ddp.no_sync();
        ddp.backward(&loss(ddp, pg.rank(), 5)?).map(drop)
    };
    let train = |joins: bool| {
        ranks(2, move |pg| {
            let (_, ddp) = wrap(&pg)?;
            let body = || match pg.rank() {
                0 if joins => accumulate(&pg, &ddp).map(|()| None),
                _ => {
                    accumulate(&pg, &ddp)?;
                    // Without the join, rank 0 adds nothing in the synchronised pass.
                    let scale = Tensor::new(if pg.rank() == 0 { 0f64 } else { 1. }, pg.device())?;
                    let grads = ddp.backward(&(loss(&ddp, pg.rank(), 6)? * scale)?)?;
                    Ok(Some(
                        ddp.parameters().iter().flat_map(|var| floats(grads.get(var).unwrap())).collect::<Vec<_>>(),
                    ))
                }
            };
            if joins { Ok(ddp.join(JoinOptions::default(), body)?.value) } else { body() }
        })
    };
    assert_close(train(true)[1].as_ref().unwrap(), train(false)[1].as_ref().unwrap(), 1e-6, "rank 1's gradients");
}

#[test]
fn the_first_rank_without_inputs_can_end_all_loops() {
    let calls = AtomicUsize::new(0);
    ranks(3, |pg| {
        let (_, ddp) = wrap(&pg)?;
        let options = JoinOptions { throw_on_early_termination: true, ..Default::default() };
        let train = |batches: usize| {
            ddp.join(options, || {
                for step in 0..batches {
                    ddp.backward(&loss(&ddp, pg.rank(), step)?)?;
                    calls.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            })
        };
        let error = train(if pg.rank() == 1 { 2 } else { 4 }).unwrap_err();
        assert!(matches!(error, Error::InputsExhausted { rank: 1 }), "{error}");
        // The group continues.
        assert!(!train(2)?.was_uneven);
        pg.barrier()
    });
    assert_eq!(calls.into_inner(), 12);
}

#[test]
fn several_models_join_together() {
    let batches = [1, 3];
    let results = ranks(2, |pg| {
        let ((first_vars, first), (second_vars, second)) = (wrap(&pg)?, wrap(&pg)?);
        let (mut one, mut two) = (sgd(&first)?, sgd(&second)?);
        join(&[&first, &second], JoinOptions::default(), || {
            for step in 0..batches[pg.rank()] {
                let (a, b) = (loss(&first, pg.rank(), step)?, loss(&second, pg.rank(), step)?);
                let grads = match step {
                    // Given in another order than to the join.
                    0 => backward_with(&(a + b)?, &[&second, &first], Backward::default())?,
                    1 => {
                        let mut grads = first.backward(&a)?;
                        grads = backward_with(&b, &[&second], added_to(&mut grads))?;
                        grads
                    }
                    _ => backward_with(&(a + b)?, &[&first, &second], Backward::default())?,
                };
                one.step(&grads)?;
                two.step(&grads)?;
            }
            Ok(())
        })?;
        assert_eq!(weights(&first_vars), weights(&second_vars));
        Ok(weights(&first_vars))
    });
    assert_all(&results, &single(&batches, false, ParamsAdamW::default(), false), "both models");
}

#[test]
fn what_cannot_join_is_refused() {
    ranks(2, |pg| {
        let ((_, ddp), (_, other)) = (wrap(&pg)?, wrap(&pg)?);
        let result = ddp.join(JoinOptions::default(), || {
            let refused = other.backward(&loss(&other, pg.rank(), 0)?);
            assert_error(refused, &["a.weight is trained inside a join that does not include it", "&[&a, &b]"]);
            assert_error(ddp.join(JoinOptions::default(), || Ok(())), &["already in a join"]);
            let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, pg.device());
            let norm = sync_batch_norm(&pg, 3, BatchNormConfig::default(), vb)?;
            assert_error(norm.forward_t(&tensor(&[4, 3], 1), true), &["inside `join`"]);
            norm.forward_t(&tensor(&[4, 3], 1), false)?;
            Ok(())
        })?;
        assert!(!result.was_uneven);
        let options = JoinOptions { divide_by_initial_world_size: pg.rank() == 0, ..Default::default() };
        let error = ddp.join(options, || Ok(())).unwrap_err();
        assert!(matches!(&error, Error::Mismatch { what: "join", rank: 1, .. }), "{error}");
        let half = pg.new_group(&[0, 1])?.unwrap();
        let (_, elsewhere) = wrap(&half)?;
        assert_error(join(&[&ddp, &elsewhere], JoinOptions::default(), || Ok(())), &["the same process group"]);
        Ok(())
    });
}

#[test]
fn an_error_of_one_body_ends_all() {
    let texts = ranks(3, |pg| {
        let (_, ddp) = wrap(&pg)?;
        let joined = ddp.join(JoinOptions::default(), || {
            for step in 0..2 + 2 * pg.rank() {
                ddp.backward(&loss(&ddp, pg.rank(), step)?)?;
                if pg.rank() == 1 && step == 2 {
                    return Err(Error::RankFailed { rank: 1, reason: "its disk is full".to_string() });
                }
            }
            Ok(())
        });
        Ok(joined.unwrap_err())
    });
    for (rank, error) in texts.iter().enumerate().filter(|(rank, _)| *rank != 1) {
        let is_told = matches!(error, Error::Group(Failure::PeerFailed { peer: 1, .. }));
        assert!(is_told && error.to_string().contains("its disk is full"), "rank {rank}: {error}");
    }
}

#[test]
fn loops_of_different_lengths_without_a_join_are_named() {
    const HINT: &str = "If ranks have different numbers of batches, train inside `ddp.join`";
    type End = fn(&ProcessGroup) -> Result<()>;
    let ends: [(End, &str); 3] = [
        (|_| Ok(()), "rank 1 left the group after sequence"),
        (|pg| pg.barrier(), "rank 1 called barrier() where rank 0 called all_reduce(f64["),
        (
            |pg| pg.all_reduce_scalars([1.], ReduceOp::Sum).map(drop),
            "rank 1 called all_reduce(f64[1]) for all_reduce_scalars",
        ),
    ];
    for (end, expected) in ends {
        let error = try_ranks(2, |pg| {
            let build = |vb: VarBuilder| linear(3, 2, vb);
            let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), build, pure(DType::F64))?;
            for step in 0..3 - pg.rank() {
                ddp.backward(&ddp.forward(&batch(pg.rank(), step).0)?.sqr()?.mean_all()?)?;
            }
            end(&pg)
        });
        let text = error.unwrap_err().to_string();
        assert!(text.starts_with(expected), "{text}\n{expected}");
        assert!(text.contains("for the gradients of bias, weight (bucket 0)") && text.contains(HINT), "{text}");
    }
}

#[test]
fn a_collective_of_the_program_inside_of_a_join_is_named() {
    let error = try_ranks(2, |pg| {
        let (_, ddp) = wrap(&pg)?;
        ddp.join(JoinOptions::default(), || {
            for step in 0..1 + pg.rank() {
                ddp.backward(&loss(&ddp, pg.rank(), step)?)?;
                pg.all_reduce_scalars([1.], ReduceOp::Sum)?;
            }
            Ok(())
        })
    });
    let text = error.unwrap_err().to_string();
    let join = "for ddp.join (call no collectives inside)";
    assert!(text.contains(join), "{text}");
}
