//! Parameters, and views of them, that leave their block or their model.
use super::*;
use candle_ddp::nn::{Embedding, embedding, matmul};
use std::sync::{Arc, Mutex};

const WORDS: usize = 8;

/// A language model whose head is tied to the embedding, with learned positions.
struct Tied {
    words: Block<Embedding>,
    positions: Block<Tensor>,
    body: Block<Linear>,
}

impl Tied {
    fn new(vb: VarBuilder) -> Result<Self> {
        let positions =
            |vb: VarBuilder| vb.get_with_hints((5, WIDTH), "weight", candle_nn::init::DEFAULT_KAIMING_NORMAL);
        Ok(Self {
            words: block(vb.pp("words"), |vb| embedding(WORDS, WIDTH, vb))?,
            positions: block(vb.pp("positions"), positions)?,
            body: block(vb.pp("body"), |vb| linear(WIDTH, WIDTH, vb))?,
        })
    }

    /// `ours` is whether the last product is ours or candle's.
    fn logits(&self, words: &Tensor, ours: bool) -> Result<Tensor> {
        let positions = self.positions.call(&[words], |positions, x| positions.narrow(0, 0, x[0].dim(0)?))?;
        let x = self.body.forward(&self.words.forward(words)?.add(&positions)?.tanh()?)?;
        let weight = self.words.call(&[], |words, _| Ok(words.embeddings().clone()))?;
        if ours { matmul(&x, &weight.t()?) } else { x.matmul(&weight.t()?) }
    }
}

/// The losses of some steps, the weights that the model gave away, and what an evaluation gives.
fn train_tied(pg: &ProcessGroup, sharding: Sharding, ours: bool) -> candle_ddp::Result<(Vec<f32>, Vec<Vec<f32>>)> {
    let options = DdpOptions { sharding, init_seed: Some(5), ..Default::default() };
    let ddp = DistributedDataParallel::with_options(pg, &VarMap::new(), Tied::new, options)?;
    let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, ParamsAdamW { lr: 0.01, ..Default::default() })?;
    let (mut losses, mut others) = (Vec::new(), Vec::new());
    for step in 0..4 {
        let words = Tensor::new(&[step, 3, 1 + pg.rank() as u32], &Device::Cpu)?;
        let (logits, positions) = ddp.call(|net| {
            let positions = net.positions.call(&[&words], |positions, _| positions.narrow(0, 1, 2))?;
            Ok::<_, candle_core::Error>((net.logits(&words, ours)?, positions))
        })?;
        let loss = candle_nn::loss::cross_entropy(&logits, &words)?;
        optimizer.step(&ddp.backward(&loss)?)?;
        losses.push(loss.to_scalar()?);
        // As it was in the forward pass, or as the step has made it.
        assert_eq!(positions.dims(), [2, WIDTH]);
        positions.flatten_all()?.to_vec1::<f32>()?;
    }
    let words = Tensor::new(&[7u32, 0], &Device::Cpu)?;
    others.push(no_grad(|| ddp.call(|net| net.logits(&words, ours)))?.flatten_all()?.to_vec1()?);
    let positions = no_grad(|| {
        ddp.call(|net| net.positions.call(&[&words], |positions, _| positions.t()?.narrow(1, 2, 3)?.narrow(0, 1, 2)))
    })?;
    assert!(!positions.track_op() || sharding == Sharding::Optimizer { ranks: None });
    others.push(positions.flatten_all()?.to_vec1()?);
    Ok((losses, others))
}

