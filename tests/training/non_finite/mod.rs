//! Steps whose gradients are not finite are left out on all ranks, or end the run on all.
mod ignored;
mod passes;
mod skip;
mod stop;

use crate::common::{filled, floats, tensor};
use candle_core::{DType, Module, Tensor};
use candle_ddp::nn::{BatchNorm, Linear, batch_norm, linear};
use candle_ddp::{Buckets, DdpOptions, DistributedDataParallel, OnNonFinite, ProcessGroup, Result, Role, Unused};
use candle_nn::{ModuleT, VarBuilder};

/// Layers with buffers, and parameters that are frozen and unused.
struct Net {
    a: Linear,
    norm: BatchNorm,
    b: Linear,
}

impl Net {
    fn new(vb: VarBuilder) -> candle_core::Result<Self> {
        linear(2, 2, vb.pp("unused"))?;
        let frozen = linear(3, 3, vb.pp("frozen"))?;
        drop(frozen);
        Ok(Self {
            a: linear(3, 4, vb.pp("a"))?,
            norm: batch_norm(4, 1e-5, vb.pp("norm"))?,
            b: linear(4, 2, vb.pp("b"))?,
        })
    }
}

/// What is wrong with a step of one rank.
#[derive(Clone, Copy, Debug)]
enum Bad {
    Nothing,
    /// The inputs.
    Inputs(f64),
    /// The gradients of the first layer alone.
    First(f64),
    /// Those of the last layer alone, whose bias does not see it.
    Last(f64),
}

type Ddp = DistributedDataParallel<Net>;

fn skip(at_most: u64) -> DdpOptions {
    DdpOptions { on_non_finite: Some(OnNonFinite::Skip { at_most }), ..Default::default() }
}

fn stop() -> DdpOptions {
    DdpOptions { on_non_finite: Some(OnNonFinite::Stop), ..Default::default() }
}

/// Each parameter in its own bucket.
fn small(options: DdpOptions) -> DdpOptions {
    DdpOptions { buckets: Buckets { bucket_cap_mb: 0., first_bucket_mb: 0., ..options.buckets }, ..options }
}

fn model(pg: &ProcessGroup, options: DdpOptions) -> Result<Ddp> {
    let role = |name: &str| if name.starts_with("frozen") { Role::Frozen } else { Role::Parameter };
    let unused = Unused::AllowNames(std::sync::Arc::new(|name: &str| name.starts_with("unused")));
    let options = DdpOptions { role: std::sync::Arc::new(role), unused, ..options };
    Ok(filled(pg, Net::new, options, 1)?.0)
}

fn loss(ddp: &Ddp, step: u64, bad: Bad) -> Result<Tensor> {
    let rank = ddp.process_group().rank() as u64;
    let x = tensor(&[5, 3], 100 * step + rank);
    ddp.call(|net| {
        let (inputs, first, last) = match bad {
            Bad::Nothing => (0., 0., 0.),
            Bad::Inputs(value) => (value, 0., 0.),
            Bad::First(value) => (0., value, 0.),
            Bad::Last(value) => (0., 0., value),
        };
        let x = (x + inputs)?.to_dtype(net.a.weight().dtype())?;
        let hidden = net.norm.forward_t(&net.a.forward(&x)?, true)?;
        let output = net.b.forward(&hidden)?.to_dtype(DType::F32)?;
        let loss = output.sqr()?.mean_all()?;
        // A term whose gradient is the factor.
        let with = |loss: Tensor, of: &Tensor, factor: f64| -> Result<Tensor> {
            let of = of.to_dtype(DType::F32)?.sum_all()?;
            Ok(if factor == 0. { loss } else { (loss + (of * factor)?)? })
        };
        let loss = with(loss, net.a.weight(), first)?;
        with(loss, net.b.weight(), last)
    })
}

/// Parameters and buffers.
fn state(ddp: &Ddp) -> Vec<f32> {
    let all = [ddp.named_parameters(), ddp.named_frozen(), ddp.named_buffers()].concat();
    all.into_iter().flat_map(|(_, var)| floats(&var)).collect()
}
