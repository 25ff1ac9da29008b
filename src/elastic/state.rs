//! The state of a training run, and its last commit.
use super::shards::{ELASTIC, Shards};
use crate::panic::lock;
use crate::placement::Spread;
use crate::process_group::{ProcessGroup, WeakProcessGroup};
use crate::state::{Dict, Parts, StateDict, fingerprint};
use crate::tensor::copy::copy_all;
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Mutex;

/// A training run with its last commit, to which the surviving ranks return when one is gone: Horovod's
/// `hvd.elastic.State`. It dereferences to the value from which it was made.
///
/// The [parts](Parts) of that value are the state that training needs to continue: the variables, the optimizer, schedules,
/// generators, the position in the data. They must be the same on all ranks; if not, the first commit returns an error. A part
/// that each rank has for itself ([`PerRank`](crate::checkpoint::PerRank), a [`Generator`](crate::seed::Generator) of
/// `for_rank`) is mirrored on another rank, as in [`commit_including`](Self::commit_including). Parts that depend on the group,
/// such as a [`GradScaler`](crate::amp::GradScaler), are made in the training loop; use [`restore`](Self::restore) and
/// `commit_including` for them.
///
/// A commit is a copy of all parts on their own devices: it takes as much memory as the variables and the states of the
/// optimizer, and the time to copy them. If a step is much faster than that, commit every few steps; after a failure,
/// the steps since the last commit are repeated.
#[derive(Debug)]
pub struct State<S> {
    inner: S,
    commits: u64,
    /// `part/key` of all parts that are the same on all ranks, in their own storage.
    committed: Dict,
    /// The parts that are spread over the ranks, or that each rank has for itself.
    pub(super) shards: Shards,
    /// How each part of the last commit is spread.
    spreads: BTreeMap<String, Spread>,
    /// The parts of the present group that every commit must have: those of the last commit, and those that were to be restored; and
    /// whether they have been, or were committed.
    needed: Mutex<BTreeMap<String, bool>>,
    /// The group of the present generation.
    group: WeakProcessGroup,
    /// Whether the ranks of this generation have found the parts of a commit to be equal.
    is_compared: bool,
    load_last: Option<LoadLast<S>>,
}

/// The program's function that loads its last checkpoint.
struct LoadLast<S>(Box<Load<S>>);

type Load<S> = dyn FnMut(&mut State<S>, &ProcessGroup) -> Result<bool> + Send;

impl<S> fmt::Debug for LoadLast<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LoadLast")
    }
}

impl<S: Parts> State<S> {
    /// A run that begins with `inner`, which is new, or loaded from a checkpoint.
    pub fn new(inner: S) -> Self {
        Self {
            inner,
            commits: 0,
            committed: Dict::new(),
            shards: Shards::default(),
            spreads: BTreeMap::new(),
            needed: Mutex::default(),
            group: WeakProcessGroup::default(),
            load_last: None,
            is_compared: false,
        }
    }

    /// Sets how the run continues when all of its ranks, and so every commit, are lost at once. `load` gives the state
    /// the last checkpoint of this run, and returns whether there was one. All ranks of the next generation call it,
    /// with its group, before they train. It also runs when torchrun has restarted all ranks. If it returns true on
    /// some ranks only, all ranks get the state that these have loaded.
    ///
    /// ```
    /// use candle_ddp::checkpoint::{Parts, StateDict};
    /// use candle_ddp::elastic::State;
    /// # use candle_ddp::data::LoaderState;
    /// # struct Training(LoaderState);
    /// # impl Parts for Training {
    /// #     fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
    /// #         vec![("progress", &mut self.0)]
    /// #     }
    /// # }
    /// # let training = Training(LoaderState::default());
    /// let path = std::path::PathBuf::from("/scratch/run7/state.safetensors"); // from state.save(path)
    /// let state = State::new(training).on_total_loss(move |state, _| match path.try_exists() {
    ///     Ok(false) => Ok(false),
    ///     _ => state.load(&path).map(|()| true),
    /// });
    /// # let _ = state;
    /// ```
    #[must_use]
    pub fn on_total_loss(
        mut self,
        load: impl FnMut(&mut Self, &ProcessGroup) -> Result<bool> + Send + 'static,
    ) -> Self {
        self.load_last = Some(LoadLast(Box::new(load)));
        self
    }

