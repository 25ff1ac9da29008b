//! DistributedDataParallel with ranks as threads: one test for each guarantee.
use crate::common::{
    Between, assert_close, assert_error, fill, filled, floats, plain, pure, ranks, tensor, tiny, try_ranks, values,
    var, with_role,
};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Module, Tensor, Var};
use candle_ddp::{
    Buckets, DdpOptions, DistributedDataParallel, Error, Failure, ProcessGroup, ReduceOp, Result, Role, Unused,
};
use candle_nn::{Func, Linear, Optimizer, SGD, VarBuilder, VarMap, func, func_t, linear};

/// Three layers; the last may be left out.
struct Net {
    first: Linear,
    second: Linear,
    third: Linear,
}

impl Net {
    fn new(vb: VarBuilder) -> candle_core::Result<Self> {
        Ok(Self {
            first: linear(4, 8, vb.pp("first"))?,
            second: linear(8, 8, vb.pp("second"))?,
            third: linear(8, 2, vb.pp("third"))?,
        })
    }

    fn trunk(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.second.forward(&self.first.forward(x)?.tanh()?)?.tanh()
    }
}

impl Module for Net {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.third.forward(&self.trunk(x)?)
    }
}

const NET_NAMES: [&str; 6] =
    ["first.weight", "first.bias", "second.weight", "second.bias", "third.weight", "third.bias"];

fn wrap(pg: &ProcessGroup, options: DdpOptions) -> Result<(DistributedDataParallel<Net>, VarMap)> {
    filled(pg, |vb| Net::new(vb), options, 7)
}

fn loss(output: &Tensor) -> Result<Tensor> {
    Ok(output.sqr()?.mean_all()?)
}

fn gradient(grads: &GradStore, var: &Var) -> Vec<f32> {
    floats(grads.get(var).expect("a gradient"))
}

fn plain_net(seed: u64) -> (Net, VarMap) {
    plain(|vb| Net::new(vb), DType::F32, seed)
}

/// The gradients of the plain model on `x`, by name.
fn reference(x: &Tensor, names: &[&str], run: impl Fn(&Net, &Tensor) -> candle_core::Result<Tensor>) -> Vec<Vec<f32>> {
    reference_of(plain_net(7), x, names, run)
}

fn reference_of<M>(
    (model, varmap): (M, VarMap),
    x: &Tensor,
    names: &[&str],
    run: impl Fn(&M, &Tensor) -> candle_core::Result<Tensor>,
) -> Vec<Vec<f32>> {
    let grads = loss(&run(&model, x).unwrap()).unwrap().backward().unwrap();
    names.iter().map(|name| gradient(&grads, &var(&varmap, name))).collect()
}

/// The mean over the ranks of `reference`.
fn mean(gradients: &[Vec<Vec<f32>>]) -> Vec<Vec<f32>> {
    let scale = 1.0 / gradients.len() as f32;
    (0..gradients[0].len())
        .map(|index| {
            let rank_sum = |k: usize| gradients.iter().map(|rank| rank[index][k]).sum::<f32>();
            (0..gradients[0][index].len()).map(|k| rank_sum(k) * scale).collect()
        })
        .collect()
}

fn batch(rank: usize) -> Tensor {
    tensor(&[5, 4], 100 + rank as u64)
}

/// Compares the values of [`NET_NAMES`].
#[track_caller]
fn assert_all_close(actual: &[Vec<f32>], expected: &[Vec<f32>], tolerance: f32, what: &str) {
    assert_eq!((actual.len(), expected.len()), (NET_NAMES.len(), NET_NAMES.len()));
    for ((actual, expected), name) in actual.iter().zip(expected).zip(NET_NAMES) {
        assert_close(actual, expected, tolerance, &format!("{name}, {what}"));
    }
}

#[test]
fn construction_broadcasts_the_values_of_rank_0() {
    let found = ranks(3, |pg| {
        let (_, varmap) = plain_net(50 + pg.rank() as u64);
        let ddp = DistributedDataParallel::new(&pg, &varmap, |vb| Net::new(vb))?;
        Ok(ddp.named_parameters().iter().map(|(_, var)| floats(var)).collect::<Vec<_>>())
    });
    let (_, varmap) = plain_net(50);
    let expected: Vec<_> = NET_NAMES.iter().map(|name| floats(&var(&varmap, name))).collect();
    assert_eq!(found, vec![expected; 3]);
}

