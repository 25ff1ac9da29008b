//! What each rank has of a state.
use super::pieces::{PART_OF, of_piece_key, piece_key};
use super::{Dict, begin};
use crate::Result;
use crate::placement::{Placement, Spread};
use candle_core::{Device, Tensor};
use std::collections::HashMap;
use std::ops::Range;

/// What a rank has of a state.
#[derive(Debug)]
pub struct Share {
    pub spread: Spread,
    /// What this rank saves. What is the same on all ranks is saved by one of them.
    pub dict: Dict,
    /// What another rank has as well, and saves.
    copies: Dict,
    /// The elements that are here of the entries of which each rank has a part.
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

    /// Whether each rank saves its own.
    pub fn is_per_rank(&self) -> bool {
        self.spread.is_per_rank()
    }

    /// Spreads it in this way, unless each rank saves its own already.
    pub fn or(self, spread: Spread) -> Self {
        if self.is_per_rank() { self } else { Self { spread, ..self } }
    }

    /// All that is here.
    pub fn all(self) -> Dict {
        self.dict.into_iter().chain(self.copies).collect()
    }

    /// The elements of the saved entry `key`, which has `elements`, that this rank needs.
    pub fn needs(&self, key: &str, elements: usize) -> Range<usize> {
        let Some((whole, start)) = of_piece_key(key) else { return 0..elements };
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
