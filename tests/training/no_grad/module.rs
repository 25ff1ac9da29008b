//! A model's own methods, the model itself, and the second model for `no_grad`.
use super::{images, ours, wrap};
use crate::common::{assert_error, bits, fill, ranks, tensor, var, with_role};
use candle_core::{Module, ModuleT, Tensor};
use candle_ddp::nn::no_grad;
use candle_ddp::optim::{Optimizer, ParamsSgd, Sgd};
use candle_ddp::{DdpOptions, DistributedDataParallel, Error, Role};
use candle_nn::{Init, Linear, VarBuilder, VarMap, func, linear};

/// A model whose forward pass takes `&mut self`.
struct Counting {
    layer: Linear,
    passes: usize,
}

impl Counting {
    fn new(vb: VarBuilder) -> candle_core::Result<Self> {
        Ok(Self { layer: linear(4, 2, vb)?, passes: 0 })
    }

    fn forward(&mut self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.passes += 1;
        self.layer.forward(x)
    }
}

#[test]
fn call_mut_lends_a_model_with_the_last_values() {
    ranks(2, |pg| {
        let varmap = VarMap::new();
        let mut ddp = DistributedDataParallel::new(&pg, &varmap, Counting::new)?;
        let mut optimizer = Sgd::new(&ddp, ParamsSgd { lr: 0.1, ..Default::default() })?;
        let x = tensor(&[3, 4], pg.rank() as u64);
        for passes in 1..4 {
            let output = ddp.call_mut(|net| net.forward(&x))?;
            let expected = (x.matmul(&var(&varmap, "weight").t()?)?.broadcast_add(&var(&varmap, "bias")))?;
            assert_eq!(bits(&output), bits(&expected));
            assert_eq!(ddp.call(|net| Ok::<_, Error>(net.passes))?, passes);
            optimizer.step(&ddp.backward(&output.sqr()?.mean_all()?)?)?;
        }
        // Under no_grad, it is the other model's turn.
        let mut ddp = ddp.with_no_grad_model(Counting::new)?;
        assert!(!no_grad(|| ddp.call_mut(|net| net.forward(&x)))?.track_op());
        assert_eq!(no_grad(|| ddp.call(|net| Ok::<_, Error>(net.passes)))?, 1);
        assert_eq!(ddp.call(|net| Ok::<_, Error>(net.passes))?, 3);
        let error = ddp.call_mut(|net| net.forward(&tensor(&[3, 5], 1))).unwrap_err();
        assert!(matches!(error, Error::Candle(_)), "{error:?}");
        Ok(())
    });
}

#[test]
fn into_module_returns_the_last_values_and_no_backward_pass_goes_through_it_unnoticed() {
    ranks(2, |pg| {
        let (varmap, ddp) = wrap(&pg, ours, true, DdpOptions::default())?;
        ddp.forward_t(&images(1), false)?;
        fill(&varmap, 4);
        let variance = var(&varmap, "norm.running_var");
        variance.set(&variance.ones_like()?)?;
        let plain = ours(VarBuilder::from_varmap(&varmap, candle_core::DType::F32, pg.device()))?;
        let module = ddp.into_module()?;
        let output = module.forward_t(&images(1), false)?;
        assert_eq!(bits(&output), bits(&plain.forward_t(&images(1), false)?));
        let error = Error::from(output.sum_all()?.backward().unwrap_err());
        assert!(matches!(error, Error::BackwardOutside { .. }), "{error:?}");
        Ok(())
    });
}

#[test]
fn the_second_model_must_be_the_same() {
    ranks(1, |pg| {
        let wrap = || DistributedDataParallel::new(&pg, &VarMap::new(), |vb| linear(4, 2, vb.pp("fc")));
        let of =
            |build: fn(VarBuilder<'static>) -> candle_core::Result<Linear>| wrap()?.with_no_grad_model(build).map(drop);
        of(|vb| linear(4, 2, vb.pp("fc")))?;
        assert_error(of(|vb| linear(4, 2, vb.pp("other"))), &["other.weight is not a variable of the model"]);
        assert_error(of(|vb| linear(4, 3, vb.pp("fc"))), &["fc.weight", "shape"]);
        let less = of(|vb| Ok(Linear::new(vb.pp("fc").get((2, 4), "weight")?, None)));
        assert!(matches!(&less, Err(Error::Parameter { parameter, .. }) if parameter == "fc.bias"), "{less:?}");
        Ok(())
    });
}

/// Every role, a tied weight, and a model that was not built with DDP's VarBuilder.
#[test]
fn the_second_model_has_variables_of_every_role() {
    let build = |vb: VarBuilder| {
        let get = |name| vb.get_with_hints(4, name, Init::Randn { mean: 0., stdev: 1. });
        assert_eq!(get("parameter")?.id(), get("parameter")?.id());
        let all = [get("parameter")?, get("frozen")?, get("buffer")?, get("ignored")?];
        let add = |x: Tensor, tensor: &Tensor| x.broadcast_add(tensor)?.sin();
        Ok::<_, candle_core::Error>(func(move |x| all.iter().try_fold(x.clone(), add)))
    };
    let role = |name: &str| match name {
        "frozen" => Role::Frozen,
        "buffer" => Role::Buffer,
        "ignored" => Role::Ignored,
        _ => Role::Parameter,
    };
    ranks(2, |pg| {
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, candle_core::DType::F32, pg.device());
        let module = build(vb)?;
        let ddps = [
            DistributedDataParallel::with_options(&pg, &varmap, build, with_role(role))?,
            DistributedDataParallel::from_vars(&pg, module, &varmap, with_role(role))?,
        ];
        for ddp in ddps {
            let ddp = ddp.with_no_grad_model(build)?;
            for seed in 0..2 {
                fill(&varmap, seed);
                let x = tensor(&[3, 4], 1);
                let found = no_grad(|| ddp.forward(&x))?;
                assert!(!found.track_op());
                assert_eq!(bits(&found), bits(&ddp.forward(&x)?));
            }
        }
        Ok(())
    });
}
