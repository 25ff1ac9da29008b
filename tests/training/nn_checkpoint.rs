//! Activation checkpointing changes memory use and nothing else.
use crate::common::{Between, assert_close, assert_error, floats, of_micro_batch, ranks, tensor, tiny, var};
use candle_core::{DType, Device, Module, ModuleT, Result, Tensor, Var};
use candle_ddp::nn::{BatchNorm, Dropout, Linear, batch_norm, checkpoint, linear, relu, sync_batch_norm};
use candle_ddp::seed::Generator;
use candle_ddp::{DdpOptions, DistributedDataParallel, SpawnOptions, backward_with, spawn_with};
use candle_nn::{VarBuilder, VarMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Three layers with dropout, the second used twice; plain, in a checkpoint, or in nested checkpoints.
#[derive(Clone)]
struct Net {
    layers: [Linear; 3],
    dropout: Dropout,
    runs: Arc<AtomicUsize>,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Plain,
    Checkpoint,
    Nested,
}

impl Net {
    fn new(kind: Kind, vb: &VarBuilder) -> Result<Self> {
        let layer = |name: &str| linear(6, 6, vb.pp(name));
        let dropout = Dropout::with_generator(0.4, Arc::new(Mutex::new(Generator::new(5))));
        Ok(Self { layers: [layer("a")?, layer("b")?, layer("c")?], dropout, runs: Arc::default(), kind })
    }

    fn middle(&self, x: &Tensor) -> Result<Tensor> {
        self.runs.fetch_add(1, Ordering::Relaxed);
        let x = self.dropout.forward(&relu(&self.layers[1].forward(x)?)?, true)?;
        // One of candle's own operations with a parameter.
        let x = (x * 1.5)?.broadcast_add(self.layers[0].bias().unwrap())?;
        if self.kind != Kind::Nested {
            return self.last(&x);
        }
        let net = self.clone();
        checkpoint(&[&x], move |x| net.last(&x[0]))
    }

    fn last(&self, x: &Tensor) -> Result<Tensor> {
        self.dropout.forward(&self.layers[2].forward(x)?, true)
    }
}

impl Module for Net {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = relu(&self.layers[0].forward(x)?)?;
        let y = if self.kind == Kind::Plain {
            self.middle(&x)?
        } else {
            let net = self.clone();
            checkpoint(&[&x], move |x| net.middle(&x[0]))?
        };
        // The input and one of the checkpoint's layers are used outside it too.
        self.layers[1].forward(&(y + x)?)
    }
}

const NAMES: [&str; 6] = ["a.weight", "a.bias", "b.weight", "b.bias", "c.weight", "c.bias"];

fn fill(varmap: &VarMap) {
    for (index, name) in NAMES.iter().enumerate() {
        let var = var(varmap, name);
        var.set(&tensor(var.dims(), index as u64 + 1)).unwrap();
    }
}

#[test]
fn results_and_gradients_match_those_without_a_checkpoint() {
    let gradients = |kind| {
        let varmap = VarMap::new();
        let net = Net::new(kind, &VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu)).unwrap();
        fill(&varmap);
        let x = Var::from_tensor(&tensor(&[4, 6], 9)).unwrap();
        let mut all = Vec::new();
        for _ in 0..2 {
            let y = net.forward(&x).unwrap();
            let grads = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
            all.push(floats(&y));
            all.extend(NAMES.iter().map(|name| floats(grads.get(&var(&varmap, name)).unwrap())));
            all.push(floats(grads.get(&x).unwrap()));
        }
        (all.concat(), net.runs.load(Ordering::Relaxed))
    };
    let (plain, once) = gradients(Kind::Plain);
    assert_eq!(once, 2);
    for kind in [Kind::Checkpoint, Kind::Nested] {
        let (checkpointed, twice) = gradients(kind);
        assert_eq!(twice, 4);
        assert_close(&checkpointed, &plain, 1e-6, "outputs and gradients");
    }
}

#[test]
fn hooks_fire_once_under_ddp() {
    let trained = |kind: Kind| {
        ranks(2, move |pg| {
            let varmap = VarMap::new();
            let build = |vb: VarBuilder| Net::new(kind, &vb);
            let ddp = DistributedDataParallel::with_options(&pg, &varmap, build, tiny())?;
            fill(&varmap);
            let mut all = Vec::new();
            for step in 0..3 {
                let x = tensor(&[4, 6], 10 + 2 * step + pg.rank() as u64);
                let grads = ddp.backward(&ddp.forward(&x)?.sqr()?.sum_all()?)?;
                all.extend(NAMES.iter().flat_map(|name| floats(grads.get(&var(&varmap, name)).unwrap())));
            }
            Ok(all)
        })
    };
    let plain = trained(Kind::Plain);
    for kind in [Kind::Checkpoint, Kind::Nested] {
        for (checkpointed, plain) in trained(kind).iter().zip(&plain) {
            assert_close(checkpointed, plain, 1e-6, "averaged gradients");
        }
    }
}

