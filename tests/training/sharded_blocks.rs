//! Blocks whose parameters are spread over the ranks.
mod adapters;
mod averages;
mod freed;
mod generation;
mod graphs;
mod hybrid;
mod muon;
mod thawed;
mod views;
mod whole;

use crate::common::{added_to, assert_error, going_on, of_zero, ranks, sharded};
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_ddp::amp::{Autocast, GradScaler};
use candle_ddp::checkpoint::{self, Checkpointer, CheckpointerOptions, LoadOptions, StateDict};
use candle_ddp::comm_hook::Fp16Compress;
use candle_ddp::nn::{LayerNorm, Linear, add, gelu, layer_norm, linear, linear_no_bias, no_grad};
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW, ZeroRedundancyOptimizer};
use candle_ddp::{
    Backward, Block, DdpOptions, DistributedDataParallel, Error, JoinOptions, OnNonFinite, Precision, ProcessGroup,
    Role, Sharding, SpawnOptions, backward_with, block, spawn_with,
};
use candle_nn::{VarBuilder, VarMap};
use std::sync::Arc;

type Ddp = DistributedDataParallel<Net>;
type Optim = ZeroRedundancyOptimizer<ParamsAdamW>;

const WIDTH: usize = 6;

struct Layer {
    norm: LayerNorm,
    first: Linear,
    second: Linear,
}

impl Layer {
    fn new(vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            norm: layer_norm(WIDTH, 1e-5, vb.pp("norm"))?,
            first: linear(WIDTH, 2 * WIDTH, vb.pp("first"))?,
            second: linear_no_bias(2 * WIDTH, WIDTH, vb.pp("second"))?,
        })
    }
}

impl Module for Layer {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        add(x, &self.second.forward(&gelu(&self.first.forward(&self.norm.forward(x)?)?)?)?)
    }
}

struct Net {
    stem: Linear,
    layers: Vec<Block<Layer>>,
    head: Linear,
}

impl Net {
    fn new(vb: VarBuilder) -> Result<Self> {
        let layer = |index| block(vb.pp(format!("layers.{index}")), Layer::new);
        Ok(Self {
            stem: linear(3, WIDTH, vb.pp("stem"))?,
            layers: (0..3).map(layer).collect::<Result<_>>()?,
            head: linear(WIDTH, 1, vb.pp("head"))?,
        })
    }
}

impl Module for Net {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.layers.iter().try_fold(self.stem.forward(x)?, |x, layer| layer.forward(&x))?;
        self.head.forward(&x)
    }
}

fn batch(pg: &ProcessGroup, step: usize) -> Result<Tensor> {
    let value = |index: usize| ((index * 37 + step * 11 + pg.rank() * 5) as f32 * 0.1).sin();
    Tensor::from_vec((0..12).map(value).collect(), (4, 3), &Device::Cpu)
}

fn loss(ddp: &Ddp, pg: &ProcessGroup, step: usize) -> candle_ddp::Result<Tensor> {
    Ok(ddp.forward(&batch(pg, step)?)?.to_dtype(DType::F32)?.sqr()?.mean_all()?)
}

fn made(pg: &ProcessGroup, varmap: &VarMap, options: DdpOptions) -> candle_ddp::Result<(Ddp, Optim)> {
    let sharding =
        if options.sharding == Sharding::Off { Sharding::Optimizer { ranks: None } } else { options.sharding };
    let options = DdpOptions { init_seed: Some(7), sharding, ..options };
    let ddp = DistributedDataParallel::with_options(pg, varmap, Net::new, options)?;
    let optimizer = ZeroRedundancyOptimizer::new(&ddp, ParamsAdamW { lr: 0.02, ..Default::default() })?;
    Ok((ddp, optimizer))
}

type Make<'a> = dyn Fn(&ProcessGroup, &VarMap, DdpOptions) -> candle_ddp::Result<(Ddp, Optim)> + Sync + 'a;
type Step = dyn Fn(&Ddp, &mut Optim, &ProcessGroup, usize) -> candle_ddp::Result<f32> + Sync;

fn plain_step(ddp: &Ddp, optimizer: &mut Optim, pg: &ProcessGroup, step: usize) -> candle_ddp::Result<f32> {
    let loss = loss(ddp, pg, step)?;
    let grads = ddp.backward(&loss)?;
    optimizer.step(&grads)?;
    Ok(loss.to_scalar()?)
}

