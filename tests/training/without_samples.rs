//! Ranks without samples: each error names what works.
use crate::common::{assert_error, floats, ranks, tensor};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor};
use candle_ddp::nn::{BatchNorm, batch_norm};
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW};
use candle_ddp::{DdpOptions, DistributedDataParallel, ProcessGroup, Result};
use candle_nn::{Linear, ModuleT, VarMap, linear};

fn model(pg: &ProcessGroup, options: DdpOptions) -> Result<DistributedDataParallel<Linear>> {
    DistributedDataParallel::with_options(pg, &VarMap::new(), |vb| linear(3, 4, vb), options)
}

const REMEDY: &str = "backward_with(&zero, &[&ddp], Backward { count: Some(0.), .. })";

#[test]
fn a_loss_without_samples_names_the_remedy() {
    ranks(2, |pg| {
        let ddp = model(&pg, DdpOptions::default())?;
        let loss = match pg.rank() {
            0 => ddp.forward(&tensor(&[2, 3], 1))?.sqr()?.mean_all()?,
            _ => Tensor::zeros((), DType::F32, &Device::Cpu)?,
        };
        assert_error(ddp.backward(&loss).map(drop), &[REMEDY, "rank 1"]);
        Ok(())
    });
}

#[test]
fn a_skipped_step_names_the_remedy() {
    ranks(2, |pg| {
        let ddp = model(&pg, DdpOptions::default())?;
        let work = || -> Result<()> {
            for step in 0..2 {
                if (pg.rank(), step) != (1, 1) {
                    ddp.backward(&ddp.forward(&tensor(&[2, 3], 1))?.sqr()?.mean_all()?)?;
                }
            }
            pg.barrier()
        };
        assert_error(work(), &[REMEDY]);
        Ok(())
    });
}

#[test]
fn buffers_are_broadcast_on_demand() {
    let statistics = ranks(2, |pg| {
        let build = |vb| batch_norm(3, 1e-5, vb);
        let ddp: DistributedDataParallel<BatchNorm> = DistributedDataParallel::new(&pg, &VarMap::new(), build)?;
        // A batch that is skipped after its forward pass.
        ddp.call(|norm| norm.forward_t(&tensor(&[4, 3], pg.rank() as u64), true))?;
        let values = || ddp.named_buffers().iter().flat_map(|(_, var)| floats(var)).collect::<Vec<_>>();
        let before = values();
        ddp.broadcast_buffers()?;
        Ok((before, values()))
    });
    assert_ne!(statistics[0].0, statistics[1].0);
    assert_eq!(statistics[0].0, statistics[0].1);
    assert_eq!(statistics[0].1, statistics[1].1);
}

#[test]
fn clipping_and_batch_norm_speak_of_what_is_there() {
    ranks(1, |pg| {
        let ddp = model(&pg, DdpOptions::default())?;
        let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
        assert_error(optimizer.clip_grad_norm(&mut GradStore::default(), 1.0), &["the store that `backward` returned"]);
        let varmap = VarMap::new();
        let vb = candle_nn::VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
        let error = batch_norm(3, 1e-5, vb)?.forward_t(&tensor(&[1, 3], 1), true).unwrap_err().to_string();
        assert!(error.contains("at least two values per channel") && !error.contains("rank"), "{error}");
        Ok(())
    });
}
