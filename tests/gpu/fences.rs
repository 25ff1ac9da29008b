//! Failures if either fence between candle's stream and NCCL's is missing.
use super::left_out;
use candle_core::{DType, Device, Tensor};
use candle_ddp::{DistributedDataParallel, ProcessGroup, ReduceOp, Result};
use candle_nn::{Init, VarBuilder, VarMap};
use std::time::{Duration, Instant};

/// 64 MiB: so large that reading without waiting comes too early.
const COUNT: usize = 16 << 20;
const ROUNDS: usize = 3;

/// Keeps candle's stream busy for at least a tenth of a second on any GPU; the host does not wait for it.
pub(crate) fn keep_busy(device: &Device) -> Result<Tensor> {
    const LEAST: Duration = Duration::from_millis(150);
    let matrix = (Tensor::ones((1024, 1024), DType::F32, device)? / 1024.0)?;
    let mut product = matrix.matmul(&matrix)?; // the first product takes longer
    device.synchronize()?;
    let start = Instant::now();
    product = product.matmul(&matrix)?;
    device.synchronize()?;
    let one = start.elapsed();
    for _ in 0..LEAST.as_nanos().div_ceil(one.as_nanos().max(1)) {
        product = product.matmul(&matrix)?;
    }
    Ok(product)
}

pub(crate) fn assert_all(tensor: &Tensor, expected: f32, what: &str) -> Result<()> {
    let (low, high) =
        (tensor.flatten_all()?.min(0)?.to_vec0::<f32>()?, tensor.flatten_all()?.max(0)?.to_vec0::<f32>()?);
    assert_eq!((low, high), (expected, expected), "{what}");
    Ok(())
}

/// Delays rank 0 while the others have already started.
fn come_late(pg: &ProcessGroup) {
    if pg.rank() == 0 {
        std::thread::sleep(Duration::from_millis(300));
    }
}

/// The data is written after a lot of other work and reduced at once.
pub(crate) fn first(pg: &ProcessGroup) -> Result<()> {
    left_out::begin(pg.device());
    for round in 1..=ROUNDS {
        let source = Tensor::full((pg.rank() + round) as f32, COUNT, pg.device())?;
        let tensor = Tensor::zeros(COUNT, DType::F32, pg.device())?;
        pg.device().synchronize()?;
        let _product = keep_busy(pg.device())?;
        tensor.slice_set(&source, 0, 0)?;
        pg.all_reduce_async(&tensor, ReduceOp::Sum)?.wait()?;
        let world_size = pg.world_size();
        let expected = (0..world_size).map(|rank| (rank + round) as f32).sum();
        assert_all(&tensor, expected, "the all-reduce ran before its data was written")?;
    }
    Ok(())
}

/// The result is read at once, although the all-reduce has not begun because rank 0 is late.
pub(crate) fn second(pg: &ProcessGroup) -> Result<()> {
    left_out::begin(pg.device());
    for round in 1..=ROUNDS {
        let tensor = Tensor::full(round as f32, COUNT, pg.device())?;
        pg.device().synchronize()?;
        pg.barrier()?;
        come_late(pg);
        let work = pg.all_reduce_async(&tensor, ReduceOp::Sum)?;
        work.wait()?;
        // This copy runs on candle's stream: without the fence it would run now.
        let seen = tensor.copy()?;
        assert_all(&seen, (round * pg.world_size()) as f32, "the result was read before it was complete")?;
    }
    Ok(())
}

/// Both fences, in a backward pass with two large buckets: y = mean of a × x + b × x.
pub(crate) fn backward(pg: &ProcessGroup) -> Result<()> {
    struct Net(Tensor, Tensor);
    let build = |vb: VarBuilder| -> candle_core::Result<Net> {
        Ok(Net(vb.get_with_hints(COUNT, "a", Init::Const(0.5))?, vb.get_with_hints(COUNT, "b", Init::Const(0.5))?))
    };
    let ddp = DistributedDataParallel::new(pg, &VarMap::new(), build)?;
    left_out::begin(pg.device());
    for round in 1..=ROUNDS {
        let x = Tensor::full((pg.rank() + round) as f32, COUNT, pg.device())?;
        pg.barrier()?;
        come_late(pg);
        let _product = keep_busy(pg.device())?;
        let loss = ddp.call(|Net(a, b)| (a * &x)?.sum_all()? + (b * &x)?.sum_all()?)?;
        let grads = ddp.backward(&loss)?;
        let world_size = pg.world_size();
        let mean = (0..world_size).map(|rank| (rank + round) as f32).sum::<f32>() / world_size as f32;
        for var in ddp.parameters() {
            let gradient = grads.get(&var).expect("it was used").copy()?;
            assert_all(
                &gradient,
                mean,
                "a gradient was read before it was averaged, or averaged before it was complete",
            )?;
        }
    }
    Ok(())
}
