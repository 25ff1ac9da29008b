//! Loading: all parts on all ranks, or none on any.
use super::folder::{Checkpoint, Faulty, Listing, Name};
use super::index::{Fault, Index};
use super::read::Reader;
use super::{Checkpointer, Skipped};
use crate::backend::Purpose;
use crate::state::{Parts, Saved, StateDict, non_finite};
use crate::warnings::warn_aloud;
use crate::{Error, Result};
use candle_ddp_state::weights::unreadable;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

static CHECKPOINTER_LOAD: Purpose = Purpose::of("Checkpointer::load_latest");

/// The checkpoint that rank 0 found.
#[derive(Serialize, Deserialize)]
struct Found {
    folder: String,
    index: Index,
}

#[derive(Clone, Copy)]
enum Wanted {
    Latest,
    Best,
    Step(u64),
}

impl Wanted {
    fn matches(self, index: &Index) -> bool {
        match self {
            Self::Latest => true,
            Self::Best => index.best,
            Self::Step(step) => index.step == step,
        }
    }

    /// Whether a checkpoint without an index that can be read may be a wanted one.
    fn may_be(self, name: Name) -> bool {
        match self {
            Self::Latest | Self::Best => true,
            Self::Step(step) => name.step == step,
        }
    }
}

impl Checkpointer {
    /// Loads the newest complete checkpoint in the folder and returns its step. Returns `None`, and changes nothing,
    /// if there is none. All ranks call it; the number of ranks may differ from the number that saved. The checkpoint
    /// may have more parts than `parts`, for example when a model is only evaluated.
    ///
    /// A damaged checkpoint (on any rank, one of its files is missing, or is not the one that was saved) is skipped on all
    /// ranks, and rank 0 warns of it, on standard error if the program has no logger. So is one with an infinity or a NaN in its
    /// tensors, unless [`allow_non_finite`](super::CheckpointerOptions::allow_non_finite) is set. Checkpoints that were saved before
    /// their index had hashes are checked for missing files and wrong lengths only.
    ///
    /// # Errors
    /// Errors come on every rank and leave all parts unchanged: [`Error::CheckpointPart`] for a part that
    /// does not fit or that the checkpoint does not have; [`Error::CheckpointFile`] if there are only damaged checkpoints, or if
    /// a later version of this crate has saved the newest one; [`Error::Io`] for a file that cannot be read;
    /// [`Error::InvalidArgument`] without [`CheckpointerOptions::resume`](super::CheckpointerOptions::resume), before
    /// this run has saved anything; the group's errors.
    pub fn load_latest(&mut self, mut parts: impl Parts) -> Result<Option<u64>> {
        CHECKPOINTER_LOAD.during(|| self.load(&mut parts.parts(), Wanted::Latest))
    }

    /// [`load_latest`](Self::load_latest) for the newest checkpoint that [`save_best`](Self::save_best) has saved.
    ///
    /// # Errors
    /// As with [`load_latest`](Self::load_latest).
    pub fn load_best(&mut self, mut parts: impl Parts) -> Result<Option<u64>> {
        CHECKPOINTER_LOAD.during(|| self.load(&mut parts.parts(), Wanted::Best))
    }

    /// [`load_latest`](Self::load_latest) for the checkpoint of step `step`. Returns false if there is none. Before
    /// the run saves a step earlier than others in the folder, move the later checkpoints away.
    ///
    /// # Errors
    /// As with [`load_latest`](Self::load_latest).
    pub fn load_step(&mut self, step: u64, mut parts: impl Parts) -> Result<bool> {
        let found = CHECKPOINTER_LOAD.during(|| self.load(&mut parts.parts(), Wanted::Step(step)))?;
        Ok(found.is_some())
    }