    /// The number of commits so far, on all ranks and over all generations.
    pub fn commits(&self) -> u64 {
        self.commits
    }

    /// Ends a step: if a rank is lost later, the others continue from here. Call it on all ranks, after the optimizer's
    /// step and everything that belongs to it, such as the schedule's step and counting the samples. There must be a
    /// collective of all ranks between two commits, as in a backward pass of DDP. Then either all ranks have made a
    /// commit, or some are one commit ahead and the others get their state.
    ///
    /// Waits until a GPU has done the step, since only then it is known whether the group failed in it.
    ///
    /// The first commit of each generation compares the parts of all ranks.
    ///
    /// # Errors
    /// Returns errors of the parts, of the device when memory runs out, and of the group. Returns
    /// [`Error::PartDiffers`], on every rank, for a part that is not the same on all ranks. Returns [`Error::InvalidArgument`] if an
    /// the last commit has a part, or [`restore`](Self::restore) has named one, that this commit does not have, or if a part of the
    /// last generation's has not been restored: it would continue from its initial state.
    pub fn commit(&mut self) -> Result<()> {
        self.commit_parts(Vec::new())
    }

    /// Like [`commit`](Self::commit), with additional parts that belong to the present group. Their names must differ
    /// from the others, and every call must give the same ones.
    ///
    /// Parts that are spread over the ranks, such as the optimizer of a [sharded](crate::Sharding) model, are
    /// mirrored: each rank sends its shard to the next rank, on another host if there are several, and keeps the shard
    /// of the one before. When a rank dies, the rank that mirrors it has its shard. Each rank then needs memory for
    /// four shards, its own and the mirrored one of the last two commits, and sends and receives one in each commit.
    ///
    /// # Errors
    /// Returns the errors of `commit`; with sharded parts also errors of the group.
    pub fn commit_including(&mut self, mut more: impl Parts) -> Result<()> {
        self.commit_parts(more.parts())
    }

    fn commit_parts(&mut self, more: Vec<(&str, &mut dyn StateDict)>) -> Result<()> {
        let names: BTreeSet<String> = more.iter().map(|(name, _)| name.to_string()).collect();
        let own: BTreeSet<String> = self.inner.parts().iter().map(|(name, _)| name.to_string()).collect();
        let mut needed = lock(&self.needed);
        let missing: Vec<_> = needed.keys().filter(|name| !names.contains(*name) && !own.contains(*name)).collect();
        if !missing.is_empty() {
            let reason = format!(
                "the commit must have the parts {missing:?} too, which commit_including or restore have named before: pass them to \
                 commit_including in every commit. After a failure they would begin from their initial state"
            );
            return Err(Error::invalid("parts", reason));
        }
        let unrestored: Vec<_> =
            needed.iter().filter(|(_, is_restored)| !**is_restored).map(|(name, _)| name).collect();
        if !unrestored.is_empty() {
            let reason = format!(
                "the last commit has the parts {unrestored:?}, which have not got their states back, so this one must not replace it: call \
                 State::restore for each of them when it has been made"
            );
            return Err(Error::invalid("parts", reason));
        }
        needed.extend(names.into_iter().map(|name| (name, true)));
        drop(needed);
        // The last commit is only overwritten by parts that are known to be right.
        if let Some(group) = self.group.upgrade() {
            group.settle()?;
        }
        self.take(self.commits + 1, more)?;
        self.commits += 1;
        if let Some(group) = self.group.upgrade().filter(|_| !self.is_compared) {
            self.compare(&group)?;
            self.is_compared = true;
        }
        Ok(())
    }

