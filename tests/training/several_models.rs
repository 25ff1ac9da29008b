//! Several DDP models in one graph.
use crate::common::programs::{Ddp, all_floats, distillation, gan, mlp, plain_distillation, plain_gan, wrap};
use crate::common::{Mlp, assert_close, assert_error, fill, floats, gradients, plain, ranks, tensor, tiny, var};
use candle_core::{DType, Module, Tensor, Var};
use candle_ddp::{Backward, DdpOptions, DistributedDataParallel, Error, ProcessGroup, Result, backward_with};
use candle_nn::{VarMap, func};

/// Two models of the same size.
fn two(pg: &ProcessGroup) -> Result<(Ddp, Ddp)> {
    Ok((wrap(pg, [4, 5, 4], 1, &tiny())?, wrap(pg, [4, 5, 4], 2, &tiny())?))
}

fn x(rank: usize) -> Tensor {
    tensor(&[3, 4], 50 + rank as u64)
}

fn loss(output: &Tensor) -> Result<Tensor> {
    Ok(output.sqr()?.mean_all()?)
}

#[test]
fn programs_with_several_models_train_like_one_process_with_the_whole_batch() {
    type Program = fn(&ProcessGroup, &DdpOptions) -> Result<Vec<f32>>;
    let programs: [(&str, Program, Vec<f32>); 2] =
        [("gan", gan, plain_gan(2)), ("distillation", distillation, plain_distillation(2))];
    for (name, program, expected) in &programs {
        for options in [DdpOptions::default(), tiny()] {
            let trained = ranks(2, |pg| program(&pg, &options));
            assert_eq!(trained[0], trained[1], "{name}: ranks must agree bit for bit");
            assert_close(&trained[0], expected, 1e-5, name);
        }
    }
}

/// The gradients of `loss` for the models `a` and `b` in one process, averaged over two ranks.
fn expected(of: impl Fn(usize, &Mlp, &Mlp) -> Result<Tensor>) -> Vec<f32> {
    let build = |seed| {
        let (module, varmap) = plain(|vb| mlp([4, 5, 4], vb), DType::F32, seed);
        (module, crate::common::programs::NAMES.map(|name| var(&varmap, name)))
    };
    let ((a, of_a), (b, of_b)) = (build(1), build(2));
    let vars = [of_a, of_b].concat();
    let sum = (of(0, &a, &b).unwrap() + of(1, &a, &b).unwrap()).unwrap();
    let grads = (sum / 2.).unwrap().backward().unwrap();
    let gradient = |var: &Var| grads.get(var).map_or_else(|| vec![0.; var.elem_count()], floats);
    vars.iter().flat_map(gradient).collect()
}

#[test]
fn ranks_reduce_in_one_order_whatever_their_graphs() {
    // b's gradients arrive first on one rank and last on the other; in the third step rank 1 does not use b.
    let graph = |step: usize,
                 rank: usize,
                 a: &dyn Fn(&Tensor) -> Result<Tensor>,
                 b: &dyn Fn(&Tensor) -> Result<Tensor>| {
        match (step, rank) {
            (2, 1) => loss(&a(&x(rank))?),
            (_, 0) => loss(&a(&b(&x(rank))?)?),
            _ => loss(&b(&a(&x(rank))?)?),
        }
    };
    let found = ranks(2, |pg| {
        let (a, b) = two(&pg)?;
        let vars = [a.parameters(), b.parameters()].concat();
        (0..4)
            .map(|step| {
                let loss = graph(step, pg.rank(), &|x| a.forward(x), &|x| b.forward(x))?;
                Ok(gradients(&backward_with(&loss, &[&a, &b], Backward::default())?, &vars))
            })
            .collect::<Result<Vec<_>>>()
    });
    assert_eq!(found[0], found[1]);
    for (step, found) in found[0].iter().enumerate() {
        let of = |rank, a: &Mlp, b: &Mlp| graph(step, rank, &|x| Ok(a.forward(x)?), &|x| Ok(b.forward(x)?));
        assert_close(found, &expected(of), 1e-5, &format!("step {step}"));
    }
}

#[test]
fn no_sync_of_one_model_does_not_affect_another() {
    let found = ranks(2, |pg| {
        let (a, b) = two(&pg)?;
        let loss = || loss(&b.forward(&a.forward(&x(pg.rank()))?)?);
        let local = {
            let _guard = a.no_sync();
            let grads = backward_with(&loss()?, &[&a, &b], Backward::default())?;
            (gradients(&grads, &a.parameters()), gradients(&grads, &b.parameters()))
        };
        let grads = backward_with(&loss()?, &[&a, &b], Backward::default())?;
        Ok((local, gradients(&grads, &a.parameters()), gradients(&grads, &b.parameters())))
    });
    assert_ne!(found[0].0.0, found[1].0.0, "a's are local");
    assert_eq!(found[0].0.1, found[1].0.1, "b's are averaged");
    let both = expected(|rank, a, b| loss(&b.forward(&a.forward(&x(rank))?)?));
    let (of_a, of_b) = both.split_at(both.len() / 2);
    let twice: Vec<f32> = of_a.iter().map(|gradient| 2. * gradient).collect();
    assert_close(&found[1].1, &twice, 1e-5, "a, both passes");
    assert_close(&found[1].2, of_b, 1e-5, "b, the second pass");
}

