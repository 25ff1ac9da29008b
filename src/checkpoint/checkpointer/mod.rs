//! Checkpoints of a whole run.
mod apply;
mod folder;
mod handle;
mod index;
mod load;
mod read;
mod save;
mod snapshot;

pub use handle::SaveHandle;
#[cfg(any(test, fuzzing))]
pub(crate) use index::fuzz_index;

use crate::backend::Purpose;
use crate::optim::unsaved;
use crate::process_group::ProcessGroup;
use crate::warnings::warn_aloud;
use crate::{Error, Result};
use folder::Listing;
use handle::Save;
use serde::{Deserialize, Serialize};
use snapshot::Buffers;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::JoinHandle;

static CHECKPOINTER_NEW: Purpose = Purpose::of("Checkpointer::new");
static CHECKPOINTER_SAVE: Purpose = Purpose::of("Checkpointer::save");

/// Options of [`Checkpointer`]: when it saves, and what it keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointerOptions {
    /// The number of newest checkpoints to keep, in addition to the one that [`Checkpointer::save_best`] saved last;
    /// at least 1. Default: 2, so that an intact one remains if the newest is damaged.
    pub keep: usize,
    /// [`Checkpointer::save_if_due`] saves at multiples of this number, which must be at least 1, and before a
    /// [stop](crate::ProcessGroup::stop_requested). Default: 1, every
    /// time.
    pub every: u64,
    /// Whether the run continues from checkpoints of earlier runs in the folder, with
    /// [`load_latest`](Checkpointer::load_latest) or [`load_best`](Checkpointer::load_best). Otherwise the run starts
    /// from scratch, and [`Checkpointer::new`] refuses a folder that holds checkpoints. Default: false.
    pub resume: bool,
    /// Whether a checkpoint may have infinities and NaNs in its tensors (those of one number always may). Otherwise such a checkpoint is
    /// saved, but does not count: the last finite ones stay, [`load_latest`](Checkpointer::load_latest) and
    /// [`load_best`](Checkpointer::load_best) skip it, and only [`load_step`](Checkpointer::load_step) loads it. Rank 0 warns of the
    /// first. Default: false.
    pub allow_non_finite: bool,
}

impl Default for CheckpointerOptions {
    fn default() -> Self {
        Self { keep: 2, every: 1, resume: false, allow_non_finite: false }
    }
}

/// Saves the states of a run together, in the background, and loads them again.
///
/// ```
/// use candle_core::{DType, Tensor};
/// use candle_ddp::checkpoint::{Checkpointer, CheckpointerOptions, Parts, StateDict};
/// use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW};
/// use candle_ddp::{DdpOptions, DistributedDataParallel};
/// use candle_nn::{VarMap, linear};
///
/// struct Training {
///     varmap: VarMap,
///     optimizer: AdamW,
///     best_loss: f64,
/// }
///
/// impl Parts for Training {
///     fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
///         vec![("model", &mut self.varmap), ("optimizer", &mut self.optimizer), ("best_loss", &mut self.best_loss)]
///     }
/// }
///
/// # fn main() -> candle_ddp::Result<()> {
/// # let folder = std::env::temp_dir().join(format!("checkpointer-{}", std::process::id()));
/// candle_ddp::spawn(2, |pg| {
///     let varmap = VarMap::new();
///     let ddp = DistributedDataParallel::new(&pg, &varmap, |vb| linear(4, 2, vb))?;
///     let optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
///     let mut training = Training { varmap, optimizer, best_loss: f64::INFINITY };
///
///     let options = CheckpointerOptions { every: 2, resume: true, ..Default::default() };
///     let mut checkpointer = Checkpointer::new(&pg, &folder, options)?;
///     let first = checkpointer.load_latest(&mut training)?.unwrap_or(0);
///     for step in first + 1..=4 {
///         let x = Tensor::randn(0f32, 1.0, (8, 4), pg.device())?;
///         let loss = ddp.forward(&x)?.sqr()?.mean_all()?;
///         training.optimizer.step(&ddp.backward(&loss)?)?;
///         checkpointer.save_if_due(step, &mut training)?;
///     }
///     checkpointer.finish()
/// })?;
/// assert!(folder.join("step-00000004/model.safetensors").exists());
/// # std::fs::remove_dir_all(&folder).unwrap();
/// # Ok(())
/// # }
/// ```
///
/// # What is saved
/// The [`Parts`](super::Parts) that the program names. Each is a [`StateDict`](super::StateDict): the `VarMap` of the model,
/// optimizers, schedules, the scaler, a loader, generators, plain numbers, [`Serde`](super::Serde) of anything else, and the
/// program's own states.
/// Rank 0 writes `step-00001000/NAME.safetensors` for each. If a part is spread over the ranks
/// (as the state of a [sharded](crate::Sharding) model's optimizer is), every rank writes its own shard. All other
/// parts are compared between ranks: a part that differs, such as a loss that each rank computes for itself, is an
/// error, unless it is saved as [`PerRank`](super::PerRank) or [`RankZero`](super::RankZero). Ranks on several
/// machines need a shared file system.
///
/// `checkpoint.json`, which is written last, completes a checkpoint: it lists the parts and their files, with hashes of their
/// contents, which are compared when they are loaded. A folder without it is still being written, or its save was interrupted.
///
/// # In the background
/// [`save`](Self::save) returns as soon as everything has been copied to host memory; the program may then change its
/// states. The copies' memory is kept for the next save. A thread on each rank writes the files, and these threads
/// agree over a separate group, whose calls do not interfere with the training's. One save runs at a time; the next
/// one waits for it. Dropping the `Checkpointer` waits too, so a save completes even if the training ends with an
/// error.
///
/// # Errors
/// Every rank makes every call, and each call succeeds on all ranks or fails on all of them.
#[derive(Debug)]
pub struct Checkpointer {
    group: ProcessGroup,
    /// The group for the writing thread's calls.
    background: ProcessGroup,
    root: PathBuf,
    options: CheckpointerOptions,
    buffers: Buffers,
    in_flight: Option<(Arc<Save>, JoinHandle<()>)>,
    /// The last step that was saved.
    newest: Option<u64>,
    /// Folders that loads pass over.
    skipped: HashMap<PathBuf, Skipped>,
    /// Whether rank 0 has warned of an infinity or a NaN in a checkpoint of this run.
    has_warned: Arc<AtomicBool>,
}

