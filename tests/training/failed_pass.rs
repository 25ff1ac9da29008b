//! A backward pass that fails leaves nothing to the next, with this crate's layers and with candle's.
use crate::common::{Between, assert_error, counted, failing, filled, floats, ranks, tensor, tiny};
use candle_core::{CustomOp1, Module, Tensor, Var};
use candle_ddp::comm_hook::{CommHook, GradBucket, HookWork};
use candle_ddp::{
    Backward, DdpOptions, DistributedDataParallel, Error, OnNonFinite, ProcessGroup, Result, backward_with, nn,
};
use candle_nn::{VarBuilder, VarMap};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, OnceLock};

/// An embedding that shares its weight with the last layer, and layers with biases.
struct Net {
    embedding: nn::Embedding,
    hidden: nn::Linear,
    output: nn::Linear,
    theirs: candle_nn::Linear,
}

const WIDTH: usize = 4;

impl Net {
    fn new(vb: VarBuilder) -> candle_core::Result<Self> {
        let embedding = nn::embedding(5, WIDTH, vb.pp("embedding"))?;
        let output = nn::Linear::new(embedding.embeddings().clone(), None);
        let hidden = nn::linear(WIDTH, WIDTH, vb.pp("hidden"))?;
        Ok(Self { embedding, hidden, output, theirs: candle_nn::linear(WIDTH, WIDTH, vb.pp("theirs"))? })
    }

    /// The loss for this rank's tokens. `between` is an identity between the two uses of `hidden`, and of the embedding.
    fn loss(&self, rank: usize, between: impl CustomOp1 + Send + Sync + 'static) -> candle_core::Result<Tensor> {
        let tokens = Tensor::new(&[rank as u32, 2, 3], self.hidden.weight().device())?;
        let x = self.hidden.forward(&self.embedding.forward(&tokens)?)?.tanh()?;
        let x = self.theirs.forward(&x)?.apply_op1(between)?;
        self.output.forward(&self.hidden.forward(&x)?)?.sqr()?.mean_all()
    }
}

fn wrap(pg: &ProcessGroup, options: DdpOptions) -> Result<DistributedDataParallel<Net>> {
    Ok(filled(pg, |vb| Net::new(vb), options, 3)?.0)
}

fn loss(ddp: &DistributedDataParallel<Net>, fails: bool) -> Result<Tensor> {
    ddp.call(|net| net.loss(ddp.process_group().rank(), failing(&Arc::new(AtomicBool::new(fails)))))
}

fn gradients(ddp: &DistributedDataParallel<Net>, loss: &Tensor) -> Result<Vec<Vec<f32>>> {
    let grads = ddp.backward(loss)?;
    Ok(ddp.parameters().iter().map(|var: &Var| floats(grads.get(var).expect("a gradient"))).collect())
}

#[test]
fn nothing_is_left_after_a_refused_pass() {
    for world_size in [1, 2] {
        ranks(world_size, |pg| {
            let expected = {
                let fresh = wrap(&pg, DdpOptions::default())?;
                gradients(&fresh, &loss(&fresh, false)?)?
            };
            let ddp = wrap(&pg, DdpOptions::default())?;
            let same = loss(&ddp, false)?;
            for _ in 0..2 {
                let error = Error::from(same.backward().unwrap_err());
                assert!(matches!(error, Error::BackwardOutside { .. }), "{error}");
            }
            assert_eq!(gradients(&ddp, &same)?, expected, "the same graph, {world_size} ranks");
            let another = loss(&ddp, false)?;
            assert!(another.backward().is_err());
            assert_eq!(gradients(&ddp, &loss(&ddp, false)?)?, expected, "another graph, {world_size} ranks");
            Ok(())
        });
    }
}

