//! The hashes of files that ranks read in pieces.
use crate::Result;
use crate::process_group::ProcessGroup;
use crate::state::file::{PartHashes, SafetensorsFile};
use candle_ddp_state::weights::{Hashes, unreadable};

/// [`Hashes`] that the ranks of a group check together.
pub(super) struct OfRanks(pub(super) Hashes);

impl OfRanks {
    /// As [`Hashes::check`], if each rank has read what it needs: together they have all, apart from what no rank needs, which is
    /// read now. So everything that a rank uses counts as that rank has read it. Every rank must call it.
    pub(super) fn check(mut self, group: &ProcessGroup) -> Result<()> {
        self.compare(group)?;
        if self.0.0.iter().all(|(file, _)| file.hash().is_none()) {
            return Ok(());
        }
        self.join(group)?;
        let (rank, world_size, mut missing) = (group.rank(), group.world_size(), 0);
        let mut is_own = || {
            missing += 1;
            missing % world_size == rank
        };
        let rest = self.0.0.iter_mut().try_for_each(|(file, hashes)| file.hash_rest(hashes, &mut is_own));
        group.agree(rest)?;
        self.join(group)?;
        group.agree(self.0.check())
    }

    fn own(&mut self) -> impl Iterator<Item = &mut Option<u64>> {
        self.0.0.iter_mut().flat_map(|(_, hashes)| hashes.iter_mut().flatten())
    }

    /// Refuses files that are not the same on all ranks. On several hosts, each may have its own copies.
    fn compare(&mut self, group: &ProcessGroup) -> Result<()> {
        let described = |(file, hashes): &(SafetensorsFile, Vec<PartHashes>)| {
            (file.hash().cloned(), hashes.iter().map(Vec::len).sum::<usize>())
        };
        let all = group.all_gather_object(&self.0.0.iter().map(described).collect::<Vec<_>>())?;
        let (Some(other), Some((file, _))) = (all.iter().position(|theirs| *theirs != all[0]), self.0.0.first()) else {
            return Ok(());
        };
        let reason = format!("rank {other} has another file of this name than rank 0: give all ranks the same one");
        Err(unreadable(file.path(), reason))
    }

    /// Adds what the other ranks have.
    fn join(&mut self, group: &ProcessGroup) -> Result<()> {
        let own: PartHashes = self.own().map(|hash| *hash).collect();
        let all = group.all_gather_object(&own)?;
        let mut differs = false;
        for (index, hash) in self.own().enumerate() {
            let mut found = all.iter().filter_map(|theirs| theirs.get(index).copied().flatten());
            *hash = found.next();
            differs |= found.any(|other| Some(other) != *hash);
        }
        match self.0.0.first() {
            Some((file, _)) if differs => {
                Err(unreadable(file.path(), "ranks have read different bytes from it: one of their copies is damaged"))
            }
            _ => Ok(()),
        }
    }
}
