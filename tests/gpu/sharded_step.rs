//! An upper bound of what a step of a sharded model asks of a GPU, as the emulated GPU counts it.
#[path = "../../examples/char_gpt/block.rs"]
mod char_gpt_block;

use super::common::{skip, tensor};
use super::gpu_counts::take_counts;
use candle_ddp::optim::{Optimizer, ParamsAdamW, ZeroRedundancyOptimizer};
use candle_ddp::{DdpOptions, DistributedDataParallel, ProcessGroup, Result, Sharding, block};
use candle_nn::{VarBuilder, VarMap};
use char_gpt_block::Block;

const LAYERS: usize = 6;
/// Of the thread that trains.
const OPERATIONS: usize = 870;

pub(crate) fn asks_for_little(pg: &ProcessGroup) -> Result<()> {
    let build = |vb: VarBuilder<'static>| {
        let layer = |index| block(vb.pp(index), |vb| Block::new(16, 2, vb));
        (0..LAYERS).map(layer).collect::<candle_core::Result<Vec<_>>>()
    };
    let options = DdpOptions { sharding: Some(Sharding::default()), ..Default::default() };
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
    let (waits, asked): (Vec<_>, Vec<_>) = counts.into_iter().partition(|(name, _)| name.starts_with("wait for "));
    // For the order of the last pass's blocks, which was compared before its backward pass.
    assert_eq!(waits, [("wait for earlier work".to_string(), 1)]);
    let operations: usize = asked.iter().filter(|(name, _)| name != "allocation").map(|(_, count)| count).sum();
    assert!(operations <= OPERATIONS, "{operations} operations must be at most {OPERATIONS}: {asked:#?}");
    pg.barrier()
}
