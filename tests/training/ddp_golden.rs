//! Two ranks reproduce the golden training run of PyTorch's DDP: the same losses on each rank and the same final
//! weights.
use crate::common::ranks;
use candle_core::Result as CandleResult;
use candle_ddp::{DdpOptions, DistributedDataParallel};
use candle_nn::{AdamW, Optimizer, SGD, VarMap};

fn train<O: Optimizer>(name: &str, config: impl Fn() -> O::Config + Sync, options: &DdpOptions) {
    let losses = ranks(2, |pg| {
        let golden = crate::model::Golden::load()?;
        let varmap = VarMap::new();
        let ddp = DistributedDataParallel::with_options(&pg, &varmap, crate::model::net, options.clone())?;
        golden.set_initial(&varmap)?;
        let mut optimizer = O::new(ddp.parameters(), config())?;
        let mut losses = Vec::new();
        for step in 0..crate::model::STEPS {
            let (images, labels) = golden.batch(step, pg.rank(), 2)?;
            let loss = candle_nn::loss::cross_entropy(&ddp.forward(&images)?, &labels)?;
            losses.push(loss.to_scalar::<f32>()?);
            optimizer.step(&ddp.backward(&loss)?)?;
        }
        let difference = golden.difference(&varmap, name)?;
        assert!(difference < 1e-4, "{name}: weights differ by {difference}");
        Ok(losses)
    });
    let golden = crate::model::Golden::load().unwrap();
    let expected: CandleResult<Vec<Vec<f32>>> = golden.get(&format!("{name}.losses")).to_vec2();
    for (rank, (losses, expected)) in losses.iter().zip(expected.unwrap()).enumerate() {
        crate::common::assert_close(losses, &expected, 1e-4, &format!("{name}: losses of rank {rank}"));
    }
}

#[test]
fn sgd_trains_as_pytorchs_ddp_does() {
    train::<SGD>("sgd", || crate::model::SGD_LEARNING_RATE, &DdpOptions::default());
}

#[test]
fn adamw_trains_as_pytorchs_ddp_does() {
    let small = DdpOptions { buckets: crate::common::buckets(0.001, 0.001), ..Default::default() };
    train::<AdamW>("adamw", crate::model::adamw, &small);
}