/// One update for one batch, whether or not the backward pass computes it again. So it is with SyncBatchNorm.
#[test]
fn batch_norms_update_their_statistics_once() {
    let run = |is_checkpointed: bool, is_synchronised: bool| {
        ranks(2, |pg| {
            let build = |vb: VarBuilder| -> Result<BatchNorm> {
                if is_synchronised { sync_batch_norm(&pg, 6, 1e-5, vb) } else { batch_norm(6, 1e-5, vb) }
            };
            let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), build)?;
            for step in 0..3 {
                let x = tensor(&[4, 6], 10 * step + pg.rank() as u64);
                let y = ddp.call(|norm| {
                    let norm = norm.clone();
                    let forward = move |x: &[Tensor]| norm.forward_t(&x[0], true);
                    // Nested checkpoints are computed again twice.
                    let nested = move |x: &[Tensor]| checkpoint(&[&x[0]], forward.clone());
                    if is_checkpointed { checkpoint(&[&x], nested) } else { nested(&[x]) }
                })?;
                ddp.backward(&y.sqr()?.mean_all()?)?;
            }
            Ok(ddp.named_buffers().iter().flat_map(|(_, var)| floats(var)).collect::<Vec<f32>>())
        })
    };
    for is_synchronised in [false, true] {
        let plain = plain_statistics(is_synchronised);
        assert_eq!(run(true, is_synchronised), [plain.clone(), plain.clone()]);
        assert_eq!(run(false, is_synchronised), [plain.clone(), plain]);
    }
}

/// The statistics of a model without checkpoints.
fn plain_statistics(is_synchronised: bool) -> Vec<f32> {
    let mut run = ranks(2, |pg| {
        let build = |vb: VarBuilder| -> Result<BatchNorm> {
            if is_synchronised { sync_batch_norm(&pg, 6, 1e-5, vb) } else { batch_norm(6, 1e-5, vb) }
        };
        let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), build)?;
        for step in 0..3 {
            let x = tensor(&[4, 6], 10 * step + pg.rank() as u64);
            ddp.backward(&ddp.forward_t(&x, true)?.sqr()?.mean_all()?)?;
        }
        Ok(ddp.named_buffers().iter().flat_map(|(_, var)| floats(var)).collect::<Vec<f32>>())
    });
    run.remove(0)
}

/// The running statistics, on every rank, of candle's batch norm that was trained in a checkpoint, whose backward pass changes them
/// a second time.
fn statistics(world_size: usize, virtual_ranks: Option<usize>) -> Vec<Vec<f32>> {
    type Normed = (Linear, candle_nn::BatchNorm);
    let options = SpawnOptions { world_size, virtual_ranks, ..Default::default() };
    let run = spawn_with(options, |pg| {
        let build = |vb: VarBuilder| -> Result<Normed> {
            Ok((linear(6, 4, vb.pp("linear"))?, candle_nn::batch_norm(4, 1e-5, vb.pp("norm"))?))
        };
        let options = DdpOptions { init_seed: Some(7), ..Default::default() };
        let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), build, options)?;
        let forward = |seed: u64| {
            ddp.call(|(linear, norm): &Normed| {
                let (linear, norm) = (linear.clone(), norm.clone());
                checkpoint(&[&tensor(&[4, 6], seed)], move |x| norm.forward_t(&linear.forward(&x[0])?, true))
            })
        };
        for step in 0..3 {
            let loss = |number: usize| forward(10 * step + number as u64)?.sqr()?.mean_all();
            match ddp.micro_batches() {
                None => drop(ddp.backward(&loss(pg.rank())?)?),
                Some(numbers) => {
                    for number in numbers {
                        backward_with(&loss(number)?, &[&ddp], of_micro_batch(number))?;
                    }
                }
            }
        }
        Ok(ddp.named_buffers().iter().flat_map(|(_, var)| floats(var)).collect())
    });
    run.unwrap()
}

#[test]
fn statistics_that_the_backward_pass_changes_follow_rank_0() {
    let alone = statistics(1, None);
    assert_eq!(statistics(2, None), [&alone[0]; 2].map(Clone::clone));
    for world_size in [1, 2, 4] {
        for of_rank in statistics(world_size, Some(4)) {
            assert_eq!(of_rank, alone[0], "virtual ranks on {world_size} ranks");
        }
    }
}

#[test]
fn the_checkpoint_returns_the_functions_error() {
    let x = Var::from_tensor(&tensor(&[2, 2], 1)).unwrap();
    let error = checkpoint::<_, Tensor>(&[x.as_tensor()], |_| candle_core::bail!("no such layer")).unwrap_err();
    assert!(error.to_string().contains("no such layer"), "{error}");
    assert_error(checkpoint(&[x.as_tensor()], |x| x[0].argmax(1)), &["must be floating-point for gradients to flow"]);
    let error = checkpoint(&[x.as_tensor()], |x| Ok((x[0].argmax(1)?, Vec::<Tensor>::new()))).unwrap_err().to_string();
    assert!(error.contains("must be floating-point for gradients to flow, not u32[2]"), "{error}");
}

