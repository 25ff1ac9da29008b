//! Under sharding, passes under `no_sync` send their gradients, and each rank adds up its parts.
use crate::common::{added_to, assert_error, buckets, counted, ranks, waves};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor};
use candle_ddp::amp::{GradScaler, GradScalerOptions};
use candle_ddp::nn::{Linear, add, gelu, linear, no_grad};
use candle_ddp::optim::{AdamW, Muon, Optimizer, ParamsAdamW, ParamsMuon};
use candle_ddp::{
    Backward, Block, Buckets, DdpOptions, DistributedDataParallel, Error, JoinOptions, OnNonFinite, Precision,
    ProcessGroup, Result, Sharding, Unused, backward_with, block,
};
use candle_nn::{Module, VarBuilder, VarMap};

const WIDTH: usize = 6;
const STEPS: usize = 3;

/// A layer that only some passes use, next to layers of blocks.
struct Net {
    stem: Linear,
    layers: Vec<Block<Linear>>,
    extra: Linear,
    head: Linear,
}

impl Net {
    fn new(vb: VarBuilder) -> candle_core::Result<Self> {
        let layer = |index| block(vb.pp(format!("layers.{index}")), |vb| linear(WIDTH, WIDTH, vb));
        Ok(Self {
            stem: linear(3, WIDTH, vb.pp("stem"))?,
            layers: (0..2).map(layer).collect::<candle_core::Result<_>>()?,
            extra: linear(WIDTH, WIDTH, vb.pp("extra"))?,
            head: linear(WIDTH, 1, vb.pp("head"))?,
        })
    }

    fn forward(&self, x: &Tensor, has_extra: bool) -> candle_core::Result<Tensor> {
        let x = self.layers.iter().try_fold(self.stem.forward(x)?, |x, layer| gelu(&layer.forward(&x)?))?;
        let x = if has_extra { add(&x, &self.extra.forward(&x)?)? } else { x };
        self.head.forward(&x)
    }
}

type Ddp = DistributedDataParallel<Net>;

fn batch(rank: usize, pass: usize) -> Tensor {
    waves(&[4, 3], pass * 11 + rank * 5)
}

fn loss(ddp: &Ddp, pass: usize, has_extra: bool) -> Result<Tensor> {
    let x = ddp.cast_forward_inputs(&batch(ddp.process_group().rank(), pass))?;
    Ok(ddp.call(|net| net.forward(&x, has_extra))?.to_dtype(DType::F64)?.sqr()?.mean_all()?)
}

/// Each parameter in its own bucket.
fn options(sharding: Sharding) -> DdpOptions {
    DdpOptions {
        sharding,
        precision: Precision::Pure(DType::F64),
        unused: Unused::Allow,
        buckets: buckets(0., 0.),
        init_seed: Some(7),
        ..Default::default()
    }
}

fn blocks(ranks: Option<usize>) -> Sharding {
    Sharding::Blocks { reshard_after_forward: true, ranks }
}

fn made(pg: &ProcessGroup, options: DdpOptions) -> Result<(Ddp, AdamW)> {
    let ddp = DistributedDataParallel::with_options(pg, &VarMap::new(), Net::new, options)?;
    let optimizer = AdamW::new(&ddp, ParamsAdamW { lr: 0.02, ..Default::default() })?;
    Ok((ddp, optimizer))
}

/// Returns the outputs of the model for other inputs.
fn output(ddp: &Ddp) -> Result<Vec<f64>> {
    let x = ddp.cast_forward_inputs(&batch(9, 99))?;
    let y = no_grad(|| ddp.call(|net| net.forward(&x, true)))?;
    Ok(y.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?)
}

type Step = dyn Fn(&Ddp, &mut dyn Optimizer, usize) -> Result<()> + Sync;

/// The gradients of three passes.
fn accumulated(ddp: &Ddp, step: usize) -> Result<GradStore> {
    for pass in 0..2 {
        let _guard = ddp.no_sync();
        ddp.backward(&loss(ddp, 3 * step + pass, true)?)?;
    }
    ddp.backward(&loss(ddp, 3 * step + 2, true)?)
}

