//! One collective at one size: its tensors, what must come out, and how its bandwidth is reckoned.
use crate::values;
use candle_core::{DType, Device};
use candle_ddp::backend::Collective;
use candle_ddp::{ReduceOp, Result};
use clap::ValueEnum;

/// The collectives that can be measured.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum Kind {
    AllReduce,
    Broadcast,
    AllGather,
    ReduceScatter,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::Broadcast => "broadcast",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
        }
    }

    pub(crate) fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter)
    }
}

/// The rank that broadcasts.
const ROOT: usize = 0;

/// A collective at one size, the same on every rank.
pub(crate) struct Problem {
    pub(crate) kind: Kind,
    pub(crate) dtype: DType,
    pub(crate) world_size: usize,
    op: ReduceOp,
    count: usize,
}

impl Problem {
    /// The problem whose larger buffer is of `bytes` bytes, or the little less that whole elements, the same number for
    /// every rank where they are shared out, leave; but never none at all.
    pub(crate) fn new(kind: Kind, op: ReduceOp, dtype: DType, world_size: usize, bytes: usize) -> Self {
        let elements = bytes / dtype.size_in_bytes();
        let mut problem = Self { kind, op, dtype, world_size, count: 0 };
        problem.count = (elements / problem.parts()).max(1);
        problem
    }

    /// Elements of the smaller buffer of a rank.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Bytes of the larger buffer of a rank.
    pub(crate) fn bytes(&self) -> usize {
        self.count * self.parts() * self.dtype.size_in_bytes()
    }

    pub(crate) fn op(&self) -> Option<ReduceOp> {
        self.kind.reduces().then_some(self.op)
    }

    pub(crate) fn root(&self) -> Option<usize> {
        (self.kind == Kind::Broadcast).then_some(ROOT)
    }

    /// How many of the smaller buffers the larger one holds.
    fn parts(&self) -> usize {
        match self.kind {
            Kind::AllReduce | Kind::Broadcast => 1,
            Kind::AllGather | Kind::ReduceScatter => self.world_size,
        }
    }

    /// What to multiply size over time with to get the bytes that go over each rank's link, one way, in a second, when
    /// no more is sent than the collective needs.
    pub(crate) fn bus_factor(&self) -> f64 {
        let world_size = self.world_size as f64;
        match self.kind {
            Kind::AllReduce => 2. * (world_size - 1.) / world_size,
            Kind::AllGather | Kind::ReduceScatter => (world_size - 1.) / world_size,
            Kind::Broadcast => 1.,
        }
    }

    /// The call on `rank`, with tensors that hold its values.
    pub(crate) fn call(&self, rank: usize, device: &Device) -> Result<Collective> {
        let tensor = |len| values::tensor(self.dtype, rank, len, device);
        let (part, whole) = (self.count, self.count * self.parts());
        Ok(match self.kind {
            Kind::AllReduce => Collective::AllReduce { tensor: tensor(whole)?, op: self.op },
            Kind::Broadcast => Collective::Broadcast { tensor: tensor(whole)?, root: ROOT },
            Kind::AllGather => Collective::AllGather { output: tensor(whole)?, input: tensor(part)? },
            Kind::ReduceScatter => {
                Collective::ReduceScatter { output: tensor(part)?, input: tensor(whole)?, op: self.op }
            }
        })
    }

    /// How many values of the result of `call`, carried out once on `rank`, are not what they must be.
    pub(crate) fn errors(&self, rank: usize, call: &Collective) -> Result<u64> {
        let reduced = || values::reduced(self.dtype, self.op, self.world_size);
        Ok(match call {
            Collective::AllReduce { tensor, .. } => values::differences(tensor, &reduced(), 0)?,
            Collective::Broadcast { tensor, root } => values::differences(tensor, &values::of(*root), 0)?,
            Collective::AllGather { output, .. } => {
                let part =
                    |rank| values::differences(&output.narrow(0, rank * self.count, self.count)?, &values::of(rank), 0);
                (0..self.world_size).map(part).sum::<Result<u64>>()?
            }
            Collective::ReduceScatter { output, .. } => values::differences(output, &reduced(), rank * self.count)?,
            _ => unreachable!("no other collective is ever made here"),
        })
    }
}
