//! Putting in place what was read: all parts on all ranks, or none on any.
use super::Checkpointer;
use super::load::of_part;
use super::snapshot::Buffers;
use crate::Result;
use crate::state::{Dict, Saved, StateDict};
use crate::warnings::warn_aloud;
use std::path::Path;

impl Checkpointer {
    /// Loads all parts from `folder`, or none. Parts that can be prepared come last, when nothing can fail any more. Of the others, copies
    /// are kept.
    pub(super) fn apply(
        &self,
        folder: &Path,
        parts: &mut [(&str, &mut dyn StateDict)],
        saved: Vec<Saved>,
    ) -> Result<()> {
        let (rank, world_size) = (self.group.rank(), self.group.world_size());
        let mut prepared = Vec::new();
        let mut others: Vec<((&str, &mut dyn StateDict), Saved)> = Vec::new();
        for ((name, part), saved) in parts.iter_mut().zip(saved) {
            let (name, part): (&str, &mut dyn StateDict) = (*name, &mut **part);
            match part.can_prepare() {
                true => prepared.push((name, part.prepare(saved, rank, world_size))),
                false => others.push(((name, part), saved)),
            }
        }
        let of = |name| move |error| of_part(folder, name, error);
        let prepared = prepared.into_iter().map(|(name, put)| Ok((name, put.map_err(of(name))?)));
        let prepared = self.group.agree(prepared.collect::<Result<Vec<_>>>())?;
        let (mut parts, saved): (Vec<_>, Vec<_>) = others.into_iter().unzip();
        let before = Buffers::default().backup(&parts);
        let before = self.group.agree(before)?;
        let mut loaded = 0;
        let result = parts.iter_mut().zip(saved).try_for_each(|((name, part), saved)| {
            loaded += 1;
            part.prepare(saved, rank, world_size).and_then(|put| put()).map_err(of(name))
        });
        let agreed = self.group.agree(result);
        if agreed.is_err() {
            for ((name, part), before) in parts.iter_mut().zip(before).take(loaded) {
                if let Err(error) = self.restore(*part, before) {
                    warn_aloud(format_args!(
                        "rank {rank}: the part {name} could not be restored to its previous state: {error}"
                    ));
                }
            }
        }
        agreed?;
        self.group.agree(prepared.into_iter().try_for_each(|(name, put)| put().map_err(of(name))))
    }

    fn restore(&self, part: &mut dyn StateDict, before: Dict) -> Result<()> {
        let (rank, world_size) = (self.group.rank(), self.group.world_size());
        let saved = if part.share()?.spread.is_per_rank() {
            let mut shards = vec![Dict::new(); world_size];
            shards[rank] = before;
            Saved::Shards(shards)
        } else {
            Saved::Whole(before)
        };
        part.prepare(saved, rank, world_size)?()
    }
}
