//! The files of a checkpoint in PyTorch, and PyTorch's here.
//!
//! Needs PyTorch and the package safetensors for the interpreter named by CANDLE_DDP_PYTHON (default: python3); otherwise
//! skipped with a message.
use crate::common::{Mlp, floats, succeed};
use candle_core::{DType, Device, Module, Tensor};
use candle_ddp::checkpoint::{self, Checkpointer, CheckpointerOptions};
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW};
use candle_ddp::{DistributedDataParallel, Result};
use candle_nn::{VarBuilder, VarMap};
use std::process::Command;

fn net(vb: VarBuilder) -> candle_core::Result<Mlp> {
    Mlp::new([4, 8, 2], ["fc1", "fc2"], vb)
}

#[track_caller]
fn assert_close(actual: &Tensor, expected: &[f32]) {
    let actual = floats(actual);
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
        let ddp = DistributedDataParallel::new(&pg, &varmap, net)?;
        let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
        optimizer.step(&ddp.backward(&ddp.forward(&x)?.sqr()?.mean_all()?)?)?;
        let options = CheckpointerOptions::default();
        Checkpointer::new(&pg, folder.path(), options)?
            .save(1, (("model", &mut varmap), ("optimizer", &mut optimizer)))?
            .wait()?;
        ddp.forward(&x)
    });
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/interop/checkpointer.py");
    let [stdout, _] = succeed(Command::new(python).arg(script).arg(folder.path().join("step-00000001")));
    let [before, after]: [Vec<f32>; 2] = serde_json::from_str(&stdout).unwrap();
    assert_close(&outputs.unwrap()[0], &before);
    // Tensors that PyTorch has changed and saved, in both formats.
    let load = |file: &str| -> Result<Tensor> {
        let varmap = VarMap::new();
        let net = net(VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?;
        checkpoint::load(&varmap, folder.path().join("step-00000001").join(file))?;
        Ok(net.forward(&x)?)
    };
    for file in ["from_pytorch.safetensors", "from_pytorch.pt"] {
        assert_close(&load(file).unwrap(), &after);
    }
}
