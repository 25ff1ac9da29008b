//! Checkpoints of a whole run.
mod folder;
mod handle;
mod index;
mod load;
mod save;
mod snapshot;

pub use handle::SaveHandle;
#[cfg(any(test, fuzzing))]
pub(crate) use index::fuzz_index;

use crate::backend::Label;
use crate::process_group::ProcessGroup;
use crate::{Error, Result};
use handle::Save;
use snapshot::Buffers;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

/// When a [`Checkpointer`] saves, and what it keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointerOptions {
    /// How many checkpoints are kept, the newest ones, beside the one that [`Checkpointer::save_best`] saved last; at least 1.
    /// Default: 2, so that there is another one if the newest is damaged.
    pub keep: usize,
    /// [`Checkpointer::save_if_due`] saves at the multiples of this number; at least 1. Default: 1, every time.
    pub every: u64,
    /// Whether the run goes on from what earlier runs have saved in the folder, with
    /// [`load_latest`](Checkpointer::load_latest) or [`load_best`](Checkpointer::load_best). Otherwise it begins from scratch,
    /// and [`Checkpointer::new`] refuses a folder that holds checkpoints. Default: false.
    pub resume: bool,
}

impl Default for CheckpointerOptions {
    fn default() -> Self {
        Self { keep: 2, every: 1, resume: false }
    }
}

/// Saves the states of a run together, in the background, and loads them again.
///
/// ```
/// use candle_core::{DType, Tensor};
/// use candle_ddp::checkpoint::{Checkpointer, CheckpointerOptions};
/// use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW};
/// use candle_ddp::{DdpOptions, DistributedDataParallel};
/// use candle_nn::{VarMap, linear};
///
/// # fn main() -> candle_ddp::Result<()> {
/// # let folder = std::env::temp_dir().join(format!("checkpointer-{}", std::process::id()));
/// candle_ddp::spawn(2, |pg| {
///     let mut varmap = VarMap::new();
///     let ddp = DistributedDataParallel::new(&pg, &varmap, DType::F32, |vb| linear(4, 2, vb), DdpOptions::default())?;
///     let mut optimizer = AdamW::from_named(ddp.named_parameters(), ParamsAdamW::default())?;
///     let mut best_loss = f64::INFINITY;
///
///     let options = CheckpointerOptions { every: 2, resume: true, ..Default::default() };
///     let mut checkpointer = Checkpointer::new(&pg, &folder, options)?;
///     let first = checkpointer
///         .load_latest(&mut [("model", &mut varmap), ("optimizer", &mut optimizer), ("best_loss", &mut best_loss)])?
///         .unwrap_or(0);
///     for step in first + 1..=4 {
///         let x = Tensor::randn(0f32, 1.0, (8, 4), pg.device())?;
///         let loss = ddp.forward(&x)?.sqr()?.mean_all()?;
///         optimizer.step(&ddp.backward(&loss)?)?;
///         checkpointer.save_if_due(step, &[("model", &varmap), ("optimizer", &optimizer), ("best_loss", &best_loss)])?;
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
/// Each part is a [`StateDict`](super::StateDict): the `VarMap` of the model, optimizers, schedules, the scaler, a loader's state, generators,
/// plain numbers, [`Serde`](super::Serde) of anything else, and states of the program's own. Rank 0 writes
/// `step-00001000/NAME.safetensors` for each; of a part that is spread over the ranks
/// ([`sharded_state_dict`](super::StateDict::sharded_state_dict): [`ZeroRedundancyOptimizer`](crate::optim::ZeroRedundancyOptimizer)),
/// every rank writes its own shard. The others are compared: what differs from rank to rank, such as a loss that a rank has
/// computed for itself, is an error, unless it is saved as [`PerRank`](super::PerRank) or [`RankZero`](super::RankZero). Ranks on
/// several machines need a file system that they share.
///
/// `checkpoint.json`, which is written last, makes a checkpoint whole: it lists the parts and their files. A folder without
/// it is one that is being written, or was.
///
/// # In the background
/// [`save`](Self::save) returns as soon as everything has been copied to host memory: the program may change its states at
/// once. The copies' memory is kept for the next save. A thread on each rank writes, and its ranks agree over a group of
/// their own, whose calls do not come between those of the training. One save is under way at a time, and a further one
/// waits for it. Dropping the `Checkpointer` waits as well, so that a save also ends well where a training ends by an error.
///
/// # Errors
/// Every rank makes every call, and each call succeeds on all ranks or fails on all of them.
#[derive(Debug)]
pub struct Checkpointer {
    group: ProcessGroup,
    /// For the calls of the thread that writes.
    background: ProcessGroup,
    root: PathBuf,
    options: CheckpointerOptions,
    buffers: Buffers,
    in_flight: Option<(Arc<Save>, JoinHandle<()>)>,
    /// The step that was saved last.
    newest: Option<u64>,
    /// Folders whose files turned out to be damaged: they count as if they were not there.
    damaged: HashSet<PathBuf>,
}

