//! The files of a checkpoint in PyTorch, and PyTorch's here.
//!
//! Needs PyTorch and the package safetensors for the interpreter named by CANDLE_DDP_PYTHON (default: python3); otherwise
//! skipped with a message.
use candle_core::{DType, Device, Module, Tensor};
use candle_ddp::checkpoint::{self, Checkpointer, CheckpointerOptions};
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW};
use candle_ddp::{DistributedDataParallel, Result};
use candle_nn::{Linear, VarBuilder, VarMap, linear};
use std::process::Command;

struct Net(Linear, Linear);

impl Net {
    fn new(vb: VarBuilder) -> candle_core::Result<Self> {
        Ok(Self(linear(4, 8, vb.pp("fc1"))?, linear(8, 2, vb.pp("fc2"))?))
    }
}

impl Module for Net {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.1.forward(&self.0.forward(x)?.tanh()?)
    }
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

#[track_caller]
fn assert_close(actual: &Tensor, expected: &[f32]) {
    let actual = values(actual);
    assert_eq!(actual.len(), expected.len());
    assert!(actual.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-5), "{actual:?} {expected:?}");
}

#[test]
fn a_checkpoints_model_loads_in_pytorch_and_pytorchs_here() {
    let Some(python) = crate::pytorch::python("a_checkpoints_model_loads_in_pytorch_and_pytorchs_here") else { return };
    let folder = tempfile::tempdir().unwrap();
    let x = Tensor::arange(0f32, 12., &Device::Cpu).unwrap().affine(0.1, -0.5).unwrap().reshape((3, 4)).unwrap();
    let outputs = candle_ddp::spawn(2, |pg| {
        let mut varmap = VarMap::new();
        let ddp = DistributedDataParallel::new(&pg, &varmap, Net::new)?;
        let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
        optimizer.step(&ddp.backward(&ddp.forward(&x)?.sqr()?.mean_all()?)?)?;
        let options = CheckpointerOptions::default();
        Checkpointer::new(&pg, folder.path(), options)?
            .save(1, (("model", &mut varmap), ("optimizer", &mut optimizer)))?
            .wait()?;
        ddp.forward(&x)
    });
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/interop/checkpointer.py");
    let output = Command::new(python).arg(script).arg(folder.path().join("step-00000001")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let [before, after]: [Vec<f32>; 2] = serde_json::from_slice(&output.stdout).unwrap();
    assert_close(&outputs.unwrap()[0], &before);
    // Tensors that PyTorch has changed and saved, in both formats.
    let load = |file: &str| -> Result<Tensor> {
        let varmap = VarMap::new();
        let net = Net::new(VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?;
        checkpoint::load(&varmap, folder.path().join("step-00000001").join(file))?;
        Ok(net.forward(&x)?)
    };
    for file in ["from_pytorch.safetensors", "from_pytorch.pt"] {
        assert_close(&load(file).unwrap(), &after);
    }
}
