//! The part of a parameter that a rank has.
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

/// How a parameter is spread over the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spread {
    /// Every rank has all of it.
    Replicate,
    /// Other ranks have the other elements.
    Shard,
    /// Likewise, and another rank has the same elements as well, and saves them.
    Copy,
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
        self.spread != Spread::Replicate
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

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