    /// The steps of the complete checkpoints in the folder, which [`load_step`](Self::load_step) can load, in
    /// ascending order, as rank 0 finds them. All ranks call it. It waits for a running save.
    ///
    /// # Errors
    /// On every rank: [`Error::Io`] if the folder cannot be read; the error of a save that was running, unless its
    /// [handle](super::SaveHandle) has returned it on every rank; the group's errors.
    pub fn steps(&mut self) -> Result<Vec<u64>> {
        CHECKPOINTER_LOAD.during(|| {
            let ended = self.end_previous();
            self.group.agree(ended)?;
            self.search(|listing, skipped| {
                let is_damaged = |found: &&Checkpoint| matches!(skipped.get(&found.path), Some(Skipped::Damaged(_)));
                let whole = listing.whole.iter().filter(|found| !is_damaged(found));
                let mut steps: Vec<u64> = whole.map(|found| found.name.step).collect();
                // A step that was saved more than once has several folders.
                steps.dedup();
                Ok(steps)
            })
        })
    }

    fn load(&mut self, parts: &mut [(&str, &mut dyn StateDict)], wanted: Wanted) -> Result<Option<u64>> {
        if !self.options.resume && self.newest.is_none() {
            let reason = "the Checkpointer was made for a run from scratch: set CheckpointerOptions::resume to load \
                          checkpoints of earlier runs";
            return Err(Error::invalid("resume", reason));
        }
        // The checkpoint that is being saved may be the newest one.
        let ended = self.end_previous();
        self.group.agree(ended)?;
        loop {
            let Some(Found { folder, index }) = self.find(wanted)? else { return Ok(None) };
            let folder = self.root.join(folder);
            let read = |name: &str, state: &dyn StateDict| {
                let part = index.part(name).map_err(|error| of_part(&folder, name, error))?;
                Reader { folder: &folder, rank: self.group.rank(), world_size: self.group.world_size() }
                    .read(part, state)
            };
            let read = parts.iter().map(|(name, state)| read(name, &**state)).collect::<Result<Vec<_>>>();
            let names: Vec<&str> = parts.iter().map(|(name, _)| *name).collect();
            let read = read.and_then(|saved| Ok((self.non_finite(&names, &saved)?, saved)));
            let (fault, saved) = match read {
                Ok((what, saved)) => (Ok(what.map(Skipped::NonFinite)), Some(saved)),
                Err(error) if is_damage(&error) => (Ok(Some(Skipped::Damaged(error.to_string()))), None),
                Err(error) => (Err(error), None),
            };
            let faults = self.group.agree(fault).and_then(|fault| self.group.all_gather_object(&fault))?;
            let faults = faults.into_iter().enumerate().filter_map(|(rank, fault)| Some((rank, fault?)));
            // Damage counts first: such a rank has nothing to load.
            let fault = faults.min_by_key(|(_, fault)| matches!(fault, Skipped::NonFinite(_)));
            let fault = match (fault, wanted) {
                (Some((_, Skipped::NonFinite(what))), Wanted::Step(_)) => {
                    if self.group.rank() == 0 {
                        warn_aloud(format_args!(
                            "the checkpoint {} has {what}: it is loaded as asked",
                            folder.display()
                        ));
                    }
                    None
                }
                (fault, _) => fault,
            };
            match (fault, saved) {
                (None, Some(saved)) => {
                    self.apply(&folder, parts, saved)?;
                    if self.group.rank() == 0 && !index.is_hashed() {
                        log::warn!("{} has no hashes: damage to its values would not be noticed", folder.display());
                    }
                    return Ok(Some(index.step));
                }
                (Some((rank, Skipped::Damaged(reason))), _) => {
                    self.skip(folder, Skipped::Damaged(format!("on rank {rank}, {reason}")));
                }
                (Some((_, fault)), _) => self.skip(folder, fault),
                (None, None) => return Err(unreadable(&folder, "this rank could not read it, and no rank says why")),
            }
        }
    }