fn train(pg: &ProcessGroup, options: DdpOptions, by_muon: bool, step: &Step) -> Result<Vec<f64>> {
    let ddp = DistributedDataParallel::with_options(pg, &VarMap::new(), Net::new, options)?;
    let adamw = ParamsAdamW { lr: 0.02, ..Default::default() };
    let mut optimizer: Box<dyn Optimizer> = match by_muon {
        true => Box::new(Muon::with_adamw(&ddp, ParamsMuon { lr: 0.02, ..Default::default() }, adamw, |name| {
            name.starts_with("head")
        })?),
        false => Box::new(AdamW::new(&ddp, adamw)?),
    };
    (0..STEPS).try_for_each(|number| step(&ddp, &mut *optimizer, number))?;
    output(&ddp)
}

/// Checks that training with these options has the results of a model that is not sharded.
fn as_whole(name: &str, options: &DdpOptions, by_muon: bool, tolerance: f64, step: &Step) {
    for world_size in 1..=4 {
        let halves = (world_size % 2 == 0).then_some(blocks(Some(world_size / 2)));
        ranks(world_size, |pg| {
            let whole = train(&pg, options.clone(), by_muon, step)?;
            for sharding in [Sharding::Optimizer { ranks: None }, blocks(None)].into_iter().chain(halves) {
                let found = train(&pg, DdpOptions { sharding, ..options.clone() }, by_muon, step)?;
                for (found, whole) in found.iter().zip(&whole) {
                    let is_close = (found - whole).abs() <= tolerance;
                    assert!(is_close, "{name}, {world_size} ranks, {sharding:?}: {found}, not {whole}");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn accumulated_parts_are_those_of_whole_sums() {
    let plain: &Step = &|ddp, optimizer, step| optimizer.step(&accumulated(ddp, step)?);
    // In each step, some ranks use the extra layer in some passes, and none in the last.
    let unused: &Step = &|ddp, optimizer, step| {
        let rank = ddp.process_group().rank();
        for pass in 0..2 {
            let _guard = ddp.no_sync();
            ddp.backward(&loss(ddp, 3 * step + pass, step < 2 && pass == step && rank == 0)?)?;
        }
        optimizer.step(&ddp.backward(&loss(ddp, 3 * step + 2, false)?)?)
    };
    let weighted: &Step = &|ddp, optimizer, step| {
        let mut grads = GradStore::default();
        for pass in 0..3 {
            let _guard = ddp.sync_if(pass == 2);
            let count = (ddp.process_group().rank() + pass) as f64;
            let sum = loss(ddp, 3 * step + pass, true)?.mul(&Tensor::new(count, &Device::Cpu)?)?;
            grads = backward_with(&sum, &[ddp], counted(count))?;
        }
        optimizer.step(&grads)
    };
    // The earlier gradients are clipped, those that are added to them are not.
    let added: &Step = &|ddp, optimizer, step| {
        // A new store has nothing of an earlier one, even after sums were accumulated on that.
        let mut gone = ddp.backward(&loss(ddp, 40, true)?)?;
        let guard = ddp.no_sync();
        backward_with(&loss(ddp, 41, true)?, &[ddp], added_to(&mut gone))?;
        drop((guard, gone));
        let mut grads = ddp.backward(&loss(ddp, 3 * step, true)?)?;
        optimizer.clip_grad_norm(&mut grads, 0.01)?;
        for pass in 1..3 {
            let _guard = ddp.sync_if(pass == 2);
            let loss = loss(ddp, 3 * step + pass, true)?;
            backward_with(&loss, &[ddp], added_to(&mut grads))?;
        }
        optimizer.step(&grads)
    };
    let dropped: &Step = &|ddp, optimizer, step| {
        let guard = ddp.no_sync();
        ddp.backward(&loss(ddp, 50 + step, true)?)?;
        ddp.zero_grad();
        ddp.backward(&loss(ddp, 2 * step, true)?)?;
        drop(guard);
        // An evaluation, and a forward pass without a backward pass.
        output(ddp)?;
        loss(ddp, 60, true)?;
        optimizer.step(&ddp.backward(&loss(ddp, 2 * step + 1, true)?)?)
    };
    let scaled: &Step = &|ddp, optimizer, step| {
        let enabled = GradScalerOptions { init_scale: 1024., ..Default::default() };
        let mut scaler = GradScaler::new(ddp.process_group(), ddp, enabled)?;
        let guard = ddp.no_sync();
        ddp.backward(&scaler.scale(&loss(ddp, 2 * step, true)?)?)?;
        drop(guard);
        let mut grads = ddp.backward(&scaler.scale(&loss(ddp, 2 * step + 1, true)?)?)?;
        optimizer.unscale(&mut scaler, &mut grads)?;
        assert!(optimizer.clip_grad_norm(&mut grads, 0.01)?.to_scalar::<f64>()? > 0.01);
        assert!(scaler.step_if_finite(&mut grads, |grads| optimizer.step(grads))?);
        scaler.update()
    };
    let in_one_call: &Step = &|ddp, optimizer, step| {
        let guard = ddp.no_sync();
        ddp.backward(&loss(ddp, 2 * step, true)?)?;
        drop(guard);
        ddp.backward_and_step(&loss(ddp, 2 * step + 1, true)?, optimizer).map(drop)
    };
    let pure = options(Sharding::Off);
    as_whole("plain", &pure, false, 1e-12, plain);
    as_whole("unused", &pure, false, 1e-12, unused);
    as_whole("unused, Muon", &pure, true, 1e-12, unused);
    as_whole("weighted", &pure, false, 1e-12, weighted);
    as_whole("added", &pure, false, 1e-12, added);
    as_whole("dropped", &pure, false, 1e-12, dropped);
    as_whole("scaled", &pure, false, 1e-12, scaled);
    as_whole("in one call", &pure, false, 1e-12, in_one_call);
}

#[test]
fn lower_precision_accumulates_parts_too() {
    let plain: &Step = &|ddp, optimizer, step| optimizer.step(&accumulated(ddp, step)?);
    let precision = Precision::Half { param_dtype: DType::BF16, buffer_dtype: None };
    for (reduce_dtype, keep_low_precision_grads) in [(Some(DType::F32), false), (None, true)] {
        let buckets = Buckets { reduce_dtype, keep_low_precision_grads, ..options(Sharding::Off).buckets };
        let half = DdpOptions { precision, buckets, ..options(Sharding::Off) };
        as_whole(&format!("{reduce_dtype:?}"), &half, false, 0.02, plain);
    }
}

/// Two models in one graph, of which one accumulates.
#[test]
fn a_model_accumulates_next_to_another() {
    let train = |sharding| {
        let found = ranks(3, |pg| {
            let ((a, mut of_a), (b, mut of_b)) = (made(&pg, options(sharding))?, made(&pg, options(sharding))?);
            for step in 0..STEPS {
                for pass in 0..2 {
                    let both = (loss(&a, 2 * step + pass, true)? + loss(&b, 20 + 2 * step + pass, true)?)?;
                    let _guard = a.sync_if(pass == 1);
                    let grads = backward_with(&both, &[&a, &b], Default::default())?;
                    of_b.step(&grads)?;
                    if pass == 1 {
                        of_a.step(&grads)?;
                    }
                }
            }
            Ok([output(&a)?, output(&b)?].concat())
        });
        found.into_iter().next().unwrap()
    };
    let whole = train(Sharding::Off);
    for sharding in [Sharding::Optimizer { ranks: None }, blocks(None)] {
        let found = train(sharding);
        assert!(found.iter().zip(&whole).all(|(a, b)| (a - b).abs() < 1e-12), "{sharding:?}: {found:?}, not {whole:?}");
    }
}

/// The inputs of some ranks end in the middle of a step, or before it.
#[test]
fn ranks_without_inputs_take_part_in_passes_under_no_sync() {
    let train = |sharding, divide_by_initial_world_size, weighted: bool, passes: &'static [usize]| {
        ranks(passes.len(), move |pg| {
            let (ddp, mut optimizer) = made(&pg, options(sharding))?;
            let join = JoinOptions { divide_by_initial_world_size, ..Default::default() };
            let joined = optimizer.join(&ddp, join, |optimizer| {
                for pass in 0..passes[pg.rank()] {
                    let is_last = pass % 3 == 2;
                    let _guard = ddp.sync_if(is_last);
                    let count = weighted.then_some((1 + pg.rank() + pass) as f64);
                    let loss = loss(&ddp, pass, true)?;
                    let grads = backward_with(&loss, &[&ddp], Backward { count, ..Default::default() })?;
                    if is_last {
                        optimizer.step(&grads)?;
                    }
                }
                Ok(())
            })?;
            assert!(joined.was_uneven);
            output(&ddp)
        })
    };
    for passes in [&[3, 6][..], &[4, 9, 1], &[9, 2, 3]] {
        for (initial, weighted) in [(true, false), (false, false), (false, true)] {
            let whole = train(Sharding::Off, initial, weighted, passes);
            for found in train(Sharding::Optimizer { ranks: None }, initial, weighted, passes) {
                let is_close = found.iter().zip(&whole[0]).all(|(a, b)| (a - b).abs() < 1e-12);
                assert!(is_close, "{passes:?}, {initial}, {weighted}: {found:?}, not {whole:?}");
            }
        }
    }
}

/// Ranks without inputs treat all models of a pass alike.
#[test]
fn in_a_join_models_accumulate_together() {
    ranks(2, |pg| {
        let ((a, _of_a), (b, _of_b)) =
            (made(&pg, options(Sharding::Optimizer { ranks: None }))?, made(&pg, options(Sharding::Off))?);
        let error = candle_ddp::join(&[&a, &b], JoinOptions::default(), || {
            let _guard = a.no_sync();
            let both = (loss(&a, 0, true)? + loss(&b, 0, true)?)?;
            backward_with(&both, &[&a, &b], Default::default()).map(drop)
        });
        assert_error(error, &["under no_sync or none"]);
        Ok(())
    });
}

/// Each pass needs all ranks, so that they must make equally many.
#[test]
fn unequal_numbers_of_passes_are_an_error_on_all_ranks() {
    for world_size in [2, 3] {
        for sharding in [Sharding::Optimizer { ranks: None }, blocks(None)] {
            let errors = ranks(world_size, |pg| {
                let (ddp, mut optimizer) = made(&pg, options(sharding))?;
                let mut step = || {
                    for pass in 0..1 + usize::from(pg.rank() == 1) {
                        let _guard = ddp.no_sync();
                        ddp.backward(&loss(&ddp, pass, true)?)?;
                    }
                    optimizer.step(&ddp.backward(&loss(&ddp, 9, true)?)?)
                };
                Ok(step().unwrap_err())
            });
            for error in errors {
                let text = error.to_string();
                let is_clear =
                    ["(bucket 0)", "(bucket 0) under no_sync"].map(|part| text.matches(part).count()) == [2, 1];
                assert!(is_clear, "{sharding:?}: {text}");
            }
        }
    }
}

#[test]
fn a_failed_pass_drops_what_has_accumulated() {
    // A variable outside of the model, on which the loss depends.
    let wrong = |ddp: &Ddp, pass| -> Result<Tensor> {
        let (_, var) = &ddp.named_parameters()[0];
        Ok((loss(ddp, pass, true)? + var.sum_all()?)?)
    };
    for sharding in [Sharding::Optimizer { ranks: None }, blocks(None)] {
        let train = |fails: bool| {
            ranks(1, |pg| {
                let (ddp, mut optimizer) = made(&pg, options(sharding))?;
                for step in 0..STEPS {
                    if fails {
                        let _guard = ddp.no_sync();
                        ddp.backward(&loss(&ddp, 30 + step, true)?)?;
                        ddp.backward(&wrong(&ddp, 40 + step)?).unwrap_err();
                    }
                    optimizer.step(&accumulated(&ddp, step)?)?;
                }
                output(&ddp)
            })
        };
        assert_eq!(train(true), train(false), "{sharding:?}");
        // The others wait for a part.
        let errors = ranks(2, |pg| {
            let (ddp, _optimizer) = made(&pg, options(sharding))?;
            let _guard = ddp.no_sync();
            let pass = |pass| match pg.rank() {
                1 => ddp.backward(&wrong(&ddp, pass)?).map(drop),
                _ => ddp.backward(&loss(&ddp, pass, true)?).map(drop),
            };
            Ok(pass(0).and_then(|()| pass(1)).unwrap_err().to_string())
        });
        assert!(errors.iter().all(|error| error.contains("uses its variable directly")), "{errors:?}");
    }
}

/// The rank that had a NaN is known, though the pass that sent it is over.
#[test]
fn a_nan_in_an_earlier_pass_ends_the_step() {
    let bad = |ddp: &Ddp, pass, is_bad: bool| -> Result<Tensor> {
        let factor = if is_bad { f64::NAN } else { 1. };
        Ok((loss(ddp, pass, true)? * factor)?)
    };
    for sharding in [Sharding::Optimizer { ranks: None }, blocks(None), blocks(Some(2))] {
        let train = |policy: OnNonFinite, with_bad: bool| {
            ranks(4, move |pg| {
                let options = DdpOptions { on_non_finite: Some(policy), ..options(sharding) };
                let (ddp, mut optimizer) = made(&pg, options)?;
                for step in (0..3).filter(|step| with_bad || *step != 1) {
                    for pass in 0..3 {
                        let _guard = ddp.sync_if(pass == 2);
                        let is_bad = with_bad && (step, pass, pg.rank()) == (1, 0, 2);
                        let found = ddp.backward(&bad(&ddp, 3 * step + pass, is_bad)?);
                        match found {
                            Err(Error::NonFinite { rank, parameter, .. }) => return Ok(Err((rank, parameter))),
                            found if pass == 2 => optimizer.step(&found?)?,
                            found => drop(found?),
                        }
                    }
                }
                assert_eq!(ddp.skipped_steps(), u64::from(with_bad));
                Ok(Ok(output(&ddp)?))
            })
        };
        let skip = OnNonFinite::Skip { at_most: 2 };
        assert_eq!(train(skip, true), train(skip, false), "{sharding:?}");
        let found = train(OnNonFinite::Stop, true);
        assert!(found.iter().all(|found| matches!(found, Err((Some(2), Some(_))))), "{sharding:?}: {found:?}");
    }
}

/// The store of such a pass has no gradients of the model, and a step or a division of them is refused.
#[test]
fn what_has_accumulated_is_no_gradient_of_a_step() {
    ranks(1, |pg| {
        for sharding in [Sharding::Optimizer { ranks: None }, blocks(None)] {
            let (ddp, mut optimizer) = made(&pg, options(sharding))?;
            let mut grads = {
                let _guard = ddp.no_sync();
                ddp.backward(&loss(&ddp, 0, true)?)?
            };
            assert!(ddp.parameters().iter().all(|var| grads.get(var).is_none()));
            let refused = |result: Result<()>, text: &str| {
                assert_error(result, &[text]);
            };
            refused(optimizer.step(&grads), "sum of passes under no_sync");
            refused(optimizer.clip_grad_norm(&mut grads, 1.).map(drop), "there are no new gradients");
            refused(candle_ddp::optim::clip_grad_norm(&mut grads, &ddp, 1.).map(drop), "`clip_grad_norm`");
            let options = added_to(&mut grads);
            refused(backward_with(&loss(&ddp, 1, true)?, &[&ddp], options).map(drop), "sums from a backward pass");
            optimizer.step(&ddp.backward(&loss(&ddp, 1, true)?)?)?;
        }
        Ok(())
    });
}
