//! The running statistics of batch normalisation for averaged weights.
use crate::backend::Purpose;
use crate::ddp::DistributedDataParallel;
use crate::nn::no_grad;
use crate::process_group::ProcessGroup;
use crate::tensor::copy;
use crate::{Error, ReduceOp, Result};
use candle_core::{DType, Tensor, Var};
use candle_ddp_nn::with_cumulative_statistics;

static UPDATE_BN: Purpose = Purpose::of("update_bn");

/// Computes the running statistics of all [`BatchNorm`](crate::nn::BatchNorm)s of `ddp` anew, for weights that it has not been trained with,
/// such as averages: PyTorch's `torch.optim.swa_utils.update_bn`. They become the statistics over all `batches` of all ranks, each with the same weight,
/// and are the same on all ranks.
///
/// `forward` must be the forward pass in training mode. It runs under [`no_grad`](crate::nn::no_grad), inside of
/// [`call`](DistributedDataParallel::call).
///
/// ```
/// # use candle_core::{ModuleT, Tensor};
/// # use candle_ddp::DistributedDataParallel;
/// # use candle_ddp::nn::batch_norm;
/// # use candle_nn::VarMap;
/// use candle_ddp::optim::{Ema, update_bn};
///
/// # fn main() -> candle_ddp::Result<()> {
/// # candle_ddp::spawn(2, |pg| {
/// # let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), |vb| batch_norm(4, 1e-5, vb))?;
/// # let batches = || (0..3).map(|_| Ok(Tensor::randn(0f32, 1., (8, 4), pg.device())?));
/// let mut ema = Ema::new(&ddp, None)?; // equal averages
/// // … ema.update()? after each epoch of the training …
/// # ema.update()?;
/// ema.copy_to_parameters()?;
/// update_bn(&ddp, batches(), |model, x| model.forward_t(&x, true))
/// # })?;
/// # Ok(())
/// # }
/// ```
///
/// To continue the training afterwards, let the average also have the [buffers](DistributedDataParallel::named_buffers):
/// [`Ema::apply`](super::Ema::apply), this, an evaluation, and [`Ema::restore`](super::Ema::restore).
///
/// Every rank must call it. Ranks may have different numbers of batches, even none, except under
/// [sharding](crate::DdpOptions::sharding) and with `SyncBatchNorm`, whose forward passes they make together.
///
/// # Errors
/// Returns an error on every rank, and changes nothing, if a batch or a forward pass of one rank fails; [`Error::InvalidArgument`] if no
/// `BatchNorm` has run in training mode; [`Error::Parameter`] for statistics of candle_nn's `BatchNorm`.
pub fn update_bn<M, T, U, E>(
    ddp: &DistributedDataParallel<M>,
    batches: impl IntoIterator<Item = Result<T>>,
    mut forward: impl FnMut(&M, T) -> std::result::Result<U, E>,
) -> Result<()>
where
    Error: From<E>,
{
    let statistics: Vec<_> = ddp.named_buffers().into_iter().filter_map(Statistic::of).collect();
    let before = statistics.iter().map(|Statistic { var, .. }| var.as_detached_tensor().copy());
    let before = before.collect::<candle_core::Result<Vec<_>>>()?;
    let pass = || {
        for Statistic { var, initial, .. } in &statistics {
            var.set(&(var.ones_like()?.detach() * *initial)?)?;
        }
        batches.into_iter().try_for_each(|batch| {
            let batch = batch?;
            no_grad(|| ddp.call(|model| forward(model, batch))).map(drop)
        })
    };
    let (passed, counts) = with_cumulative_statistics(pass);
    let counts: Vec<_> = statistics.iter().map(|one| counts.get(&one.var.id()).copied().unwrap_or(0) as f64).collect();
    let passed = passed.and_then(|()| statistics.iter().zip(&counts).try_for_each(|(one, count)| one.check(*count)));
    let updated = average(ddp.process_group(), passed, &statistics, &counts);
    if updated.is_err() {
        statistics.iter().zip(&before).try_for_each(|(one, before)| one.var.set(before))?;
    }
    updated
}

/// A running mean or variance.
struct Statistic {
    name: String,
    var: Var,
    initial: f64,
}

impl Statistic {
    fn of((name, var): (String, Var)) -> Option<Self> {
        let initial = match name.rsplit('.').next() {
            Some("running_mean") => 0.,
            Some("running_var") => 1.,
            _ => return None,
        };
        var.dtype().is_float().then_some(Self { name, var, initial })
    }

    /// Refuses a variable that has changed although no layer of ours counts a batch in it.
    fn check(&self, count: f64) -> Result<()> {
        let values = self.var.as_detached_tensor().to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
        if count > 0. || values.iter().all(|value| *value == self.initial) {
            return Ok(());
        }
        let reason = "its layer must be a BatchNorm of candle_ddp::nn, as nn::batch_norm makes it: no other one has an average of all batches";
        Err(Error::parameter(&self.name, reason))
    }
}

/// Replaces each statistic by its mean over the ranks, in which it has this rank's count as its weight.
fn average(group: &ProcessGroup, passed: Result<()>, statistics: &[Statistic], counts: &[f64]) -> Result<()> {
    UPDATE_BN.during(|| group.agree(passed))?;
    let all = Tensor::new(counts, group.device())?;
    UPDATE_BN.during(|| group.all_reduce(&all, ReduceOp::Sum))?;
    let all = all.to_vec1::<f64>()?;
    if all.iter().sum::<f64>() == 0. {
        let reason = "no BatchNorm of candle_ddp::nn has run in training mode: there must be batches, and `forward` must call forward_t with true";
        return Err(Error::invalid("forward", reason));
    }
    let used: Vec<_> = statistics.iter().zip(counts.iter().zip(&all)).filter(|(_, (_, all))| **all > 0.).collect();
    let parts = used.iter().map(|(Statistic { var, .. }, (here, all))| {
        let value = var.as_detached_tensor().to_device(group.device())?.to_dtype(DType::F64)?;
        // Statistics of no batches may be anything.
        if **here > 0. { value * (**here / **all) } else { value.zeros_like() }
    });
    let means = Tensor::cat(&parts.collect::<candle_core::Result<Vec<_>>>()?, 0)?.detach();
    UPDATE_BN.during(|| group.all_reduce(&means, ReduceOp::Sum))?;
    let means = copy::views(&means, used.iter().map(|(one, _)| one.var.shape()))?;
    for ((Statistic { var, .. }, _), mean) in used.into_iter().zip(means) {
        var.set(&mean.to_dtype(var.dtype())?.to_device(var.device())?)?;
    }
    Ok(())
}
