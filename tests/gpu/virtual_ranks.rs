//! Virtual ranks over NCCL, which only moves the sums, and gathering tensors of unequal shapes.
use crate::common::{buckets, of_micro_batch, values};
use crate::launch::{Ranks, gpus};
use crate::{finish, floats_of};
use candle_core::{DType, Tensor};
use candle_ddp::checkpoint::StateDict;
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW, ZeroRedundancyOptimizer};
use candle_ddp::{Backward, DdpOptions, DistributedDataParallel, ProcessGroup, Result, Sharding, backward_with};
use candle_nn::{VarBuilder, VarMap, linear, seq};

pub(crate) const VIRTUAL: usize = 4;

/// The parameters and the optimizer's state after some steps, and the losses.
pub(crate) fn train(pg: &ProcessGroup, is_sharded: bool) -> Result<Vec<f32>> {
    let options = DdpOptions {
        init_seed: Some(7),
        sharding: if is_sharded { Sharding::Optimizer { ranks: None } } else { Sharding::Off },
        buckets: buckets(0.0005, 0.0002),
        ..Default::default()
    };
    let build = |vb: VarBuilder| -> candle_core::Result<_> {
        let (first, second) = (linear(4, 13, vb.pp("a"))?, linear(13, 3, vb.pp("b"))?);
        Ok(seq().add(first).add_fn(|x| x.tanh()).add(second))
    };
    let ddp = DistributedDataParallel::with_options(pg, &VarMap::new(), build, options)?;
    let params = ParamsAdamW { lr: 0.01, ..Default::default() };
    let mut losses = Vec::new();
    let mut train = |step: &mut dyn FnMut(&candle_core::backprop::GradStore) -> Result<()>| -> Result<()> {
        for step_number in 0..3 {
            let (mut own, mut grads) = (Vec::new(), candle_core::backprop::GradStore::default());
            for number in ddp.micro_batches().unwrap() {
                let x = values(20, (step_number * VIRTUAL + number) as u64);
                let x = Tensor::from_vec(x, (5, 4), pg.device())?;
                let loss = ddp.forward(&x)?.sqr()?.sum_all()?;
                own.push(f64::from(loss.to_scalar::<f32>()?));
                let options = Backward { count: Some(5. + number as f64), ..of_micro_batch(number) };
                grads = backward_with(&loss, &[&ddp], options)?;
            }
            step(&grads)?;
            losses.extend(ddp.gather_micro_batches(&own)?.into_iter().map(|loss| loss as f32));
        }
        Ok(())
    };
    let state = if is_sharded {
        let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, params)?;
        train(&mut |grads| optimizer.step(grads))?;
        optimizer.state_dict()?
    } else {
        let mut optimizer = AdamW::new(&ddp, params)?;
        train(&mut |grads| optimizer.step(grads))?;
        optimizer.state_dict()?
    };
    let mut state: Vec<_> = state.into_iter().collect();
    state.sort_by(|(name, _), (other, _)| name.cmp(other));
    let parameters = ddp.parameters();
    let tensors = state.iter().map(|(_, tensor)| tensor).chain(parameters.iter().map(|var| var.as_tensor()));
    for tensor in tensors {
        losses.extend(tensor.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?);
    }
    Ok(losses)
}

#[test]
fn a_run_has_the_same_bits_on_any_number_of_ranks() {
    let Some(_) = gpus("a_run_has_the_same_bits_on_any_number_of_ranks") else { return };
    let one = floats_of(&Ranks::start(1, "virtual ranks").finish()).remove(0);
    assert!(one.len() > 3 * 100 && one.iter().all(|value| value.is_finite()));
    for (world_size, job) in [(2, "virtual ranks"), (3, "virtual ranks"), (2, "virtual ranks with shards")] {
        for (rank, other) in floats_of(&Ranks::start(world_size, job).finish()).into_iter().enumerate() {
            let differing = one.iter().zip(&other).filter(|(one, other)| one.to_bits() != other.to_bits()).count();
            assert_eq!((differing, other.len()), (0, one.len()), "{job}, rank {rank} of {world_size}");
        }
    }
}

/// Gradients that cuDNN adds up in any order have other bits in every run.
#[test]
#[cfg(feature = "cudnn")]
fn sums_in_any_order_are_refused() {
    let Some(_) = gpus("sums_in_any_order_are_refused") else { return };
    let variable = |_| Some(("CANDLE_DDP_CUDNN_ATTENTION", "fast"));
    for error in Ranks::start_in(2, "virtual ranks in any order", variable).finish() {
        assert!(
            error.contains("virtual_ranks") && error.contains("CANDLE_DDP_CUDNN_ATTENTION must not be `fast`"),
            "{error}"
        );
    }
}

#[test]
fn tensors_of_unequal_shapes_are_gathered() {
    finish("tensors_of_unequal_shapes_are_gathered", 3, "varied");
}

pub(crate) fn varied(pg: &ProcessGroup) -> Result<()> {
    let part = |rank: usize| Tensor::from_vec(values(2 * rank * 3, rank as u64), (2, rank, 3), pg.device());
    // Rank 0 has none.
    let all = pg.all_gather_varied(&part(pg.rank())?, 1)?;
    assert_eq!(all.len(), pg.world_size());
    for (rank, found) in all.iter().enumerate() {
        assert_eq!(found.dims(), [2, rank, 3]);
        assert_eq!(found.flatten_all()?.to_vec1::<f32>()?, part(rank)?.flatten_all()?.to_vec1::<f32>()?, "{rank}");
    }
    let error = pg.all_gather_varied(&part(1 + pg.rank())?, 2).unwrap_err().to_string();
    assert!(error.contains("[2, 1, 3]") || error.contains("dimension"), "{error}");
    pg.barrier()
}
