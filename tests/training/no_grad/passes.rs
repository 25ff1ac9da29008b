//! Backward passes, and evaluations between them.
use super::{Build, candles, images, ours, wrap};
use crate::common::{assert_error, bits, counted, of_micro_batch, ranks, tensor, var, with_virtual_ranks};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Module, ModuleT, Tensor, Var};
use candle_ddp::data_parallel::DataParallel;
use candle_ddp::nn::{self, Dropout, enable_grad, is_grad_enabled, no_grad};
use candle_ddp::{DdpOptions, DistributedDataParallel, Error, Failure, ProcessGroup, Result, Unused, backward_with};
use candle_nn::{VarBuilder, VarMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

fn loss(output: &Tensor) -> candle_core::Result<Tensor> {
    output.sqr()?.mean_all()
}

fn gradients<M>(ddp: &DistributedDataParallel<M>, grads: &GradStore) -> Vec<Vec<u32>> {
    ddp.parameters().iter().map(|var| bits(grads.get(var).unwrap())).collect()
}

/// Two micro-batches and a last pass, with an evaluation between any two of their parts, or without.
fn accumulate<M: ModuleT>(
    pg: &ProcessGroup,
    build: Build<M>,
    has_model: bool,
    evaluates: bool,
) -> Result<Vec<Vec<u32>>> {
    let (_, ddp) = wrap(pg, build, has_model, DdpOptions::default())?;
    let evaluate = || match evaluates {
        true => no_grad(|| ddp.forward_t(&images(9), false)).map(drop),
        false => Ok(()),
    };
    let mut all = Vec::new();
    for step in 0..2 {
        for number in 0..3 {
            let _guard = ddp.sync_if(number == 2);
            evaluate()?;
            let output = ddp.call(|net| net.forward_t(&images(6 * step + 2 * number + pg.rank()), false))?;
            evaluate()?;
            let grads = ddp.backward(&loss(&output)?)?;
            evaluate()?;
            all.extend(gradients(&ddp, &grads));
        }
    }
    Ok(all)
}

#[test]
fn an_evaluation_disturbs_no_pending_pass() {
    ranks(2, |pg| {
        for has_model in [false, true] {
            assert_eq!(accumulate(&pg, ours, has_model, true)?, accumulate(&pg, ours, has_model, false)?);
            assert_eq!(accumulate(&pg, candles, has_model, true)?, accumulate(&pg, candles, has_model, false)?);
        }
        Ok(())
    });
}

/// Neither do evaluations within a step of micro-batches, whose buffers begin with the values from before the step.
#[test]
fn an_evaluation_disturbs_no_step_of_virtual_ranks() {
    with_virtual_ranks(4, 2, |pg| {
        let run = |evaluates: bool| {
            let (varmap, ddp) = wrap(&pg, ours, true, DdpOptions::default())?;
            let mut last = GradStore::default();
            for number in [2 * pg.rank(), 2 * pg.rank() + 1] {
                let output = ddp.call(|net| net.norm.forward_t(&net.conv.forward(&images(number))?, true))?;
                if evaluates {
                    no_grad(|| ddp.forward_t(&images(9), false))?;
                }
                let rest = ddp.call(|net| net.forward_t(&images(number), false))?;
                let loss = (loss(&output)? + loss(&rest)?)?;
                last = backward_with(&loss, &[&ddp], of_micro_batch(number))?;
            }
            let mut all = gradients(&ddp, &last);
            all.push(bits(&var(&varmap, "norm.running_mean")));
            Ok::<_, Error>(all)
        };
        assert_eq!(run(true)?, run(false)?);
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_loss_of_an_evaluation_is_an_error_that_names_the_cause() {
    for unused in [Unused::Refuse, Unused::Allow] {
        let results = ranks(2, |pg| {
            let options = DdpOptions { unused: unused.clone(), ..Default::default() };
            let (_, ddp) = wrap(&pg, ours, true, options)?;
            let forward = || ddp.forward_t(&images(1), false);
            let output = if pg.rank() == 1 { no_grad(forward)? } else { forward()? };
            Ok(ddp.backward(&loss(&output)?).unwrap_err())
        });
        assert!(matches!(&results[0], Error::Group(Failure::PeerFailed { peer: 1, .. })), "{:?}", results[0]);
        assert!(matches!(&results[1], Error::InvalidArgument { argument: "loss", .. }), "{:?}", results[1]);
        results.iter().for_each(|error| assert!(error.to_string().contains("no_grad"), "{error}"));
    }
    // A single rank may continue, and a rank without samples may have evaluated before.
    ranks(1, |pg| {
        let (_, ddp) = wrap(&pg, ours, false, DdpOptions { unused: Unused::Allow, ..Default::default() })?;
        let evaluated = no_grad(|| ddp.forward_t(&images(1), false))?;
        for result in [ddp.backward(&loss(&evaluated)?), backward_with(&loss(&evaluated)?, &[&ddp], counted(2.))] {
            assert!(matches!(result, Err(Error::InvalidArgument { argument: "loss", .. })));
        }
        let nothing = Tensor::zeros((), DType::F32, pg.device())?;
        assert!(matches!(backward_with(&nothing, &[&ddp], counted(0.)), Err(Error::NothingCounted { .. })));
        ddp.backward(&loss(&ddp.forward_t(&images(1), false)?)?).map(drop)
    });
}

/// As in PyTorch, where no_grad is about what is recorded.
#[test]
fn a_graph_from_outside_has_its_gradients_inside() {
    ranks(2, |pg| {
        let run = |is_inside: bool| {
            let (_, ddp) = wrap(&pg, candles, false, DdpOptions::default())?;
            let dropout = Arc::new(Dropout::new(0.5));
            let output = ddp.call(|net| {
                let head = net.head.clone();
                let x = net.conv.forward(&images(pg.rank()))?.broadcast_add(&net.position)?;
                let x = net.norm.forward_t(&x, false)?.flatten_from(1)?;
                let dropout = Arc::clone(&dropout);
                nn::checkpoint(&[&x], move |x| head.forward(&dropout.forward(&x[0], false)?))
            })?;
            let backward = || ddp.backward(&loss(&output)?);
            let grads = if is_inside { no_grad(backward)? } else { backward()? };
            Ok::<_, Error>(gradients(&ddp, &grads))
        };
        assert_eq!(run(true)?, run(false)?);
        Ok(())
    });
}

#[test]
fn a_checkpoint_computes_once_and_records_as_its_surroundings_do() {
    let x = Var::from_tensor(&tensor(&[4, 3], 1)).unwrap();
    let runs = Arc::new(AtomicUsize::new(0));
    let checkpoint = || {
        let runs = Arc::clone(&runs);
        nn::checkpoint(&[&x], move |x| {
            runs.fetch_add(1, Ordering::Relaxed);
            // A part under no_grad is the same part in both runs.
            nn::relu(&x[0])? + no_grad(|| nn::gelu(&x[0]))?
        })
        .unwrap()
    };
    let plain = no_grad(checkpoint);
    assert!(!plain.track_op() && runs.load(Ordering::Relaxed) == 1);
    let recorded = no_grad(|| enable_grad(checkpoint));
    assert_eq!(bits(&recorded), bits(&plain));
    let gradient = no_grad(|| recorded.backward()).unwrap();
    assert_eq!(runs.load(Ordering::Relaxed), 3);
    let positive: Vec<f32> = crate::common::floats(&x).iter().map(|x| f32::from(*x > 0.)).collect();
    assert_eq!(crate::common::floats(gradient.get(&x).unwrap()), positive);
}

#[test]
fn one_rank_may_evaluate_a_model_with_sync_batch_norm_alone() {
    ranks(2, |pg| {
        let build = |vb: VarBuilder| {
            let norm = nn::sync_batch_norm(&pg, 3, 1e-5, vb.pp("norm"))?;
            let fc = nn::linear(2, 3, vb.pp("fc"))?;
            Ok::<_, candle_core::Error>(nn::func_t(move |x, train| norm.forward_t(&fc.forward(x)?, train)))
        };
        let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), build)?.with_no_grad_model(build)?;
        let x = tensor(&[4, 2], 1);
        if pg.rank() == 0 {
            assert!(!no_grad(|| ddp.forward_t(&x, false))?.track_op());
        }
        ddp.backward(&loss(&ddp.forward_t(&x, true)?)?)?;
        Ok(())
    });
}

/// A layer that says whether its thread records.
fn records(vb: VarBuilder) -> candle_core::Result<nn::Func<'static>> {
    let layer = nn::linear(2, 3, vb)?;
    Ok(nn::func(move |x| {
        let recorded = layer.forward(x)?;
        assert_eq!(recorded.track_op(), is_grad_enabled());
        recorded * f64::from(u8::from(is_grad_enabled()))
    }))
}

#[test]
fn data_parallel_passes_the_state_to_its_threads() {
    let devices = [Device::Cpu, Device::Cpu];
    let dp = DataParallel::new(&devices, &Device::Cpu, &VarMap::new(), records).unwrap();
    for x in [tensor(&[4, 2], 1), Var::from_tensor(&tensor(&[1, 2], 1)).unwrap().into_inner()] {
        let sum = |y: &Tensor| y.abs().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap();
        let recorded = dp.forward(&x).unwrap();
        assert!(recorded.track_op() && sum(&recorded) > 0.);
        let plain = no_grad(|| dp.forward(&x)).unwrap();
        assert!(!plain.track_op() && sum(&plain) == 0.);
        dp.backward(&loss(&recorded).unwrap()).unwrap();
        assert_error(dp.backward(&loss(&plain).unwrap()), &["no_grad"]);
    }
}
