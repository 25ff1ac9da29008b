//! The README's quick start: the shortest program that trains on several ranks.
//!
//! ci:
use candle_ddp::nn::{Activation, Sequential, cross_entropy, linear, seq};
use candle_ddp::{prelude::*, seed::Generator};

fn net(vb: VarBuilder) -> Result<Sequential> {
    let (hidden, output) = (linear(784, 128, vb.pp("hidden"))?, linear(128, 10, vb.pp("output"))?);
    Ok(seq().add(hidden).add(Activation::Relu).add(output))
}

fn main() -> Result<()> {
    candle_ddp::run(|pg| {
        // Your data, the same on all ranks: here noise from one seed, labelled by the sign of its mean.
        let images = Generator::new(0).randn(0.0, 1.0, (6000, 784), DType::F32, pg.device())?;
        let labels = images.mean(1)?.gt(0.0)?.to_dtype(DType::U32)?;
        let data = TensorDataset::new((images, labels))?;
        // The loader gives each rank its part of the rows.
        let loader = DataLoader::new(data, pg, LoaderOptions { batch_size: 64, ..Default::default() })?;

        // All ranks start with rank 0's parameters.
        let varmap = VarMap::new();
        let ddp = DistributedDataParallel::new(pg, &varmap, net)?;
        let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
        for epoch in 0..10 {
            let mut losses = 0.0;
            for batch in loader.epoch(epoch) {
                let (x, y) = batch?;
                let loss = cross_entropy(&ddp.forward(&x)?, &y)?;
                optimizer.step(&ddp.backward(&loss)?)?; // gradients are averaged over the ranks
                losses += loss.to_scalar::<f32>()?;
            }
            println!("rank {}, epoch {epoch}: loss {:.4}", pg.rank(), losses / loader.num_batches() as f32);
        }
        checkpoint::save_distributed(pg, &varmap, "model.safetensors")
    })
}