#[test]
fn a_backward_pass_through_another_model_is_refused_before_anything_is_sent() {
    ranks(2, |pg| {
        let (g, d) = two(&pg)?;
        let loss = || loss(&d.forward(&g.forward(&x(pg.rank()))?)?);
        // The second time only one rank calls it, which must not leave the other waiting, since nothing is sent.
        for alone in [false, true] {
            if alone && pg.rank() == 1 {
                continue;
            }
            let error = g.backward(&loss()?).unwrap_err();
            assert!(matches!(&error, Error::OtherModelInGraph { parameter } if parameter == "out.bias"), "{error}");
            let text = error.to_string();
            assert!(text.contains("backward_with(&loss, &[") && text.contains("freeze()"), "{text}");
        }
        pg.barrier()?;
        // Both remedies work for both models.
        let both = backward_with(&loss()?, &[&g, &d], Backward::default())?;
        let of_g = gradients(&both, &g.parameters());
        let of_d = gradients(&both, &d.parameters());
        let _frozen = d.freeze();
        assert_eq!(gradients(&g.backward(&loss()?)?, &g.parameters()), of_g);
        drop(_frozen);
        let _frozen = g.freeze();
        assert_eq!(gradients(&d.backward(&loss()?)?, &d.parameters()), of_d);
        Ok(())
    });
}

#[test]
fn a_frozen_model_passes_gradients_on_and_gets_none() {
    ranks(1, |pg| {
        let (g, d) = two(&pg)?;
        let input = Var::from_tensor(&x(0))?;
        let run = || loss(&d.forward(&input)?);
        // candle's own backward pass is allowed only while the guard lives.
        let grads = {
            let _frozen = d.freeze();
            {
                let _again = d.freeze();
            }
            run()?.backward()?
        };
        assert!(grads.get(&input).is_some() && d.parameters().iter().all(|var| grads.get(var).is_none()));
        assert_error(run()?.backward(), &["out.bias", "freeze()"]);
        // The guard is dropped even on failure.
        let failed: Result<()> = (|| {
            let _frozen = d.freeze();
            g.backward(&d.forward(&g.forward(&tensor(&[1, 3], 1))?)?).map(|_| ())
        })();
        assert!(failed.is_err());
        let error = {
            let _frozen = d.freeze();
            d.backward(&run()?).unwrap_err()
        };
        assert!(matches!(&error, Error::InvalidArgument { argument: "models", .. }), "{error}");
        assert!(error.to_string().contains("drop the guard"), "{error}");
        d.backward(&run()?)?;
        Ok(())
    });
}

#[test]
fn models_must_be_the_same_on_all_ranks_and_each_only_once() {
    ranks(2, |pg| {
        let (a, b) = two(&pg)?;
        let loss = || loss(&b.forward(&a.forward(&x(pg.rank()))?)?);
        let order: [&candle_ddp::DistributedModel; 2] = if pg.rank() == 0 { [&a, &b] } else { [&b, &a] };
        let error = backward_with(&loss()?, &order, Backward::default()).unwrap_err();
        assert!(matches!(&error, Error::InvalidArgument { argument: "models", .. }), "{error}");
        assert!(error.to_string().contains("on rank 1") && error.to_string().contains("on rank 0"), "{error}");
        for wrong in [&[][..], &[&a as _, &b as _, &a as _]] {
            let error = backward_with(&loss()?, wrong, Backward::default()).unwrap_err();
            assert!(matches!(&error, Error::InvalidArgument { argument: "models", .. }), "{error}");
        }
        // The group and the models remain usable.
        backward_with(&loss()?, &[&b, &a], Backward::default())?;
        pg.barrier()
    });
}

/// An encoder and a decoder may share an embedding; its gradient is the sum of both models'.
#[test]
fn a_variable_of_two_models_gets_the_sum_of_both_gradients() {
    let found = ranks(2, |pg| {
        let varmap = VarMap::new();
        let build = |vb| mlp([4, 5, 4], vb);
        let a = DistributedDataParallel::with_options(&pg, &varmap, build, tiny())?;
        let b = DistributedDataParallel::with_options(&pg, &varmap, build, tiny())?;
        fill(&varmap, 1);
        let loss = loss(&b.forward(&a.forward(&x(pg.rank()))?)?)?;
        Ok(gradients(&backward_with(&loss, &[&a, &b], Backward::default())?, &a.parameters()))
    });
    let expected = expected(|rank, a, _| loss(&a.forward(&a.forward(&x(rank))?)?));
    assert_close(&found[0], &expected[..expected.len() / 2], 1e-5, "tied");
    assert_eq!(found[0], found[1]);
}