    /// Finds parts that ranks have computed separately, before a rank dies and the others get one rank's.
    fn compare(&mut self, group: &ProcessGroup) -> Result<()> {
        let fingerprints = self.fingerprints();
        let fingerprints = ELASTIC.during(|| group.agree(fingerprints))?;
        let states: Vec<_> = fingerprints.iter().map(|(name, fingerprint)| (name.as_str(), fingerprint)).collect();
        ELASTIC.during(|| group.compare_states(&states))
    }

    /// The hashes of the last commit's tensors, by part.
    pub(super) fn fingerprints(&self) -> Result<BTreeMap<String, BTreeMap<String, u64>>> {
        let mut parts = BTreeMap::<String, BTreeMap<String, u64>>::new();
        for (key, hash) in fingerprint(&self.committed)? {
            if let Some((part, name)) =
                key.split_once('/').filter(|(part, _)| self.spreads.get(*part) != Some(&Spread::RankZero))
            {
                parts.entry(part.to_string()).or_default().insert(name.to_string(), hash);
            }
        }
        Ok(parts)
    }

    /// Gives `part`, which [`commit_including`](Self::commit_including) commits under this name, its state as of the last commit.
    /// Call it when the part has been made. Returns false before the first such commit.
    ///
    /// Every rank must call it for a part that is spread over the ranks. If their number has changed, each rank briefly
    /// needs memory for one more rank's part.
    ///
    /// # Errors
    /// Returns the part's errors; with sharded parts also errors of the group.
    pub fn restore(&self, name: &str, part: &mut dyn StateDict) -> Result<bool> {
        lock(&self.needed).insert(name.to_string(), true);
        if part.share()?.spread.is_per_rank() {
            return self.shards.restore(self.commits, name, part);
        }
        let dict = self.committed_part(name)?;
        if dict.is_empty() {
            return Ok(false);
        }
        part.take_over(&dict, true)?;
        Ok(true)
    }

    /// The value from which this was made.
    pub fn into_inner(self) -> S {
        self.inner
    }

    /// Returns to the state before the first step, unless there were commits.
    pub(super) fn commit_first(&mut self) -> Result<()> {
        if self.committed.is_empty() { self.take(self.commits, Vec::new()) } else { Ok(()) }
    }

    /// Loads the program's last checkpoint, and returns whether there was one.
    pub(super) fn load_last(&mut self, pg: &ProcessGroup) -> Result<bool> {
        let Some(mut load) = self.load_last.take() else { return Ok(false) };
        // Additional parts of an earlier checkpoint do not belong to what is loaded now.
        let earlier = self.take_additional();
        let loaded = load.0(self, pg);
        self.load_last = Some(load);
        let is_loaded = matches!(loaded, Ok(true));
        let additional = if is_loaded { self.take_additional() } else { earlier };
        if is_loaded {
            // `load` may have loaded the parts one by one, instead of a whole state.
            self.take(self.commits, Vec::new())?;
        }
        self.committed.extend(additional);
        loaded
    }

    /// Takes the parts of [`commit_including`](Self::commit_including) out of the last commit.
    fn take_additional(&mut self) -> Dict {
        let parts = self.inner.parts();
        let is_own =
            |key: &str| key.split_once('/').is_some_and(|(part, _)| parts.iter().any(|(name, _)| *name == part));
        self.committed.extract_if(|key, _| !is_own(key)).collect()
    }

