//! A step in parts: the same bits as in one, and a part before the last bucket is there.
use crate::common::{Between, filled, floats, tiny};
use crate::launch::Worker;
use crate::optim::tensor;
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Module, Tensor};
use candle_ddp::checkpoint::StateDict;
use candle_ddp::optim::{AdamW, FusedOptimizer, Optimizer, ParamsLamb, ParamsSgd, UpdateRule};
use candle_ddp::{Buckets, DdpOptions, Precision, ProcessGroup, Result};
use candle_nn::{Linear, ParamsAdamW, VarBuilder, linear};
use std::collections::HashMap;

/// A bucket for each parameter. The step has parts from the second pass on.
fn in_parts() -> DdpOptions {
    DdpOptions { replica_check: None, ..tiny() }
}

fn net(vb: VarBuilder) -> candle_core::Result<[Linear; 2]> {
    Ok([linear(30, 100, vb.pp("a"))?, linear(100, 3, vb.pp("b"))?])
}

/// In the backward pass, `between` comes between the gradients of the layers.
fn loss(
    [a, b]: &[Linear; 2],
    x: &Tensor,
    between: impl Fn() -> candle_core::Result<()> + Send + Sync + 'static,
) -> candle_core::Result<Tensor> {
    let x = x.to_dtype(a.weight().dtype())?;
    b.forward(&a.forward(&x)?.tanh()?.apply_op1(Between(between))?)?.to_dtype(DType::F32)?.sqr()?.mean_all()
}

/// Rank 1 has its last gradients only when the GPU of rank 0 has updated a parameter.
pub(crate) fn early(pg: &ProcessGroup) -> Result<()> {
    struct Reporting(AdamW, Device);

    impl Optimizer for Reporting {
        fn step(&mut self, grads: &GradStore) -> Result<()> {
            Optimizer::step(&mut self.0, grads)
        }

        fn takes_parts(&self) -> Result<bool> {
            self.0.takes_parts()
        }

        fn step_part(&mut self, grads: &GradStore, is_last: bool) -> Result<()> {
            self.0.step_part(grads, is_last)?;
            self.1.synchronize()?;
            Worker::of_this_process().report("a part");
            Ok(())
        }

        fn learning_rates(&self) -> Vec<f64> {
            self.0.learning_rates()
        }

        fn set_learning_rates(&mut self, learning_rates: &[f64]) -> Result<()> {
            self.0.set_learning_rates(learning_rates)
        }

        fn clip_grad_norm(&mut self, grads: &mut GradStore, max_norm: f64) -> Result<Tensor> {
            self.0.clip_grad_norm(grads, max_norm)
        }
    }

    impl StateDict for Reporting {
        fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
            self.0.state_dict()
        }

        fn load_state_dict(&mut self, state: &HashMap<String, Tensor>) -> Result<()> {
            self.0.load_state_dict(state)
        }
    }

    let (ddp, _) = filled(pg, net, in_parts(), 3)?;
    let mut optimizer = Reporting(AdamW::new(&ddp, ParamsAdamW::default())?, pg.device().clone());
    let x = tensor(8 * 30, pg.rank() as u64, DType::F32, pg.device()).reshape((8, 30))?;
    for pass in 0..2 {
        let waits = pass == 1 && pg.rank() == 1;
        let between = move || {
            if waits {
                Worker::of_this_process().await_report(0);
            }
            Ok(())
        };
        ddp.backward_and_step(&ddp.call(|net| loss(net, &x, between))?, &mut optimizer)?;
    }
    pg.barrier()
}

/// One call gives the bits of two.
pub(crate) fn same_bits(pg: &ProcessGroup) -> Result<()> {
    fn train<R: UpdateRule>(pg: &ProcessGroup, rule: &R, options: DdpOptions, in_one: bool) -> Result<Vec<Vec<f32>>> {
        let (ddp, _) = filled(pg, net, options, 3)?;
        let mut optimizer = FusedOptimizer::new(&ddp, rule.clone())?;
        for step in 0..3 {
            let x = tensor(8 * 30, 50 + step + 100 * pg.rank() as u64, DType::F32, pg.device()).reshape((8, 30))?;
            let loss = ddp.call(|net| loss(net, &x, || Ok(())))?;
            match in_one {
                true => ddp.backward_and_step(&loss, &mut optimizer).map(drop)?,
                false => Optimizer::step(&mut optimizer, &ddp.backward(&loss)?)?,
            }
        }
        let mut state: Vec<_> = optimizer.state_dict()?.into_iter().collect();
        state.sort_by(|(a, _), (b, _)| a.cmp(b));
        Ok(ddp.parameters().iter().map(|var| floats(var)).chain(state.iter().map(|(_, state)| floats(state))).collect())
    }
    fn compare<R: UpdateRule>(
        pg: &ProcessGroup,
        rule: R,
        precision: Precision,
        keep_low_precision_grads: bool,
    ) -> Result<()> {
        let options = || DdpOptions {
            precision,
            buckets: Buckets { keep_low_precision_grads, ..in_parts().buckets },
            ..in_parts()
        };
        let expected = train(pg, &rule, options(), false)?;
        assert_eq!(train(pg, &rule, options(), true)?, expected, "{rule:?} {precision:?}");
        Ok(())
    }
    let bf16 = Precision::Half { param_dtype: DType::BF16, buffer_dtype: None };
    compare(pg, ParamsAdamW::default(), bf16, true)?;
    compare(pg, ParamsSgd { lr: 0.1, momentum: 0.9, ..Default::default() }, Precision::default(), false)?;
    compare(pg, ParamsLamb { lr: 0.01, max_grad_norm: None, ..Default::default() }, Precision::default(), false)
}

#[test]
fn a_part_of_a_step_comes_before_the_last_bucket() {
    crate::finish("a_part_of_a_step_comes_before_the_last_bucket", 2, "early part");
}

#[test]
fn a_step_in_parts_has_the_same_bits() {
    crate::finish("a_step_in_parts_has_the_same_bits", 2, "parts");
}