/// A pair, a list and a triple, of which some are of 16 bits, some have no gradient, and some are not used.
#[test]
fn several_results_have_the_values_and_gradients_that_they_have_without_a_checkpoint() {
    type Results = (Tensor, Vec<Tensor>, (Tensor, Tensor));
    for is_used in [true, false] {
        let run = |is_checkpointed: bool| {
            let varmap = VarMap::new();
            let net = Net::new(Kind::Plain, &VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu)).unwrap();
            fill(&varmap);
            let x = Var::from_tensor(&tensor(&[4, 6], 9)).unwrap();
            let of = net.clone();
            let function = move |x: &[Tensor]| -> Result<Results> {
                let y = of.middle(&x[0])?;
                let half = y.to_dtype(DType::BF16)?;
                Ok((y.t()?.sqr()?, vec![half, of.last(&y)?.narrow(1, 1, 2)?], (y.argmax(1)?, y.mean_all()?)))
            };
            let (a, list, (best, mean)) = match is_checkpointed {
                true => checkpoint(&[&x], function).unwrap(),
                false => function(&[x.as_tensor().clone()]).unwrap(),
            };
            assert_eq!((list[0].dtype(), best.dtype(), mean.rank()), (DType::BF16, DType::U32, 0));
            let mut loss = (a.sum_all().unwrap() + mean.sqr().unwrap()).unwrap();
            if is_used {
                let half = list[0].sin().unwrap().to_dtype(DType::F32).unwrap().sum_all().unwrap();
                loss = (loss + (half * list[1].sqr().unwrap().sum_all().unwrap()).unwrap()).unwrap();
            }
            let grads = loss.backward().unwrap();
            let values = [&a, &list[0].to_dtype(DType::F32).unwrap(), &list[1], &mean].map(floats).concat();
            let best = best.to_vec1::<u32>().unwrap();
            let used = NAMES.iter().filter(|name| **name != "a.weight");
            let mut gradients: Vec<Vec<f32>> =
                used.map(|name| floats(grads.get(&var(&varmap, name)).unwrap())).collect();
            gradients.push(floats(grads.get(&x).unwrap()));
            (best, values, gradients.concat(), net.runs.load(Ordering::Relaxed))
        };
        let (plain, checkpointed) = (run(false), run(true));
        assert_eq!((&checkpointed.0, &checkpointed.1), (&plain.0, &plain.1));
        assert_close(&checkpointed.2, &plain.2, 1e-5, "gradients");
        assert_eq!((plain.3, checkpointed.3), (1, 2));
    }
}

#[test]
fn results_may_be_inputs_or_views_or_constants_and_need_no_inputs() {
    let x = Var::from_tensor(&tensor(&[4, 6], 1)).unwrap();
    let function = |x: &[Tensor]| -> Result<Vec<Tensor>> {
        let ones = Tensor::ones(3, DType::F32, &Device::Cpu)?;
        Ok(vec![x[0].clone(), x[0].narrow(1, 1, 2)?, ones, x[0].clone(), x[0].narrow(0, 0, 0)?])
    };
    let gradient = |results: Vec<Tensor>| {
        let terms = results.iter().zip(1..).map(|(result, factor)| (result.sqr()? * f64::from(factor))?.sum_all());
        let loss = terms.reduce(|sum, term| sum? + term?).unwrap().unwrap();
        floats(loss.backward().unwrap().get(&x).unwrap())
    };
    let plain = gradient(function(&[x.as_tensor().clone()]).unwrap());
    assert_close(&gradient(checkpoint(&[&x], function).unwrap()), &plain, 1e-6, "several");
    // One alone, and none.
    let same = gradient(vec![checkpoint(&[&x], |x| Ok(x[0].clone())).unwrap()]);
    assert_close(&same, &floats(&(x.as_tensor() * 2.).unwrap()), 1e-6, "the input");
    let captured = x.clone();
    let (a, b) = checkpoint(&[], move |_| Ok(((captured.as_tensor() * 3.)?, captured.sqr()?))).unwrap();
    let grads = (a.sum_all().unwrap() + b.sum_all().unwrap()).unwrap().backward().unwrap();
    assert_close(floats(grads.get(&x).unwrap()).as_slice(), &floats(&x.affine(2., 3.).unwrap()), 1e-6, "no inputs");
}

#[test]
fn a_gradient_that_arrives_twice_is_an_error() {
    let errors = ranks(1, |pg| {
        let build = |vb: VarBuilder| linear(6, 6, vb);
        let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), build)?;
        let y = ddp.call(|layer| {
            let y = layer.forward(&tensor(&[4, 6], 1))?;
            // Hand-written activation checkpointing: a backward pass within another, which reaches a parameter a second time.
            let (again, x) = (layer.clone(), y.detach());
            let by_hand = Between(move || again.forward(&x)?.sum_all()?.backward().map(drop));
            layer.forward(&y.apply_op1(by_hand)?)
        })?;
        Ok(ddp.backward(&y.sum_all()?).unwrap_err().to_string())
    });
    for error in errors {
        assert!(error.contains("its gradient came twice in one backward pass"), "{error}");
    }
}
