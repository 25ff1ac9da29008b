//! A world of one rank without an engine: `Backend::Single` on any device.
use crate::common::{assert_close, fill, floats, ranks, tensor, var};
use candle_core::Device;
use candle_ddp::nn::sync_batch_norm;
use candle_ddp::{Backend, DistributedDataParallel, InitOptions, ProcessGroup, Result, init_process_group};
use candle_nn::{Module, ModuleT, VarBuilder, VarMap, func_t, linear};
use std::time::Duration;

/// Trains three steps of DDP with a layer that communicates in its forward pass; returns the first layer's final
/// weights.
fn train(pg: &ProcessGroup) -> Result<Vec<f32>> {
    let varmap = VarMap::new();
    let build = |vb: VarBuilder<'static>| -> candle_core::Result<_> {
        let norm = sync_batch_norm(pg, 6, 1e-5, vb.pp("norm"))?;
        let (first, last) = (linear(4, 6, vb.pp("first"))?, linear(6, 2, vb.pp("last"))?);
        Ok(func_t(move |x, train| last.forward(&norm.forward_t(&first.forward(x)?, train)?)))
    };
    let ddp = DistributedDataParallel::new(pg, &varmap, build)?;
    fill(&varmap, 5);
    let x = tensor(&[8, 4], 1).to_device(pg.device())?;
    for _ in 0..3 {
        let grads = ddp.backward(&ddp.forward_t(&x, true)?.sqr()?.mean_all()?)?;
        for (_, var) in ddp.named_parameters() {
            var.set(&(var.as_tensor() - (grads.get(&var).unwrap() * 0.1)?)?)?;
        }
    }
    Ok(floats(&var(&varmap, "first.weight")))
}

/// A group of one rank on `device` trains like one of the CPU engine and supports every operation of a group.
pub(crate) fn works_on(device: &Device, backend: Backend) {
    let folder = tempfile::tempdir().unwrap();
    let options = InitOptions {
        backend,
        init_method: format!("file://{}", folder.path().join("store").display()),
        rank: Some(0),
        world_size: Some(1),
        timeout: Duration::from_secs(120),
        device: Some(device.clone()),
        ..Default::default()
    };
    let pg = init_process_group(options).unwrap();
    assert_eq!((pg.rank(), pg.world_size(), pg.backend()), (0, 1, Backend::Single));
    assert!(pg.device().same_device(device));
    let expected = ranks(1, |pg| train(&pg));
    assert_close(&train(&pg).unwrap(), &expected[0], 1e-5, "as with the CPU engine");

    let sub = pg.new_group(&[0]).unwrap().unwrap();
    let (input, output) = (tensor(&[4], 3).to_device(device).unwrap(), tensor(&[4], 4).to_device(device).unwrap());
    let work = sub.all_gather_async(&output, &input).unwrap();
    work.synchronize().unwrap();
    assert_eq!(floats(&output), floats(&input));
    sub.barrier().unwrap();
    pg.abort("no more data");
    assert_eq!(pg.barrier().unwrap_err().to_string(), "rank 0 ended the group: no more data");
    sub.barrier().unwrap();
}
