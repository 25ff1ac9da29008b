//! A GradScaler divides all gradients of a store, also those of parameters that it was not made for.
use crate::common::{floats, of_zero, ranks, tensor};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Module, Tensor, Var};
use candle_ddp::amp::GradScaler;
use candle_ddp::nn::{Linear, linear};
use candle_ddp::optim::{Optimizer, ParameterGroup, ParamsSgd, Sgd, ZeroRedundancyOptimizer, clip_grad_norm};
use candle_ddp::{DdpOptions, DistributedDataParallel, Error, ProcessGroup, Result, Role, backward_with};
use candle_nn::{VarBuilder, VarMap};
use std::sync::Arc;

type Net = (Linear, Linear);
type Ddp = DistributedDataParallel<Net>;

fn net(vb: VarBuilder) -> candle_core::Result<Net> {
    Ok((linear(6, 6, vb.pp("backbone"))?, linear(6, 2, vb.pp("head"))?))
}

/// The parameters of the backbone have this role.
fn model(pg: &ProcessGroup, varmap: &VarMap, backbone: Role) -> Result<Ddp> {
    let role = move |name: &str| if name.starts_with("backbone.") { backbone } else { Role::Parameter };
    let options = DdpOptions { init_seed: Some(3), role: Arc::new(role), ..Default::default() };
    DistributedDataParallel::with_options(pg, varmap, net, options)
}

fn loss(ddp: &Ddp, step: u64) -> Result<Tensor> {
    let x = tensor(&[4, 6], 10 * step + ddp.process_group().rank() as u64);
    Ok(ddp.call(|(backbone, head)| head.forward(&backbone.forward(&x)?.tanh()?))?.sqr()?.mean_all()?)
}

fn sgd() -> ParamsSgd {
    ParamsSgd { lr: 0.1, ..Default::default() }
}

fn weights(varmap: &VarMap) -> Vec<f32> {
    let mut vars: Vec<_> = varmap.data().lock().unwrap().clone().into_iter().collect();
    vars.sort_by(|a, b| a.0.cmp(&b.0));
    vars.iter().flat_map(|(_, var)| floats(var)).collect()
}

/// Steps with a scaler that was made before the backbone was thawed, or without one. A power of two changes no bit.
fn thawed(scaled: bool, by_hand: bool) -> Vec<f32> {
    let mut weights = ranks(2, |pg| {
        let varmap = VarMap::new();
        let mut ddp = model(&pg, &varmap, Role::Frozen)?;
        let mut optimizer = Sgd::new(&ddp, sgd())?;
        let mut scaler = GradScaler::new(&pg, &ddp, Default::default())?;
        for step in 0..4 {
            if step == 2 {
                let parameters = ddp.named_frozen();
                ddp = model(&pg, &varmap, Role::Parameter)?;
                optimizer.add_param_group(ParameterGroup { parameters, options: sgd() })?;
            }
            let loss = loss(&ddp, step)?;
            if !scaled {
                let mut grads = ddp.backward(&loss)?;
                optimizer.clip_grad_norm(&mut grads, 0.1)?;
                optimizer.step(&grads)?;
                continue;
            }
            let mut grads = ddp.backward(&scaler.scale(&loss)?)?;
            match by_hand {
                true => scaler.unscale(&mut grads)?,
                false => optimizer.unscale(&mut scaler, &mut grads)?,
            }
            let norm = optimizer.clip_grad_norm(&mut grads, 0.1)?.to_scalar::<f64>()?;
            assert!((0. ..2.).contains(&norm), "step {step}: {norm}");
            assert!(scaler.step_if_finite(&mut grads, |grads| optimizer.step(grads))?);
            scaler.update()?;
        }
        Ok(self::weights(&varmap))
    });
    weights.swap_remove(0)
}

#[test]
fn thawed_parameters_are_divided_too() {
    let expected = thawed(false, false);
    assert_eq!(thawed(true, false), expected);
    assert_eq!(thawed(true, true), expected);
}

