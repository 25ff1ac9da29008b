//! DistributedDataParallel in mixed precision: which dtype is used where, and f32 masters that keep updates too small
//! for the replicas.
use crate::common::{assert_close, assert_error, filled, floats, plain, pure, ranks, reduced_in, tensor, var};
use candle_core::{DType, IndexOp, Module, ModuleT, Tensor, Var};
use candle_ddp::nn::sync_batch_norm;
use candle_ddp::optim::{FusedOptimizer, ParamsAdamW, ParamsLamb, ParamsSgd, UpdateRule};
use candle_ddp::{Buckets, DdpOptions, DistributedDataParallel, Error, Precision, ProcessGroup, Result, Role, Unused};
use candle_nn::{FuncT, Linear, Optimizer, SGD, VarBuilder, VarMap, func_t, linear};
use std::sync::Arc;

/// Two layers; the second may be left out.
type Net = (Linear, Linear);
const NAMES: [&str; 4] = ["first.weight", "first.bias", "second.weight", "second.bias"];

fn net(vb: VarBuilder) -> candle_core::Result<Net> {
    Ok((linear(4, 8, vb.pp("first"))?, linear(8, 2, vb.pp("second"))?))
}

fn forward(net: &Net, x: &Tensor) -> candle_core::Result<Tensor> {
    net.1.forward(&net.0.forward(x)?.tanh()?)
}

fn options(param: Option<DType>, reduce: Option<DType>, buffer: Option<DType>) -> DdpOptions {
    let precision = match param {
        Some(param_dtype) => Precision::Half { param_dtype, buffer_dtype: buffer },
        None => Precision::default(),
    };
    DdpOptions { precision, unused: Unused::Allow, ..reduced_in(reduce) }
}

fn wrap(pg: &ProcessGroup, options: DdpOptions) -> Result<(DistributedDataParallel<Net>, VarMap)> {
    filled(pg, |vb| net(vb), options, 7)
}

fn loss(output: &Tensor) -> Result<Tensor> {
    Ok(output.to_dtype(DType::F32)?.sqr()?.mean_all()?)
}

fn batch(rank: usize) -> Tensor {
    tensor(&[5, 4], 100 + rank as u64)
}

/// The gradients of plain candle's model, whose variables have the values of `wrap`, rounded to `dtype`.
fn reference(dtype: DType, rank: usize) -> Vec<Tensor> {
    let (net, varmap) = plain(|vb| net(vb), dtype, 7);
    let grads = loss(&forward(&net, &batch(rank).to_dtype(dtype).unwrap()).unwrap()).unwrap().backward().unwrap();
    NAMES.iter().map(|name| grads.get(&var(&varmap, name)).unwrap().clone()).collect()
}

/// The parameters after three steps are the same bit for bit, and gradients have the dtype in which they were summed.
#[test]
fn gradients_may_keep_their_low_precision() {
    fn train<R: UpdateRule + Sync>(rule: &R, keep_low_precision_grads: bool) -> Vec<Vec<Vec<f32>>> {
        let train = |pg: ProcessGroup| {
            let options = options(Some(DType::BF16), None, None);
            let (ddp, varmap) =
                wrap(&pg, DdpOptions { buckets: Buckets { keep_low_precision_grads, ..options.buckets }, ..options })?;
            let mut optimizer = FusedOptimizer::new(&ddp, rule.clone())?;
            for step in 0..3 {
                let x = batch(pg.rank() + 2 * step).to_dtype(DType::BF16)?;
                let grads = ddp.backward(&loss(&ddp.call(|net| forward(net, &x))?)?)?;
                let dtype = grads.get(&var(&varmap, NAMES[0])).unwrap().dtype();
                assert_eq!(dtype, if keep_low_precision_grads { DType::BF16 } else { DType::F32 });
                candle_ddp::optim::Optimizer::step(&mut optimizer, &grads)?;
            }
            Ok(NAMES.map(|name| floats(&var(&varmap, name))).to_vec())
        };
        ranks(2, train)
    }
    fn check<R: UpdateRule + Sync>(rule: R) {
        assert_eq!(train(&rule, true), train(&rule, false), "{}", R::NAME);
    }
    check(ParamsAdamW::default());
    check(ParamsSgd { momentum: 0.9, ..Default::default() });
    check(ParamsLamb::default());
}

