//! The model of ddp.safetensors in candle, and the file's content; see the README in this folder.
#![allow(dead_code, clippy::unwrap_used)] // each test uses only some items
use candle_core::{Device, Module, Result, Tensor};
use candle_nn::{Conv2dConfig, Func, VarBuilder, VarMap, func};
use std::collections::HashMap;

/// The number of training steps.
pub(crate) const STEPS: usize = 20;
/// The size of the global batch, over all ranks.
pub(crate) const BATCH: usize = 12;
/// The learning rate of SGD.
pub(crate) const SGD_LEARNING_RATE: f64 = 0.5;

/// The options of AdamW.
pub(crate) fn adamw() -> candle_nn::ParamsAdamW {
    candle_nn::ParamsAdamW { lr: 0.005, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 }
}

/// Builds the network with the names of the golden file.
pub(crate) fn net(vb: VarBuilder) -> Result<Func<'static>> {
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

/// The content of the golden file.
pub(crate) struct Golden(HashMap<String, Tensor>);

impl Golden {
    /// Reads the file, which is compiled into the test binary.
    pub(crate) fn load() -> Result<Self> {
        candle_core::safetensors::load_buffer(include_bytes!("../golden/ddp.safetensors"), &Device::Cpu).map(Self)
    }

    /// Returns a tensor by its name in the file, such as `sgd.losses`.
    pub(crate) fn get(&self, name: &str) -> &Tensor {
        self.0.get(name).unwrap_or_else(|| panic!("ddp.safetensors has no {name}"))
    }

    /// Returns rank `rank`'s part of the batch of `step`: images and labels.
    pub(crate) fn batch(&self, step: usize, rank: usize, world_size: usize) -> Result<(Tensor, Tensor)> {
        let (images, labels) = (self.get("images"), self.get("labels"));
        let rows = BATCH / world_size;
        let start = step * BATCH % images.dim(0)? + rank * rows;
        Ok((images.narrow(0, start, rows)?, labels.narrow(0, start, rows)?))
    }

    /// Sets the variables of a network to the weights before training.
    pub(crate) fn set_initial(&self, varmap: &VarMap) -> Result<()> {
        for (name, var) in varmap.data().lock().unwrap().iter() {
            var.set(self.get(&format!("initial.{name}")))?;
        }
        Ok(())
    }

    /// Returns the largest difference between the variables and the weights after training with `optimizer` (`sgd` or
    /// `adamw`).
    pub(crate) fn difference(&self, varmap: &VarMap, optimizer: &str) -> Result<f32> {
        let mut largest = 0f32;
        for (name, var) in varmap.data().lock().unwrap().iter() {
            let difference = (var.as_tensor() - self.get(&format!("{optimizer}.{name}")))?.abs()?;
            let difference: f32 = difference.flatten_all()?.max(0)?.to_scalar()?;
            // f32::max would ignore a NaN.
            if difference.is_nan() || difference > largest {
                largest = difference;
            }
        }
        Ok(largest)
    }
}