#[test]
fn nothing_is_left_after_an_operation_has_failed() {
    ranks(1, |pg| {
        let ddp = wrap(&pg, DdpOptions::default())?;
        let expected = gradients(&ddp, &loss(&ddp, false)?)?;
        let fails = Arc::new(AtomicBool::new(true));
        let same = ddp.call(|net| net.loss(0, failing(&fails)))?;
        for _ in 0..2 {
            assert_error(ddp.backward(&same), &["out of memory"]);
        }
        assert_error(loss(&ddp, false)?.backward(), &["ddp.backward(&loss)"]);
        fails.store(false, Ordering::Relaxed);
        assert_eq!(gradients(&ddp, &same)?, expected, "the same graph");
        assert!(ddp.backward(&loss(&ddp, true)?).is_err());
        assert_eq!(gradients(&ddp, &loss(&ddp, false)?)?, expected, "another graph");

        // Accumulated gradients end with a failed pass too.
        {
            let _guard = ddp.no_sync();
            ddp.backward(&loss(&ddp, false)?)?;
            assert!(ddp.backward(&loss(&ddp, true)?).is_err());
        }
        assert_eq!(gradients(&ddp, &loss(&ddp, false)?)?, expected, "after a failed pass under no_sync");
        Ok(())
    });
}

#[test]
fn a_nan_does_not_survive_the_pass_that_it_failed() {
    ranks(1, |pg| {
        let options = DdpOptions { on_non_finite: Some(OnNonFinite::Stop), ..tiny() };
        let build = |vb: VarBuilder| nn::linear(3, 2, vb.pp("a"));
        let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), build, options)?;
        let pass = |x: &Tensor| -> Result<Vec<Vec<f32>>> {
            let grads = ddp.backward(&ddp.forward(x)?.sqr()?.mean_all()?)?;
            Ok(ddp.parameters().iter().map(|var| floats(grads.get(var).expect("a gradient"))).collect())
        };
        let good = tensor(&[5, 3], 0);
        let expected = pass(&good)?;
        assert_error(pass(&(&good * f64::NAN)?), &["NaN"]);
        assert_eq!(pass(&good)?, expected);
        Ok(())
    });
}

/// Doubles gradients, in its second stage. In the stage whose number is stored, it fails for the second bucket.
struct FailsIn(Arc<AtomicUsize>);

impl FailsIn {
    fn check(&self, stage: usize, bucket: &GradBucket) -> Result<()> {
        match bucket.index() == 1 && self.0.load(Ordering::Relaxed) == stage {
            true => Err(candle_core::Error::msg(format!("stage {stage} fails")).into()),
            false => Ok(()),
        }
    }
}

impl CommHook for FailsIn {
    fn run(&mut self, bucket: &GradBucket, _: &ProcessGroup) -> Result<HookWork<Self>> {
        self.check(1, bucket)?;
        Ok(HookWork::then([], |hook: &mut Self, bucket, _| {
            hook.check(2, bucket)?;
            bucket.set_buffer(&(bucket.buffer() * 2.)?)?;
            Ok(HookWork::done())
        }))
    }
}

#[test]
fn nothing_is_left_after_a_hook_has_failed() {
    ranks(1, |pg| {
        let plain = wrap(&pg, tiny())?;
        let expected = gradients(&plain, &loss(&plain, false)?)?;
        let expected: Vec<Vec<f32>> =
            expected.iter().map(|values| values.iter().map(|value| value * 2.).collect()).collect();
        let ddp = wrap(&pg, tiny())?;
        let stage = Arc::new(AtomicUsize::new(0));
        ddp.register_comm_hook(FailsIn(Arc::clone(&stage)))?;
        // The first pass, from which the order of the buckets would have been taken, and later ones.
        for failing in [1, 2, 1, 2] {
            stage.store(failing, Ordering::Relaxed);
            assert_error(ddp.backward(&loss(&ddp, false)?), &[&format!("stage {failing} fails")]);
            stage.store(0, Ordering::Relaxed);
            assert_eq!(gradients(&ddp, &loss(&ddp, false)?)?, expected, "after stage {failing}");
            plain.backward(&loss(&plain, false)?)?;
            assert_eq!(ddp.buckets(), plain.buckets());
        }
        Ok(())
    });
}

