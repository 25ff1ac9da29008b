//! The four functions that a forward pass of `DataParallel` consists of.
use super::mlp::Mlp;
use candle_core::{DType, Device, Module, Tensor};
use candle_ddp::Result;
use candle_ddp::data_parallel::{gather, parallel_apply, replicate, scatter};
use candle_nn::VarMap;

pub(crate) fn show(devices: &[Device], width: usize) -> Result<()> {
    let batch = Tensor::randn(0f32, 1., (10, width), &devices[0])?;

    // The model on each device. The variables are on the first one; the others have copies.
    let varmap = VarMap::new();
    let replicas = replicate(devices, &varmap, DType::F32, |vb| Mlp::new(width, vb))?;
    let places: Vec<_> = replicas.iter().map(|replica| replica.device().location()).collect();
    println!("replicate       {} replicas, on {places:?}", replicas.len());

    // A part of the batch for each device.
    let parts = scatter(&batch, devices)?;
    let rows: Vec<_> = parts.iter().map(|part| part.dims()[0]).collect();
    println!("scatter         {} rows become {rows:?}", batch.dim(0)?);

    // Copies the variables to the other devices, then runs all replicas at once, each on a thread.
    let outputs = parallel_apply(&replicas, parts, |mlp, part| mlp.forward(&part))?;
    println!("parallel_apply  {} outputs, one on each device", outputs.len());

    // The outputs on the first device.
    let output = gather(&outputs, &devices[0])?;
    let alone = replicas[0].module().forward(&batch)?;
    let difference = (&output - alone)?.abs()?.max_all()?.to_scalar::<f32>()?;
    println!("gather          {:?}, {difference:e} from the output of one device\n", output.dims());
    Ok(())
}