#[test]
fn parameters_are_numbered_in_the_order_of_requests() {
    ranks(1, |pg| {
        let (ddp, _) = wrap(&pg, DdpOptions::default())?;
        let names: Vec<String> = ddp.named_parameters().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, NET_NAMES);
        Ok(())
    });
}

#[test]
fn buckets_are_rebuilt_once_in_gradient_order() {
    // Requests its layers in a different order than it uses them.
    let build = |vb: VarBuilder| {
        let third = linear(8, 2, vb.pp("third"))?;
        let first = linear(4, 8, vb.pp("first"))?;
        Ok::<_, candle_core::Error>(Net { first, second: linear(8, 8, vb.pp("second"))?, third })
    };
    let single = |names: [&str; 6]| names.map(|name| vec![name.to_string()]);
    ranks(2, |pg| {
        let (ddp, varmap) = filled(&pg, build, tiny(), 7)?;
        let reverse = ["second.bias", "second.weight", "first.bias", "first.weight", "third.bias", "third.weight"];
        assert_eq!(ddp.buckets(), single(reverse));
        let step = || ddp.backward(&loss(&ddp.forward(&batch(pg.rank()))?)?);
        let first = step()?;
        let before = NET_NAMES.map(|name| gradient(&first, &var(&varmap, name)));
        let second = step()?;
        // Gradients arrive from the last layer to the first; in each layer the bias is first, since it is added after
        // the product.
        let came = ["third.bias", "third.weight", "second.bias", "second.weight", "first.bias", "first.weight"];
        assert_eq!(ddp.buckets(), single(came));
        let after = NET_NAMES.map(|name| gradient(&second, &var(&varmap, name)));
        assert_eq!(before, after, "the same gradients in other slices");
        // Buckets are rebuilt only once: a later change of the order has no effect.
        ddp.backward(&loss(&ddp.call(|net| net.first.forward(&batch(pg.rank())))?)?)?;
        step()?;
        assert_eq!(ddp.buckets(), single(came));
        Ok(())
    });
}

/// A model with its weights on the left of products, so that candle visits their gradients late.
fn left(vb: VarBuilder) -> candle_core::Result<Func<'static>> {
    let (a, b) = (vb.get((4, 4), "a")?, vb.get((3, 4), "b")?);
    Ok(func(move |x| b.matmul(&a.matmul(&x.t()?.contiguous()?)?.tanh()?)))
}

#[test]
fn a_weight_on_the_left_of_a_product_fires_once_and_late() {
    let out = ranks(2, |pg| {
        let (ddp, varmap) = filled(&pg, |vb| left(vb), tiny(), 3)?;
        let run = || ddp.backward(&loss(&ddp.forward(&batch(pg.rank()))?)?);
        let grads = run()?;
        let result = ["a", "b"].map(|name| gradient(&grads, &var(&varmap, name)));
        run()?;
        Ok((result, ddp.buckets()))
    });
    let alone = || plain(|vb| left(vb), DType::F32, 3);
    let reference = [0, 1].map(|rank| reference_of(alone(), &batch(rank), &["a", "b"], |net, x| net.forward(x)));
    for (gradients, buckets) in &out {
        for (actual, expected) in gradients.iter().zip(mean(&reference)) {
            assert_close(actual, &expected, 1e-6, "gradient");
        }
        // `b` is used last, but on the left: its hook fires after `a`'s.
        assert_eq!(*buckets, [["a"], ["b"]]);
    }
}

