//! A generator as a part of checkpoints and elastic runs.
use super::Generator;
use crate::placement::Spread;
use crate::state::{self, Dict, Loader, PutInPlace, Saved, Share, StateDict};
use crate::{Error, Result};
use candle_core::Tensor;
use std::collections::HashMap;

/// Contains `seed` and `offset`, but not the rank that the generator was made for: one file fits all ranks that have
/// drawn equally many numbers. If each rank saves its own, the state also contains the `sequence`.
impl StateDict for Generator {
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        let mut dict = state::begin(KIND)?;
        // All 64 bits, as a signed number.
        dict.insert(SEED.to_string(), state::list(&[self.seed() as i64])?);
        dict.insert(OFFSET.to_string(), state::list(&[self.offset() as i64])?);
        Ok(dict)
    }

    fn load_state_dict(&mut self, dict: &HashMap<String, Tensor>) -> Result<()> {
        let mut loader = Loader::new(dict, KIND)?;
        let (seed, offset) = (loader.list::<i64>(SEED, 1)?[0], loader.list::<i64>(OFFSET, 1)?[0]);
        loader.finish()?;
        self.restore(seed as u64, self.sequence().0, offset as u64);
        Ok(())
    }

    fn share(&self) -> Result<Share> {
        let mut dict = self.state_dict()?;
        let (sequence, is_of_rank) = self.sequence();
        if !is_of_rank {
            return Ok(Share::new(Spread::Replicate, dict));
        }
        dict.insert(SEQUENCE.to_string(), state::list(&[sequence as i64])?);
        Ok(Share::new(Spread::Own, dict))
    }

    fn prepare(&mut self, saved: Saved, rank: usize, world_size: usize) -> Result<PutInPlace<'_>> {
        Ok(Box::new(move || match saved {
            Saved::Whole(state) => self.load_state_dict(&state),
            Saved::Shards(shards) => load_shards(self, &shards, rank, world_size),
        }))
    }
}

/// In a world of another size, the generator of a new rank gets the seed of the others, or keeps its own if those
/// differ.
fn load_shards(generator: &mut Generator, shards: &[Dict], rank: usize, world_size: usize) -> Result<()> {
    let mut saved = vec![None; shards.len()];
    for (shard, saved) in shards.iter().zip(&mut saved).filter(|(shard, _)| !shard.is_empty()) {
        let mut loader = Loader::new(shard, KIND)?;
        let mut value = |key| Ok::<_, Error>(loader.list::<i64>(key, 1)?[0] as u64);
        *saved = Some((value(SEED)?, value(SEQUENCE)?, value(OFFSET)?));
        loader.finish()?;
    }
    let own = saved.get(rank).copied().flatten();
    if let Some((seed, sequence, offset)) = own
        && shards.len() == world_size
    {
        generator.restore(seed, sequence, offset);
        return Ok(());
    }
    let Some((first, ..)) = saved.iter().flatten().next().copied() else {
        return Err(Error::invalid("shards", "no rank has saved a generator in them: load the shards of a generator"));
    };
    let is_common = saved.iter().flatten().all(|(seed, ..)| *seed == first);
    let seed = own.map(|(seed, ..)| seed).or(is_common.then_some(first)).unwrap_or(generator.seed());
    let offset = saved.iter().flatten().map(|(.., offset)| *offset).max().unwrap_or(generator.offset());
    generator.restore(seed, Generator::for_rank(seed, rank).sequence().0, offset);
    Ok(())
}

const KIND: &str = "Generator";
const SEED: &str = "seed";
const OFFSET: &str = "offset";
const SEQUENCE: &str = "sequence";

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(generator: &mut Generator, count: usize) -> Vec<u64> {
        (0..count).map(|_| generator.next_u64()).collect()
    }

    #[test]
    fn a_saved_generator_continues_where_it_was() {
        let mut generator = Generator::for_rank(u64::MAX, 1);
        drawn(&mut generator, 10);
        let state = generator.state_dict().unwrap();
        let expected = drawn(&mut generator, 10);
        let mut other = Generator::for_rank(3, 1);
        other.load_state_dict(&state).unwrap();
        assert_eq!(drawn(&mut other, 10), expected);
        // Another rank draws other numbers, from the same offset.
        let mut other = Generator::for_rank(3, 0);
        other.load_state_dict(&state).unwrap();
        assert_eq!((other.seed(), other.offset()), (u64::MAX, 10));
        assert_ne!(drawn(&mut other, 10), expected);

        let mut state = state;
        state.remove("offset");
        assert!(other.load_state_dict(&state).unwrap_err().to_string().contains("offset"));
    }
}
