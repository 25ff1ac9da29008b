//! An upper bound of what a step of a sharded model asks of a GPU, as the emulated GPU counts it; and weights that are not there.
#[path = "../../examples/char_gpt/block.rs"]
mod char_gpt_block;

use super::common::{skip, tensor};
use candle_core::{DType, Device, Tensor};
use candle_ddp::nn::{matmul, no_grad};
use candle_ddp::optim::{Optimizer, ParamsAdamW, ZeroRedundancyOptimizer};
use candle_ddp::{DdpOptions, DistributedDataParallel, ProcessGroup, Result, Sharding, block};
use candle_ddp_testing::{is_operation, take_counts};
use candle_nn::{VarBuilder, VarMap};
use char_gpt_block::Block;

const LAYERS: usize = 6;
/// Of the thread that trains.
const OPERATIONS: usize = 425;

pub(crate) fn asks_for_little(pg: &ProcessGroup) -> Result<()> {
    let build = |vb: VarBuilder<'static>| {
        let layer = |index| block(vb.pp(index), |vb| Block::new(16, 2, vb));
        (0..LAYERS).map(layer).collect::<candle_core::Result<Vec<_>>>()
    };
    let options =
        DdpOptions { sharding: Sharding::Blocks { reshard_after_forward: true, ranks: None }, ..Default::default() };
    let ddp = DistributedDataParallel::with_options(pg, &VarMap::new(), build, options)?;
    let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, ParamsAdamW::default())?;
    let x = tensor(&[1, 8, 16], 1).to_device(pg.device())?;
    let mut step = || {
        let y = ddp.call(|layers| layers.iter().try_fold(x.clone(), |x, layer| layer.forward(&x)))?;
        optimizer.step(&ddp.backward(&y.sqr()?.mean_all()?)?)
    };
    for _ in 0..2 {
        step()?;
    }
    take_counts();
    step()?;
    let Some(counts) = take_counts() else {
        skip("a_step_of_a_sharded_model_asks_for_little", "only an emulated GPU counts operations");
        return Ok(());
    };
    let waits: Vec<_> = counts.iter().filter(|(name, _)| name.starts_with("wait for ")).cloned().collect();
    // For the order of the last pass's blocks, which was compared before its backward pass.
    let [(wait, 1)] = &waits[..] else { panic!("{waits:?}") };
    assert!(wait.starts_with("wait for earlier work"), "{wait}");
    let operations: usize = counts.iter().filter(|(name, _)| is_operation(name)).map(|(_, count)| count).sum();
    assert!(operations <= OPERATIONS, "{operations} operations must be at most {OPERATIONS}: {counts:#?}");
    pg.barrier()
}

/// Uses a weight that has left its model and was freed.
pub(crate) fn refuses_freed_weights(pg: &ProcessGroup) -> Result<()> {
    let build = |vb: VarBuilder<'static>| vb.get((6, 6), "weight");
    let options =
        DdpOptions { sharding: Sharding::Blocks { reshard_after_forward: true, ranks: None }, ..Default::default() };
    let ddp = DistributedDataParallel::with_options(pg, &VarMap::new(), build, options)?;
    let weight = no_grad(|| ddp.call(|weight| Ok::<_, candle_core::Error>(weight.clone())))?;
    let x = tensor(&[6, 6], 1).to_device(pg.device())?;
    let uses = [
        ("matmul", x.matmul(&weight)),
        ("matmul of ours", matmul(&x, &weight)),
        ("both", weight.matmul(&weight)),
        ("add", &x + &weight),
        ("sqr", weight.sqr()),
        ("sum_all", weight.sum_all()),
        ("copy", weight.copy()),
        ("contiguous", weight.t().and_then(|weight| weight.contiguous())),
        ("cat", Tensor::cat(&[&x, &weight], 0)),
        ("index_select", weight.index_select(&Tensor::new(&[0u32], pg.device())?, 0)),
        ("to_dtype", weight.to_dtype(DType::BF16)),
        ("to_device", weight.to_device(&Device::Cpu)),
    ];
    for (name, result) in uses {
        assert!(result.is_err(), "{name} computed with nothing");
    }
    let copy = no_grad(|| ddp.call(|weight| weight.copy()))?;
    assert_eq!(x.matmul(&copy)?.dims(), [6, 6]);
    pg.barrier()
}
