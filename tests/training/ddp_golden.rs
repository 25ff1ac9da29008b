//! Ranks reproduce the golden training run of PyTorch's DDP (see golden/README.md): the same losses on each rank, their means in one
//! process with the whole batch, and the same final weights.
use crate::common::{assert_close, buckets, floats, golden, ranks};
use candle_core::{Module, Result, Tensor};
use candle_ddp::{DdpOptions, DistributedDataParallel};
use candle_nn::{AdamW, Conv2dConfig, Func, Optimizer, ParamsAdamW, SGD, VarBuilder, VarMap, func};

/// The number of training steps.
const STEPS: usize = 20;
/// The size of the global batch, over all ranks.
const BATCH: usize = 12;

/// Builds the network with the names of the golden file.
fn net(vb: VarBuilder) -> Result<Func<'static>> {
    let padded = Conv2dConfig { padding: 1, ..Default::default() };
    let conv1 = candle_nn::conv2d(1, 8, 3, padded, vb.pp("conv1"))?;
    let conv2 = candle_nn::conv2d(8, 8, 3, Conv2dConfig { stride: 2, ..padded }, vb.pp("conv2"))?;
    let fc1 = candle_nn::linear(128, 32, vb.pp("fc1"))?;
    let fc2 = candle_nn::linear(32, 10, vb.pp("fc2"))?;
    Ok(func(move |images| {
        let x = conv1.forward(images)?.relu()?;
        let x = conv2.forward(&x)?.relu()?;
        let x = fc1.forward(&x.flatten_from(1)?)?.relu()?;
        fc2.forward(&x)
    }))
}

fn train<O: Optimizer>(name: &str, config: impl Fn() -> O::Config + Sync, options: &DdpOptions) {
    let golden = golden("ddp.safetensors");
    for (world_size, tolerance) in [(1, 1e-5), (2, 1e-4)] {
        let losses = ranks(world_size, |pg| {
            let varmap = VarMap::new();
            let ddp = DistributedDataParallel::with_options(&pg, &varmap, net, options.clone())?;
            let vars = varmap.data().lock().unwrap().clone();
            vars.iter().try_for_each(|(name, var)| var.set(&golden[&format!("initial.{name}")]))?;
            let mut optimizer = O::new(ddp.parameters(), config())?;
            let mut losses = Vec::new();
            for step in 0..STEPS {
                let rows = BATCH / world_size;
                let start = step * BATCH % golden["images"].dim(0)? + pg.rank() * rows;
                let own = |tensor: &Tensor| tensor.narrow(0, start, rows);
                let output = ddp.forward(&own(&golden["images"])?)?;
                let loss = candle_nn::loss::cross_entropy(&output, &own(&golden["labels"])?)?;
                losses.push(loss.to_scalar::<f32>()?);
                optimizer.step(&ddp.backward(&loss)?)?;
            }
            for (variable, var) in &vars {
                let expected = floats(&golden[&format!("{name}.{variable}")]);
                assert_close(&floats(var), &expected, tolerance, &format!("{name}, {world_size} ranks: {variable}"));
            }
            Ok(losses)
        });
        let of_ranks = &golden[&format!("{name}.losses")];
        let expected = if world_size == 1 { of_ranks.mean_keepdim(0).unwrap() } else { of_ranks.clone() };
        let what = format!("{name}: losses of {world_size} ranks");
        assert_close(&losses.concat(), &floats(&expected), tolerance, &what);
    }
}

#[test]
fn sgd_trains_as_pytorchs_ddp_does() {
    train::<SGD>("sgd", || 0.5, &DdpOptions::default());
}

#[test]
fn adamw_trains_as_pytorchs_ddp_does() {
    let small = DdpOptions { buckets: buckets(0.001, 0.001), ..Default::default() };
    let adamw = || ParamsAdamW { lr: 0.005, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };
    train::<AdamW>("adamw", adamw, &small);
}