/// The reason why a checkpoint is passed over.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Skipped {
    /// It is not as it was saved, for this reason.
    Damaged(String),
    /// It has this infinity or NaN. `load_step` takes it nevertheless.
    NonFinite(String),
}

impl Checkpointer {
    /// Keeps checkpoints in `folder`, which is made if it is missing. Leftovers of killed saves are removed from it.
    /// All ranks of `group` call this.
    ///
    /// # Errors
    /// On every rank: [`Error::Io`] if `folder` is not a folder in which each rank can make files;
    /// [`Error::InvalidArgument`] if it is another folder on another host, or holds checkpoints and
    /// [`resume`](CheckpointerOptions::resume) is not set, and for options that are 0 or differ between ranks; the group's errors.
    pub fn new(group: &ProcessGroup, folder: impl AsRef<Path>, options: CheckpointerOptions) -> Result<Self> {
        let root = folder.as_ref().to_path_buf();
        let checked = options.check().map(|()| format!("{options:?}"));
        let compared = CHECKPOINTER_NEW.during(|| group.compare(checked.as_ref().cloned(), "it made no Checkpointer"));
        checked?;
        if let Some((_, difference)) = compared? {
            return Err(Error::invalid("options", format!("all ranks must give the same options: {difference}")));
        }
        CHECKPOINTER_NEW.during(|| open(group, &root, options.resume))?;
        let background = group.background_group()?;
        // Schedules of an earlier training do not count.
        unsaved::watch(|| ());
        Ok(Self {
            group: group.clone(),
            background,
            root,
            options,
            buffers: Buffers::default(),
            in_flight: None,
            newest: None,
            skipped: HashMap::new(),
            has_warned: Arc::default(),
        })
    }

    /// Waits until a running save has ended.
    ///
    /// # Errors
    /// On every rank, the save's error, unless its [handle](SaveHandle) has returned it on every rank.
    pub fn finish(&mut self) -> Result<()> {
        let ended = self.end_previous();
        CHECKPOINTER_SAVE.during(|| self.group.agree(ended))
    }

    /// Joins the thread of the previous save. Returns the save's error, if no call has returned it yet.
    fn end_previous(&mut self) -> Result<()> {
        let Some((save, thread)) = self.in_flight.take() else { return Ok(()) };
        if thread.join().is_err() {
            // The thread catches panics itself and reports them through the handle.
            log::debug!("the thread of a save panicked");
        }
        save.unreported().map_or(Ok(()), Err)
    }
}

/// Checks that all ranks can use the folder, before the run does any work that could not be saved.
fn open(group: &ProcessGroup, root: &Path, resume: bool) -> Result<()> {
    let is_first = group.rank() == 0;
    let prepare = || {
        folder::make(root)?;
        folder::clean(root);
        let listing = Listing::of(root)?;
        let unknown = listing.newest_unknown(|_| true).map(|unknown| &unknown.path);
        match unknown.or(listing.whole.last().map(|newest| &newest.path)).filter(|_| !resume) {
            None => Ok(()),
            Some(newest) => {
                let reason = format!(
                    "it holds the checkpoint {}: to continue from it, set CheckpointerOptions::resume and call \
                     load_latest; to start from scratch, use another folder or move the checkpoints away",
                    newest.display()
                );
                Err(Error::invalid("folder", reason))
            }
        }
    };
    group.agree(if is_first { prepare() } else { Ok(()) })?;
    // Until all ranks have found it.
    let mark = group.agree(if is_first { folder::Mark::new(root).map(Some) } else { Ok(None) })?;
    let name = group.broadcast_object(mark.as_ref().map(|mark| &mark.name), 0)?;
    group.agree(folder::find(root, &name))?;
    group.agree(folder::probe(root))
}

impl CheckpointerOptions {
    fn check(&self) -> Result<()> {
        for (name, value) in [("keep", self.keep as u64), ("every", self.every)] {
            if value == 0 {
                return Err(Error::invalid(name, "it must be at least 1, not 0"));
            }
        }
        Ok(())
    }
}

/// Waits until a running save has ended. If no call has returned the error of that save, a warning says it.
impl Drop for Checkpointer {
    fn drop(&mut self) {
        if let Err(error) = self.end_previous() {
            warn_aloud(format_args!("rank {}: a checkpoint could not be saved: {error}", self.group.rank()));
        }
    }
}

#[cfg(test)]
mod tests;