/// An infinity on one rank, in a parameter that the scaler does not know by itself.
#[test]
fn an_overflow_in_any_parameter_skips_the_step_on_all_ranks() {
    ranks(2, |pg| {
        for backbone in [Role::Parameter, Role::Ignored] {
            let varmap = VarMap::new();
            let ddp = model(&pg, &varmap, backbone)?;
            let head = ddp.named_parameters().into_iter().filter(|(name, _)| name.starts_with("head."));
            let mut scaler = GradScaler::new(&pg, head.collect::<Vec<_>>(), Default::default())?;
            let before = weights(&varmap);
            let mut optimizer = Sgd::new(&ddp, sgd())?;
            for infinite in [true, false] {
                let factor = if infinite && pg.rank() == 1 { f64::INFINITY } else { 0. };
                let overflow = ddp.call(|(backbone, _)| backbone.weight().sum_all()?.affine(factor, 0.))?;
                let loss = if factor == 0. { loss(&ddp, 1)? } else { (loss(&ddp, 1)? + overflow)? };
                let mut grads = ddp.backward(&scaler.scale(&loss)?)?;
                assert_eq!(scaler.step_if_finite(&mut grads, |grads| optimizer.step(grads))?, !infinite);
                assert_eq!(weights(&varmap) == before, infinite, "{backbone:?}");
                scaler.update()?;
            }
        }
        Ok(())
    });
}

#[test]
fn two_models_may_have_a_scaler_that_was_made_for_one() {
    let run = |scaled: bool| {
        ranks(2, |pg| {
            let maps = [VarMap::new(), VarMap::new()];
            let (first, second) = (model(&pg, &maps[0], Role::Parameter)?, model(&pg, &maps[1], Role::Ignored)?);
            let mut optimizers = [Sgd::new(&first, sgd())?, Sgd::new(&second, sgd())?];
            let mut scaler = GradScaler::new(&pg, &first, Default::default())?;
            for step in 0..3 {
                let both = (loss(&first, step)? + loss(&second, step + 9)?)?;
                let both = if scaled { scaler.scale(&both)? } else { both };
                let mut grads = backward_with(&both, &[&first, &second], Default::default())?;
                let mut step = |grads: &GradStore| optimizers.iter_mut().try_for_each(|own| own.step(grads));
                match scaled {
                    true => assert!(scaler.step_if_finite(&mut grads, step)?),
                    false => step(&grads)?,
                }
                if scaled {
                    scaler.update()?;
                }
            }
            Ok(maps.iter().flat_map(self::weights).collect::<Vec<_>>())
        })
    };
    assert_eq!(run(true), run(false));
}

/// Gradients of candle's own backward pass, of variables that belong to no model; those in f16 become f32.
#[test]
fn nothing_in_a_store_stays_scaled() {
    ranks(1, |pg| {
        let of = |dtype| Ok::<_, Error>(Var::from_tensor(&Tensor::new(&[1f32, 2.], &Device::Cpu)?.to_dtype(dtype)?)?);
        let known = of(DType::F32)?;
        for dtype in [DType::F32, DType::F16, DType::F64] {
            let (unknown, input) = (of(dtype)?, of(dtype)?.as_detached_tensor());
            let mut scaler = GradScaler::new(&pg, vec![("w".to_string(), known.clone())], Default::default())?;
            let product = (unknown.as_tensor() * &input)?.to_dtype(DType::F32)?;
            let loss = (known.sum_all()? + (product * 0.25)?.sum_all()?)?;
            let mut grads = scaler.scale(&loss)?.backward()?;
            scaler.unscale(&mut grads)?;
            assert_eq!(floats(grads.get(&known).unwrap()), [1., 1.]);
            let wide = if dtype == DType::F16 { DType::F32 } else { dtype };
            for tensor in [unknown.as_tensor(), &input] {
                let gradient = grads.get(tensor).unwrap();
                // The scale is 65536, and f16 rounds 16384 and 32768 not at all.
                assert_eq!((gradient.dtype(), floats(gradient)), (wide, vec![0.25, 0.5]), "{dtype:?}");
            }
        }
        Ok(())
    });
}

/// A gradient of an ignored parameter is in the store, those that are averaged are not.
#[test]
fn gradients_that_an_optimizer_keeps_are_its_own_business() {
    ranks(2, |pg| {
        let role = Arc::new(|name: &str| if name.starts_with("backbone.") { Role::Ignored } else { Role::Parameter });
        let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), net, DdpOptions { role, ..of_zero() })?;
        let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, sgd())?;
        let mut scaler = GradScaler::new(&pg, &ddp, Default::default())?;
        let mut grads = ddp.backward(&scaler.scale(&loss(&ddp, 1)?)?)?;
        match scaler.unscale(&mut grads) {
            Err(Error::InvalidArgument { argument: "grads", reason }) => assert!(reason.contains("head."), "{reason}"),
            other => panic!("{other:?}"),
        }
        scaler.step(&mut optimizer, &mut grads)?;
        let ignored = ddp.named_parameters().into_iter().filter(|(name, _)| name.starts_with("backbone."));
        let norm = clip_grad_norm(&mut grads, ignored.collect::<Vec<_>>(), 10.)?.to_scalar::<f64>()?;
        assert!((0. ..10.).contains(&norm), "{norm}");
        Ok(())
    });
}
