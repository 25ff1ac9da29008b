//! Deep graphs on the main thread: candle walks and drops them recursively. The test harness runs tests on other threads, so this
//! program is without it.
use candle_core::{DType, Tensor};
use candle_ddp::{DistributedDataParallel, Result};
use candle_nn::VarMap;

fn main() -> Result<()> {
    candle_ddp::run(|pg| {
        let build = |vb: candle_nn::VarBuilder| vb.get_with_hints(1, "weight", candle_nn::init::ONE);
        let ddp = DistributedDataParallel::new(pg, &VarMap::new(), build)?;
        let loss = ddp.call(|weight| {
            let mut x = Tensor::zeros(1, DType::F32, pg.device())?;
            for _ in 0..50_000 {
                x = (x + weight)?;
            }
            x.sum_all()
        })?;
        let grads = ddp.backward(&loss)?;
        let gradient =
            ddp.parameters().iter().filter_map(|var| grads.get(var)).next().map(|grad| grad.to_vec1::<f32>());
        assert_eq!(gradient.transpose()?, Some(vec![50_000.0]));
        println!("a graph of 50,000 operations: ok");
        Ok(())
    })
}
