//! One collective at one size: its tensors, its expected results and its bandwidth.
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
    /// Creates the problem whose larger buffer has `bytes` bytes, rounded down to whole elements and, if the elements
    /// are divided among ranks, to an equal number per rank; at least one.
    pub(crate) fn new(kind: Kind, op: ReduceOp, dtype: DType, world_size: usize, bytes: usize) -> Self {
        let elements = bytes / dtype.size_in_bytes();
        let mut problem = Self { kind, op, dtype, world_size, count: 0 };
        problem.count = (elements / problem.parts()).max(1);
        problem
    }

    /// Returns the number of elements of a rank's smaller buffer.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Returns the number of bytes of a rank's larger buffer.
    pub(crate) fn bytes(&self) -> usize {
        self.count * self.parts() * self.dtype.size_in_bytes()
    }

    pub(crate) fn op(&self) -> Option<ReduceOp> {
        self.kind.reduces().then_some(self.op)
    }

    pub(crate) fn root(&self) -> Option<usize> {
        (self.kind == Kind::Broadcast).then_some(ROOT)
    }

    /// Returns how many of the smaller buffers fit into the larger one.
    fn parts(&self) -> usize {
        match self.kind {
            Kind::AllReduce | Kind::Broadcast => 1,
            Kind::AllGather | Kind::ReduceScatter => self.world_size,
        }
    }

    /// Returns the factor that converts size over time to the bytes per second and direction on each rank's link,
    /// assuming that no more is sent than the collective needs.
    pub(crate) fn bus_factor(&self) -> f64 {
        let world_size = self.world_size as f64;
        match self.kind {
            Kind::AllReduce => 2. * (world_size - 1.) / world_size,
            Kind::AllGather | Kind::ReduceScatter => (world_size - 1.) / world_size,
            Kind::Broadcast => 1.,
        }
    }

    /// Returns the call on `rank`, with tensors that hold its values.
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

    /// Returns the number of wrong values in the result of `call`, executed once on `rank`.
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
            _ => unreachable!("call() creates no other collective"),
        })
    }
}
