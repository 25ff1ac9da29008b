//! Groups that are split off from another one.
use super::engine::{self, Settings};
use super::place::Place;
use super::whole::Whole;
use super::{Backend, ProcessGroup};
use crate::backend::{CallSite, Communicator, Construction, Role, Split};
use crate::error::Failure;
use crate::flight_recorder::Recording;
use crate::panic::lock;
use crate::rendezvous::{PrefixStore, Store};
use crate::{Error, Result};
use candle_core::Device;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether a group has had a [companion](ProcessGroup::companion).
static HAS_COMPANIONS: AtomicBool = AtomicBool::new(false);

impl ProcessGroup {
    /// Creates a group of some of this group's ranks. Rank `i` of the new group is rank `ranks[i]` of this one.
    ///
    /// Every rank of this group must call it with the same `ranks`. Ranks that are not in `ranks` get `None`.
    ///
    /// # Errors
    /// Returns [`Error::RankOutOfRange`] for a rank that does not exist, [`Error::InvalidArgument`] for an empty list
    /// or a rank given twice, an error if ranks do not arrive within the time-out, and, at once, the failure of this
    /// group if it has failed.
    #[track_caller]
    pub fn new_group(&self, ranks: &[usize]) -> Result<Option<Self>> {
        CallSite::during(Location::caller(), || self.split_off(ranks, None))
    }

    /// Like [`new_group`](Self::new_group). With a role, the program does not know the group: either ends with the other, and its errors
    /// belong to the group of all ranks.
    pub(super) fn split_off(&self, ranks: &[usize], role: Option<Role>) -> Result<Option<Self>> {
        if let Some(&rank) = ranks.iter().find(|rank| **rank >= self.world_size()) {
            return Err(Error::RankOutOfRange { rank, world_size: self.world_size() });
        }
        let mut seen = vec![false; self.world_size()];
        for &rank in ranks {
            if std::mem::replace(&mut seen[rank], true) {
                return Err(Error::invalid("ranks", format!("rank {rank} is in {ranks:?} twice")));
            }
        }
        if ranks.is_empty() {
            return Err(Error::invalid("ranks", "the list must name at least one rank"));
        }
        let number = self.0.subgroups.fetch_add(1, Ordering::Relaxed);
        let place = ranks.iter().position(|rank| *rank == self.rank());
        // The ranks are part of the key, so that processes that were given different ranks do not connect by accident.
        let members = ranks.iter().map(usize::to_string).collect::<Vec<_>>().join("-");
        let store: Arc<dyn Store> =
            Arc::new(PrefixStore::new(format!("group{number}/{members}"), Arc::clone(&self.0.store)));
        let settings = self.0.settings.clone();
        let split =
            self.0.communicator.make(role.unwrap_or(Role::Group), ranks, engine::engine_store(&store, &settings));
        let split = split.map_err(|error| self.note(error))?;
        let key = format!("group{number}");
        let recording = self.recording_of(&key, ranks);
        let Some(rank) = place else { return Ok(None) };
        let names = (key.as_str(), "the group");
        let place = match role {
            Some(_) => {
                let whole = Whole::new(&self.0.communicator, self.global_ranks(), &self.0.store);
                self.0.place.split_part(names, whole, ranks, rank)
            }
            None => self.0.place.split(names, ranks, rank),
        };
        let communicator = self.member(split, &store, &place, recording.as_ref());
        let made = communicator.map_err(|error| self.note_of(&place, error))?;
        made.map(|made| Ok(Self::around(made, store, place, settings, recording)?.listed())).transpose()
    }

    /// Records the error of the construction of a group at `place`: the failure of this group if that has ended it.
    fn note_of(&self, place: &Place, error: Error) -> Error {
        match self.failed() {
            Err(own) if error.failure().is_some() => self.note(own),
            _ => place.note(error),
        }
    }

    /// Returns the same group, which ends when its whole job does.
    fn listed(self) -> Self {
        self.0.place.list(&self.0.communicator);
        self
    }

    /// A second group of the same ranks, for collectives inside a model's forward and backward passes. DDP launches
    /// buckets in the first group at times that differ between ranks, but ranks must make the calls of a group in the
    /// same order. All layers share it. The first call creates it and waits for all other ranks; it ends with this
    /// group.
    pub(crate) fn companion(&self) -> Result<Self> {
        self.companion_for(Role::Companion)
    }

    /// The companion that gathers blocks of sharded models: over NCCL another one, since these kernels need more of the GPU.
    pub(crate) fn gathers(&self) -> Result<Self> {
        self.companion_for(if self.backend() == Backend::Nccl { Role::Gathers } else { Role::Companion })
    }

    fn companion_for(&self, role: Role) -> Result<Self> {
        HAS_COMPANIONS.store(true, Ordering::Relaxed);
        let mut companions = lock(&self.0.companions);
        if let Some(companion) = companions.get(&role) {
            return Ok(companion.clone());
        }
        let names = match role {
            Role::Gathers => ("gathers", "the gathers of"),
            _ => ("companion", "the companion of"),
        };
        let companion = self.duplicate(role, names.0, self.0.place.part(names))?.listed();
        companions.insert(role, companion.clone());
        Ok(companion)
    }