#[test]
fn gradients_of_low_precision_replicas_are_averaged_in_the_reduce_dtype() {
    let (f, h, b) = (DType::F32, DType::F16, DType::BF16);
    for (param, reduce) in
        [(Some(b), Some(f)), (Some(h), Some(f)), (Some(b), None), (None, Some(b)), (Some(h), Some(b))]
    {
        let held = param.unwrap_or(f);
        let reduced = reduce.unwrap_or(held);
        // Each rank's gradient is halved in the reduce dtype; the sum is rounded once more.
        let parts: Vec<Vec<Tensor>> = (0..2).map(|rank| reference(held, rank)).collect();
        let half = |t: &Tensor| (t.to_dtype(f).unwrap() * 0.5).unwrap().to_dtype(reduced).unwrap().to_dtype(f).unwrap();
        let expected: Vec<Vec<f32>> = (0..NAMES.len())
            .map(|index| floats(&(half(&parts[0][index]) + half(&parts[1][index])).unwrap().to_dtype(reduced).unwrap()))
            .collect();
        ranks(2, |pg| {
            let (ddp, varmap) = wrap(&pg, options(param, reduce, None))?;
            // The first pass rebuilds the buckets; a second one must give the same result.
            for _ in 0..2 {
                let output = ddp.call(|net| forward(net, &batch(pg.rank()).to_dtype(held)?))?;
                assert_eq!(output.dtype(), held);
                let grads = ddp.backward(&loss(&output)?)?;
                for (name, expected) in NAMES.iter().zip(&expected) {
                    let master = var(&varmap, name);
                    assert_eq!(master.dtype(), f);
                    let gradient = grads.get(&master).unwrap();
                    assert_eq!(gradient.dtype(), f);
                    assert_eq!(&floats(gradient), expected, "{name}, {param:?}, {reduce:?}");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn masters_accumulate_updates_too_small_for_the_replicas() {
    ranks(2, |pg| {
        let varmap = VarMap::new();
        let build = |vb: VarBuilder<'static>| vb.get_with_hints(1, "w", candle_nn::Init::Const(1.0));
        let options = options(Some(DType::BF16), Some(DType::F32), None);
        let ddp = DistributedDataParallel::with_options(&pg, &varmap, build, options)?;
        let mut optimizer = SGD::new(ddp.parameters(), 0.001)?;
        // bf16 has no value between 1 and 1.0078: steps of a thousandth would all be rounded away.
        for _ in 0..8 {
            let loss = ddp.call(|w| w.neg()?.sum_all())?;
            optimizer.step(&ddp.backward(&loss)?)?;
        }
        assert_close(&floats(&var(&varmap, "w")), &[1.008], 1e-6, "master");
        assert_eq!(ddp.call(|w| candle_core::Result::Ok(floats(w)))?, [1.0078125]);
        Ok(())
    });
}

#[test]
fn accumulation_and_unused_parameters_work_in_every_reduce_dtype() {
    for reduce in [DType::F32, DType::BF16] {
        ranks(2, |pg| {
            let (ddp, varmap) = wrap(&pg, options(Some(DType::BF16), Some(reduce), None))?;
            let x = batch(pg.rank()).to_dtype(DType::BF16)?;
            let run = |ddp: &DistributedDataParallel<Net>| ddp.backward(&loss(&ddp.call(|net| net.0.forward(&x))?)?);
            let once = floats(run(&ddp)?.get(&var(&varmap, "first.weight")).unwrap());
            {
                let _guard = ddp.no_sync();
                let local = run(&ddp)?;
                assert_eq!(local.get(&var(&varmap, "first.weight")).unwrap().dtype(), DType::F32);
                assert!(local.get(&var(&varmap, "second.weight")).is_none());
            }
            let grads = run(&ddp)?;
            let twice: Vec<f32> = once.iter().map(|once| 2.0 * once).collect();
            let tolerance = if reduce == DType::F32 { 1e-6 } else { 1e-2 };
            assert_close(&floats(grads.get(&var(&varmap, "first.weight")).unwrap()), &twice, tolerance, "twice");
            assert!(grads.get(&var(&varmap, "second.weight")).is_none(), "no rank has used it");
            // Only rank 1 uses the second layer, so the average is half of its gradient.
            let y = ddp.call(|net| if pg.rank() == 1 { forward(net, &x) } else { net.0.forward(&x) })?;
            let grads = ddp.backward(&loss(&y)?)?;
            let half: Vec<f32> = floats(&reference(DType::BF16, 1)[2]).iter().map(|value| value / 2.0).collect();
            assert_close(&floats(grads.get(&var(&varmap, "second.weight")).unwrap()), &half, 1e-2, "rank 1's");
            Ok(())
        });
    }
}

#[test]
fn forward_converts_floating_point_inputs() {
    ranks(1, |pg| {
        // Other calls convert their inputs themselves, and an error says how.
        let (ddp, _) = wrap(&pg, options(Some(DType::BF16), None, None))?;
        assert_error(ddp.call(|net| net.0.forward(&batch(0))), &["the model computes in bf16", "cast_forward_inputs"]);
        let x = ddp.cast_forward_inputs(&batch(0))?;
        assert_eq!(ddp.call(|net| net.0.forward(&x))?.dtype(), DType::BF16);
        let build = |vb: VarBuilder<'static>| linear(4, 2, vb);
        let mixed = options(Some(DType::BF16), None, None);
        let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), build, mixed.clone())?;
        assert_eq!(ddp.forward(&batch(0))?.dtype(), DType::BF16);
        assert_eq!(ddp.forward_t(&batch(0), true)?.dtype(), DType::BF16);
        let build = |vb: VarBuilder<'static>| candle_nn::embedding(4, 2, vb);
        let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), build, mixed)?;
        assert_eq!(ddp.forward(&Tensor::new(&[1u32, 3], pg.device())?)?.dtype(), DType::BF16);
        Ok(())
    });
}

#[test]
fn a_layer_that_asks_for_f32_gets_its_master() {
    ranks(2, |pg| {
        let build = |vb: VarBuilder<'static>| -> candle_core::Result<(Linear, Linear)> {
            Ok((linear(4, 8, vb.pp("low"))?, linear(8, 2, vb.pp("high").to_dtype(DType::F32))?))
        };
        let mixed = options(Some(DType::BF16), None, None);
        let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), build, mixed)?;
        let output = ddp.call(|(low, high)| {
            let hidden = low.forward(&batch(pg.rank()).to_dtype(DType::BF16)?)?;
            high.forward(&hidden.to_dtype(DType::F32)?)
        })?;
        assert_eq!(output.dtype(), DType::F32);
        let grads = ddp.backward(&loss(&output)?)?;
        assert!(ddp.parameters().iter().all(|var| grads.get(var).unwrap().dtype() == DType::F32));
        Ok(())
    });
}

