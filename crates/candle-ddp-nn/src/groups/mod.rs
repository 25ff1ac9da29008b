//! Normalisation of groups of channels, the common core of GroupNorm and InstanceNorm, whose groups have one channel.
mod cpu;
mod cuda;
mod extents;

use candle_core::{DType, Result, Tensor};
use candle_ddp_tensor::Error;
use candle_ddp_tensor::error::describe;
use candle_ddp_tensor::function::{Function, apply};
use extents::Extents;

/// Normalises each sample's groups of channels, and multiplies and shifts each channel.
#[derive(Clone, Debug)]
pub(super) struct Groups {
    weight_and_bias: Option<(Tensor, Tensor)>,
    channels: usize,
    groups: usize,
    eps: f64,
}

impl Groups {
    pub(super) fn new(
        weight_and_bias: Option<(Tensor, Tensor)>,
        channels: usize,
        groups: usize,
        eps: f64,
    ) -> Result<Self> {
        if groups == 0 || !channels.is_multiple_of(groups) {
            let reason = format!("it must divide num_channels, which is {channels}, but is {groups}");
            return Err(Error::invalid("num_groups", reason).into());
        }
        if eps < 0. {
            return Err(Error::invalid("eps", format!("it must not be negative, but is {eps}")).into());
        }
        let parameters = weight_and_bias.iter().flat_map(|(weight, bias)| [("weight", weight), ("bias", bias)]);
        for (name, tensor) in parameters {
            if tensor.dims() != [channels] {
                let is = describe(tensor.dtype(), tensor.shape());
                return Err(Error::invalid(name, format!("it must have the shape ({channels}), but is {is}")).into());
            }
        }
        Ok(Self { weight_and_bias, channels, groups, eps })
    }

    /// `input` is the name of `x` in messages.
    pub(super) fn forward(&self, x: &Tensor, input: &'static str) -> Result<Tensor> {
        let Self { weight_and_bias, channels, groups, eps } = self;
        if x.rank() < 2 || x.dim(1)? != *channels {
            let is = describe(x.dtype(), x.shape());
            let reason = format!("it must be (N, {channels}) or (N, {channels}, …), not {is}");
            return Err(Error::invalid(input, reason).into());
        }
        let extents = Extents {
            samples: x.dim(0)?,
            groups: *groups,
            in_group: channels / groups,
            spatial: x.dims()[2..].iter().product(),
        };
        let values = x.detach().contiguous()?;
        let parameters = weight_and_bias.as_ref().map(|(weight, bias)| [weight, bias]);
        let (y, statistics) = if x.device().is_cuda() {
            let (y, statistics) = cuda::forward(&values, extents, parameters, *eps)?;
            (y, Statistics::OnGpu(statistics))
        } else {
            let (y, statistics) = cpu::forward(&values, extents, parameters, *eps)?;
            (y, Statistics::OnCpu(statistics))
        };
        let function = GroupNormFunction {
            x: values,
            extents,
            statistics,
            weight: parameters.map(|[weight, _]| weight.detach()),
            dtypes: parameters.map(|parameters| parameters.map(Tensor::dtype)),
        };
        let mut arguments = vec![x];
        arguments.extend(parameters.into_iter().flatten());
        apply(&arguments, y, function)
    }
}

/// The values that the backward pass needs.
enum Statistics {
    /// Mean and 1 / deviation of each group.
    OnCpu(Vec<[f64; 2]>),
    OnGpu(cuda::Statistics),
}

/// The function of x and, if there are any, weight and bias.
struct GroupNormFunction {
    /// Contiguous.
    x: Tensor,
    extents: Extents,
    statistics: Statistics,
    weight: Option<Tensor>,
    /// The dtypes of weight and bias.
    dtypes: Option<[DType; 2]>,
}

impl Function for GroupNormFunction {
    fn name(&self) -> &'static str {
        "group-norm"
    }

    fn backward(&self, dy: &Tensor, _: &[bool]) -> Result<Vec<Option<Tensor>>> {
        let Self { x, extents, statistics, weight, dtypes } = self;
        let weight = weight.as_ref();
        let (dx, of_parameters) = match statistics {
            Statistics::OnCpu(statistics) => cpu::backward(x, dy, *extents, statistics, (weight, *dtypes))?,
            Statistics::OnGpu(statistics) => cuda::backward(x, dy, *extents, statistics, (weight, *dtypes))?,
        };
        Ok(std::iter::once(dx).chain(of_parameters).map(Some).collect())
    }
}
