//! DDP says once, on rank 0, that an evaluation under `no_grad` has recorded a graph.
use crate::common::tensor;
use crate::logger::of_two_ranks;
use candle_core::Module;
use candle_ddp::DistributedDataParallel;
use candle_ddp::nn::{self, no_grad};
use candle_nn::{VarBuilder, VarMap};

/// The warnings of two evaluations on each of two ranks.
fn warnings<M: Module>(
    build: fn(VarBuilder<'static>) -> candle_core::Result<M>,
    has_no_grad_model: bool,
) -> Vec<String> {
    of_two_ranks(|pg| {
        let mut ddp = DistributedDataParallel::new(&pg, &VarMap::new(), build)?;
        if has_no_grad_model {
            ddp = ddp.with_no_grad_model(build)?;
        }
        for seed in 0..2 {
            let result = no_grad(|| ddp.forward(&tensor(&[3, 4], seed)))?;
            assert!(!result.track_op());
        }
        Ok(())
    })
}

#[test]
fn a_graph_that_candles_operations_record_under_no_grad_is_told_of_once() {
    let none: Vec<String> = Vec::new();
    assert_eq!(warnings(|vb| nn::linear(4, 2, vb), false), none);
    assert_eq!(warnings(|vb| candle_nn::linear(4, 2, vb), true), none);
    let told = warnings(|vb| candle_nn::linear(4, 2, vb), false);
    assert!(
        told.len() == 1 && told[0].contains("with_no_grad_model") && told[0].contains("parameter weight"),
        "{told:?}"
    );
    assert_eq!(warnings(|vb| candle_nn::linear(4, 2, vb), false), none);
}
