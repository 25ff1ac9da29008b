//! Saving: a snapshot on the training thread, the rest in the background.
use super::folder::{self, Checkpoint, Listing, Started};
use super::handle::{Save, SaveHandle};
use super::index::{self, Files, Index};
use super::snapshot::PartSnapshot;
use super::{CHECKPOINTER_SAVE, Checkpointer, Skipped};
use crate::backend::Purpose;
use crate::optim::unsaved;
use crate::panic::panic_message;
use crate::placement::Spread;
use crate::process_group::ProcessGroup;
use crate::state::file::WriteJob;
use crate::state::{FileHash, Parts, StateDict, non_finite};
use crate::warnings::warn_aloud;
use crate::{Error, Result, thread};
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};

static CHECKPOINTER_WRITE: Purpose = Purpose::of("the background write of Checkpointer::save");

impl Checkpointer {
    /// Saves `parts` as the checkpoint of `step`, the number of steps (or epochs) that the run has made. All ranks
    /// call it.
    ///
    /// It returns once `parts` are copied and all ranks have confirmed that all earlier calls of the group succeeded,
    /// on GPUs too. The rest happens in the background. It may take longer than the group's time-out; it fails only
    /// if there is no progress for that long (and for 10 minutes). The [handle](SaveHandle) says when the checkpoint
    /// is complete; only then are older ones removed, as
    /// [`CheckpointerOptions::keep`](super::CheckpointerOptions::keep) says.
    ///
    /// # Errors
    /// Errors come on every rank, and nothing is saved. If the previous save failed, its error, unless its handle has
    /// returned it; to continue without that checkpoint, call the handle on every rank. [`Error::PartDiffers`] for a
    /// part that is not the same on all ranks. [`Error::InvalidArgument`] for lists of parts that differ or have
    /// invalid names, and for a checkpoint of a later step in the folder that the run has not loaded. The group's
    /// failure.
    pub fn save(&mut self, step: u64, mut parts: impl Parts) -> Result<SaveHandle> {
        self.start(step, &parts.parts(), false)
    }

    /// Like [`save`](Self::save), for the best checkpoint so far: it is kept, in addition to the newest ones, until
    /// there is a better one. [`load_best`](Self::load_best) loads it. A checkpoint with an infinity or a NaN does not become the best.
    ///
    /// # Errors
    /// As with [`save`](Self::save).
    pub fn save_best(&mut self, step: u64, mut parts: impl Parts) -> Result<SaveHandle> {
        self.start(step, &parts.parts(), true)
    }

    /// Calls [`save`](Self::save) if `step` is a multiple of
    /// [`CheckpointerOptions::every`](super::CheckpointerOptions::every), or if the ranks are to
    /// [stop](crate::ProcessGroup::stop_requested).
    ///
    /// # Errors
    /// As with [`save`](Self::save) and [`stop_requested`](crate::ProcessGroup::stop_requested).
    pub fn save_if_due(&mut self, step: u64, parts: impl Parts) -> Result<Option<SaveHandle>> {
        let is_due = step.is_multiple_of(self.options.every) || self.group.stop_requested()?;
        if is_due { self.save(step, parts).map(Some) } else { Ok(None) }
    }

    fn start(&mut self, step: u64, parts: &[(&str, &mut dyn StateDict)], best: bool) -> Result<SaveHandle> {
        let snapshot = self.end_previous().and_then(|()| self.snapshot(step, parts));
        // An engine may end failed calls as if they were complete. Their results must not be saved.
        let snapshot = snapshot.and_then(|snapshot| self.group.failed().map(|()| snapshot));
        let described = snapshot.as_ref().map(|parts| describe(step, best, parts));
        let compared = CHECKPOINTER_SAVE.during(|| self.group.compare(described, "it saved no checkpoint"));
        let snapshot = snapshot?;
        if let Some((_, difference)) = compared? {
            return Err(Error::invalid(
                "parts",
                format!(
                    "all ranks must save the same parts of the same step: \
                                                        {difference}"
                ),
            ));
        }
        let states = snapshot.iter().filter(|part| part.spread == Spread::Replicate);
        let states = states.map(|part| (part.name.as_str(), &part.fingerprint)).collect::<Vec<_>>();
        CHECKPOINTER_SAVE.during(|| self.group.compare_states(&states))?;
        self.newest = Some(step);
        let job = Job {
            group: self.background.clone(),
            root: self.root.clone(),
            step,
            best,
            parts: snapshot,
            keep: self.options.keep,
            allow_non_finite: self.options.allow_non_finite,
            has_warned: Arc::clone(&self.has_warned),
            skipped: self.skipped.clone(),
        };
        let save = Save::new(step);
        let body = {
            let (save, group) = (save.clone(), self.background.clone());
            move || {
                let ended = catch_unwind(AssertUnwindSafe(|| CHECKPOINTER_WRITE.during(|| job.run())));
                let ended = ended.unwrap_or_else(|panic| {
                    Err(Error::io("writing a checkpoint", std::io::Error::other(panic_message(&*panic))))
                });
                // Not all of them come from a call that has recorded its error for the launcher.
                save.end(ended.map_err(|error| group.note(error)));
            }
        };
        // The other ranks' threads are running already.
        let thread =
            thread::spawn("ddp-checkpoint", body).inspect_err(|error| self.background.abort(&error.to_string()))?;
        self.in_flight = Some((save.clone(), thread));
        Ok(SaveHandle(save))
    }

