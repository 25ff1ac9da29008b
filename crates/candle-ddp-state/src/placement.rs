//! The part of a parameter that a rank has, and how parts come from a flat tensor.
use crate::Result;
use candle_core::{Shape, Tensor, Var};
use candle_ddp_tensor::carry::{carried, carrying};
use std::ops::Range;

/// The part of a parameter that a rank's variable has, and so the rank's part of all that follows the parameter: its gradient, moments,
/// average and saved values. PyTorch's word, of its `DTensor`.
///
/// The variable itself carries it, so that it is known as long as the variable exists, wherever it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The whole parameter's.
    pub shape: Shape,
    /// The elements that are here.
    pub range: Range<usize>,
    pub spread: Spread,
}

/// How a parameter or a state is spread over the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spread {
    /// Every rank has all of it.
    Replicate,
    /// Other ranks have the other elements.
    Shard,
    /// Likewise, and another rank has the same elements as well, and saves them.
    Copy,
    /// Rank 0's counts for all ranks, although theirs may differ.
    RankZero,
    /// Each rank has its own.
    Own,
}

impl Spread {
    /// Whether each rank saves its own.
    pub fn is_per_rank(self) -> bool {
        !matches!(self, Self::Replicate | Self::RankZero)
    }
}

impl Placement {
    /// The placement of a tensor of this shape that every rank has.
    pub fn whole(shape: &Shape) -> Self {
        Self { shape: shape.clone(), range: 0..shape.elem_count(), spread: Spread::Replicate }
    }

    pub fn of(var: &Var) -> Self {
        Self::decode(&carried(var).unwrap_or_default()).unwrap_or_else(|| Self::whole(var.shape()))
    }

    /// A variable with these elements, which are a list.
    pub fn variable(&self, elements: &Tensor) -> Result<Var> {
        // Of the parameter's rank, by which programs group parameters.
        let mut dims = vec![1; self.shape.rank()];
        match dims.last_mut() {
            Some(last) => *last = self.range.len(),
            None if self.range.is_empty() => dims.push(0),
            None => {}
        }
        let number = |value: usize| value as u64;
        let mut fact = vec![self.spread as u64, number(self.range.start), number(self.range.end)];
        fact.extend(self.shape.dims().iter().map(|size| *size as u64));
        Ok(carrying(elements, &dims.into(), &fact)?)
    }

    fn decode(fact: &[u64]) -> Option<Self> {
        let [spread, start, end, dims @ ..] = fact else { return None };
        let spread = [Spread::Replicate, Spread::Shard, Spread::Copy].into_iter().find(|one| *one as u64 == *spread)?;
        let dims: Vec<_> = dims.iter().map(|size| *size as usize).collect();
        Some(Self { shape: dims.into(), range: *start as usize..*end as usize, spread })
    }

    /// Whether other ranks have other elements.
    pub fn is_sharded(&self) -> bool {
        self.spread.is_per_rank()
    }
}

/// Tensors one after the other in a flat one, which is cut into as many equal parts as there are ranks. The last part may extend beyond
/// them.
#[derive(Clone, Debug)]
pub struct Cut {
    /// The offset of each tensor, and the end of the last one.
    offsets: Vec<usize>,
    ranks: usize,
    part: usize,
}

impl Cut {
    /// For tensors with so many elements.
    pub fn new(elements: impl IntoIterator<Item = usize>, ranks: usize) -> Self {
        let mut offsets = vec![0];
        let mut end = 0;
        offsets.extend(elements.into_iter().map(|elements| {
            end += elements;
            end
        }));
        Self { offsets, ranks, part: end.div_ceil(ranks) }
    }

    /// With parts that can be cut into so many equal ones again.
    pub fn divisible(self, by: usize) -> Self {
        Self { part: self.part.next_multiple_of(by), ..self }
    }

    /// The elements of all tensors.
    pub fn elements(&self) -> usize {
        self.offsets[self.offsets.len() - 1]
    }

    /// The elements of each part.
    pub fn part(&self) -> usize {
        self.part
    }

    /// The elements of all parts.
    pub fn length(&self) -> usize {
        self.part() * self.ranks
    }

    /// The elements of the tensor `number` that are in `rank`'s part.
    pub fn range(&self, number: usize, rank: usize) -> Range<usize> {
        let (start, end) = (self.offsets[number], self.offsets[number + 1]);
        let within = |at: usize| at.clamp(start, end) - start;
        within(rank * self.part())..within((rank + 1) * self.part())
    }

    /// The offset of these elements in that part.
    pub fn offset(&self, number: usize, rank: usize) -> usize {
        let at = (self.offsets[number] + self.range(number, rank).start).saturating_sub(rank * self.part());
        at.min(self.part() - self.range(number, rank).len())
    }

    /// The tensor `number`, as a list, in all parts.
    pub fn whole(&self, parts: &Tensor, number: usize) -> Result<Tensor> {
        Ok(parts.narrow(0, self.offsets[number], self.offsets[number + 1] - self.offsets[number])?)
    }

    /// Its elements in `rank`'s part.
    pub fn piece(&self, part: &Tensor, number: usize, rank: usize) -> Result<Tensor> {
        Ok(part.narrow(0, self.offset(number, rank), self.range(number, rank).len())?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    /// Also with tensors that have no elements, and parts beyond all tensors.
    #[test]
    fn each_element_is_in_one_part() -> Result<()> {
        for (ranks, by) in (1..=9).flat_map(|ranks| [(ranks, 1), (ranks, 2), (ranks, 3)]) {
            let sizes = [3, 0, 5, 1, 4, 0];
            let cut = Cut::new(sizes, ranks).divisible(by);
            assert_eq!((cut.elements(), cut.length()), (13, 13usize.next_multiple_of(ranks * by)));
            let flat = Tensor::arange(0u32, cut.length() as u32, &Device::Cpu)?;
            for (number, size) in sizes.into_iter().enumerate() {
                let whole = cut.whole(&flat, number)?.to_vec1::<u32>()?;
                let (mut pieces, mut next) = (Vec::new(), 0);
                for rank in 0..ranks {
                    let range = cut.range(number, rank);
                    assert!(range.is_empty() || range.start == next);
                    next = next.max(range.end);
                    let part = flat.narrow(0, rank * cut.part(), cut.part())?;
                    pieces.extend(cut.piece(&part, number, rank)?.to_vec1::<u32>()?);
                }
                assert_eq!((whole.len(), whole), (size, pieces));
            }
        }
        Ok(())
    }

    #[test]
    fn a_variable_knows_its_placement_wherever_it_is() {
        for (shape, range) in
            [(vec![4, 5], 3..11), (vec![4, 5], 0..20), (vec![4, 5], 7..7), (vec![], 0..1), (vec![], 1..1)]
        {
            for spread in [Spread::Shard, Spread::Copy] {
                let placement = Placement { shape: shape.clone().into(), range: range.clone(), spread };
                let values = Tensor::zeros(range.len(), DType::F32, &Device::Cpu).unwrap();
                let var = placement.variable(&values).unwrap();
                assert_eq!((var.elem_count(), Placement::of(&var)), (range.len(), placement));
                assert!(var.rank() == shape.len().max(usize::from(range.is_empty())));
            }
        }
        let whole = Var::zeros((2, 3), DType::I64, &Device::Cpu).unwrap();
        let placement = Placement { shape: (2, 3).into(), range: 0..6, spread: Spread::Replicate };
        assert_eq!(Placement::of(&whole), placement);
    }
}