impl Checkpointer {
    /// Checkpoints in `folder`, which is made if it is missing. What killed saves have left there is removed. All ranks of
    /// `group` call this.
    ///
    /// # Errors
    /// On every rank: [`Error::Io`] if `folder` is not a folder in which each rank can make files; [`Error::InvalidArgument`] if
    /// it holds checkpoints and [`resume`](CheckpointerOptions::resume) is not set, and for options that are 0 or differ from
    /// rank to rank; those of the group.
    pub fn new(group: &ProcessGroup, folder: impl AsRef<Path>, options: CheckpointerOptions) -> Result<Self> {
        let root = folder.as_ref().to_path_buf();
        let checked = options.check().map(|()| format!("{options:?}"));
        let compared =
            Label::CHECKPOINTER_NEW.during(|| group.compare(checked.as_ref().cloned(), "it made no Checkpointer"));
        checked?;
        if let Some((_, difference)) = compared? {
            return Err(Error::invalid("options", format!("ranks gave different ones: {difference}")));
        }
        Label::CHECKPOINTER_NEW.during(|| open(group, &root, options.resume))?;
        let background = group.background_group()?;
        Ok(Self {
            group: group.clone(),
            background,
            root,
            options,
            buffers: Buffers::default(),
            in_flight: None,
            newest: None,
            damaged: HashSet::new(),
        })
    }

    /// Waits until the save that is under way has ended.
    ///
    /// # Errors
    /// On every rank that of this save, if its [handle](SaveHandle) was not asked on every rank.
    pub fn finish(&mut self) -> Result<()> {
        let ended = self.end_previous();
        Label::CHECKPOINTER_SAVE.during(|| self.group.agree(ended))
    }

    /// Joins the thread of the save before; its error, if nobody has asked for it.
    fn end_previous(&mut self) -> Result<()> {
        let Some((save, thread)) = self.in_flight.take() else { return Ok(()) };
        if thread.join().is_err() {
            // It catches panics, and has told the handle.
            log::debug!("the thread of a save panicked");
        }
        save.unreported().map_or(Ok(()), Err)
    }
}

/// Makes sure that all ranks can use the folder, before any work is done that could not be saved.
fn open(group: &ProcessGroup, root: &Path, resume: bool) -> Result<()> {
    let is_first = group.rank() == 0;
    let prepare = || {
        folder::make(root)?;
        folder::clean(root);
        let newest = folder::whole(root, |_, _| {})?.pop();
        match newest.filter(|_| !resume) {
            None => Ok(()),
            Some(newest) => {
                let reason = format!(
                    "it holds the checkpoint {}: to go on from there, set CheckpointerOptions::resume and call load_latest; to \
                     begin from scratch, use another folder or move the checkpoints away",
                    newest.path.display()
                );
                Err(Error::invalid("folder", reason))
            }
        }
    };
    group.agree(if is_first { prepare() } else { Ok(()) })?;
    group.agree(folder::probe(root))
}

impl CheckpointerOptions {
    fn check(&self) -> Result<()> {
        for (name, value) in [("keep", self.keep as u64), ("every", self.every)] {
            if value == 0 {
                return Err(Error::invalid(name, "it must be at least 1"));
            }
        }
        Ok(())
    }
}

/// Waits until the save that is under way has ended. An error of it that nobody has asked for goes to the log.
impl Drop for Checkpointer {
    fn drop(&mut self) {
        if let Err(error) = self.end_previous() {
            log::error!("a checkpoint could not be saved: {error}");
        }
    }
}

#[cfg(test)]
mod tests;
