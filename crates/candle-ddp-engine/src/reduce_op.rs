use std::fmt;

/// How the values of all ranks are reduced to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum. Integers wrap.
    Sum,
    /// The sum divided by the number of ranks; floating point only.
    Avg,
    /// The smallest value; NaN if any value is NaN (NCCL may treat NaN differently).
    Min,
    /// The largest value; NaN if any value is NaN (NCCL may treat NaN differently).
    Max,
    /// The product. Integers wrap.
    Prod,
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Avg => "avg",
            Self::Min => "min",
            Self::Max => "max",
            Self::Prod => "prod",
        })
    }
}