    /// Copies all parts, as commit `commit`.
    fn take(&mut self, commit: u64, more: Vec<(&str, &mut dyn StateDict)>) -> Result<()> {
        let mut live = Live::default();
        self.inner.parts().into_iter().try_for_each(|(name, part)| live.add(name, part))?;
        more.into_iter().try_for_each(|(name, part)| live.add(name, part))?;
        let kept = self.group.upgrade().map(|group| group.kept()).unwrap_or_default();
        if !kept.is_empty() {
            let number =
                |(place, numbers): (usize, [u64; 3])| [place as i64].into_iter().chain(numbers.map(|n| n as i64));
            let numbers: Vec<i64> = kept.into_iter().flat_map(number).collect();
            live.same.insert(SKIPPED.to_string(), crate::state::list(&numbers)?);
        }
        self.shards.commit(commit, &live.own)?;
        // Nothing changes before everything is known to fit.
        let mut copies = Vec::new();
        let mut committed = Dict::new();
        for (key, tensor) in live.same {
            let fits = |old: &&Tensor| {
                (old.shape(), old.dtype()) == (tensor.shape(), tensor.dtype())
                    && old.device().same_device(tensor.device())
            };
            match self.committed.get(&key).filter(fits) {
                Some(old) => {
                    copies.push((old.clone(), tensor));
                    committed.insert(key, old.clone());
                }
                None => {
                    committed.insert(key, tensor.detach().copy()?);
                }
            }
        }
        copy_all(copies.iter().map(|(old, new)| (old, new)))?;
        (self.committed, self.spreads) = (committed, live.spreads);
        Ok(())
    }

    /// Copies the part's tensors, since a part may keep the tensors it is given, and the next commit overwrites these.
    fn committed_part(&self, name: &str) -> Result<Dict> {
        let prefix = format!("{name}/");
        let of_the_part = self.committed.iter().filter_map(|(key, tensor)| Some((key.strip_prefix(&prefix)?, tensor)));
        of_the_part.map(|(key, tensor)| Ok((key.to_string(), tensor.copy()?))).collect()
    }

    #[cfg(test)]
    pub(super) fn set_commits(&mut self, commits: u64) {
        self.commits = commits;
    }

    /// Begins a generation with this group.
    pub(super) fn enter(&mut self, pg: &ProcessGroup) -> Result<()> {
        let own: BTreeSet<String> = self.inner.parts().iter().map(|(name, _)| name.to_string()).collect();
        let keys = self.committed.keys().map(String::as_str).chain(self.shards.keys(self.commits));
        let parts = keys.filter_map(|key| Some(key.split_once('/')?.0)).filter(|part| !own.contains(*part));
        let needed = parts.map(|part| (part.to_string(), false)).collect();
        (self.group, self.is_compared, self.needed) = (pg.downgrade(), false, Mutex::new(needed));
        let Some(numbers) = self.committed.get(SKIPPED) else { return Ok(()) };
        let numbers = numbers.to_vec1::<i64>()?;
        let (of_models, _) = numbers.as_chunks();
        let number = |[place, numbers @ ..]: &[i64; 4]| (*place as usize, numbers.map(|number| number as u64));
        pg.take_over(of_models.iter().map(number).collect());
        Ok(())
    }

    /// The last commit.
    pub(super) fn committed(&self) -> &Dict {
        &self.committed
    }

    /// Takes over another rank's commit, and returns to it.
    pub(super) fn adopt(&mut self, commits: u64, committed: Dict) -> Result<()> {
        (self.commits, self.committed) = (commits, committed);
        self.roll_back()
    }

    /// Returns to the last commit, except for the parts that each rank has for itself.
    pub(super) fn roll_back(&mut self) -> Result<()> {
        self.load_parts(|part, dict| part.take_over(dict, false))
    }

    /// Gives the parts that are the same on all ranks their states as of the last commit, by `load`.
    fn load_parts(&mut self, load: impl Fn(&mut dyn StateDict, &Dict) -> Result<()>) -> Result<()> {
        let names: Vec<String> = self.inner.parts().iter().map(|(name, _)| name.to_string()).collect();
        for name in names {
            let dict = self.committed_part(&name)?;
            if let Some((_, part)) = self.inner.parts().into_iter().find(|(other, _)| *other == name)
                && !part.share()?.spread.is_per_rank()
            {
                load(part, &dict)?;
            }
        }
        Ok(())
    }

