//! One rank under test: its tensors, its calls, and the comparison of results.
use crate::backend::{Collective, Communicator, P2pOp, ReduceOp, Work, bytes};
use crate::error::describe;
use candle_core::{DType, Device, Tensor};
use std::fmt;
use std::sync::atomic::AtomicUsize;

/// The result of a case.
pub(super) type Outcome<T = ()> = std::result::Result<T, Fault>;

/// A fault of the engine.
pub(super) struct Fault {
    pub(super) reason: String,
    /// The engine's error, if that is the fault.
    pub(super) error: Option<Box<crate::Error>>,
}

impl Fault {
    pub(super) fn new(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), error: None }
    }

    fn at(self, place: fmt::Arguments) -> Self {
        Self { reason: format!("{place}: {}", self.reason), ..self }
    }
}

impl From<crate::Error> for Fault {
    fn from(error: crate::Error) -> Self {
        Self { reason: error.to_string(), error: Some(Box::new(error)) }
    }
}

impl From<candle_core::Error> for Fault {
    fn from(error: candle_core::Error) -> Self {
        crate::Error::from(error).into()
    }
}

pub(super) struct Rank<'a> {
    pub(super) dtypes: &'a [DType],
    pub(super) counts: &'a [usize],
    pub(super) reductions: &'a [ReduceOp],
    pub(super) average_is_rounded_once: bool,
    pub(super) device: &'a Device,
    /// Two groups of all ranks.
    pub(super) groups: [&'a dyn Communicator; 2],
    /// The number of ranks that have reached barriers, if ranks are threads.
    pub(super) come: Option<&'a AtomicUsize>,
}

impl Rank<'_> {
    pub(super) fn number(&self) -> usize {
        self.groups[0].rank()
    }

    pub(super) fn world_size(&self) -> usize {
        self.groups[0].world_size()
    }

    /// The previous and the next rank in the ring.
    pub(super) fn neighbours(&self) -> (usize, usize) {
        let (rank, world_size) = (self.number(), self.world_size());
        ((rank + world_size - 1) % world_size, (rank + 1) % world_size)
    }

    pub(super) fn start(&self, collective: Collective) -> Outcome<Work> {
        Ok(self.groups[0].start(collective)?)
    }

    pub(super) fn start_batch(&self, batch: Vec<P2pOp>) -> Outcome<Work> {
        Ok(self.groups[0].start_batch(batch)?)
    }

    pub(super) fn run(&self, collective: Collective) -> Outcome {
        Ok(self.groups[0].run(collective)?)
    }

    /// Calls `body` with every dtype and count.
    pub(super) fn moves(&self, body: impl Fn(DType, usize) -> Outcome) -> Outcome {
        for &dtype in self.dtypes {
            for count in self.counts(dtype) {
                body(dtype, count).map_err(|fault| fault.at(format_args!("{}[{count}]", dtype.as_str())))?;
            }
        }
        Ok(())
    }

    /// Calls `body` with every dtype and reduction for small counts, and with the first reduction only for large ones.
    pub(super) fn reductions(&self, body: impl Fn(DType, ReduceOp, usize) -> Outcome) -> Outcome {
        for &op in self.reductions {
            self.moves(|dtype, count| {
                let is_undefined = op == ReduceOp::Avg && !dtype.is_float();
                if is_undefined || count > 1000 && Some(&op) != self.reductions.first() {
                    return Ok(());
                }
                body(dtype, op, count).map_err(|fault| fault.at(format_args!("{op}")))
            })?;
        }
        Ok(())
    }

    fn counts(&self, dtype: DType) -> impl Iterator<Item = usize> {
        let most = if matches!(dtype, DType::F32 | DType::BF16) { usize::MAX } else { 10_000 };
        let least = usize::from(!self.device.is_cpu());
        self.counts.iter().copied().filter(move |count| (least..=most).contains(count))
    }

    /// Whether the world is small enough for a case that moves much data but does not depend on the number of ranks.
    pub(super) fn is_small_world(&self) -> bool {
        (2..=3).contains(&self.world_size())
    }

    /// More elements than the largest count.
    pub(super) fn many(&self) -> usize {
        4 * self.counts.iter().max().copied().unwrap_or(1).max(1)
    }

    /// `value` of the indices from 0 up to `count`. It repeats after `period` elements, so that candle does the work
    /// per element.
    pub(super) fn periodic(
        &self,
        dtype: DType,
        count: usize,
        period: usize,
        value: impl Fn(usize) -> f64,
    ) -> Outcome<Tensor> {
        let length = (period * 1024_usize.div_ceil(period)).min(count);
        let values: Vec<f64> = (0..length).map(value).collect();
        let first = Tensor::from_vec(values, length, &Device::Cpu)?.to_dtype(dtype)?;
        let tensor = if count > length {
            let rows = count.div_ceil(length);
            first.broadcast_as((rows, length))?.contiguous()?.flatten_all()?.narrow(0, 0, count)?.copy()?
        } else {
            first
        };
        Ok(tensor.to_device(self.device)?)
    }

    pub(super) fn full(&self, dtype: DType, count: usize, value: f64) -> Outcome<Tensor> {
        self.periodic(dtype, count, 1, |_| value)
    }

    /// The relative tolerance of averages.
    pub(super) fn tolerance(&self, op: ReduceOp, dtype: DType) -> f64 {
        match (op, dtype) {
            (ReduceOp::Avg, DType::F16) if !self.average_is_rounded_once => 3e-3,
            (ReduceOp::Avg, DType::BF16) if !self.average_is_rounded_once => 2e-2,
            (ReduceOp::Avg, _) => 1e-6,
            _ => 0.0,
        }
    }

    pub(super) fn assert_equal(&self, found: &Tensor, expected: &Tensor) -> Outcome {
        self.assert_near(found, expected, 0.0)
    }

    /// Checks that every element of `found` equals `expected` within the relative `tolerance`.
    pub(super) fn assert_near(&self, found: &Tensor, expected: &Tensor, tolerance: f64) -> Outcome {
        let values = |tensor: &Tensor| tensor.flatten_all()?.to_device(&Device::Cpu);
        let (mut found, mut expected) = (values(found)?, values(expected)?);
        if found.dims() != expected.dims() {
            let [found, expected] = [&found, &expected].map(|tensor| describe(tensor.dtype(), tensor.shape()));
            return Err(Fault::new(format!("the result is {found} where {expected} is expected")));
        }
        // Most results have the same bits; without optimisation, candle's operations are much slower than this.
        let bits = |tensor: &Tensor| bytes(tensor, <[u8]>::to_vec);
        if found.dtype() == expected.dtype() && bits(&found)? == bits(&expected)? {
            return Ok(());
        }
        let right = if tolerance == 0.0 {
            found.eq(&expected)?
        } else {
            (found, expected) = (found.to_dtype(DType::F64)?, expected.to_dtype(DType::F64)?);
            (&found - &expected)?.abs()?.le(&(expected.abs()? * tolerance)?)?
        };
        let right = right.to_vec1::<u8>()?;
        if !right.contains(&0) {
            return Ok(());
        }
        let index = right.iter().position(|right| *right == 0).unwrap_or_default();
        let at = |tensor: &Tensor| tensor.get(index)?.to_dtype(DType::F64)?.to_scalar::<f64>();
        let (found, expected) = (at(&found)?, at(&expected)?);
        Err(Fault::new(format!("element {index} is {found} where {expected} is expected")))
    }
}