#[test]
fn shared_weights_fire_once_with_the_sum_of_their_uses() {
    /// Requests the same name twice, as tied embeddings do.
    struct Tied(Tensor, Tensor);
    let forward = |net: &Tied, x: &Tensor| x.matmul(&net.0)?.tanh()?.matmul(&net.1);
    let build = |vb: VarBuilder| Ok::<_, candle_core::Error>(Tied(vb.get((4, 4), "w")?, vb.get((4, 4), "w")?));
    let out = ranks(2, |pg| {
        let (ddp, varmap) = filled(&pg, build, tiny(), 3)?;
        assert_eq!(ddp.parameters().len(), 1);
        assert!(ddp.call(|net| Ok::<_, Error>(net.0.id() == net.1.id()))?);
        let grads = ddp.backward(&loss(&ddp.call(|net| forward(net, &batch(pg.rank())))?)?)?;
        Ok(gradient(&grads, &var(&varmap, "w")))
    });
    let reference = [0, 1].map(|rank| reference_of(plain(build, DType::F32, 3), &batch(rank), &["w"], forward));
    out.iter().for_each(|actual| assert_close(actual, &mean(&reference)[0], 1e-6, "w"));
}

#[test]
fn ranks_may_use_different_parameters() {
    // Rank 0 leaves out the third layer, rank 1 the second and third, also in the first step, which decides the
    // order of the rebuilt buckets. Rank 2 uses all layers.
    let forward = |rank: usize, net: &Net, x: &Tensor| match rank {
        0 => net.trunk(x),
        1 => net.first.forward(x),
        _ => net.forward(x),
    };
    for options in [DdpOptions::default(), tiny()] {
        let out = ranks(3, |pg| {
            let (ddp, varmap) = wrap(&pg, options.clone())?;
            let x = batch(pg.rank());
            for _ in 0..2 {
                ddp.backward(&loss(&ddp.call(|net| forward(pg.rank(), net, &x))?)?)?;
            }
            let grads = ddp.backward(&loss(&ddp.call(|net| forward(pg.rank(), net, &x))?)?)?;
            Ok(NET_NAMES.map(|name| gradient(&grads, &var(&varmap, name))))
        });
        let used = [&NET_NAMES[..4], &NET_NAMES[..2], &NET_NAMES[..]];
        let mut gradients = Vec::new();
        for (rank, used) in used.iter().enumerate() {
            let mut rank_gradients = reference(&batch(rank), used, |net, x| forward(rank, net, x));
            let sizes = [32, 8, 64, 8, 16, 2];
            rank_gradients.extend(sizes[used.len()..].iter().map(|size| vec![0.0; *size]));
            gradients.push(rank_gradients);
        }
        out.iter().for_each(|actual| assert_all_close(actual, &mean(&gradients), 1e-6, "the mean"));
    }
}

#[test]
fn a_parameter_that_no_rank_used_has_no_gradient() {
    for options in [DdpOptions::default(), tiny()] {
        let options = DdpOptions { unused: Unused::Allow, ..options };
        ranks(2, |pg| {
            let (ddp, varmap) = wrap(&pg, options.clone())?;
            for _ in 0..3 {
                // First fill the slices, whose contents must not be mistaken for gradients.
                ddp.backward(&loss(&ddp.forward(&batch(pg.rank()))?)?)?;
                let grads = ddp.backward(&loss(&ddp.call(|net| net.trunk(&batch(pg.rank())))?)?)?;
                for name in &NET_NAMES[..4] {
                    assert!(grads.get(&var(&varmap, name)).is_some(), "{name}");
                }
                for name in &NET_NAMES[4..] {
                    assert!(grads.get(&var(&varmap, name)).is_none(), "{name}");
                }
            }
            // A loss that depends on no parameter must not cause a hang either.
            let grads = ddp.backward(&Tensor::new(1f32, &Device::Cpu)?)?;
            assert!(NET_NAMES.iter().all(|name| grads.get(&var(&varmap, name)).is_none()));
            Ok(())
        });
    }
}

