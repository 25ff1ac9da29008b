use super::*;
use crate::{DdpOptions, DistributedDataParallel, ProcessGroup, Sharding, spawn};
use candle_core::{DType, Device};
use candle_ddp_nn::{Linear, linear, no_grad};
use candle_nn::VarMap;

struct Net(Linear, Block<Linear>);

impl Module for Net {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.1.forward(&self.0.forward(x)?)
    }
}

type Ddp = DistributedDataParallel<Net>;

/// How many hold the blocks of a model after `work` and the end of the model.
fn left(
    pg: &ProcessGroup,
    sharding: Sharding,
    work: fn(&Ddp, &Tensor) -> crate::Result<Tensor>,
) -> crate::Result<usize> {
    let build = |vb: VarBuilder<'static>| {
        Ok::<_, candle_core::Error>(Net(linear(3, 3, vb.pp("a"))?, block(vb.pp("b"), |vb| linear(3, 3, vb))?))
    };
    let options = DdpOptions { sharding, ..Default::default() };
    let ddp = DistributedDataParallel::with_options(pg, &VarMap::new(), build, options)?;
    let units = ddp.core.blocks.as_ref().map(|blocks| Arc::downgrade(&blocks.units));
    let result = work(&ddp, &Tensor::ones((2, 3), DType::F32, &Device::Cpu)?);
    drop((result, ddp));
    Ok(units.map_or(0, |units| units.strong_count()))
}

#[test]
fn a_model_ends_whatever_its_last_pass_was() {
    let works: [fn(&Ddp, &Tensor) -> crate::Result<Tensor>; 3] = [
        |ddp, x| ddp.forward(x),
        |ddp, x| no_grad(|| ddp.forward(x)),
        // A product that does not fit, after the first layer.
        |ddp, x| ddp.call(|net| net.1.forward(&net.0.forward(x)?.narrow(1, 0, 2)?)),
    ];
    spawn(2, |pg| {
        for reshard_after_forward in [true, false] {
            for work in works {
                assert_eq!(left(&pg, Sharding::Blocks { reshard_after_forward, ranks: None }, work)?, 0);
            }
        }
        Ok(())
    })
    .unwrap();
}
