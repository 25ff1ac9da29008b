//! Runs of the recipe in docs/ranks_that_differ.md for batches that one rank cannot use.
use crate::common::{floats, tensor};
use candle_ddp::nn::{BatchNorm, batch_norm};
use candle_ddp::optim::{AdamW, ParamsAdamW};
use candle_ddp::{DdpOptions, Error, ReplicaCheck};
use candle_nn::{Linear, Module, ModuleT, VarBuilder, VarMap, linear};
include!("../training/bad_batches_recipe.rs");

struct Net(BatchNorm, Linear);

impl Net {
    fn new(vb: VarBuilder) -> candle_core::Result<Self> {
        Ok(Self(batch_norm(3, 1e-5, vb.pp("norm"))?, linear(3, 1, vb.pp("out"))?))
    }
}

fn loss(net: &Net, x: &Tensor) -> Result<Tensor> {
    Ok(net.1.forward(&net.0.forward_t(x, true)?)?.sqr()?.mean_all()?)
}

/// What each rank has in the place of a batch.
#[derive(Clone, Copy)]
enum Bad {
    Undecodable,
    Nan,
}

/// Trains with good batches of these numbers, and with bad ones on one of the ranks. Returns all variables, and how many steps were
/// skipped.
fn trained(pg: &ProcessGroup, bad: &[(usize, usize, Bad)]) -> Result<(Vec<f32>, usize)> {
    let check = ReplicaCheck { every: 1, ..Default::default() };
    let options = DdpOptions { init_seed: Some(3), replica_check: Some(check), ..Default::default() };
    let ddp = DistributedDataParallel::with_options(pg, &VarMap::new(), |vb| Net::new(vb), options)?;
    let mut optimizer = AdamW::new(&ddp, ParamsAdamW { lr: 0.1, ..Default::default() })?;
    let good = |number: usize| tensor(&[8, 3], (10 * number + pg.rank()) as u64).to_device(pg.device());
    let mut batches: Vec<Result<Tensor>> = Vec::new();
    for number in 0..6 {
        for (_, rank, bad) in bad.iter().filter(|(before, ..)| *before == number) {
            batches.push(match bad {
                Bad::Undecodable if *rank == pg.rank() => {
                    Err(Error::Samples { indices: vec![number], reason: "torn".to_string() })
                }
                Bad::Nan if *rank == pg.rank() => Ok((good(100 + number)? * f64::NAN)?),
                _ => Ok(good(100 + number)?),
            });
        }
        batches.push(Ok(good(number)?));
    }
    let skipped = train(&ddp, &mut optimizer, batches, loss)?;
    let variables = [ddp.named_parameters(), ddp.named_frozen(), ddp.named_buffers()].concat();
    Ok((variables.into_iter().flat_map(|(_, var)| floats(&var)).collect(), skipped))
}

/// Trains with bad batches and without any: what is skipped must change no bit. Returns the variables.
pub(crate) fn bad_batches(pg: &ProcessGroup) -> Result<Vec<f32>> {
    let last = pg.world_size() - 1;
    let bad = [(0, last, Bad::Undecodable), (2, 0, Bad::Nan), (4, last, Bad::Nan), (4, 0, Bad::Undecodable)];
    let (whole, none) = trained(pg, &[])?;
    assert!(whole.iter().all(|value| value.is_finite()));
    assert_eq!((trained(pg, &bad)?, none), ((whole.clone(), bad.len()), 0));
    Ok(whole)
}