#[test]
fn no_sync_accumulates_until_the_next_synchronised_backward() {
    let world = 2;
    let out = ranks(world, |pg| {
        let (ddp, varmap) = wrap(&pg, DdpOptions::default())?;
        let step = |batch: Tensor| ddp.backward(&loss(&ddp.forward(&batch)?)?);
        step(batch(90 + pg.rank()))?; // these gradients must not leak into the next pass
        let local = {
            let _guard = ddp.no_sync();
            step(batch(pg.rank()))?;
            let grads = step(batch(10 + pg.rank()))?;
            NET_NAMES.map(|name| gradient(&grads, &var(&varmap, name)))
        };
        // The last pass does not use the third layer, but its accumulated gradient counts.
        let grads = ddp.backward(&loss(&ddp.call(|net| net.trunk(&batch(20 + pg.rank())))?)?)?;
        let synchronised = NET_NAMES.map(|name| gradient(&grads, &var(&varmap, name)));
        // The accumulated gradients are gone.
        let grads = step(batch(30 + pg.rank()))?;
        Ok((local, synchronised, NET_NAMES.map(|name| gradient(&grads, &var(&varmap, name)))))
    });
    let after: Vec<_> = (30..32).map(|seed| reference(&batch(seed), &NET_NAMES, |net, x| net.forward(x))).collect();
    let mut sums = Vec::new();
    for (rank, (rank_local, _, _)) in out.iter().enumerate() {
        let full = |offset: usize| reference(&batch(offset + rank), &NET_NAMES, |net, x| net.forward(x));
        let add = |a: Vec<Vec<f32>>, b: Vec<Vec<f32>>| -> Vec<Vec<f32>> {
            a.iter().zip(&b).map(|(a, b)| a.iter().zip(b).map(|(a, b)| a + b).collect()).collect()
        };
        let local = add(full(0), full(10));
        assert_all_close(rank_local, &local, 1e-6, "local");
        let mut trunk = reference(&batch(20 + rank), &NET_NAMES[..4], |net, x| net.trunk(x));
        trunk.extend([vec![0.0; 16], vec![0.0; 2]]);
        sums.push(add(local, trunk));
    }
    for (_, synchronised, fresh) in &out {
        assert_all_close(synchronised, &mean(&sums), 1e-6, "synchronised");
        assert_all_close(fresh, &mean(&after), 1e-6, "of the next step");
    }
}

#[test]
fn candles_own_backward_pass_is_refused() {
    ranks(1, |pg| {
        let (ddp, varmap) = wrap(&pg, DdpOptions::default())?;
        let loss = loss(&ddp.forward(&batch(0))?)?;
        let mut optimizer = SGD::new(ddp.parameters(), 0.1)?;
        let before = floats(&var(&varmap, "first.weight"));
        for error in [loss.backward().unwrap_err(), optimizer.backward_step(&loss).unwrap_err()] {
            let text = error.to_string();
            assert!(text.contains("ddp.backward(&loss)") && text.contains("third.bias"), "{text}");
        }
        assert_eq!(before, floats(&var(&varmap, "first.weight")));
        ddp.backward(&loss)?;
        assert!(loss.backward().is_err(), "still refused after DDP's own backward pass");
        Ok(())
    });
}

#[test]
fn replicas_are_never_stale() {
    ranks(1, |pg| {
        let (ddp, mut varmap) = wrap(&pg, DdpOptions::default())?;
        let x = batch(0);
        let check = |what: &str| {
            let plain = Net::new(VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu)).unwrap();
            let expected = floats(&plain.forward(&x).unwrap());
            assert_eq!(floats(&ddp.forward(&x).unwrap()), expected, "{what}");
            expected
        };
        let first = check("at first");
        var(&varmap, "second.weight").set(&tensor(&[8, 8], 77))?;
        let second = check("after Var::set");
        assert_ne!(first, second);
        let mut optimizer = SGD::new(ddp.parameters(), 0.5)?;
        optimizer.step(&ddp.backward(&loss(&ddp.forward(&x)?)?)?)?;
        assert_ne!(second, check("after an optimizer's step"));
        let file = tempfile::NamedTempFile::new().unwrap();
        varmap.save(file.path())?;
        fill(&varmap, 99);
        let filled = check("after filling");
        varmap.load(file.path())?;
        let plain = Net::new(VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?;
        let loaded = floats(&ddp.forward(&x)?);
        assert_eq!(loaded, floats(&plain.forward(&x)?), "after VarMap::load");
        assert_ne!(loaded, filled);
        Ok(())
    });
}

#[test]
fn buckets_are_reused_once_their_gradients_are_dropped() {
    ranks(1, |pg| {
        let (ddp, varmap) = wrap(&pg, DdpOptions::default())?;
        let step = |seed: usize| ddp.backward(&loss(&ddp.forward(&batch(seed))?)?);
        let weight = var(&varmap, "first.weight");
        step(0)?;
        let second = step(1)?.get(&weight).expect("a gradient").clone();
        let before = floats(&second);
        let third = step(2)?;
        assert_ne!(before, gradient(&third, &weight));
        assert_eq!(floats(&second), gradient(&third, &weight), "the same memory");
        Ok(())
    });
}

