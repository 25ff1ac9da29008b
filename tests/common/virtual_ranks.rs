//! A training run with virtual ranks, and its bits.
#![allow(dead_code, clippy::unwrap_used)] // each test program uses only some of it, and a failed test may panic
use crate::common::{Made, bits, of_micro_batch, values, with_virtual_ranks};
use candle_core::{DType, Device, ModuleT, Result as CandleResult, Tensor, Var};
use candle_ddp::amp::{GradScaler, GradScalerOptions};
use candle_ddp::checkpoint::StateDict;
use candle_ddp::data::{DataLoader, Dataset, LoaderOptions};
use candle_ddp::nn::{BatchNorm, Conv2d, Conv2dConfig, Dropout, Linear, VarBuilder, batch_norm, conv2d, linear, loss};
use candle_ddp::optim::{AdamW, Ema, Optimizer, ParamsAdamW};
use candle_ddp::seed::Generator;
use candle_ddp::{
    Buckets, DdpOptions, DistributedDataParallel, Precision, ProcessGroup, Result, Unused, backward_with,
};
use candle_nn::{Init, VarMap};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

pub(crate) const VIRTUAL: usize = 8;

/// Ranks of a group with [`VIRTUAL`] virtual ranks, all of which must succeed.
#[track_caller]
pub(crate) fn ranks<T: Send>(world_size: usize, work: impl Fn(ProcessGroup) -> Result<T> + Sync) -> Vec<T> {
    with_virtual_ranks(VIRTUAL, world_size, work).unwrap()
}

/// Images with noise that each sample draws, and labels.
pub(crate) fn noisy() -> impl Dataset<Sample = (Tensor, u32)> {
    // No multiple of a global batch.
    Made(90, |index, random: &mut Generator| {
        let noise = random.randn(0., 0.1, (1, 6, 6), DType::F32, &Device::Cpu)?;
        let image = Tensor::from_vec(values(36, index as u64), (1, 6, 6), &Device::Cpu)?;
        Ok(((image + noise)?, (index % 4) as u32))
    })
}

/// A running mean that the forward pass reads, a convolution, batch normalisation, dropout, and a part that some micro-batches do
/// not use.
struct Net {
    centre: Var,
    conv: Conv2d,
    norm: BatchNorm,
    dropout: Dropout,
    head: Linear,
    rare: Linear,
}

impl Net {
    fn new(vb: VarBuilder, generator: &Arc<Mutex<Generator>>) -> CandleResult<Self> {
        let centre = vb.get_with_hints(1, "centre.running_mean", Init::Const(0.))?;
        Ok(Self {
            // Shares the variable.
            centre: Var::from_tensor(&centre)?,
            conv: conv2d(1, 5, 3, Conv2dConfig::default(), vb.pp("conv"))?,
            norm: batch_norm(5, 1e-5, vb.pp("norm"))?,
            dropout: Dropout::with_generator(0.3, Arc::clone(generator)),
            head: linear(80, 4, vb.pp("head"))?,
            rare: linear(4, 4, vb.pp("rare"))?,
        })
    }

    fn forward(&self, x: &Tensor, is_rare: bool) -> CandleResult<Tensor> {
        let centre = self.centre.as_detached_tensor().copy()?;
        let mean = x.detach().to_dtype(DType::F32)?.mean_all()?.reshape(1)?;
        self.centre.set(&((&centre * 0.8)? + (mean * 0.2)?)?)?;
        let x = x.broadcast_sub(&centre.to_dtype(x.dtype())?)?;
        let x = self.norm.forward_t(&x.apply(&self.conv)?, true)?.relu()?.flatten_from(1)?;
        let x = self.dropout.forward(&x, true)?.apply(&self.head)?;
        if is_rare { x.apply(&self.rare) } else { Ok(x) }
    }
}

/// The bits of a run.
pub(crate) type Bits = BTreeMap<String, Vec<u32>>;

