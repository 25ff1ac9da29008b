//! LayerNorm, RMSNorm and SyncBatchNorm on a GPU, compared with the CPU.
use super::common::{assert_close, fill, floats, new_var, tensor, var};
use candle_core::{DType, Device, Module, ModuleT, Tensor, Var};
use candle_ddp::nn::{LayerNorm, sync_batch_norm};
use candle_ddp::{ProcessGroup, ReduceOp, Result};
use candle_nn::{VarBuilder, VarMap, batch_norm};

/// Sizes around the number of threads of a block, more rows than are summed together, and no rows.
const SHAPES: [[usize; 2]; 9] =
    [[1, 1], [3, 15], [40, 256], [33, 257], [20_000, 3], [4096, 1024], [0, 8], [5, 1280], [2, 8320]];

pub(crate) fn norms_alike(gpu: &Device) {
    let dtypes = [(DType::F32, 1e-4), (DType::F64, 1e-5), (DType::F16, 1e-2), (DType::BF16, 5e-2)];
    for (dtype, tolerance) in dtypes {
        for (shape, kind) in SHAPES.into_iter().flat_map(|shape| [0, 1, 2].map(|kind| (shape, kind))) {
            let run = |device: &Device| {
                let var = |shape: &[usize], seed| new_var(shape, seed, dtype, device);
                // This input begins in the middle of its storage.
                let (x, dy) = (var(&[shape[0] + 1, shape[1]], 1), var(&shape, 2));
                let (weight, bias) = (var(&[shape[1]], 3), var(&[shape[1]], 4));
                let (w, b) = (weight.as_tensor().clone(), bias.as_tensor().clone());
                let norm = match kind {
                    0 => LayerNorm::new(w, b, 0.1),
                    1 => LayerNorm::new_no_bias(w, 0.1),
                    _ => LayerNorm::rms_norm(w, 0.1),
                };
                let y = norm.forward(&x.narrow(0, 1, shape[0]).unwrap()).unwrap();
                let grads = (&y * dy.as_tensor()).unwrap().sum_all().unwrap().backward().unwrap();
                let vars = [&x, &weight, &bias];
                let gradients = vars.into_iter().filter_map(|var| grads.get(var)).map(floats);
                assert_eq!(y.dims(), shape);
                // candle cannot convert an empty tensor on a GPU.
                let y = if shape[0] == 0 { Vec::new() } else { floats(&y) };
                std::iter::once(y).chain(gradients).collect::<Vec<_>>()
            };
            for (number, (there, here)) in run(gpu).iter().zip(run(&Device::Cpu)).enumerate() {
                assert_close(there, &here, tolerance, &format!("{number} of {dtype:?} {shape:?}, kind {kind}"));
            }
        }
    }
}

/// Checks, on one of two ranks, that SyncBatchNorm's output for this rank's rows and its gradients equal those of
/// candle's layer on the CPU for the whole batch. Rank 1 has as many rows as rank 0, or none.
pub(crate) fn batches_join(pg: &ProcessGroup) -> Result<()> {
    let whole = [8, 3, 2, 3];
    for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F16, 1e-2), (DType::BF16, 5e-2)] {
        for split in [[4, 4], [8, 0]] {
            let what = format!("{dtype:?} {split:?}");
            let rounded = |t: Tensor| t.to_dtype(dtype)?.to_dtype(DType::F32);
            let (x, dy) = (rounded((tensor(&whole, 1) + 2.0)?)?, rounded(tensor(&whole, 2))?);
            let (start, rows) = (pg.rank() * split[0], split[pg.rank()]);
            let mine = |t: &Tensor| t.narrow(0, start, rows);

            let there = VarMap::new();
            let layer = batch_norm(3, 1e-5, VarBuilder::from_varmap(&there, DType::F32, &Device::Cpu))?;
            fill_norm(&there);
            let x_there = Var::from_tensor(&x)?;
            let y_there = layer.forward_t(&x_there, true)?;
            let grads_there = (&y_there * &dy)?.sum_all()?.backward()?;

            let here = VarMap::new();
            let layer = sync_batch_norm(pg, 3, 1e-5, VarBuilder::from_varmap(&here, DType::F32, pg.device()))?;
            fill_norm(&here);
            let on_gpu = |t: &Tensor| mine(t)?.to_dtype(dtype)?.to_device(pg.device());
            let x_here = Var::from_tensor(&on_gpu(&x)?)?;
            let y = layer.forward_t(&x_here, true)?;
            let grads = (&y * on_gpu(&dy)?)?.sum_all()?.backward()?;

            let dx = grads.get(&x_here).unwrap();
            for (name, gpu, cpu) in [("y", &y, &y_there), ("dx", dx, grads_there.get(&x_there).unwrap())] {
                let cpu = mine(cpu)?;
                assert_eq!((gpu.dims(), gpu.dtype()), (cpu.dims(), dtype), "{what}: {name}");
                // candle cannot convert an empty tensor on a GPU.
                if rows > 0 {
                    assert_close(&floats(gpu), &floats(&cpu), tolerance, &format!("{what}: {name}"));
                }
            }
            for name in ["weight", "bias"] {
                let gradient = grads.get(&var(&here, name)).unwrap().copy()?;
                pg.all_reduce(&gradient, ReduceOp::Sum)?;
                let expected = floats(grads_there.get(&var(&there, name)).unwrap());
                assert_close(&floats(&gradient), &expected, tolerance, &format!("{what}: d{name}"));
            }
            for name in ["running_mean", "running_var"] {
                assert_close(&floats(&var(&here, name)), &floats(&var(&there, name)), 1e-5, &format!("{what}: {name}"));
            }
            let y = layer.forward_t(&x_here, false)?;
            assert_eq!(y.dims(), x_here.dims(), "{what}: evaluation");
        }
    }
    Ok(())
}

/// Fills variables with values that differ from a new layer's; the variance is positive.
fn fill_norm(varmap: &VarMap) {
    fill(varmap, 3);
    let variance = var(varmap, "running_var");
    variance.set(&(variance.as_tensor() + 2.0).unwrap()).unwrap();
}