/// The losses of six steps, and the output of an evaluation.
fn train(pg: &ProcessGroup, make: &Make, options: DdpOptions, step: &Step) -> candle_ddp::Result<(Vec<f32>, Vec<f32>)> {
    let (ddp, mut optimizer) = make(pg, &VarMap::new(), options)?;
    let losses = (0..6).map(|number| step(&ddp, &mut optimizer, pg, number)).collect::<candle_ddp::Result<_>>()?;
    let output = no_grad(|| ddp.forward(&batch(pg, 99)?))?;
    Ok((losses, output.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?))
}

/// Checks that sharded training has the bits of plain training, with these options and this step.
fn same_bits(options: &DdpOptions, step: &Step) {
    same_bits_of(&made, options, step);
}

fn same_bits_of(make: &Make, options: &DdpOptions, step: &Step) {
    for ranks in 1..=4 {
        crate::common::ranks(ranks, |pg| {
            let plain = train(&pg, make, options.clone(), step)?;
            assert!(plain.0.iter().all(|loss| loss.is_finite()));
            for reshard_after_forward in [true, false] {
                let sharding = Sharding::Blocks { reshard_after_forward, ranks: None };
                let sharded = train(&pg, make, DdpOptions { sharding, ..options.clone() }, step)?;
                assert_eq!(sharded, plain, "{ranks} ranks, reshard_after_forward: {reshard_after_forward}");
            }
            Ok(())
        });
    }
}

#[test]
fn sharded_training_has_the_bits_of_plain_training() {
    same_bits(&DdpOptions::default(), &plain_step);
}

#[test]
fn lower_precision_has_the_bits_of_plain_training() {
    let half = Precision::Half { param_dtype: DType::BF16, buffer_dtype: None };
    for precision in [half, Precision::Autocast(Autocast::Products(DType::BF16))] {
        same_bits(&DdpOptions { precision, ..Default::default() }, &plain_step);
    }
    same_bits(&DdpOptions::default(), &|ddp, optimizer, pg, number| {
        let mut scaler = GradScaler::new(pg, ddp, Default::default())?;
        let loss = loss(ddp, pg, number)?;
        let mut grads = ddp.backward(&scaler.scale(&loss)?)?;
        scaler.step(optimizer, &mut grads)?;
        Ok(loss.to_scalar()?)
    });
}

#[test]
fn frozen_parameters_are_gathered_too() {
    let role = Arc::new(|name: &str| if name.contains("second") { Role::Frozen } else { Role::Parameter });
    same_bits(&DdpOptions { role, ..Default::default() }, &plain_step);
}

/// Steps with all kinds of passes.
fn kinds() -> [&'static Step; 5] {
    let clip: &Step = &|ddp, optimizer, pg, number| {
        let loss = loss(ddp, pg, number)?;
        let mut grads = ddp.backward(&loss)?;
        optimizer.clip_grad_norm(&mut grads, 0.1)?;
        optimizer.step(&grads)?;
        Ok(loss.to_scalar()?)
    };
    let weighted: &Step = &|ddp, optimizer, pg, number| {
        let loss = loss(ddp, pg, number)?;
        let count = Some(1. + pg.rank() as f64);
        optimizer.step(&backward_with(&loss, &[ddp], Backward { count, ..Default::default() })?)?;
        Ok(loss.to_scalar()?)
    };
    let two_losses: &Step = &|ddp, optimizer, pg, number| {
        let (first, second) = (loss(ddp, pg, number)?, loss(ddp, pg, 20 + number)?);
        let mut grads = ddp.backward(&first)?;
        backward_with(&second, &[ddp], added_to(&mut grads))?;
        optimizer.step(&grads)?;
        Ok(first.to_scalar()?)
    };
    let one_graph: &Step = &|ddp, optimizer, pg, number| {
        let both = (loss(ddp, pg, number)? + loss(ddp, pg, 20 + number)?)?;
        optimizer.step(&ddp.backward(&both)?)?;
        Ok(both.to_scalar()?)
    };
    let evaluated: &Step = &|ddp, optimizer, pg, number| {
        no_grad(|| ddp.forward(&batch(pg, 50)?))?;
        let loss = loss(ddp, pg, number)?;
        let grads = ddp.backward(&loss)?;
        optimizer.step(&grads)?;
        ddp.forward(&batch(pg, 51)?)?;
        Ok(loss.to_scalar()?)
    };
    [clip, weighted, two_losses, one_graph, evaluated]
}