    /// The entries that this rank saves.
    fn snapshot(&mut self, step: u64, parts: &[(&str, &mut dyn StateDict)]) -> Result<Vec<PartSnapshot>> {
        index::check_names(parts.iter().map(|(name, _)| *name))?;
        let is_first = self.group.rank() == 0;
        if is_first && self.newest.is_none_or(|newest| step < newest) {
            self.check_step(step)?;
        }
        let (snapshot, is_left_out) = unsaved::watch(|| self.buffers.snapshot(parts, is_first));
        let snapshot = snapshot?;
        let is_optimizer = |part: &PartSnapshot| part.tensors.iter().any(|dict| dict.contains_key("learning_rates"));
        if is_first && is_left_out && snapshot.iter().any(is_optimizer) {
            static ONCE: Once = Once::new();
            ONCE.call_once(|| {
                warn_aloud(format_args!(
                    "the checkpoint of step {step} has an optimizer, but not the schedule of its learning rates: a run that resumes would \
                     begin the schedule anew. Add it to the parts, as in (\"schedule\", &mut schedule), unless the program restores it"
                ));
            });
        }
        Ok(snapshot)
    }

    /// A later checkpoint would be the newest one after a restart, and this one would be removed.
    fn check_step(&self, step: u64) -> Result<()> {
        let listing = Listing::of(&self.root)?;
        let mut whole = listing.whole.iter();
        let later = whole.rfind(|found| found.name.step > step && !self.skipped.contains_key(&found.path));
        let unknown = listing.newest_unknown(|name| name.step > step).map(|unknown| &unknown.path);
        let Some(later) = unknown.or(later.map(|found| &found.path)) else { return Ok(()) };
        let reason = format!(
            "{} is of a later step than {step}: to continue from it, call load_latest first; otherwise use another \
             folder, or move the later checkpoints away",
            later.display()
        );
        Err(Error::invalid("step", reason))
    }
}

/// The facts on which ranks have to agree.
fn describe(step: u64, best: bool, parts: &[PartSnapshot]) -> String {
    let mut text = format!("step {step}\n{}", if best { "save_best" } else { "save" });
    for PartSnapshot { name, spread, .. } in parts {
        let kind = match spread {
            Spread::Replicate => "the same on all ranks",
            Spread::RankZero => "rank 0's for all ranks",
            _ => "one for each rank",
        };
        text.push_str(&format!("\npart {name}, {kind}"));
    }
    text
}

/// The part of a save that runs in the background.
struct Job {
    group: ProcessGroup,
    root: PathBuf,
    step: u64,
    best: bool,
    parts: Vec<PartSnapshot>,
    keep: usize,
    allow_non_finite: bool,
    /// Whether the warning about an infinity or a NaN has been given.
    has_warned: Arc<AtomicBool>,
    skipped: HashMap<PathBuf, Skipped>,
}

impl Job {
    fn run(self) -> Result<PathBuf> {
        let (root, step, keep, skipped) = (self.root.clone(), self.step, self.keep, self.skipped.clone());
        let is_first = self.group.rank() == 0;
        let started = self.group.agree_on_long_work(move |_| {
            let start = || {
                // Runs that were killed before they reached this point may have left several.
                prune(&root, keep, &skipped);
                Started::new(&root, step)
            };
            is_first.then(start).transpose()
        })?;
        let folder = self.write(started)?;
        if is_first {
            prune(&self.root, self.keep, &self.skipped);
        }
        Ok(folder)
    }