fn normed(pg: &ProcessGroup, vb: VarBuilder) -> candle_core::Result<FuncT<'static>> {
    let norm = sync_batch_norm(pg, 8, 1e-5, vb.pp("norm"))?;
    let (first, last) = (linear(4, 8, vb.pp("first"))?, linear(8, 2, vb.pp("last"))?);
    Ok(func_t(move |x, train| last.forward(&norm.forward_t(&first.forward(x)?, train)?.tanh()?)))
}

#[test]
fn a_normalised_model_trains_as_in_f32() {
    let (x, y) = (tensor(&[10, 4], 1), tensor(&[10, 2], 2));
    let train = |options: &DdpOptions, buffers: DType| {
        let losses = ranks(2, |pg| {
            let build = |vb: VarBuilder<'static>| normed(&pg, vb);
            let (ddp, varmap) = filled(&pg, build, options.clone(), 7)?;
            var(&varmap, "norm.running_var").set(&Tensor::ones(8, buffers, pg.device())?)?;
            assert!(ddp.named_buffers().iter().all(|(_, var)| var.dtype() == buffers));
            let mut optimizer = SGD::new(ddp.parameters(), 0.1)?;
            let (x, y) = (x.i(pg.rank() * 5..(pg.rank() + 1) * 5)?, y.i(pg.rank() * 5..(pg.rank() + 1) * 5)?);
            let mut losses = Vec::new();
            for _ in 0..20 {
                let loss = (ddp.forward_t(&x, true)?.to_dtype(DType::F32)? - &y)?.sqr()?.mean_all()?;
                losses.push(loss.to_scalar::<f32>()?);
                optimizer.step(&ddp.backward(&loss)?)?;
            }
            // candle's own norm does not accept these dtypes together.
            ddp.forward_t(&x, false)?;
            Ok(losses)
        });
        losses.concat()
    };
    let plain = train(&DdpOptions::default(), DType::F32);
    assert!(plain[19] < plain[0] * 0.7, "{plain:?}");
    for dtype in [DType::BF16, DType::F16] {
        let mixed = train(&options(Some(dtype), Some(DType::F32), None), DType::F32);
        assert_close(&mixed, &plain, 2e-2, &format!("{dtype:?}"));
        assert_ne!(mixed, plain);
    }
    let buffers = train(&options(Some(DType::BF16), None, Some(DType::BF16)), DType::BF16);
    assert_close(&buffers, &plain, 2e-2, "bf16 buffers");
}