#[test]
fn all_kinds_of_passes_have_the_bits_of_plain_training() {
    kinds().into_iter().for_each(|step| same_bits(&DdpOptions::default(), step));
}

#[test]
fn steps_that_are_not_finite_are_left_out() {
    let options = DdpOptions { on_non_finite: Some(OnNonFinite::Skip { at_most: 3 }), ..Default::default() };
    same_bits(&options, &|ddp, optimizer, pg, number| {
        let factor = if number == 2 && pg.rank() == 0 { f64::INFINITY } else { 1. };
        let loss = loss(ddp, pg, number)?;
        optimizer.step(&ddp.backward(&(&loss * factor)?)?)?;
        assert_eq!(ddp.skipped_steps(), u64::from(number >= 2));
        Ok(loss.to_scalar()?)
    });
}

/// The values of all parameters, as one rank would save them.
fn saved(pg: &ProcessGroup, varmap: &VarMap, name: &str) -> candle_ddp::Result<Vec<(String, Vec<f32>)>> {
    let path = std::env::temp_dir().join(format!("sharded-{name}-{}.safetensors", std::process::id()));
    checkpoint::save_distributed(pg, varmap, &path)?;
    let read = checkpoint::read(&path)?;
    pg.barrier()?;
    let mut values = Vec::new();
    for (name, tensor) in read {
        values.push((name, tensor.flatten_all()?.to_vec1()?));
    }
    values.sort_by(|(a, _), (b, _)| a.cmp(b));
    if pg.rank() == 0 {
        std::fs::remove_file(path).unwrap();
    }
    Ok(values)
}

#[test]
fn checkpoints_move_between_numbers_of_ranks_and_kinds_of_models() {
    let folder = |name: &str| std::env::temp_dir().join(format!("sharded-run-{name}-{}", std::process::id()));
    let run = |ranks: usize, options: DdpOptions, from: Option<&str>, to: &str, steps: std::ops::Range<usize>| {
        let to_folder = folder(to);
        let mut all = crate::common::ranks(ranks, |pg| {
            let mut varmap = VarMap::new();
            let (ddp, mut optimizer) = made(&pg, &varmap, options.clone())?;
            if let Some(from) = from {
                let mut checkpointer = going_on(&pg, folder(from))?;
                let parts = (("model", &mut varmap), ("optimizer", &mut optimizer));
                assert_eq!(checkpointer.load_latest(parts)?, Some(1));
            }
            for step in steps.clone() {
                // The same batch on all ranks, so that their number makes no difference.
                let x = Tensor::arange(0f32, 12., &Device::Cpu)?.affine(0.1, step as f64)?.sin()?.reshape((4, 3))?;
                let loss = ddp.forward(&x)?.sqr()?.mean_all()?;
                optimizer.step(&ddp.backward(&loss)?)?;
            }
            let mut checkpointer = Checkpointer::new(&pg, &to_folder, CheckpointerOptions::default())?;
            checkpointer.save(1, (("model", &mut varmap), ("optimizer", &mut optimizer)))?;
            checkpointer.finish()?;
            saved(&pg, &varmap, to)
        });
        all.remove(0)
    };
    let reference = run(1, DdpOptions::default(), None, "reference", 0..6);
    run(3, sharded(), None, "three", 0..2);
    run(2, sharded(), Some("three"), "two", 2..3);
    run(1, DdpOptions::default(), Some("two"), "plain", 3..4);
    run(4, sharded(), Some("plain"), "four", 4..5);
    let last = run(2, DdpOptions::default(), Some("four"), "last", 5..6);
    for name in ["reference", "three", "two", "plain", "four", "last"] {
        std::fs::remove_dir_all(folder(name)).unwrap();
    }
    assert_eq!(reference.len(), last.len());
    for ((name, expected), (same, values)) in reference.iter().zip(&last) {
        assert_eq!(name, same);
        let differences = expected.iter().zip(values).map(|(a, b)| (a - b).abs());
        assert!(differences.fold(0., f32::max) < 1e-5, "{name}");
    }
}