#[test]
fn a_block_may_return_a_view_of_its_parameter() {
    for ranks in 1..=3 {
        crate::common::ranks(ranks, |pg| {
            for ours in [false, true] {
                let plain = train_tied(&pg, Sharding::Optimizer { ranks: None }, ours)?;
                for reshard_after_forward in [true, false] {
                    let sharding = Sharding::Blocks { reshard_after_forward, ranks: None };
                    let sharded = train_tied(&pg, sharding, ours)?;
                    assert_eq!(sharded, plain, "{ranks} ranks, reshard_after_forward: {reshard_after_forward}");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn a_forward_pass_may_return_a_view_of_a_parameter() {
    ranks(2, |pg| {
        let run = |options: DdpOptions| {
            let build = |vb: VarBuilder| {
                let weight = vb.get_with_hints((4, 3), "weight", candle_nn::Init::Const(0.5))?;
                Result::Ok(candle_nn::func(move |x| weight.narrow(0, 0, x.dim(0)?)))
            };
            let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), build, options)?;
            let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, ParamsAdamW::default())?;
            let x = Tensor::ones(3, DType::F32, &Device::Cpu)?;
            let y = ddp.forward(&x)?;
            let grads = ddp.backward(&y.sqr()?.mean_all()?)?;
            let before = y.flatten_all()?.to_vec1::<f32>()?;
            optimizer.step(&grads)?;
            let after = no_grad(|| ddp.forward_t(&x, false))?.flatten_all()?.to_vec1::<f32>()?;
            Ok::<_, Error>((before, after))
        };
        assert_eq!(run(sharded())?, run(of_zero())?);
        Ok(())
    });
}

#[test]
fn a_weight_that_leaves_is_an_error_where_it_is_used() {
    ranks(2, |pg| {
        let (ddp, _optimizer) = made(&pg, &VarMap::new(), sharded())?;
        let (x, wide) = (batch(&pg, 0)?, Tensor::ones((2, WIDTH), DType::F32, &Device::Cpu)?);
        let stem = || no_grad(|| ddp.call(|net| net.stem.weight().t()));
        let outside = |product: fn(&Tensor, &Tensor) -> Result<Tensor>| Ok::<_, Error>(product(&x, &stem()?)?);
        let kept = Arc::new(Mutex::new(None));
        let of_block = |product: fn(&Tensor, &Tensor) -> Result<Tensor>| {
            ddp.call(|net| {
                let keeps = Arc::clone(&kept);
                net.layers[1].call(&[&wide], move |layer, x| {
                    *keeps.lock().unwrap() = Some(layer.first.weight().t()?);
                    layer.forward(&x[0])
                })?;
                let weight = kept.lock().unwrap().clone().unwrap();
                // Another block's call is no place for it either.
                net.layers[2].call(&[&wide], move |_, x| product(&x[0], &weight))
            })
        };
        let errors = [
            (outside(Tensor::matmul).unwrap_err(), "candle's matmul"),
            (outside(matmul).unwrap_err(), "the parameters outside of blocks"),
            (of_block(Tensor::matmul).unwrap_err(), "candle's matmul"),
            (of_block(matmul).unwrap_err(), "it belongs to block layers.1"),
        ];
        for (error, words) in errors {
            let is_typed =
                matches!(&error, Error::InvalidArgument { argument, .. } if argument.contains("sharded model"));
            assert!(is_typed && error.to_string().contains(words), "{error:?}");
        }
        // A copy keeps its values.
        let copy = no_grad(|| ddp.call(|net| net.stem.weight().copy()))?;
        assert_eq!(x.matmul(&copy.t()?)?.dims(), [4, WIDTH]);
        Ok(())
    });
}

/// A block that takes two tensors and returns two, next to a view of its parameter, in a list.
struct Twins(Block<Layer>, Block<Linear>);

impl Twins {
    fn new(vb: VarBuilder) -> Result<Self> {
        let last = |vb: VarBuilder| linear(WIDTH, WIDTH, vb);
        Ok(Self(block(vb.pp("first"), Layer::new)?, block(vb.pp("last"), last)?))
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (y, z) = self.0.call(&[x, &x.sin()?], |layer, inputs| {
            let y = layer.forward(&inputs[0])?;
            Ok((layer.forward(&(&y * &inputs[1])?)?, y))
        })?;
        let all = self.1.call(&[&y, &z], |last, inputs| {
            let outputs = inputs.iter().map(|input| last.forward(input));
            outputs.chain([last.weight().narrow(0, 0, 1)]).collect::<Result<Vec<_>>>()
        })?;
        (&all[0] + (&all[1] * &z)?)?.broadcast_add(&all[2])
    }
}

#[test]
fn blocks_return_several_tensors() {
    // A recomputed sum of gradients may be rounded in another order.
    trains_alike(Twins::new, 1e-5, |ddp, step| {
        let pg = ddp.process_group();
        let x = Tensor::cat(&[batch(pg, step)?, batch(pg, step + 50)?], 1)?;
        ddp.call(|net| net.forward(&x)?.sqr()?.mean_all())
    });
}
