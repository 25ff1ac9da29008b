//! A gradient penalty: what candle cannot train, and the finite difference that can.
use crate::common::{assert_error, filled, floats, pure, ranks, tensor};
use candle_core::{DType, Tensor, Var};
use candle_ddp::nn::{Linear, linear};
use candle_ddp::{DdpOptions, DistributedDataParallel, Error, Precision, ReduceOp, Result};
use candle_nn::{Module, VarBuilder, VarMap};

type Critic = DistributedDataParallel<(Linear, Linear)>;

fn judge(critic: &Critic, x: &Tensor) -> Result<Tensor> {
    critic.call(|(a, b)| b.forward(&a.forward(x)?.tanh()?))
}

/// The gradient of the judgement with respect to its input.
fn slope(critic: &Critic, x: &Var) -> Result<Tensor> {
    let _frozen = critic.freeze();
    let grads = judge(critic, x)?.sum_all()?.backward()?;
    Ok(grads.get(x).expect("the judgement depends on x").clone())
}

fn norm(gradient: &Tensor) -> Result<Tensor> {
    Ok(gradient.sqr()?.sum_keepdim(1)?.sqrt()?)
}

fn penalty(norm: &Tensor) -> Result<Tensor> {
    Ok((norm - 1.0)?.sqr()?.mean_all()?)
}

fn critic(pg: &candle_ddp::ProcessGroup) -> Result<Critic> {
    let build = |vb: VarBuilder| Ok::<_, candle_core::Error>((linear(2, 8, vb.pp("a"))?, linear(8, 1, vb.pp("b"))?));
    let options =
        DdpOptions { precision: Precision::Pure(DType::F64), unused: candle_ddp::Unused::Allow, ..Default::default() };
    Ok(filled(pg, build, options, 1)?.0)
}

fn input() -> Result<Var> {
    Ok(Var::from_tensor(&tensor(&[4, 2], 5).to_dtype(DType::F64)?)?)
}

#[test]
fn a_finite_difference_trains_the_penalty() {
    ranks(2, |pg| {
        let (critic, x) = (critic(&pg)?, input()?);
        let gradient = slope(&critic, &x)?;
        let direction = gradient.broadcast_div(&norm(&gradient)?)?.detach();
        let eps = 1e-2;
        let (at, step) = (x.detach(), (direction * eps)?);
        let (ahead, behind) = (judge(&critic, &(&at + &step)?)?, judge(&critic, &(&at - &step)?)?);
        let grads = critic.backward(&penalty(&((ahead - behind)? / (2. * eps))?)?)?;

        // Differences of the exact penalty.
        const STEP: f64 = 1e-5;
        for (name, var) in critic.named_parameters() {
            let values = var.as_detached_tensor().copy()?;
            let found = grads.get(&var).map_or(vec![0.; var.elem_count()], floats);
            for (index, found) in found.iter().enumerate() {
                let exact = |by: f64| -> Result<f64> {
                    let mut moved = values.flatten_all()?.to_vec1::<f64>()?;
                    moved[index] += by;
                    var.set(&Tensor::from_vec(moved, var.shape(), var.device())?)?;
                    Ok(penalty(&norm(&slope(&critic, &x)?)?)?.to_scalar::<f64>()?)
                };
                let expected = (exact(STEP)? - exact(-STEP)?) / (2. * STEP);
                var.set(&values)?;
                assert!((f64::from(*found) - expected).abs() < 1e-3, "{name}[{index}]: {found}, not {expected}");
            }
        }
        Ok(())
    });
}

/// The norm of a gradient has no graph. A loss of nothing else is an error, which names that.
#[test]
fn a_loss_out_of_a_gradient_store_is_an_error() {
    let errors = ranks(1, |pg| {
        let build =
            |vb: VarBuilder| Ok::<_, candle_core::Error>((linear(2, 8, vb.pp("a"))?, linear(8, 1, vb.pp("b"))?));
        let critic = DistributedDataParallel::new(&pg, &VarMap::new(), build)?;
        let x = Var::from_tensor(&tensor(&[4, 2], 5))?;
        let loss = penalty(&norm(&slope(&critic, &x)?)?)?;
        Ok(critic.backward(&loss).unwrap_err())
    });
    for error in errors {
        assert!(error.to_string().contains("a gradient out of a GradStore"), "{error}");
        assert!(matches!(error, Error::UnusedParameters { rank: Some(_), .. }), "{error:?}");
    }
}

/// In a larger loss, too, wherever the gradient can be known: the variable is the model's input, or candle's own operation is the first to
/// use it. candle then leaves that operation's graph in the gradient, and would train one weight wrongly.
#[test]
fn a_penalty_in_a_larger_loss_is_an_error() {
    const REFUSED: &str = "a gradient of an earlier backward pass";
    let options = || pure(DType::F64);
    for is_frozen in [true, false] {
        ranks(2, |pg| {
            let ours = filled(&pg, |vb| linear(2, 1, vb), options(), 1)?.0;
            let x = input()?;
            let gradient = {
                let frozen = is_frozen.then(|| ours.freeze());
                let loss = ours.forward(&x)?.sum_all()?;
                let grads = if frozen.is_some() { loss.backward()? } else { ours.backward(&loss)? };
                grads.get(&x).expect("it depends on x").clone()
            };
            // A program may average an input's gradient itself, and use it as a constant.
            let values = gradient.detach().copy()?;
            pg.all_reduce(&gradient, ReduceOp::Avg)?;
            assert_eq!(floats(&gradient), floats(&values));
            let loss = || Ok::<_, Error>(ours.forward(&x)?.mean_all()?);
            let penalty = penalty(&norm(&gradient)?)?;
            ours.backward(&(loss()? + penalty.detach())?)?;
            assert_error(penalty.backward(), &[REFUSED]);
            // The refusal ends the group. So neither rank may be in the pass before, and one may hear of the other's refusal.
            let refused = || ours.backward(&(loss()? + penalty)?).map(drop);
            assert_error(pg.barrier().and_then(|()| refused()), &["loss: ", REFUSED]);
            Ok(())
        });
        // One rank, since the refusal ends the group, in which another rank may be in the pass before.
        ranks(1, |pg| {
            let build = |vb: VarBuilder| {
                Ok::<_, candle_core::Error>((
                    candle_nn::linear(2, 8, vb.pp("a"))?,
                    candle_nn::linear(8, 1, vb.pp("b"))?,
                ))
            };
            let of_candle = filled(&pg, build, options(), 1)?.0;
            let x = input()?;
            let judge = || of_candle.call(|(a, b)| b.forward(&a.forward(&x)?.tanh()?));
            let gradient = {
                let frozen = is_frozen.then(|| of_candle.freeze());
                let loss = judge()?.sum_all()?;
                let grads = if frozen.is_some() { loss.backward()? } else { of_candle.backward(&loss)? };
                grads.get(&x).expect("it depends on x").clone()
            };
            let penalty = penalty(&norm(&gradient)?)?;
            of_candle.backward(&(judge()?.mean_all()? + penalty.detach())?)?;
            // What the last backward pass has made is known.
            let gradient = {
                let _frozen = of_candle.freeze();
                judge()?.sum_all()?.backward()?.get(&x).expect("it depends on x").clone()
            };
            let penalty = self::penalty(&norm(&gradient)?)?;
            let error = of_candle.backward(&(judge()?.mean_all()? + penalty)?).unwrap_err();
            assert!(
                matches!(&error, Error::InvalidArgument { argument: "loss", reason } if reason.contains(REFUSED)),
                "{error}"
            );
            Ok(())
        });
    }
}