/// The gradients are views of one bucket. The ranks start the two calls in opposite order.
#[test]
fn gradients_are_reduced_in_two_groups_at_once() -> Result<()> {
    let seen = try_ranks(2, |pg| {
        let groups = [pg.new_group(&[0, 1])?.unwrap(), pg.new_group(&[0, 1])?.unwrap()];
        let (ddp, varmap) = wrap(&pg, DdpOptions::default())?;
        let grads = ddp.backward(&loss(&ddp.forward(&batch(pg.rank()))?)?)?;
        let names = ["first.weight", "second.weight"];
        let before = names.map(|name| gradient(&grads, &var(&varmap, name)));
        let order = if pg.rank() == 0 { [0, 1] } else { [1, 0] };
        let start = |index: usize| {
            groups[index].all_reduce_async(grads.get(&var(&varmap, names[index])).unwrap(), ReduceOp::Sum)
        };
        let works = [start(order[0])?, start(order[1])?];
        works.iter().try_for_each(|work| work.wait())?;
        Ok((before, names.map(|name| gradient(&grads, &var(&varmap, name)))))
    })?;
    for (before, after) in seen {
        for (before, after) in before.into_iter().flatten().zip(after.into_iter().flatten()) {
            assert_eq!(after, 2.0 * before);
        }
    }
    Ok(())
}

#[test]
fn buffers_are_the_variables_themselves_and_follow_rank_0() {
    use candle_nn::{BatchNormConfig, ModuleT, batch_norm};
    for broadcast_buffers in [true, false] {
        let out = ranks(2, |pg| {
            let varmap = VarMap::new();
            let build = |vb: VarBuilder| -> candle_core::Result<_> {
                let norm = batch_norm(3, BatchNormConfig::default(), vb.pp("norm"))?;
                let linear = linear(4, 3, vb.pp("linear"))?;
                Ok(func_t(move |x, train| norm.forward_t(&linear.forward(x)?, train)))
            };
            let options = DdpOptions { broadcast_buffers, ..Default::default() };
            let ddp = DistributedDataParallel::with_options(&pg, &varmap, build, options)?;
            let names: Vec<_> = ddp.named_buffers().into_iter().map(|(name, _)| name).collect();
            assert_eq!(names, ["norm.running_mean", "norm.running_var"]);
            let before = floats(&var(&varmap, "norm.running_mean"));
            ddp.backward(&loss(&ddp.forward_t(&batch(pg.rank()), true)?)?)?;
            let after = floats(&var(&varmap, "norm.running_mean"));
            assert_ne!(before, after, "the running mean in the VarMap is the one that BatchNorm updates");
            Ok(after)
        });
        assert_eq!(out[0] == out[1], broadcast_buffers);
    }
}

#[test]
fn vars_without_a_builder_may_come_in_another_order_on_each_rank() {
    let out = ranks(2, |pg| {
        // Of one shape, so that a difference of the orders would go unnoticed.
        let vars: Vec<Var> = (1..5).map(|seed| Var::from_tensor(&tensor(&[4, 4], seed)).unwrap()).collect();
        let mut named: Vec<_> = ["d", "a", "c", "b"].map(String::from).into_iter().zip(vars.clone()).collect();
        if pg.rank() == 1 {
            named.reverse();
        }
        let ddp = DistributedDataParallel::from_vars(&pg, vars, named, tiny())?;
        let names: Vec<_> = ddp.named_parameters().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["a", "b", "c", "d"]);
        let step = || {
            let sum = ddp.call(|vars| vars.iter().try_fold(batch(pg.rank()), |x, var| x.matmul(var)?.tanh()))?;
            ddp.backward(&loss(&sum)?)
        };
        step()?;
        let grads = step()?;
        Ok(ddp.parameters().iter().map(|var| gradient(&grads, var)).collect::<Vec<_>>())
    });
    assert_eq!(out[0], out[1]);
}