#[test]
fn unsupported_options_are_refused_by_name() {
    ranks(2, |pg| {
        let error = |options: DdpOptions| wrap(&pg, options).err().unwrap();
        let (u8, bf16) = (Some(DType::U8), Some(DType::BF16));
        let f64 = options(Some(DType::F64), None, None);
        for (options, expected) in [
            (options(None, u8, None), "reduce_dtype: it must be f32, f64, f16 or bf16, not u8"),
            (options(bf16, None, u8), "buffer_dtype: it must be f32, f64, f16 or bf16, not u8"),
            (pure(DType::U8), "precision: it must be f32, f64, f16 or bf16, not u8"),
            (f64, "param_dtype: it must be f16 or bf16, not f64"),
        ] {
            let refused = error(options).to_string();
            assert!(refused.contains(expected), "{refused}");
        }
        // Ranks that disagree.
        let reduce = if pg.rank() == 0 { DType::F32 } else { DType::BF16 };
        let refused = error(options(Some(DType::BF16), Some(reduce), None));
        assert!(matches!(refused, Error::Mismatch { what: "model", rank: 1, .. }), "{refused}");
        assert!(
            refused.to_string().contains("reduce_dtype: Some(BF16), keep_low_precision_grads: false }"),
            "{refused}"
        );
        // A buffer that exists before DDP wraps the model.
        let varmap = VarMap::new();
        normed(&pg, VarBuilder::from_varmap(&varmap, DType::F32, pg.device()))?;
        let build = |vb: VarBuilder<'static>| normed(&pg, vb);
        let bf16_buffers = options(Some(DType::BF16), None, Some(DType::BF16));
        let refused = DistributedDataParallel::with_options(&pg, &varmap, build, bf16_buffers).err().unwrap();
        assert!(refused.to_string().contains("norm.running_mean"), "{refused}");
        // A parameter whose dtype in the VarMap is not that of the options, with and without mixed precision.
        let varmap = VarMap::new();
        DistributedDataParallel::with_options(&pg, &varmap, |vb| net(vb), pure(DType::BF16))?;
        for init_seed in [None, Some(1)] {
            for param in [None, Some(DType::BF16)] {
                let options = DdpOptions { init_seed, ..options(param, None, None) };
                let refused = DistributedDataParallel::with_options(&pg, &varmap, |vb| net(vb), options).err().unwrap();
                let needed = "parameter first.weight: it is bf16 in the VarMap, but the model is built with variables of \
                              dtype f32 (DdpOptions.precision";
                assert!(refused.to_string().contains(needed), "{refused}");
            }
        }
        DistributedDataParallel::with_options(&pg, &varmap, |vb| net(vb), pure(DType::BF16))?;
        // Frozen variables may stay in the dtype that the model computes in.
        let role = Arc::new(|name: &str| if name.starts_with("first") { Role::Frozen } else { Role::Parameter });
        let varmap_of_head = VarMap::new();
        for name in ["first.weight", "first.bias"] {
            varmap_of_head.data().lock().unwrap().insert(name.to_string(), var(&varmap, name));
        }
        let frozen = DdpOptions { role, ..options(Some(DType::BF16), None, None) };
        DistributedDataParallel::with_options(&pg, &varmap_of_head, |vb| net(vb), frozen)?;
        assert_eq!(var(&varmap_of_head, "second.weight").dtype(), DType::F32);
        // A model that holds the variables themselves instead of replicas.
        let vars = || Ok::<_, Error>(vec![("w".to_string(), Var::from_tensor(&batch(0))?)]);
        let refused =
            DistributedDataParallel::from_vars(&pg, (), vars()?, options(Some(DType::BF16), None, None)).err().unwrap();
        assert!(matches!(refused, Error::InvalidArgument { argument: "precision", .. }), "{refused}");
        // Its gradients can still be averaged in another dtype.
        let vars = vars()?;
        let w = vars[0].1.clone();
        let ddp = DistributedDataParallel::from_vars(&pg, (), vars, options(None, Some(DType::BF16), None))?;
        let grads = ddp.backward(&(w.sum_all()? * 1.001)?)?;
        assert_eq!(floats(grads.get(&w).unwrap()), [1.0; 20]);
        Ok(())
    });
}
