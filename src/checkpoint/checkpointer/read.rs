//! Reading a part: each rank has no more of it in memory than it needs.
use super::index::{Part, Written};
use crate::Result;
use crate::placement::Spread;
use crate::state::file::{Hashed, SafetensorsFile, read_state, wrong};
use crate::state::{Dict, Saved, Share, StateDict, insert_needed};
use std::path::Path;

/// Reads the parts of a checkpoint.
pub(super) struct Reader<'a> {
    pub(super) folder: &'a Path,
    pub(super) rank: usize,
    pub(super) world_size: usize,
}

impl Reader<'_> {
    /// The saved values of the part `state`.
    pub(super) fn read(&self, part: &Part, state: &dyn StateDict) -> Result<Saved> {
        let all = |Written { name, hash, .. }: &Written| read_state(&self.folder.join(name), *hash);
        if let (false, [file]) = (part.sharded, &*part.files) {
            return all(file).map(Saved::Whole);
        }
        let share = state.share()?;
        let shards = part.files.iter().enumerate().map(|(index, file)| match share.spread {
            Spread::Shard => self.read_needed(index, file, &share),
            _ => all(file),
        });
        shards.collect::<Result<_>>().map(Saved::Shards)
    }

    /// Reads what this rank needs of a shard. One rank checks the hash, for which it reads the whole file, and forgets the rest.
    fn read_needed(&self, index: usize, Written { name, hash, .. }: &Written, share: &Share) -> Result<Dict> {
        let path = self.folder.join(name);
        let file = SafetensorsFile::of_state(&path, *hash)?;
        let mut shard = Dict::new();
        let needs = |key: &str, shape: &[usize]| share.needs(key, shape.iter().product());
        let is_checked = index % self.world_size == self.rank;
        let hashed = if is_checked { Hashed::All } else { Hashed::Nothing };
        let hashes = file.scan(
            hashed,
            |key, shape| Some(needs(key, shape)),
            |key, shape, elements| {
                let part = elements.map_err(|reason| wrong(&path, format_args!("cannot be read: {key}: {reason}")))?;
                insert_needed(&mut shard, key, shape, needs(key, shape), part)
            },
        )?;
        let checked = if is_checked { file.check(&hashes) } else { Ok(()) };
        checked.map_err(|flaw| wrong(&path, format_args!("is {flaw}"))).map(|()| shard)
    }
}