    /// The newest such checkpoint, as rank 0 finds it.
    fn find(&mut self, wanted: Wanted) -> Result<Option<Found>> {
        self.search(|listing, skipped| {
            let is_wanted = |found: &&Checkpoint| wanted.matches(&found.index);
            let is_lost = |found: &&Checkpoint| match skipped.get(&found.path) {
                Some(Skipped::NonFinite(_)) => !matches!(wanted, Wanted::Step(_)),
                fault => fault.is_some(),
            };
            let (lost, sound): (Vec<&Checkpoint>, Vec<&Checkpoint>) =
                listing.whole.iter().filter(is_wanted).partition(is_lost);
            let newest = sound.last();
            let is_newer = |name| wanted.may_be(name) && newest.is_none_or(|newest| newest.name < name);
            if let Some(Faulty { path, fault: Fault::Unknown(reason), .. }) = listing.newest_unknown(is_newer) {
                return Err(unreadable(path, reason));
            }
            let Some(newest) = newest else {
                // A run with checkpoints is never meant to start from scratch.
                let unreadable_ones = listing.faulty.iter().filter(|faulty| wanted.may_be(faulty.name));
                let lost = lost.iter().map(|found| (found.name, &found.path));
                let last = unreadable_ones.map(|faulty| (faulty.name, &faulty.path)).chain(lost).max();
                let fault = last.and_then(|(name, path)| Some((name, path, skipped.get(path)?)));
                return fault.map_or(Ok(None), |(Name { step, .. }, path, fault)| {
                    let reason = match fault {
                        Skipped::Damaged(reason) => format!(
                            "it is damaged, and there is no other checkpoint to fall back to: {reason}. Restore it, or move it away to \
                             continue without it"
                        ),
                        Skipped::NonFinite(what) => format!(
                            "it has {what}, and there is no finite checkpoint to fall back to. load_step({step}) loads it nevertheless, \
                             and so does CheckpointerOptions::allow_non_finite; or move it away to continue without it"
                        ),
                    };
                    Err(unreadable(path, reason))
                });
            };
            let folder = newest.path.file_name().and_then(|name| name.to_str());
            Ok(folder.map(|folder| Found { folder: folder.to_string(), index: newest.index.clone() }))
        })
    }

    /// The result of `choose` on rank 0, given the contents of the folder, and the folders to pass over.
    fn search<T: Serialize + DeserializeOwned>(
        &mut self,
        choose: impl FnOnce(&Listing, &HashMap<PathBuf, Skipped>) -> Result<T>,
    ) -> Result<T> {
        let is_first = self.group.rank() == 0;
        let search = || {
            let listing = Listing::of(&self.root)?;
            for Faulty { path, fault, .. } in &listing.faulty {
                if let Fault::Damaged(reason) = fault {
                    self.skip(path.clone(), Skipped::Damaged(reason.clone()));
                }
            }
            for Checkpoint { path, index, .. } in &listing.whole {
                if let (Some(what), false) = (&index.non_finite, self.options.allow_non_finite) {
                    self.skip(path.clone(), Skipped::NonFinite(what.clone()));
                }
            }
            choose(&listing, &self.skipped)
        };
        let found = is_first.then(search).transpose();
        let found = self.group.agree(found)?;
        self.group.broadcast_object(found.as_ref(), 0)
    }

    /// Passes over a checkpoint from now on. Rank 0 says so.
    fn skip(&mut self, folder: PathBuf, fault: Skipped) {
        if self.group.rank() == 0 && !self.skipped.contains_key(&folder) {
            let is = folder.display();
            match &fault {
                Skipped::Damaged(reason) => {
                    warn_aloud(format_args!("the checkpoint {is} is damaged and skipped: {reason}"))
                }
                Skipped::NonFinite(what) => warn_aloud(format_args!("the checkpoint {is} has {what}, and is skipped")),
            }
        }
        self.skipped.insert(folder, fault);
    }

    /// The first infinity or NaN in these parts, if it is not allowed.
    fn non_finite(&self, names: &[&str], saved: &[Saved]) -> Result<Option<String>> {
        if self.options.allow_non_finite {
            return Ok(None);
        }
        let found = names.iter().zip(saved).find_map(|(name, saved)| {
            let dicts = match saved {
                Saved::Whole(dict) => std::slice::from_ref(dict),
                Saved::Shards(dicts) => dicts,
            };
            let what = dicts.iter().find_map(|dict| non_finite(dict).transpose())?;
            Some(what.map(|what| format!("{what} of the part {name}")))
        });
        found.transpose()
    }
}

/// Adds to an error which part of which checkpoint it belongs to.
pub(super) fn of_part(folder: &Path, name: &str, error: Error) -> Error {
    Error::CheckpointPart { folder: folder.to_path_buf(), part: name.to_string(), error: Box::new(error) }
}

/// Whether the contents of a file differ from what was written.
fn is_damage(error: &Error) -> bool {
    matches!(error, Error::InvalidArgument { argument: "path", .. })
}