#[test]
fn a_loss_that_is_not_one_number_is_refused_before_anything_is_sent() {
    type Act = fn(&DistributedDataParallel<nn::Linear>, &Tensor) -> Result<()>;
    let acts: [(Act, &str); 5] = [
        (
            |ddp, loss| ddp.backward(loss).map(drop),
            "loss: it has shape [4, 1]: reduce it to one number, as with mean_all()",
        ),
        (
            |ddp, loss| {
                backward_with(loss, &[ddp], Backward { into: Some(&mut Default::default()), ..Default::default() })
                    .map(drop)
            },
            "loss: it has shape [4, 1]",
        ),
        (
            |ddp, loss| backward_with(loss, &[ddp], counted(4.)).map(drop),
            "loss: it has shape [4, 1]: reduce it to one number, as with sum_all()",
        ),
        (|ddp, loss| backward_with(loss, &[ddp], Backward::default()).map(drop), "loss: it has shape [4, 1]"),
        (|ddp, loss| ddp.backward(&loss.narrow(0, 0, 0)?).map(drop), "loss: it has shape [0, 1]"),
    ];
    for (act, expected) in acts {
        // Rank 0 alone, rank 1 alone, and both.
        for mistaken in [&[0][..], &[1], &[0, 1]] {
            let built = Barrier::new(2);
            let errors = ranks(2, |pg| {
                let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), |vb| nn::linear(3, 1, vb))?;
                built.wait();
                let losses = ddp.forward(&tensor(&[4, 3], 1))?.sqr()?;
                let own = || {
                    if mistaken.contains(&pg.rank()) {
                        act(&ddp, &losses)
                    } else {
                        ddp.backward(&losses.mean_all()?).map(drop)
                    }
                };
                Ok(own().unwrap_err().to_string())
            });
            for (rank, error) in errors.iter().enumerate() {
                let is_own = mistaken.contains(&rank);
                assert!(
                    if is_own { error.starts_with(expected) } else { error.contains(expected) },
                    "rank {rank}: {error}"
                );
            }
        }
    }
    ranks(2, |pg| {
        let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), |vb| nn::linear(3, 1, vb))?;
        ddp.backward(&ddp.forward(&tensor(&[4, 3], 1))?.mean_all()?.reshape((1, 1))?).map(drop)
    });
}

#[test]
fn a_pass_inside_of_another_is_refused_and_does_not_change_it() {
    ranks(1, |pg| {
        let ddp = Arc::new(wrap(&pg, DdpOptions::default())?);
        let expected = gradients(&ddp, &loss(&ddp, false)?)?;
        let refusal = Arc::new(OnceLock::new());
        let (model, inner, told) = (Arc::clone(&ddp), loss(&ddp, false)?, Arc::clone(&refusal));
        // Begins another pass, of the same model.
        let nested = Between(move || {
            if let Err(error) = model.backward(&inner) {
                let _ = told.set(error.to_string());
            }
            Ok(())
        });
        assert_eq!(gradients(&ddp, &ddp.call(|net| net.loss(0, nested))?)?, expected);
        let refusal = refusal.get().expect("it was refused");
        assert!(refusal.contains("another backward pass of this model is running"), "{refusal}");
        Ok(())
    });
}

/// Without DDP: the sums of a pass that failed in this crate's layers end with it, although the graph lives on.
#[test]
fn a_plain_backward_pass_can_be_repeated_after_a_layer_has_failed() {
    let weight = Var::from_tensor(&tensor(&[4, 4], 1)).unwrap();
    let layer = nn::Linear::new(weight.as_tensor().clone(), None);
    let fails = Arc::new(AtomicBool::new(true));
    let x = layer.forward(&tensor(&[2, 4], 2)).unwrap();
    let failing = {
        let fails = Arc::clone(&fails);
        nn::checkpoint(&[&x], move |inputs: &[Tensor]| {
            // The first call is the forward pass, the others are backward passes.
            inputs[0].apply_op1(failing(&fails))?.sqr()
        })
        .unwrap()
    };
    let loss = (layer.forward(&failing).unwrap() + &x).unwrap().sum_all().unwrap();
    assert!(loss.backward().is_err());
    fails.store(false, Ordering::Relaxed);
    let repeated = floats(loss.backward().unwrap().get(&weight).unwrap());
    let again = floats(loss.backward().unwrap().get(&weight).unwrap());
    assert_eq!(repeated, again);
}
