//! The part of a state that a rank has.
use super::pieces::{PART_OF, of_piece_key, piece_key};
use super::{Dict, begin};
use crate::Result;
use crate::placement::{Placement, Spread};
use candle_core::{Device, Tensor};
use std::collections::HashMap;
use std::ops::Range;

/// The part of a state that a rank has.
#[derive(Debug)]
pub struct Share {
    pub spread: Spread,
    /// The entries that this rank saves. One rank saves those that all have.
    pub dict: Dict,
    /// Entries that another rank has as well, and saves.
    copies: Dict,
    /// For each entry of which the ranks have parts, the elements that are here.
    ranges: HashMap<String, Range<usize>>,
}

impl Share {
    pub fn new(spread: Spread, dict: Dict) -> Self {
        Self { spread, dict, copies: Dict::new(), ranges: HashMap::new() }
    }

    /// The beginning of a state of `kind`. If it is sharded, each rank has parts of some entries.
    pub fn begin(kind: &str, is_sharded: bool) -> Result<Self> {
        Ok(match is_sharded {
            true => Self::new(Spread::Shard, begin(&format!("{PART_OF}{kind}"))?),
            false => Self::new(Spread::Replicate, begin(kind)?),
        })
    }

    /// Adds what is here of the entry `key`.
    pub fn insert(&mut self, key: &str, Placement { range, spread, .. }: &Placement, here: Tensor) -> Result<()> {
        let dict = match spread {
            Spread::Shard => &mut self.dict,
            Spread::Copy => &mut self.copies,
            _ => {
                self.dict.insert(key.to_string(), here);
                return Ok(());
            }
        };
        if !range.is_empty() {
            self.ranges.insert(key.to_string(), range.clone());
            dict.insert(piece_key(key, range.start), here.flatten_all()?);
        }
        Ok(())
    }

    /// Spreads it in this way, unless each rank saves its own already.
    pub fn or(self, spread: Spread) -> Self {
        if self.spread.is_per_rank() { self } else { Self { spread, ..self } }
    }

    /// All that is here.
    pub fn all(self) -> Dict {
        self.dict.into_iter().chain(self.copies).collect()
    }

    /// The elements of the saved entry `key`, which has `elements`, that this rank needs.
    pub fn needs(&self, key: &str, elements: usize) -> Range<usize> {
        let piece = of_piece_key(key).filter(|_| self.spread == Spread::Shard);
        let Some((whole, start)) = piece else { return 0..elements };
        let within = |at: usize| at.clamp(start, start + elements) - start;
        self.ranges.get(whole).map_or(0..0, |own| within(own.start)..within(own.end))
    }
}

/// Gives `dict` the saved entry `key` of this shape, of which only those elements that are [needed](Share::needs) are there: `part`, a
/// list. The others are one element, repeated, and take no memory.
pub fn insert_needed(dict: &mut Dict, key: &str, shape: &[usize], needed: Range<usize>, part: Tensor) -> Result<()> {
    let all = shape.iter().product();
    let Some((whole, start)) = of_piece_key(key).filter(|_| needed.len() < all) else {
        dict.insert(key.to_string(), part.reshape(shape)?);
        return Ok(());
    };
    for absent in [0..needed.start, needed.end..all].into_iter().filter(|absent| !absent.is_empty()) {
        let one = Tensor::zeros(1, part.dtype(), &Device::Cpu)?;
        dict.insert(piece_key(whole, start + absent.start), one.broadcast_as(absent.len())?);
    }
    if !needed.is_empty() {
        dict.insert(piece_key(whole, start + needed.start), part);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Shape};

    #[test]
    fn a_rank_saves_its_elements_and_needs_no_others() -> Result<()> {
        let elements = |range: Range<usize>| Tensor::arange(range.start as u32, range.end as u32, &Device::Cpu);
        let placed = |range, spread| Placement { shape: Shape::from((3, 4)), range, spread };
        let mut share = Share::begin("list", true)?;
        share.insert("all", &Placement::whole(&Shape::from(2)), elements(0..2)?)?;
        share.insert("own", &placed(4..9, Spread::Shard), elements(4..9)?.reshape((1, 5))?)?;
        share.insert("copy", &placed(4..9, Spread::Copy), elements(4..9)?)?;
        share.insert("none", &placed(9..9, Spread::Shard), elements(9..9)?)?;
        // The elements of the piece of `whole` that begins at `start`.
        let needs = |whole: &str, start, elements| share.needs(&format!("{whole}@{start}"), elements);
        for whole in ["own", "copy"] {
            let needed = [(0, 4), (0, 12), (3, 4), (8, 4), (9, 3)].map(|(start, len)| needs(whole, start, len).len());
            assert_eq!(needed, [0, 5, 3, 1, 0]);
            assert_eq!((needs(whole, 3, 4), needs(whole, 8, 4)), (1..4, 0..1));
        }
        assert_eq!((needs("none", 0, 12), needs("other", 0, 12), share.needs("all", 2)), (0..0, 0..0, 0..2));
        assert_eq!(Share::new(Spread::Own, Dict::new()).needs("own@4", 5), 0..5);
        // Elements that are not needed have a place, but no memory.
        let mut dict = Dict::new();
        insert_needed(&mut dict, "own@2", &[10], 2..7, elements(4..9)?)?;
        let mut found: Vec<_> = dict.iter().map(|(key, part)| (key.as_str(), part.elem_count())).collect();
        found.sort_unstable();
        assert_eq!(found, [("own@2", 2), ("own@4", 5), ("own@9", 3)]);
        assert_eq!((dict["own@4"].to_vec1::<u32>()?, dict["own@9"].stride()), (vec![4, 5, 6, 7, 8], &[0][..]));
        assert_eq!(dict["own@9"].dtype(), DType::U32);
        let keys = |dict: Dict| dict.into_keys().collect::<std::collections::BTreeSet<_>>();
        let all = ["all", "kind", "own@4"].map(str::to_string);
        assert_eq!(keys(share.dict.clone()), all.clone().into());
        assert_eq!(keys(share.all()), all.into_iter().chain(["copy@4".to_string()]).collect());
        Ok(())
    }
}
