//! Many indices, in as little memory as they need.
use candle_ddp_state::hash::content_64;

/// Indices, in half the memory where they fit in 32 bits, and in none where they are all in their order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Indices {
    /// `0..len`.
    InOrder(usize),
    Narrow(Vec<u32>),
    Wide(Vec<u64>),
}

impl Indices {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::InOrder(len) => *len,
            Self::Narrow(indices) => indices.len(),
            Self::Wide(indices) => indices.len(),
        }
    }

    pub(super) fn get(&self, position: usize) -> Option<usize> {
        (position < self.len()).then(|| self.at(position))
    }

    fn at(&self, position: usize) -> usize {
        match self {
            Self::InOrder(_) => position,
            Self::Narrow(indices) => indices[position] as usize,
            Self::Wide(indices) => indices[position] as usize,
        }
    }

    /// The indices at these places, all of which it must have.
    pub(super) fn at_places<P: ExactSizeIterator<Item = usize> + Clone>(
        self,
        places: P,
    ) -> impl ExactSizeIterator<Item = usize> + Clone {
        places.map(move |place| self.at(place))
    }

    pub(super) fn iter(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        (0..self.len()).map(|position| self.at(position))
    }

    /// The least number that is above all of them.
    pub(super) fn bound(&self) -> usize {
        let above = |max: Option<u64>| max.map_or(0, |max| (max as usize).saturating_add(1));
        match self {
            Self::InOrder(len) => *len,
            Self::Narrow(indices) => above(indices.iter().copied().max().map(u64::from)),
            Self::Wide(indices) => above(indices.iter().copied().max()),
        }
    }

    /// A hash of all of them.
    pub(super) fn fingerprint(&self) -> u64 {
        match self {
            Self::InOrder(len) => content_64(format!("0..{len}").as_bytes()),
            Self::Narrow(indices) => content_64(bytemuck::cast_slice(indices)),
            Self::Wide(indices) => content_64(bytemuck::cast_slice(indices)),
        }
    }
}

impl FromIterator<usize> for Indices {
    fn from_iter<I: IntoIterator<Item = usize>>(indices: I) -> Self {
        let mut indices = indices.into_iter();
        let mut narrow = Vec::with_capacity(indices.size_hint().0);
        while let Some(index) = indices.next() {
            match u32::try_from(index) {
                Ok(index) => narrow.push(index),
                Err(_) => {
                    let before = narrow.into_iter().map(u64::from);
                    return Self::Wide(before.chain([index as u64]).chain(indices.map(|index| index as u64)).collect());
                }
            }
        }
        Self::Narrow(narrow)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_take_the_width_that_they_need() {
        let narrow: Indices = [3, 0, u32::MAX as usize].into_iter().collect();
        assert_eq!((narrow.len(), narrow.get(2), narrow.get(3)), (3, Some(u32::MAX as usize), None));
        assert!(matches!(narrow, Indices::Narrow(_)));
        assert_eq!(narrow.bound(), 1 << 32);
        let wide: Indices = [3, 1 << 40, 7].into_iter().collect();
        assert!(matches!(&wide, Indices::Wide(indices) if *indices == [3, 1 << 40, 7]));
        assert_eq!((wide.bound(), wide.get(1)), ((1 << 40) + 1, Some(1 << 40)));
        let none: Indices = [].into_iter().collect();
        assert_eq!(
            (none.len(), none.bound(), Indices::InOrder(4).get(3), Indices::InOrder(4).get(4)),
            (0, 0, Some(3), None)
        );
    }
}