fn options(precision: Precision, reduce_dtype: Option<DType>) -> DdpOptions {
    let (bucket_cap_mb, first_bucket_mb, init_seed) = (0.001, 0.0005, Some(3));
    let unused = Unused::Allow;
    DdpOptions {
        init_seed,
        precision,
        unused,
        buckets: Buckets { bucket_cap_mb, first_bucket_mb, reduce_dtype, ..Default::default() },
        ..Default::default()
    }
}

/// Trains for some epochs of four steps in a group with [`VIRTUAL`] virtual ranks, and returns all that a run leaves: parameters, buffers, losses, and the states of the
/// optimizer, the average of weights and the loader.
pub(crate) fn train(pg: &ProcessGroup, epochs: u64, precision: Precision, reduce_dtype: Option<DType>) -> Result<Bits> {
    let generator = Arc::new(Mutex::new(Generator::new(0)));
    let varmap = VarMap::new();
    let build = |vb| Net::new(vb, &generator);
    let ddp = DistributedDataParallel::with_options(pg, &varmap, build, options(precision, reduce_dtype))?;
    let mut optimizer = AdamW::new(&ddp, ParamsAdamW { lr: 0.01, ..Default::default() })?;
    // Overflows and growth come within the run.
    let enabled = reduce_dtype.is_some();
    let scaling =
        GradScalerOptions { init_scale: 1e6, backoff_factor: 0.05, growth_interval: 3, enabled, ..Default::default() };
    let mut scaler = GradScaler::new(pg, &ddp, scaling)?;
    let mut ema = Ema::new([ddp.named_parameters(), ddp.named_frozen()].concat(), 0.9)?;
    let loader = DataLoader::new(noisy(), pg, LoaderOptions { batch_size: 3, ..Default::default() })?;
    let (mut all_losses, mut own_losses, mut kept) = (Vec::new(), Vec::new(), None);
    for epoch in 0..epochs {
        loader.set_epoch(epoch);
        for micro_batch in loader.micro_batches()? {
            let micro_batch = micro_batch?;
            micro_batch.seed(&generator);
            let (x, y) = &micro_batch.batch;
            let x = ddp.cast_forward_inputs(x)?;
            let is_rare = micro_batch.number % 3 == 2;
            let logits = ddp.call(|net| net.forward(&x, is_rare))?.to_dtype(DType::F32)?;
            let loss = loss::cross_entropy(&logits, y)?;
            own_losses.push(f64::from(loss.to_scalar::<f32>()?));
            let mut grads = backward_with(&scaler.scale(&loss)?, &[&ddp], of_micro_batch(micro_batch.number))?;
            if !micro_batch.is_last {
                continue;
            }
            all_losses.extend(ddp.gather_micro_batches(&own_losses)?);
            own_losses.clear();
            if enabled {
                optimizer.unscale(&mut scaler, &mut grads)?;
            }
            optimizer.clip_grad_norm(&mut grads, 0.5)?;
            scaler.step(&mut optimizer, &mut grads)?;
            scaler.update()?;
            ema.update()?;
            // Gradients that the program holds keep their values.
            kept = Some(grads);
        }
    }
    drop(kept);
    let mut all: Bits = varmap.data().lock().unwrap().iter().map(|(name, var)| (name.clone(), bits(var))).collect();
    let losses: Vec<u32> = all_losses.iter().map(|loss| (*loss as f32).to_bits()).collect();
    assert_eq!(losses.len(), epochs as usize * 4 * VIRTUAL);
    all.insert("losses".to_string(), losses);
    for (part, state) in [
        ("optimizer", optimizer.state_dict()?),
        ("ema", ema.state_dict()?),
        ("scaler", scaler.state_dict()?),
        ("loader", loader.state_dict()?),
    ] {
        all.extend(state.iter().map(|(name, tensor)| (format!("{part}: {name}"), bits(tensor))));
    }
    Ok(all)
}
