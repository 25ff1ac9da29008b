//! Ranks without samples and parameters without elements train like others. The layers' own tests are in candle-ddp-nn.
use crate::common::{counted, floats, of_zero, pure, ranks};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Module, ModuleT, Tensor, Var};
use candle_ddp::nn::{linear, sync_batch_norm};
use candle_ddp::optim::{
    AdamW, Lamb, Optimizer, ParamsAdamW, ParamsLamb, ParamsSgd, Sgd, ZeroRedundancyOptimizer, clip_grad_norm,
    clip_grad_value,
};
use candle_ddp::{DdpOptions, DistributedDataParallel, backward_with};
use candle_nn::{VarBuilder, VarMap};

const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

/// A rank without samples takes part in the others' statistics, and its layers have no rows.
#[test]
fn a_rank_without_rows_trains_in_every_dtype() {
    for dtype in DTYPES {
        let weights = ranks(2, |pg| {
            let build = |vb: VarBuilder| {
                Ok::<_, candle_core::Error>((
                    sync_batch_norm(&pg, 3, 1e-5, vb.pp("norm"))?,
                    linear(3, 2, vb.pp("linear"))?,
                ))
            };
            let options = pure(dtype);
            let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), build, options)?;
            let rows = [2, 0][pg.rank()];
            let x = Tensor::arange(0f32, (3 * rows) as f32, &Device::Cpu)?.reshape((rows, 3))?.to_dtype(dtype)?;
            let y = ddp.call(|(norm, linear)| linear.forward(&norm.forward_t(&x, true)?))?;
            let grads = backward_with(&y.sqr()?.sum_all()?, &[&ddp], counted(rows as f64))?;
            let gradients: Vec<_> = ddp.parameters().iter().map(|var| floats(grads.get(var).unwrap())).collect();
            assert!(gradients.iter().flatten().all(|value| value.is_finite()), "{dtype:?}: {gradients:?}");
            Ok(gradients)
        });
        assert_eq!(weights[0], weights[1], "{dtype:?}");
    }
}

/// Parameters without elements are trained, clipped and averaged like others.
#[test]
fn optimizers_and_clipping() {
    fn trains<O: Optimizer>(
        options: DdpOptions,
        make: impl Fn(&DistributedDataParallel<Tensor>) -> candle_ddp::Result<O> + Sync,
    ) {
        ranks(2, |pg| {
            let build = |vb: VarBuilder| {
                let (empty, full) = (vb.get((0, 3), "empty")?, vb.get_with_hints(2, "full", candle_nn::init::ONE)?);
                Tensor::cat(&[&empty.flatten_all()?, &full], 0)
            };
            let varmap = VarMap::new();
            let ddp = DistributedDataParallel::with_options(&pg, &varmap, build, options.clone())?;
            let mut optimizer = make(&ddp)?;
            for _ in 0..2 {
                let mut grads = ddp.backward(&ddp.call(|both| both.sqr()?.sum_all())?)?;
                assert!(optimizer.clip_grad_norm(&mut grads, 0.1)?.to_scalar::<f64>()?.is_finite());
                optimizer.step(&grads)?;
            }
            let full = floats(&varmap.data().lock().unwrap()["full"]);
            assert!(full.iter().all(|value| value.is_finite() && *value < 1.0), "{full:?}");
            Ok(())
        });
    }
    trains(DdpOptions::default(), |ddp| Sgd::new(ddp, ParamsSgd { momentum: 0.9, ..Default::default() }));
    trains(DdpOptions::default(), |ddp| AdamW::new(ddp, ParamsAdamW::default()));
    trains(DdpOptions::default(), |ddp| Lamb::new(ddp, ParamsLamb::default()));
    trains(of_zero(), |ddp| ZeroRedundancyOptimizer::new(ddp, ParamsAdamW::default()));
    trains(of_zero(), |ddp| ZeroRedundancyOptimizer::new(ddp, ParamsLamb::default()));
    for dtype in DTYPES {
        let empty = Var::zeros((0, 3), dtype, &Device::Cpu).unwrap();
        let gradients = || empty.sum_all().unwrap().backward().unwrap();
        let mut optimizer = AdamW::new(vec![empty.clone()], ParamsAdamW::default()).unwrap();
        Optimizer::step(&mut optimizer, &gradients()).unwrap();
        // PyTorch's norm of nothing is 0 as well.
        assert_eq!(
            clip_grad_norm(&mut GradStore::default(), Vec::<Var>::new(), 1.0).unwrap().to_scalar::<f64>().unwrap(),
            0.0
        );
        clip_grad_value(&mut GradStore::default(), Vec::<Var>::new(), 1.0).unwrap();
    }
}