#[test]
fn models_without_a_builder_are_told_apart_too() {
    let found = ranks(2, |pg| {
        let build = |name: &str, seed| {
            let weight = Var::from_tensor(&tensor(&[4, 4], seed))?;
            let named = vec![(name.to_string(), weight.clone())];
            DistributedDataParallel::from_vars(&pg, func(move |x| x.matmul(&weight)?.tanh()), named, tiny())
        };
        let (a, b, c) = (build("a", 1)?, build("b", 2)?, wrap(&pg, [4, 3, 2], 3, &tiny())?);
        let run = || loss(&c.forward(&b.forward(&a.forward(&x(pg.rank()))?)?)?);
        let error = backward_with(&run()?, &[&a, &c], Backward::default()).unwrap_err();
        assert!(matches!(&error, Error::OtherModelInGraph { parameter } if parameter == "b"), "{error}");
        let vars = [a.parameters(), b.parameters(), c.parameters()];
        let all = backward_with(&run()?, &[&a, &b, &c], Backward::default())?;
        let some = {
            let _frozen = b.freeze();
            backward_with(&run()?, &[&c, &a], Backward::default())?
        };
        assert!(some.get(&vars[1][0]).is_none());
        let all = vars.each_ref().map(|vars| gradients(&all, vars));
        for index in [0, 2] {
            assert_eq!(gradients(&some, &vars[index]), all[index]);
        }
        let alone = {
            let _frozen = (b.freeze(), c.freeze());
            run()?.backward()?
        };
        assert_ne!(floats(alone.get(&vars[0][0]).unwrap()), all[0], "averaged");
        Ok(all)
    });
    assert_eq!(found[0], found[1]);
}

/// The gradient of a penalty on `ddp.parameters()` would be local and lost.
#[test]
fn a_loss_that_depends_on_a_variable_beside_the_model_is_an_error() {
    ranks(1, |pg| {
        let ddp = wrap(&pg, [4, 5, 4], 1, &tiny())?;
        let penalty = ddp.named_parameters()[2].1.sqr()?.sum_all()?;
        let error = ddp.backward(&(loss(&ddp.forward(&x(0))?)? + penalty)?).unwrap_err();
        assert!(matches!(&error, Error::Parameter { parameter, .. } if parameter == "out.weight"), "{error}");
        assert!(error.to_string().contains("ddp.call"), "{error}");
        assert_eq!(all_floats(&ddp.parameters()).len(), 20 + 5 + 20 + 4);
        ddp.backward(&loss(&ddp.forward(&x(0))?)?)?;
        Ok(())
    });
}

#[test]
fn collectives_refuse_to_change_a_tensor_of_a_graph() {
    ranks(2, |pg| {
        let ddp = wrap(&pg, [4, 5, 4], 1, &tiny())?;
        let value = loss(&ddp.forward(&x(pg.rank()))?)?;
        for error in [
            pg.all_reduce(&value, candle_ddp::ReduceOp::Sum).unwrap_err(),
            pg.broadcast_async(&value, 0).map(|_| ()).unwrap_err(),
            pg.all_gather(&(ddp.parameters()[1].as_tensor() * 2.)?, &tensor(&[2], 1)).unwrap_err(),
        ] {
            assert!(matches!(&error, Error::InvalidTensor { .. }), "{error}");
            assert!(error.to_string().contains(".detach().copy()?"), "{error}");
        }
        let mean = value.detach().copy()?;
        pg.all_reduce(&mean, candle_ddp::ReduceOp::Sum)?;
        assert_ne!(floats(&mean), floats(&value));
        ddp.backward(&value)?;
        Ok(())
    });
}

#[test]
fn models_of_one_rank_share_a_trace() {
    let folder = tempfile::tempdir().unwrap();
    let options = DdpOptions { trace: Some(folder.path().to_path_buf()), ..Default::default() };
    ranks(2, |pg| distillation(&pg, &options).map(drop));
    let text = std::fs::read_to_string(folder.path().join("rank1.trace.json")).unwrap();
    let events: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
    let all_reduces =
        |event: &&serde_json::Value| event["name"].as_str().is_some_and(|name| name.starts_with("all-reduce"));
    // Eight steps, of two trained models with one bucket each.
    assert_eq!(events.iter().filter(all_reduces).count(), 16);
}

/// This happens when a model is thawed while the old wrapper still exists.
#[test]
fn models_of_the_same_variables_may_exist_beside_each_other() {
    ranks(1, |pg| {
        let build = |vb| mlp([4, 5, 4], vb);
        let new = DistributedDataParallel::with_options(&pg, &VarMap::new(), build, tiny())?;
        let _old = DistributedDataParallel::from_vars(&pg, (), new.named_parameters(), tiny())?;
        new.backward(&loss(&new.forward(&x(0))?)?)?;
        Ok(())
    });
}
