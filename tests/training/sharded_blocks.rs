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

use crate::common::{assert_error, of_zero, ranks, sharded};
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_ddp::amp::Autocast;
use candle_ddp::nn::{LayerNorm, Linear, add, gelu, layer_norm, linear, linear_no_bias, no_grad};
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW, ZeroRedundancyOptimizer};
use candle_ddp::{Block, DdpOptions, DistributedDataParallel, Error, Precision, ProcessGroup, Sharding, block};
use candle_nn::{VarBuilder, VarMap};

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
    for ranks in 1..=3 {
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
}

/// Steps with passes that `goes_with` does not make: two in one graph, and one that is left.
fn kinds() -> [&'static Step; 2] {
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
    [one_graph, evaluated]
}

#[test]
fn several_passes_have_the_bits_of_plain_training() {
    kinds().into_iter().for_each(|step| same_bits(&DdpOptions::default(), step));
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
    refused("needs the whole model", |pg| new(&pg)?.into_module().map(drop));
    refused("needs the whole model", |pg| new(&pg)?.with_no_grad_model(Net::new).map(drop));
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

/// Checks that a model in blocks has the losses of the same model without blocks within this tolerance, in training and in evaluation.
fn trains_alike<M>(
    build: fn(VarBuilder<'static>) -> Result<M>,
    tolerance: f32,
    loss: impl Fn(&DistributedDataParallel<M>, usize) -> candle_ddp::Result<Tensor> + Sync,
) {
    let train = |pg: &ProcessGroup, sharding| {
        let options = DdpOptions { init_seed: Some(5), sharding, ..Default::default() };
        let ddp = DistributedDataParallel::with_options(pg, &VarMap::new(), build, options)?;
        let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, ParamsAdamW { lr: 0.02, ..Default::default() })?;
        let mut losses = Vec::new();
        for step in 0..4 {
            let loss = loss(&ddp, step)?;
            losses.push(loss.to_scalar::<f32>()?);
            optimizer.step(&ddp.backward(&loss)?)?;
        }
        losses.push(no_grad(|| loss(&ddp, 9))?.to_scalar()?);
        Ok::<_, Error>(losses)
    };
    for world_size in [1, 3] {
        ranks(world_size, |pg| {
            let plain = train(&pg, Sharding::Optimizer { ranks: None })?;
            for reshard_after_forward in [true, false] {
                let sharded = train(&pg, Sharding::Blocks { reshard_after_forward, ranks: None })?;
                let is_near = |(a, b): (&f32, &f32)| (a - b).abs() <= tolerance * b.abs().max(1.);
                let what = format!("{world_size} ranks, reshard_after_forward: {reshard_after_forward}");
                assert!(sharded.iter().zip(&plain).all(is_near), "{what}: {sharded:?}, not {plain:?}");
            }
            assert!(plain[0] != plain[3], "{plain:?}");
            Ok(())
        });
    }
}

#[test]
fn a_block_may_have_several_inputs_and_be_called_twice() {
    let build = |vb: VarBuilder<'static>| block(vb.pp("a"), |vb| linear(3, 3, vb));
    trains_alike(build, 0., |ddp, step| {
        let x = batch(ddp.process_group(), step)?;
        let y = ddp.call(|layer| {
            let y = layer.call(&[&x, &x], |layer, x| layer.forward(&(&x[0] * &x[1])?))?;
            layer.forward(&y)
        })?;
        Ok(y.sqr()?.mean_all()?)
    });
}

#[test]
fn ranks_may_use_different_parameters_of_a_block() {
    let build =
        |vb: VarBuilder<'static>| (0..4).map(|index| block(vb.pp(index), Layer::new)).collect::<Result<Vec<_>>>();
    trains_alike(build, 0., |ddp, step| {
        let pg = ddp.process_group();
        let x = Tensor::cat(&[&batch(pg, step)?, &batch(pg, step + 1)?], 1)?;
        let skips = pg.rank() == 1 && step > 0;
        let one = move |layer: &Layer, x: &[Tensor]| {
            if skips { layer.norm.forward(&x[0]) } else { layer.forward(&x[0]) }
        };
        let y = ddp.call(|layers| layers.iter().try_fold(x, |x, layer| layer.call(&[&x], one)))?;
        Ok(y.sqr()?.mean_all()?)
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