    /// Whether a group of this process has had a companion: a backward pass may then wait for other ranks.
    pub(crate) fn has_companions() -> bool {
        HAS_COMPANIONS.load(Ordering::Relaxed)
    }

    /// A second group of the same ranks over the same engine, whose keys have the given `prefix`.
    fn duplicate(&self, role: Role, prefix: &str, place: Place) -> Result<Self> {
        let store: Arc<dyn Store> = Arc::new(PrefixStore::new(prefix, Arc::clone(&self.0.store)));
        let settings = self.0.settings.clone();
        let ranks = self.all_ranks();
        let recording = self.recording_of(prefix, &ranks);
        let duplicate = self.0.communicator.make(role, &ranks, engine::engine_store(&store, &settings));
        let made = duplicate.and_then(|split| self.member(split, &store, &place, recording.as_ref()));
        let Some(made) = made.map_err(|error| self.note_of(&place, error))? else {
            let reason = "Communicator::duplicate must make an engine for every rank".to_string();
            return Err(Failure::PeerFailed { peer: self.rank(), reason }.into());
        };
        Self::around(made, store, place, settings, recording)
    }

    /// A group of the same ranks for tensors in host memory, over the CPU engine: PyTorch's second backend in
    /// `"cpu:gloo,cuda:nccl"`. If this group works on the CPU, it returns this group. The first call creates the second
    /// group and waits for all other ranks; it ends with this group.
    ///
    /// # Errors
    /// Returns an error if ranks do not arrive within the time-out, or, at once, the failure of this group.
    pub fn cpu_group(&self) -> Result<Self> {
        if self.device().is_cpu() {
            return Ok(self.clone());
        }
        let mut cpu = lock(&self.0.cpu);
        if let Some(cpu) = &*cpu {
            return Ok(cpu.clone());
        }
        let place = self.0.place.part(("cpu-group", "the CPU group of"));
        Ok(cpu.insert(self.connect_cpu("cpu-group", place)?.listed()).clone())
    }

    /// A group of the same ranks for tensors in host memory, for the calls of a background thread: over the CPU engine, or
    /// over an engine from outside that takes such tensors, since that may be the only one whose network is there. It has
    /// separate connections, and continues when this one fails or is aborted. Every call makes another such group, and
    /// waits for the same call on every other rank.
    ///
    /// # Errors
    /// Returns the same errors as [`cpu_group`](Self::cpu_group).
    pub(crate) fn background_group(&self) -> Result<Self> {
        let number = self.0.subgroups.fetch_add(1, Ordering::Relaxed);
        let prefix = format!("background{number}");
        let place = || {
            let names = (prefix.as_str(), "the background group of");
            self.0.place.split(names, &self.all_ranks(), self.rank()).outliving()
        };
        if self.backend() == Backend::Custom && self.device().is_cpu() {
            match self.duplicate(Role::Companion, &prefix, place()) {
                // An engine that makes no further groups.
                Err(Error::Unavailable { .. }) => {}
                made => return made,
            }
        }
        self.connect_cpu(&prefix, place())
    }

    /// A group of the same ranks over the CPU engine, whose keys have the given `prefix`.
    fn connect_cpu(&self, prefix: &str, place: Place) -> Result<Self> {
        let store: Arc<dyn Store> = Arc::new(PrefixStore::new(prefix, Arc::clone(&self.0.store)));
        let settings = Settings { backend: Backend::Cpu, device: Device::Cpu, ..self.0.settings.clone() };
        let failed = || Ok(self.failed()?);
        let recording = self.recording_of(prefix, &self.all_ranks());
        let (recorded, membership) = (recording.as_ref(), Some(&place.membership));
        let construction =
            Construction { cancelled: Some(&failed), recording: recorded, membership, ..Default::default() };
        let (rank, world_size) = (self.rank(), self.world_size());
        let made = engine::communicator(construction, Arc::clone(&store), rank, world_size, &settings);
        let made = made.map_err(|error| self.note_of(&place, error))?;
        Self::around(made, store, place, settings, recording)
    }

    /// This rank's handle to a group at `place` that was split off. If this group's engine cannot split, the new group gets its own
    /// connections.
    fn member(
        &self,
        split: Split,
        store: &Arc<dyn Store>,
        place: &Place,
        recording: Option<&Recording>,
    ) -> Result<Option<Box<dyn Communicator>>> {
        match split {
            Split::Member(communicator) => Ok(Some(communicator)),
            Split::NotMember => Ok(None),
            Split::Unsupported => {
                let failed = || Ok(self.failed()?);
                let membership = Some(&place.membership);
                let construction =
                    Construction { cancelled: Some(&failed), recording, membership, ..Default::default() };
                let (store, rank, world_size) = (Arc::clone(store), place.rank(), place.global_ranks.len());
                engine::communicator(construction, store, rank, world_size, &self.0.settings).map(Some)
            }
        }
    }

    fn all_ranks(&self) -> Vec<usize> {
        (0..self.world_size()).collect()
    }

    /// Returns how the calls of a group of these `ranks` are recorded.
    fn recording_of(&self, name: &str, ranks: &[usize]) -> Option<Recording> {
        self.0.recording.as_ref().map(|recording| recording.of_subgroup(name, ranks))
    }
}
