//! Graphs that wait for their backward pass while something else is computed, and graphs that lack a block on some ranks.
use super::*;
use candle_ddp::Unused;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

type Generator = DistributedDataParallel<Linear>;

/// The work between a forward pass through a frozen model and the backward pass of another one.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Between {
    Nothing,
    Evaluations,
    Training,
}

/// The losses of a generator that a critic judges, both trained in turn.
pub(super) fn compete(
    pg: &ProcessGroup,
    make: &Make,
    sharding: Sharding,
    own_product: bool,
    between: Between,
) -> candle_ddp::Result<Vec<f32>> {
    let options = DdpOptions { sharding, init_seed: Some(3), ..Default::default() };
    let build = |vb: VarBuilder<'static>| linear(3, 3, vb);
    let generator: Generator = DistributedDataParallel::with_options(pg, &VarMap::new(), build, options.clone())?;
    let (critic, mut of_critic) = make(pg, &VarMap::new(), options)?;
    let mut of_generator = ZeroRedundancyOptimizer::new(&generator, ParamsAdamW::default())?;
    // With candle's product, which reads a weight again in the backward pass.
    let judge = |x: &Tensor| {
        critic.call(|net| {
            if !own_product {
                return net.forward(x);
            }
            let x = x.matmul(&net.stem.weight().t()?)?;
            let x = net.stem.bias().map_or(Ok(x.clone()), |bias| x.broadcast_add(bias))?;
            net.head.forward(&net.layers.iter().try_fold(x, |x, layer| layer.forward(&x))?)
        })
    };
    let mut losses = Vec::new();
    for step in 0..3 {
        let fake = generator.forward(&batch(pg, step)?)?;
        let of_both = (judge(&fake.detach())?.sqr()?.mean_all()? - judge(&batch(pg, 10 + step)?)?.mean_all()?)?;
        of_critic.step(&critic.backward(&of_both)?)?;
        let loss = judge(&fake)?.sqr()?.mean_all()?;
        match between {
            Between::Nothing => {}
            Between::Evaluations => no_grad(|| {
                let judged = judge(&fake.detach())?.sum_all()?.to_scalar::<f32>()?;
                losses.push(judged + generator.forward(&batch(pg, 20)?)?.sum_all()?.to_scalar::<f32>()?);
                Ok::<_, Error>(())
            })?,
            Between::Training => {
                critic.backward(&judge(&batch(pg, 30)?)?.mean_all()?)?;
            }
        }
        let _frozen = critic.freeze();
        of_generator.step(&generator.backward(&loss)?)?;
        losses.push(loss.to_scalar()?);
    }
    Ok(losses)
}

#[test]
fn a_graph_finds_its_weights_whatever_comes_before_its_backward_pass() {
    for (own_product, ranks) in [(false, 2), (true, 3)] {
        crate::common::ranks(ranks, |pg| {
            let mut trained = Vec::new();
            for between in [Between::Nothing, Between::Evaluations, Between::Training] {
                let plain = compete(&pg, &made, Sharding::Optimizer { ranks: None }, own_product, between)?;
                for reshard_after_forward in [true, false] {
                    let sharding = Sharding::Blocks { reshard_after_forward, ranks: None };
                    let sharded = compete(&pg, &made, sharding, own_product, between)?;
                    assert_eq!(sharded, plain, "reshard_after_forward: {reshard_after_forward}");
                }
                trained.push(plain);
            }
            assert_eq!(trained[0], trained[2]);
            Ok(())
        });
    }
}