    /// Returns to the last commit of the parts that each rank has for itself, from the shards of this generation. If
    /// there is no such commit yet, the ranks' initial state becomes one. Every rank must call it.
    pub(super) fn roll_back_own(&mut self) -> Result<()> {
        if self.shards.has(self.commits) {
            for (name, part) in self.inner.parts() {
                if part.share()?.spread.is_per_rank() {
                    self.shards.restore(self.commits, name, part)?;
                }
            }
            return Ok(());
        }
        let mut live = Live::default();
        self.inner.parts().into_iter().try_for_each(|(name, part)| live.add(name, part))?;
        self.shards.commit(self.commits, &live.own)
    }
}

/// The tensors of several parts, by keys `part/key`.
#[derive(Default)]
struct Live {
    spreads: BTreeMap<String, Spread>,
    /// The entries that all ranks get from one.
    same: BTreeMap<String, Tensor>,
    /// This rank's, also copies that another rank saves: the process that takes this one's place gets nothing else.
    own: BTreeMap<String, Tensor>,
}

impl Live {
    fn add(&mut self, name: &str, part: &dyn StateDict) -> Result<()> {
        if name.contains('/') || name.is_empty() {
            return Err(Error::invalid(
                "parts",
                format!("{name:?} is not a valid part name: it must be non-empty and must not contain `/`"),
            ));
        }
        let share = part.share()?;
        if self.spreads.insert(name.to_string(), share.spread).is_some() {
            return Err(Error::invalid("parts", format!("two parts have the name {name}")));
        }
        let tensors = if share.spread.is_per_rank() { &mut self.own } else { &mut self.same };
        tensors.extend(share.all().into_iter().map(|(key, tensor)| (format!("{name}/{key}"), tensor)));
        Ok(())
    }
}

const COMMITS: &str = "commits";
/// The models' counts of the steps that they have left out.
const SKIPPED: &str = "skipped_steps";

/// The last commit, for a checkpoint from which a run that has lost all its ranks can begin.
impl<S: Parts> StateDict for State<S> {
    /// # Errors
    /// [`Error::InvalidArgument`] if the commit has parts that are spread over the ranks, or that each rank has for
    /// itself: no rank has them whole. A [`Checkpointer`](crate::checkpoint::Checkpointer) writes them.
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        let own = self.spreads.iter().filter(|(_, spread)| spread.is_per_rank());
        let own: Vec<&str> = own.map(|(name, _)| name.as_str()).collect();
        if !own.is_empty() {
            let names = own.join(", ");
            let reason = format!(
                "its last commit has parts of which this rank has only its own shard ({names}): save the parts themselves with \
                 a Checkpointer"
            );
            return Err(Error::invalid("state", reason));
        }
        let mut dict = self.committed.clone();
        dict.insert(COMMITS.to_string(), crate::state::count(self.commits)?);
        Ok(dict)
    }

    fn load_state_dict(&mut self, state: &HashMap<String, Tensor>) -> Result<()> {
        let commits =
            state.get(COMMITS).and_then(|commits| commits.to_device(&Device::Cpu).ok()?.to_vec1::<i64>().ok());
        let Some(commits) = commits.and_then(|commits| u64::try_from(*commits.first()?).ok()) else {
            return Err(Error::parameter(COMMITS, "it is missing: this is not the state of an elastic run"));
        };
        let rest = state.iter().filter(|(key, _)| *key != COMMITS);
        let committed = rest.map(|(key, tensor)| Ok((key.clone(), tensor.copy()?))).collect::<Result<_>>()?;
        self.commit_first()?;
        let old = (self.commits, self.committed.clone());
        (self.commits, self.committed) = (commits, committed);
        let loaded = self.load_parts(|part, dict| part.load_state_dict(dict)).and_then(|()| {
            // A schedule may continue with another length than it was saved with.
            let additional = self.take_additional();
            self.take(commits, Vec::new())?;
            self.committed.extend(additional);
            Ok(())
        });
        loaded.or_else(|error| {
            // Some parts may have changed already.
            self.adopt(old.0, old.1)?;
            Err(error)
        })
    }
}

impl<S> Deref for State<S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.inner
    }
}

impl<S> DerefMut for State<S> {
    fn deref_mut(&mut self) -> &mut S {
        &mut self.inner
    }
}
