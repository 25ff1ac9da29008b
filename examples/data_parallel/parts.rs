//! A model with one part on the CPU and one on the GPU, as one has it for an embedding that is too large for the GPU.
//! `DistributedDataParallel` trains such models too.
use candle_core::{DType, Device, Module, Tensor};
use candle_ddp::Result;
use candle_ddp::nn::{Embedding, Linear, cross_entropy, embedding, linear};
use candle_ddp::optim::{Optimizer, ParamsSgd, Sgd};
use candle_ddp::seed::var_builder;
use candle_nn::{VarBuilder, VarMap};

const WORDS: usize = 1000;
const CLASSES: usize = 4;

struct Classifier {
    embedding: Embedding,
    head: Linear,
}

impl Classifier {
    fn new(vb: VarBuilder) -> candle_core::Result<Self> {
        Ok(Self {
            embedding: embedding(WORDS, 32, vb.pp("embedding").set_device(Device::Cpu))?,
            head: linear(32, CLASSES, vb.pp("head"))?,
        })
    }
}

impl Module for Classifier {
    /// From words u32[B, T] on the CPU to logits f32[B, CLASSES] on the GPU. Gradients go back the same way.
    fn forward(&self, words: &Tensor) -> candle_core::Result<Tensor> {
        let means = self.embedding.forward(words)?.mean(1)?;
        self.head.forward(&means.to_device(self.head.weight().device())?)
    }
}

pub(crate) fn train(device: &Device) -> Result<()> {
    let varmap = VarMap::new();
    let model = Classifier::new(var_builder(&varmap, 0, DType::F32, device))?;
    let variables = varmap.data().lock().map(|variables| variables.clone()).unwrap_or_default();
    let mut optimizer =
        Sgd::new(variables.into_iter().collect::<Vec<_>>(), ParamsSgd { lr: 1., ..Default::default() })?;

    let words = Tensor::rand(0f32, WORDS as f32, (64, 8), &Device::Cpu)?.to_dtype(DType::U32)?;
    let labels = Tensor::from_iter((0..64).map(|row| row % CLASSES as u32), device)?;
    let mut losses = Vec::new();
    for _ in 0..100 {
        let loss = cross_entropy(&model.forward(&words)?, &labels)?;
        optimizer.step(&loss.backward()?)?;
        losses.push(loss.to_scalar::<f32>()?);
    }
    let (cpu, gpu) = (model.embedding.embeddings().device().location(), model.head.weight().device().location());
    println!("embedding on {cpu:?}, head on {gpu:?}: loss {:.3}, after 100 steps {:.3}", losses[0], losses[99]);
    if device.is_cpu() {
        println!("(both on the CPU, since no GPU was found)");
    }
    println!();
    Ok(())
}