/// Trains on texts and images, of which rank 1 has no images: its images are zeros, and their loss counts as `silenced` says.
fn without_images(
    pg: &ProcessGroup,
    sharding: Sharding,
    silenced: fn(&Tensor) -> Result<Tensor>,
) -> candle_ddp::Result<Vec<f32>> {
    let build = |vb: VarBuilder<'static>| {
        let one = |name| block(vb.pp(name), |vb| linear(3, 3, vb));
        Ok::<_, candle_core::Error>([one("text")?, one("vision")?])
    };
    let options = DdpOptions { unused: Unused::Allow, init_seed: Some(1), sharding, ..Default::default() };
    let ddp = DistributedDataParallel::with_options(pg, &VarMap::new(), build, options)?;
    let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, ParamsAdamW::default())?;
    let mut losses = Vec::new();
    for step in 0..3 {
        let x = batch(pg, step)?;
        let image = if pg.rank() == 1 { x.zeros_like()? } else { x.clone() };
        let (text, vision) =
            ddp.call(|[text, vision]| Ok::<_, candle_core::Error>((text.forward(&x)?, vision.forward(&image)?)))?;
        let vision = vision.sqr()?.mean_all()?;
        let of_vision = if pg.rank() == 1 { silenced(&vision)? } else { vision };
        let loss = (text.sqr()?.mean_all()? + of_vision)?;
        optimizer.step(&ddp.backward(&loss)?)?;
        losses.push(loss.to_scalar()?);
    }
    Ok(losses)
}

/// Ends candle's graph.
fn by_number(loss: &Tensor) -> Result<Tensor> {
    loss * 0.
}

#[test]
fn a_rank_without_data_for_a_block_keeps_it_in_its_loss() {
    ranks(2, |pg| {
        let sharding = |reshard_after_forward| Sharding::Blocks { reshard_after_forward, ranks: None };
        let by_tensor = |loss: &Tensor| loss.mul(&loss.zeros_like()?);
        assert_eq!(
            without_images(&pg, sharding(true), by_tensor)?,
            without_images(&pg, Sharding::Optimizer { ranks: None }, by_tensor)?
        );
        // Here the backward pass gathers nothing, so that it may lack a block.
        assert_eq!(
            without_images(&pg, sharding(false), by_number)?,
            without_images(&pg, Sharding::Optimizer { ranks: None }, by_number)?
        );
        Ok(())
    });
    ranks(2, |pg| {
        let error =
            without_images(&pg, Sharding::Blocks { reshard_after_forward: true, ranks: None }, by_number).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { argument: "loss", .. }), "{error:?}");
        let error = error.to_string();
        for words in ["does not depend on block vision on rank 1", "loss.mul(&loss.zeros_like()?)?"] {
            assert!(error.contains(words), "{error}");
        }
        Ok(())
    });
}

#[test]
fn a_weight_that_is_not_there_in_the_backward_pass_is_an_error_on_every_rank() {
    let results = ranks(2, |pg| {
        let (ddp, _optimizer) = made(&pg, &VarMap::new(), sharded())?;
        let (kept, runs) = (Arc::new(Mutex::new(None)), Arc::new(AtomicUsize::new(0)));
        let y = ddp.call(|net| {
            let x = net.stem.forward(&batch(&pg, 0)?)?;
            let keeps = Arc::clone(&kept);
            let x = net.layers[0].call(&[&x], move |layer, x| {
                *keeps.lock().unwrap() = Some(layer.first.weight().clone());
                layer.forward(&x[0])
            })?;
            let rank = pg.rank();
            net.layers[1].call(&[&x], move |layer, x| {
                if runs.fetch_add(1, Ordering::Relaxed) == 1 && rank == 0 {
                    let weight = kept.lock().unwrap().clone().unwrap();
                    return x[0].matmul(&weight.t()?);
                }
                layer.forward(&x[0])
            })
        })?;
        Ok(ddp.backward(&y.sqr()?.mean_all()?).unwrap_err())
    });
    let errors = results;
    assert!(matches!(errors[0], Error::InvalidArgument { .. }), "{:?}", errors[0]);
    assert!(matches!(errors[1], Error::Group(_)), "{:?}", errors[1]);
    for error in errors {
        assert!(error.to_string().contains("a parameter of a sharded model"), "{error}");
    }
}