#[test]
fn files_of_weights_load_into_pieces() {
    ranks(3, |pg| {
        let (whole, pieces) = (VarMap::new(), VarMap::new());
        let (ddp, mut optimizer) = made(&pg, &whole, DdpOptions::default())?;
        plain_step(&ddp, &mut optimizer, &pg, 0)?;
        let path = std::env::temp_dir().join(format!("sharded-weights-{}.safetensors", std::process::id()));
        checkpoint::save_distributed(&pg, &whole, &path)?;
        let (_ddp, _optimizer) = made(&pg, &pieces, sharded())?;
        checkpoint::load_distributed(&pg, &pieces, &path, LoadOptions::default())?;
        let mut ranks = pieces.data().lock().unwrap()["layers.0.first.weight"].dims().to_vec();
        assert_eq!(ranks.remove(0), 1, "a matrix of one row");
        assert_eq!(saved(&pg, &pieces, "pieces")?, saved(&pg, &whole, "whole")?);
        assert_error(checkpoint::save(&pieces, &path), &["save_distributed"]);
        pg.barrier()?;
        if pg.rank() == 0 {
            std::fs::remove_file(path).unwrap();
        }
        Ok(())
    });
}

/// Both ranks get an error, whose text contains these words.
fn refused(words: &str, work: impl Fn(ProcessGroup) -> candle_ddp::Result<()> + Send + Sync) {
    ranks(2, |pg| {
        assert_error(work(pg), &[words]);
        Ok(())
    });
}

#[test]
fn what_cannot_be_combined_is_an_error_on_every_rank() {
    let new = |pg: &ProcessGroup| DistributedDataParallel::with_options(pg, &VarMap::new(), Net::new, sharded());
    refused("make its optimizer", |pg| {
        let ddp = new(&pg)?;
        ddp.backward(&loss(&ddp, &pg, 0)?).map(drop)
    });
    refused("make the optimizer while the model exists", |pg| {
        let pieces = new(&pg)?.named_parameters();
        AdamW::new(pieces, ParamsAdamW::default()).map(drop)
    });
    refused("is sharded", |pg| new(&pg)?.register_comm_hook(Fp16Compress::default()));
    refused("needs the whole model", |pg| new(&pg)?.into_module().map(drop));
    refused("needs the whole model", |pg| new(&pg)?.with_no_grad_model(Net::new).map(drop));
    refused("needs the whole model", |pg| new(&pg)?.join(JoinOptions::default(), || Ok(())).map(drop));
    refused("from_vars", |pg| {
        let varmap = VarMap::new();
        let net = Net::new(VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?;
        DistributedDataParallel::from_vars(&pg, net, &varmap, sharded()).map(drop)
    });
    refused("new VarMap", |pg| {
        let varmap = VarMap::new();
        DistributedDataParallel::with_options(&pg, &varmap, Net::new, sharded())?;
        DistributedDataParallel::with_options(&pg, &varmap, Net::new, sharded()).map(drop)
    });
    refused("block within the block", |pg| {
        let build = |vb: VarBuilder<'static>| block(vb.pp("a"), |vb| block(vb.pp("b"), Layer::new));
        DistributedDataParallel::with_options(&pg, &VarMap::new(), build, sharded()).map(drop)
    });
    refused("tied weights", |pg| {
        let build = |vb: VarBuilder<'static>| {
            let inner = block(vb.pp("a"), |vb| linear(3, 3, vb))?;
            Ok::<_, candle_core::Error>((inner, linear(3, 3, vb.pp("a"))?))
        };
        DistributedDataParallel::with_options(&pg, &VarMap::new(), build, sharded()).map(drop)
    });
    let options = SpawnOptions { world_size: 2, virtual_ranks: Some(4), ..Default::default() };
    spawn_with(options, |pg| {
        let error = DistributedDataParallel::with_options(&pg, &VarMap::new(), Net::new, sharded()).unwrap_err();
        assert!(error.to_string().contains("virtual ranks"), "{error}");
        Ok(())
    })
    .unwrap();
}

#[test]
fn models_that_differ_are_an_error_on_every_rank() {
    let build = |differs: &'static str, rank: usize| {
        move |vb: VarBuilder<'static>| {
            if rank == 1 && differs == "fails outside" {
                candle_core::bail!("no model here")
            }
            let inputs = if rank == 1 && differs == "shape" { 4 } else { 3 };
            let inside = block(vb.pp("a"), |vb| {
                if rank == 1 && differs == "fails inside" {
                    candle_core::bail!("no model here")
                }
                linear(inputs, 3, vb)
            })?;
            let more =
                (rank == 1 && differs == "more").then(|| block(vb.pp("b"), |vb| linear(3, 3, vb))).transpose()?;
            Ok((inside, more))
        }
    };
    for differs in ["fails outside", "fails inside", "shape", "more"] {
        ranks(2, |pg| {
            let made = DistributedDataParallel::with_options(&pg, &VarMap::new(), build(differs, pg.rank()), sharded());
            let error = made.unwrap_err();
            match (differs, pg.rank()) {
                ("shape" | "more", _) => assert!(matches!(error, Error::Mismatch { .. }), "{differs}: {error}"),
                (_, 0) => assert!(matches!(error, Error::RankFailed { rank: 1, .. }), "{differs}: {error}"),
                _ => assert!(error.to_string().contains("no model here"), "{differs}: {error}"),
            }
            // The group still works.
            pg.barrier()
        });
    }
}