#[test]
fn ignored_parameters_stay_local_to_each_rank() {
    let out = ranks(2, |pg| {
        let options = with_role(|name| if name.starts_with("second") { Role::Ignored } else { Role::Parameter });
        let (_, varmap) = plain_net(7);
        var(&varmap, "second.bias").set(&Tensor::full(pg.rank() as f32, 8, &Device::Cpu)?)?;
        let ddp = DistributedDataParallel::with_options(&pg, &varmap, |vb| Net::new(vb), options)?;
        let names: Vec<_> = ddp.named_parameters().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names[4..], ["second.weight", "second.bias"]);
        let grads = ddp.backward(&loss(&ddp.forward(&batch(pg.rank()))?)?)?;
        let bias = floats(&var(&varmap, "second.bias"));
        let of = |name: &str| gradient(&grads, &var(&varmap, name));
        Ok((bias, of("second.bias"), of("first.bias")))
    });
    assert_eq!(out[1].0, [1.0; 8], "not broadcast");
    assert_ne!(out[0].1, out[1].1, "not averaged");
    assert_eq!(out[0].2, out[1].2);
}

#[test]
fn vars_without_a_builder_are_averaged_too() {
    struct Raw(Var, Var);
    let forward = |net: &Raw, x: &Tensor| x.matmul(&net.0)?.tanh()?.matmul(&net.1);
    let vars = || (Var::from_tensor(&tensor(&[4, 4], 1)).unwrap(), Var::from_tensor(&tensor(&[4, 2], 2)).unwrap());
    let out = ranks(2, |pg| {
        let (a, b) = vars();
        let named = vec![("a".to_string(), a.clone()), ("b".to_string(), b.clone())];
        let net = Raw(a.clone(), b.clone());
        let ddp = DistributedDataParallel::from_vars(&pg, net, named, tiny())?;
        let step = || ddp.backward(&loss(&ddp.call(|net| forward(net, &batch(pg.rank())))?)?);
        step()?;
        let grads = step()?;
        let both = [gradient(&grads, &a), gradient(&grads, &b)];
        // Only rank 1 uses this parameter.
        let partly = ddp.call(|net| if pg.rank() == 0 { batch(0).matmul(&net.0) } else { forward(net, &batch(1)) })?;
        let grads = ddp.backward(&loss(&partly)?)?;
        assert!(grads.get(&b).is_some());
        Ok(both)
    });
    let reference = [0, 1].map(|rank| {
        let (a, b) = vars();
        let grads = loss(&forward(&Raw(a.clone(), b.clone()), &batch(rank)).unwrap()).unwrap().backward().unwrap();
        vec![gradient(&grads, &a), gradient(&grads, &b)]
    });
    for rank in &out {
        for (actual, expected) in rank.iter().zip(mean(&reference)) {
            assert_close(actual, &expected, 1e-6, "gradient");
        }
    }
    let error = try_ranks(1, |pg| {
        let (a, _) = vars();
        let twice = |other: &str| vec![("a".to_string(), a.clone()), (other.to_string(), a.clone())];
        let error = DistributedDataParallel::from_vars(&pg, (), twice("a"), tiny()).map(|_| ()).unwrap_err();
        assert!(matches!(&error, Error::Parameter { parameter, .. } if parameter == "a"), "{error}");
        // A batch norm's statistics are known by their names.
        let nameless = DistributedDataParallel::from_vars(&pg, (), vec![a.clone()], tiny()).err().unwrap();
        assert!(nameless.to_string().contains("they must have names for DDP"), "{nameless}");
        DistributedDataParallel::from_vars(&pg, (), twice("b"), tiny()).map(|_| ())
    });
    assert!(matches!(&error, Err(Error::Parameter { parameter, .. }) if parameter == "b"), "{error:?}");
}