    /// Only rank 0 has `started`.
    fn write(&self, started: Option<Started>) -> Result<PathBuf> {
        let written = self.write_parts(started.as_ref());
        if written.is_err() {
            // All ranks know about the error. Rank 0 removes the folder once no rank writes to it any more.
            let _ = self.group.barrier();
        }
        let (folder, files) = written?;
        if let Some(what) = &files.non_finite
            && self.group.rank() == 0
            && !self.has_warned.swap(true, Ordering::Relaxed)
        {
            warn_aloud(format_args!(
                "the checkpoint of step {} has {what}: the last finite checkpoint stays, and a run that resumes takes that one. The \
                 training has diverged, or an input was not finite; OnNonFinite::Stop names the rank and the first parameter. If it \
                 is intended, set CheckpointerOptions::allow_non_finite",
                self.step
            ));
        }
        let (step, best, world_size) = (self.step, self.best, self.group.world_size());
        let parts: Vec<_> = self.parts.iter().map(|part| (part.name.clone(), part.spread.is_per_rank())).collect();
        self.group.agree_on_long_work(move |progress| {
            let Some(started) = started else { return Ok(()) };
            let index = Index::new(&started.path, step, best, world_size, &parts, files)?;
            started.finish(&index, progress).map(drop)
        })?;
        Ok(folder)
    }

    /// Writes this rank's files. Returns the folder of all ranks' files, and what is known of them.
    fn write_parts(&self, started: Option<&Started>) -> Result<(PathBuf, Files)> {
        let (rank, world_size) = (self.group.rank(), self.group.world_size());
        let name = started.and_then(|started| started.path.file_name()).map(|name| name.to_string_lossy().into_owned());
        let folder = self.root.join(self.group.broadcast_object(name.as_ref(), 0)?);
        let own = self.parts.iter().filter_map(|part| {
            let file = match part.spread.is_per_rank() {
                true => index::shard_file(&part.name, rank, world_size),
                false => index::whole_file(&part.name),
            };
            Some((file, part.tensors.as_ref()?))
        });
        let own: Vec<_> = own.collect();
        let jobs = own.iter().map(|(file, tensors)| WriteJob::new(&folder.join(file), tensors));
        let hashes = self.group.write_together(jobs.collect::<Result<Vec<_>>>())?;
        let own: Vec<(String, FileHash)> = own.into_iter().map(|(file, _)| file).zip(hashes).collect();
        let all = self.group.all_gather_object(&(own, self.non_finite()?))?;
        let (hashes, non_finite): (Vec<_>, Vec<_>) = all.into_iter().unzip();
        let non_finite = non_finite.into_iter().flatten().next();
        Ok((folder, Files { hashes: hashes.into_iter().flatten().collect(), non_finite }))
    }

    /// The first infinity or NaN in what this rank writes.
    fn non_finite(&self) -> Result<Option<String>> {
        if self.allow_non_finite {
            return Ok(None);
        }
        for PartSnapshot { name, tensors, .. } in &self.parts {
            if let Some(what) = tensors.as_ref().map(non_finite).transpose()?.flatten() {
                return Ok(Some(format!("{what} of the part {name}")));
            }
        }
        Ok(None)
    }
}

/// Removes all checkpoints except the `keep` newest finite ones, the best one, and the newest of all. Those that cannot be removed
/// stay.
fn prune(root: &Path, keep: usize, skipped: &HashMap<PathBuf, Skipped>) {
    let is_counted = |checkpoint: &Checkpoint| !matches!(skipped.get(&checkpoint.path), Some(Skipped::Damaged(_)));
    let mut whole = match Listing::of(root) {
        Ok(listing) => listing.whole.into_iter().filter(is_counted).collect::<Vec<_>>(),
        Err(error) => return warn_aloud(format_args!("cannot remove older checkpoints: {error}")),
    };
    let is_finite =
        |checkpoint: &Checkpoint| checkpoint.index.non_finite.is_none() && !skipped.contains_key(&checkpoint.path);
    // A diverged run's last state may tell why.
    whole.pop_if(|newest| !is_finite(newest));
    let (finite, others): (Vec<_>, Vec<_>) = whole.into_iter().partition(is_finite);
    let best = finite.iter().rfind(|checkpoint| checkpoint.index.best).map(|checkpoint| checkpoint.name);
    let older = &finite[..finite.len().saturating_sub(keep)];
    for checkpoint in older.iter().filter(|checkpoint| Some(checkpoint.name) != best).chain(&others) {
        if let Err(error) = folder::remove(checkpoint) {
            warn_aloud(format_args!("cannot remove an older checkpoint: {error}"));
        }
    }
}