#[test]
fn other_blocks_are_an_error_on_every_rank() {
    ranks(2, |pg| {
        let (ddp, _optimizer) = made(&pg, &VarMap::new(), sharded())?;
        let x = batch(&pg, 0)?;
        // What is gathered ahead may suit both ranks' forward passes.
        let layers = if pg.rank() == 0 { &[0, 1, 2][..] } else { &[0, 2] };
        let result = ddp.call(|net| {
            let x = net.stem.forward(&x)?;
            net.head.forward(&layers.iter().try_fold(x, |x, layer| net.layers[*layer].forward(&x))?)
        });
        let refused = result.and_then(|y| ddp.backward(&y.mean_all()?));
        assert_error(refused, &["the loss does not depend on block layers.1 on rank 1"]);
        Ok(())
    });
}

#[test]
fn a_block_may_have_several_inputs_and_be_called_twice() {
    ranks(3, |pg| {
        let run = |options: DdpOptions| {
            let build = |vb: VarBuilder<'static>| block(vb.pp("a"), |vb| linear(3, 3, vb));
            let options = DdpOptions { init_seed: Some(1), ..options };
            let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), build, options)?;
            let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, ParamsAdamW::default())?;
            let mut losses = Vec::new();
            for step in 0..4 {
                let x = batch(&pg, step)?;
                let y = ddp.call(|layer| {
                    let y = layer.call(&[&x, &x], |layer, x| layer.forward(&(&x[0] * &x[1])?))?;
                    layer.forward(&y)
                })?;
                let loss = y.sqr()?.mean_all()?;
                losses.push(loss.to_scalar::<f32>()?);
                optimizer.step(&ddp.backward(&loss)?)?;
            }
            Ok::<_, Error>(losses)
        };
        assert_eq!(run(sharded())?, run(of_zero())?);
        Ok(())
    });
}

#[test]
fn ranks_may_use_different_parameters_of_a_block() {
    let run = |pg: &ProcessGroup, options: DdpOptions| {
        let build = |vb: VarBuilder<'static>| {
            let layer = |index| block(vb.pp(index), Layer::new);
            (0..4).map(layer).collect::<Result<Vec<_>>>()
        };
        let options = DdpOptions { init_seed: Some(1), ..options };
        let ddp = DistributedDataParallel::with_options(pg, &VarMap::new(), build, options)?;
        let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, ParamsAdamW::default())?;
        let mut losses = Vec::new();
        for step in 0..3 {
            let x = Tensor::cat(&[&batch(pg, step)?, &batch(pg, step + 1)?], 1)?;
            let skips = pg.rank() == 1 && step > 0;
            let one = move |layer: &Layer, x: &[Tensor]| {
                if skips { layer.norm.forward(&x[0]) } else { layer.forward(&x[0]) }
            };
            let y = ddp.call(|layers| layers.iter().try_fold(x, |x, layer| layer.call(&[&x], one)))?;
            let loss = y.sqr()?.mean_all()?;
            losses.push(loss.to_scalar::<f32>()?);
            optimizer.step(&ddp.backward(&loss)?)?;
        }
        Ok::<_, Error>(losses)
    };
    ranks(3, |pg| {
        assert_eq!(run(&pg, sharded())?, run(&pg, of_zero())?);
        Ok(())
    });
}

#[test]
fn a_failed_block_leaves_nothing_behind() {
    ranks(2, |pg| {
        let (ddp, _optimizer) = made(&pg, &VarMap::new(), sharded())?;
        let wrong = Tensor::zeros((4, 5), DType::F32, &Device::Cpu)?;
        assert!(ddp.forward(&wrong).is_err());
        // The same on both ranks, so that they continue.
        let loss = loss(&ddp, &pg, 0)?;
        ddp.backward(&loss)?;
        Ok(())
    });
}