/// The errors of all ranks for a construction that must fail.
fn construction_errors<E>(
    build: impl Fn(usize, VarBuilder<'static>) -> std::result::Result<Linear, E> + Sync,
    options: impl Fn(usize) -> DdpOptions + Sync,
) -> Vec<Error>
where
    Error: From<E>,
{
    ranks(3, |pg| {
        let (rank, varmap) = (pg.rank(), VarMap::new());
        let build = |vb| build(rank, vb);
        let error = DistributedDataParallel::with_options(&pg, &varmap, build, options(rank)).err();
        pg.barrier()?; // the group remains usable
        Ok(error.expect("an error"))
    })
}

#[test]
fn every_rank_reports_models_that_differ() {
    let errors = construction_errors(|rank, vb| linear(4, if rank == 2 { 5 } else { 6 }, vb), |_| Default::default());
    for error in errors {
        assert!(matches!(error, Error::Mismatch { what: "model", rank: 2, .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("parameter 0: weight f32[5, 4] on rank 2") && text.contains("f32[6, 4]"), "{text}");
    }
    let options = |rank: usize| DdpOptions {
        buckets: Buckets { bucket_cap_mb: 1.0 + (rank == 1) as u8 as f64, ..Default::default() },
        ..Default::default()
    };
    for error in construction_errors(|_, vb| linear(4, 6, vb), options) {
        assert!(error.to_string().contains("bucket_cap_mb: 2"), "{error}");
    }
}

#[test]
fn every_rank_reports_a_model_that_could_not_be_built() {
    let errors = construction_errors(
        |rank, vb| if rank == 1 { candle_core::bail!("no such file") } else { linear(4, 6, vb) },
        |_| Default::default(),
    );
    assert!(errors[1].to_string().contains("no such file"));
    for rank in [0, 2] {
        assert!(matches!(errors[rank], Error::RankFailed { rank: 1, .. }), "{}", errors[rank]);
        assert!(errors[rank].to_string().contains("no such file"), "{}", errors[rank]);
    }
    for error in construction_errors(|_, vb| linear(4, 6, vb.pp("ignored")), |_| with_role(|_| Role::Ignored)) {
        let text = error.to_string();
        assert!(text.contains("no trainable parameter") && text.contains("handed to the closure"), "{text}");
    }
}

#[test]
fn variables_of_unsupported_dtypes_are_refused_by_name() {
    for (dtype, name) in [(DType::F8E4M3, "scales.weight"), (DType::I32, "scales.count")] {
        let errors = construction_errors(
            |_, vb| {
                vb.pp("scales").get_with_hints_dtype(4, &name[7..], candle_nn::Init::Const(0.), dtype)?;
                linear(4, 6, vb)
            },
            |_| DdpOptions::default(),
        );
        for error in errors {
            assert!(matches!(&error, Error::Parameter { parameter, .. } if parameter == name), "{error}");
            assert!(error.to_string().contains(dtype.as_str()), "{error}");
        }
    }
}

/// In the middle of a backward pass, as an operation without a gradient, or as one that panics.
fn no_gradient() -> candle_core::Result<()> {
    Err(candle_core::Error::BackwardNotSupported { op: "no-gradient" })
}

fn panics() -> candle_core::Result<()> {
    panic!("a panic in backward")
}

#[test]
fn a_backward_that_fails_on_one_rank_ends_the_group_on_all() {
    let errors = ranks(3, |pg| {
        let (ddp, _) = wrap(&pg, tiny())?;
        // Rank 1 may be so far ahead that the others see the end of the group in their first step.
        let two_steps = || -> Result<()> {
            ddp.backward(&loss(&ddp.forward(&batch(pg.rank()))?)?)?;
            let output = ddp.forward(&batch(pg.rank()))?;
            let output = if pg.rank() == 1 { output.apply_op1(Between(no_gradient))? } else { output };
            ddp.backward(&loss(&output)?)?;
            Ok(())
        };
        Ok(two_steps().expect_err("an error"))
    });
    assert!(errors[1].to_string().contains("no-gradient"), "{}", errors[1]);
    for rank in [0, 2] {
        assert!(matches!(errors[rank], Error::Group(Failure::PeerFailed { peer: 1, .. })), "{}", errors[rank]);
        assert!(errors[rank].to_string().contains("no-gradient"), "{}", errors[rank]);
    }
}

#[test]
fn a_panic_ends_the_backward_pass_too() {
    let panic = |ddp: &DistributedDataParallel<Net>| {
        let rank = ddp.process_group().rank();
        let output = ddp.forward(&batch(rank)).unwrap().apply_op1(Between(panics)).unwrap();
        let bad = loss(&output).unwrap();
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| ddp.backward(&bad).map(|_| ())));
        assert!(result.is_err());
    };
    ranks(1, |pg| {
        let (ddp, _) = wrap(&pg, DdpOptions::default())?;
        panic(&ddp);
        let refused = loss(&ddp.forward(&batch(0))?)?.backward().expect_err("DDP's backward pass is over");
        assert!(refused.to_string().contains("ddp.backward(&loss)"), "{refused}");
        ddp.backward(&loss(&ddp.forward(&batch(0))?)?)?;
        Ok(())
    });
    ranks(2, |pg| {
        let (ddp, _) = wrap(&pg, DdpOptions::default())?;
        if pg.rank() == 1 {
            panic(&ddp);
            return Ok(());
        }
        let error = ddp.backward(&loss(&ddp.forward(&batch(0))?)?).unwrap_err();
        assert!(error.to_string().contains("backward failed: it panicked: a panic in backward"), "{error}");
        Ok(())
    });
}

#[test]
fn half_precision_models_reduce_in_their_own_dtype() {
    for dtype in [DType::BF16, DType::F16, DType::F64] {
        let out = ranks(2, |pg| {
            let varmap = VarMap::new();
            let build = |vb: VarBuilder| vb.get(16, "w");
            let ddp = DistributedDataParallel::with_options(&pg, &varmap, build, pure(dtype))?;
            let x = Tensor::from_vec(values(16, pg.rank() as u64), 16, &Device::Cpu)?.to_dtype(dtype)?;
            let grads = ddp.backward(&ddp.call(|w| (w * &x)?.sum_all())?)?;
            let gradient = grads.get(&var(&varmap, "w")).expect("a gradient").clone();
            assert_eq!(gradient.dtype(), dtype);
            Ok(floats(&gradient))
        });
        let expected: Vec<f32> = values(16, 0).iter().zip(values(16, 1)).map(|(a, b)| (a + b) / 2.0).collect();
        out.iter().for_each(|actual| assert_close(actual, &expected, 1e-2, dtype.as_str()));
    }
}

#[test]
fn variables_requested_after_construction_are_refused() {
    ranks(1, |pg| {
        let build = |vb: VarBuilder<'static>| Ok::<_, Error>((linear(4, 2, vb.pp("known"))?, vb));
        let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), build)?;
        assert_error(ddp.call(|(_, vb)| vb.get(3, "late")), &["late was requested after"]);
        ddp.call(|(_, vb)| vb.get((2, 4), "known.weight"))?;
        Ok(())
    });
}

