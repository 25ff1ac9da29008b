//! The shape of a call's tensor, as far as ranks must agree on it. It travels with the call as a number.
use crate::texts;
use std::cell::Cell;

/// The dimensions that say which element is which: all but the dimensions of size 1.
pub fn significant(dims: &[usize]) -> impl Iterator<Item = usize> + '_ {
    dims.iter().copied().filter(|size| *size != 1)
}

/// A number for a shape, or 0 for a shape that says nothing. A one-dimensional tensor, which is a buffer for values of any shape,
/// and a tensor without elements have such a shape. Dimensions of size 1 do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShapeCode(u32);

thread_local! {
    /// The shape that this thread has learnt last.
    static LEARNT: Cell<u32> = const { Cell::new(0) };
}

impl ShapeCode {
    /// A shape that says nothing.
    pub(crate) const NONE: Self = Self(0);

    /// The number for a shape.
    #[inline]
    pub fn of(dims: &[usize]) -> Self {
        if significant(dims).nth(1).is_none() || dims.contains(&0) {
            return Self::NONE;
        }
        let mix = |hash: u64, size: usize| (hash ^ size as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        let hash = significant(dims).fold(0x243f_6a88_85a3_08d3, mix);
        // Not 0.
        let code = ((hash >> 32) as u32 ^ hash as u32) | 1;
        if LEARNT.get() != code {
            LEARNT.set(code);
            if !texts::is_known(code) {
                texts::learn(code, significant(dims).map(|size| size.to_string()).collect::<Vec<_>>().join(", "));
            }
        }
        Self(code)
    }

    /// Whether tensors of these shapes have their elements in the same places.
    pub(crate) fn agrees(self, other: Self) -> bool {
        self == other || self == Self::NONE || other == Self::NONE
    }

    /// `2, 3`, if the shape says something, and this rank knows its text.
    pub(crate) fn text(self) -> Option<String> {
        if self == Self::NONE { None } else { texts::known(self.0) }
    }

    /// The number that is sent.
    pub(crate) fn code(self) -> u32 {
        self.0
    }

    /// The shape for a received number.
    pub(crate) fn from_code(code: u32) -> Self {
        Self(code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_agree_that_put_each_element_in_the_same_place() {
        let shape = |dims: &[usize]| ShapeCode::of(dims);
        for flat in [&[][..], &[6], &[6, 1], &[1, 6], &[1, 1], &[0, 3], &[2, 0, 3]] {
            assert_eq!((shape(flat), shape(flat).text()), (ShapeCode::NONE, None), "{flat:?}");
            assert!(shape(flat).agrees(shape(&[2, 3])) && shape(&[2, 3]).agrees(shape(flat)));
        }
        assert!(shape(&[2, 3]).agrees(shape(&[2, 1, 3])) && !shape(&[2, 3]).agrees(shape(&[3, 2])));
        assert!(!shape(&[2, 6]).agrees(shape(&[2, 2, 3])) && !shape(&[2, 2, 3]).agrees(shape(&[2, 3, 2])));
        assert_eq!(shape(&[3, 2, 1]).text().as_deref(), Some("3, 2"));
        assert_eq!(ShapeCode::from_code(shape(&[2, 3]).code()), shape(&[2, 3]));
    }
}
