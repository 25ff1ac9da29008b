//! The steps of sequences of several lengths, whose rows lie side by side, as in PyTorch's `PackedSequence`.
use candle_core::{Device, Result, Tensor};
use candle_ddp_tensor::function::{Function, adopt, argument};

/// The numbers of sequences in each step, which do not grow.
#[derive(Clone, Debug)]
pub(super) struct Steps {
    sizes: Vec<usize>,
    batch: usize,
    is_reverse: bool,
}

impl Steps {
    /// The steps of `batch` sequences, all of length `length`.
    pub(super) fn even(length: usize, batch: usize) -> Self {
        Self { sizes: vec![batch; length], batch, is_reverse: false }
    }

    /// The same steps, from the last to the first one if `is_reverse`.
    pub(super) fn directed(&self, is_reverse: bool) -> Self {
        Self { is_reverse, ..self.clone() }
    }

    pub(super) fn batch(&self) -> usize {
        self.batch
    }

    pub(super) fn rows(&self) -> usize {
        self.sizes.iter().sum()
    }

    /// The first row and the number of rows of each step, in the order of the steps.
    pub(super) fn order(&self) -> Vec<(usize, usize)> {
        let mut end = 0;
        let part = |&size: &usize| {
            end += size;
            (end - size, size)
        };
        let mut parts: Vec<_> = self.sizes.iter().map(part).collect();
        if self.is_reverse {
            parts.reverse();
        }
        parts
    }
}

/// A batch of sequences of several lengths, sorted by them.
pub(super) struct Packing {
    pub(super) steps: Steps,
    /// Turns rows of padded sequences into rows of steps, and back with zeros.
    pub(super) pack: Rows,
    pub(super) pad: Rows,
    /// The rows from the batch's order to the sorted one, and back.
    pub(super) sort: Rows,
    pub(super) restore: Rows,
}

impl Packing {
    /// `row` is the padded row of a step of a sequence. The lengths are at least 1 and at most `longest`.
    pub(super) fn new(
        lengths: &[usize],
        longest: usize,
        row: impl Fn(usize, usize) -> usize,
        device: &Device,
    ) -> Result<Self> {
        let mut order: Vec<usize> = (0..lengths.len()).collect();
        order.sort_by_key(|&sequence| std::cmp::Reverse(lengths[sequence]));
        let active = |step: usize| order.iter().take_while(move |&&sequence| lengths[sequence] > step);
        let sizes: Vec<usize> = (0..longest).map(|step| active(step).count()).take_while(|&size| size > 0).collect();
        let packed: Vec<usize> = (0..sizes.len())
            .flat_map(|step| active(step).map(move |&sequence| (step, sequence)))
            .map(|(step, sequence)| row(step, sequence))
            .collect();
        let mut padded = vec![packed.len(); longest * lengths.len()];
        packed.iter().enumerate().for_each(|(index, &row)| padded[row] = index);
        let mut places = vec![0; order.len()];
        order.iter().enumerate().for_each(|(place, &sequence)| places[sequence] = place);
        let index = |rows: Vec<usize>| Tensor::from_iter(rows.into_iter().map(|row| row as u32), device);
        let pack = Rows { forward: (index(packed)?, false), backward: (index(padded)?, true) };
        let sort = Rows { forward: (index(order)?, false), backward: (index(places)?, false) };
        let steps = Steps { sizes, batch: lengths.len(), is_reverse: false };
        Ok(Self { steps, pad: pack.inverse(), pack, restore: sort.inverse(), sort })
    }
}

/// A choice of rows: their numbers, and whether a row of zeros follows the last one.
#[derive(Clone)]
pub(super) struct Rows {
    forward: (Tensor, bool),
    backward: (Tensor, bool),
}

impl Rows {
    fn inverse(&self) -> Self {
        Self { forward: self.backward.clone(), backward: self.forward.clone() }
    }

    /// The chosen rows of `x`, each of which is chosen at most once.
    pub(super) fn of(&self, x: &Tensor) -> Result<Tensor> {
        adopt(chosen(&argument(x), &self.forward)?, &[x], self.inverse())
    }
}

fn chosen(x: &Tensor, (rows, with_zeros): &(Tensor, bool)) -> Result<Tensor> {
    if !with_zeros {
        return x.contiguous()?.index_select(rows, 0);
    }
    let zeros = Tensor::zeros((1, x.dim(1)?), x.dtype(), x.device())?;
    Tensor::cat(&[x, &zeros], 0)?.index_select(rows, 0)
}

impl Function for Rows {
    fn name(&self) -> &'static str {
        "rows"
    }

    fn backward(&self, gradient: &Tensor, _: &[bool]) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(chosen(gradient, &self.forward)?)])
    }
}