#[test]
fn a_trace_shows_the_phases_and_each_bucket() {
    let folder = tempfile::tempdir().unwrap();
    ranks(2, |pg| {
        let options = DdpOptions { trace: Some(folder.path().to_path_buf()), ..tiny() };
        let (ddp, _) = wrap(&pg, options)?;
        let grads = ddp.backward(&loss(&ddp.forward(&batch(pg.rank()))?)?)?;
        ddp.phase("optimizer \"step\"", || SGD::new(ddp.parameters(), 0.1)?.step(&grads))?;
        Ok(())
    });
    let (path, ranks) = candle_ddp::trace::merge(folder.path()).unwrap();
    assert_eq!(ranks, 2);
    let events: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let of = |rank: usize, name: &str| {
        let is = |event: &&serde_json::Value| event["pid"] == rank && event["name"].as_str().unwrap().starts_with(name);
        events.as_array().unwrap().iter().filter(is).cloned().collect::<Vec<_>>()
    };
    for rank in 0..2 {
        for phase in ["refresh", "forward", "backward", "wait for buckets", "optimizer step"] {
            assert_eq!(of(rank, phase).len(), 1, "{phase} of rank {rank}");
        }
        let backward = &of(rank, "backward")[0];
        for bucket in 0..6 {
            let ready = &of(rank, &format!("bucket {bucket} ready"))[0];
            let reduced = &of(rank, &format!("all-reduce of bucket {bucket},"))[0];
            assert!(ready["ts"].as_f64() >= backward["ts"].as_f64(), "{ready} {backward}");
            assert!(reduced["ts"].as_f64() >= ready["ts"].as_f64(), "{reduced} {ready}");
        }
    }
}
