//! The histogram of a tensor, with the buckets of PyTorch's and TensorFlow's writers.

/// The numbers of values between limits.
pub(super) struct Histogram {
    pub(super) min: f64,
    pub(super) max: f64,
    pub(super) num: f64,
    pub(super) sum: f64,
    pub(super) sum_squares: f64,
    /// The upper limit of each bucket.
    pub(super) limits: Vec<f64>,
    /// The number of values that each has, of those below its limit. The last bucket also has the values at its limit.
    pub(super) counts: Vec<f64>,
}

impl Histogram {
    /// Counts finite values, at least one.
    pub(super) fn of(values: &[f64]) -> Self {
        let limits = limits();
        let mut counts = vec![0.; limits.len() - 1];
        for value in values {
            // As numpy.histogram does, which leaves out what lies beyond the limits.
            let above = limits.partition_point(|limit| limit <= value);
            match above {
                0 => {}
                above if above < limits.len() => counts[above - 1] += 1.,
                _ if limits.last() == Some(value) => counts[above - 2] += 1.,
                _ => {}
            }
        }
        // One empty bucket stays below the first that is not, so that its lower limit is known.
        let first = counts.iter().position(|count| *count > 0.).unwrap_or(0);
        let last = counts.iter().rposition(|count| *count > 0.).unwrap_or(0);
        let mut kept = (limits[first..=last + 1].to_vec(), vec![0.]);
        kept.1.extend(&counts[first..=last]);
        Self {
            min: values.iter().copied().fold(f64::INFINITY, f64::min),
            max: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            num: values.len() as f64,
            sum: values.iter().sum(),
            sum_squares: values.iter().map(|value| value * value).sum(),
            limits: kept.0,
            counts: kept.1,
        }
    }
}

/// PyTorch's "tensorflow" bins: 0, and on both sides 1e-12 and its multiples by 1.1 up to 1e20.
fn limits() -> Vec<f64> {
    let positive: Vec<f64> =
        std::iter::successors(Some(1e-12), |limit| Some(limit * 1.1)).take_while(|limit| *limit < 1e20).collect();
    let negative = positive.iter().rev().map(|limit| -limit);
    negative.chain([0.]).chain(positive.iter().copied()).collect()
}
