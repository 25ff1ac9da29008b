//! The groups of one rank, and the file of their calls.
use super::{FlightRecorderOptions, files, now_ns, signal};
use crate::host::host_name;
use crate::panic::lock;
use crate::warnings::warn_aloud;
use crate::{Error, Result};
use candle_ddp_base::debug_fields;
use candle_ddp_base::flight_record::{CallRecord, GroupRecord, RankRecord, VERSION};
use candle_ddp_env::PROCESS;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};

/// A group whose calls are remembered.
pub(crate) trait Recorded: Send + Sync {
    /// Returns the group's calls, channel by channel, and its failure.
    fn record(&self) -> (Vec<CallRecord>, Option<String>);
}

/// The remembered calls of all groups of one rank of a job.
pub(crate) struct FlightRecorder {
    options: FlightRecorderOptions,
    rank: usize,
    world_size: usize,
    started_ns: u64,
    groups: Mutex<Vec<Registered>>,
    /// Held while the file is written: several groups may fail at once.
    writing: Mutex<()>,
}

struct Registered {
    name: String,
    ranks: Vec<usize>,
    group: Weak<dyn Recorded>,
}

/// How the calls of one group are recorded.
#[derive(Clone, Debug)]
pub struct Recording {
    /// Writes the file.
    pub(crate) recorder: Arc<FlightRecorder>,
    /// The group's name, the same on all ranks.
    name: String,
    /// The group's ranks, as numbered in the group of all ranks.
    ranks: Vec<usize>,
}

debug_fields!(FlightRecorder: options, rank);

impl FlightRecorder {
    /// Returns `None` if the recorder is turned off.
    fn new(options: FlightRecorderOptions, rank: usize, world_size: usize) -> Result<Option<Arc<Self>>> {
        if options.entries == 0 {
            return Ok(None);
        }
        let options = options.resolve(PROCESS);
        let on_sigusr1 = options.on_sigusr1;
        if on_sigusr1 && options.folder.is_none() {
            let reason = "on_sigusr1 needs a folder: set `folder`, or CANDLE_DDP_FLIGHT_RECORDER";
            return Err(Error::invalid("flight_recorder", reason));
        }
        let (groups, writing) = (Mutex::default(), Mutex::default());
        if let Some(folder) = &options.folder {
            files::prepare(folder)?;
        }
        let recorder = Arc::new(Self { options, rank, world_size, started_ns: now_ns(), groups, writing });
        if on_sigusr1 {
            let listener: Arc<dyn signal::Listener> = recorder.clone();
            signal::on_sigusr1(Arc::downgrade(&listener))?;
        }
        Ok(Some(recorder))
    }

    /// Returns how many calls a group remembers.
    pub(crate) fn entries(&self) -> usize {
        self.options.entries
    }

    /// Writes the file after a failure or on a signal, if there is a folder. A failure to write it is only a warning.
    pub(crate) fn write_because(&self, reason: &str) {
        let Some(folder) = &self.options.folder else { return };
        match self.write(folder, reason) {
            Ok(path) => log::info!("rank {}: wrote its last calls to {}", self.rank, path.display()),
            Err(error) => warn_aloud(format_args!("rank {}: its last calls are lost: {error}", self.rank)),
        }
    }

    fn write(&self, folder: &Path, reason: &str) -> Result<PathBuf> {
        let _turn = lock(&self.writing);
        let groups: Vec<_> = {
            let group =
                |Registered { name, ranks, group }: &Registered| Some((name.clone(), ranks.clone(), group.upgrade()?));
            lock(&self.groups).iter().filter_map(group).collect()
        };
        let record = |(name, ranks, group): (String, Vec<usize>, Arc<dyn Recorded>)| {
            let (calls, failure) = group.record();
            GroupRecord { name, ranks, failure, calls }
        };
        let record = RankRecord {
            version: VERSION,
            rank: self.rank,
            world_size: self.world_size,
            host: host_name(),
            pid: std::process::id(),
            reason: reason.to_string(),
            written_ns: now_ns(),
            started_ns: self.started_ns,
            groups: groups.into_iter().map(record).collect(),
        };
        files::write(folder, &record)
    }
}

impl signal::Listener for FlightRecorder {
    fn on_signal(&self) {
        self.write_because("SIGUSR1");
    }
}

impl Recording {
    /// The recording of the group of all ranks, on rank `rank`; None if it is turned off.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be created, or if a handler for SIGUSR1 cannot be installed or has no folder.
    pub fn of_world(options: FlightRecorderOptions, rank: usize, world_size: usize) -> Result<Option<Self>> {
        let recorder = FlightRecorder::new(options, rank, world_size)?;
        Ok(recorder.map(|recorder| Self { recorder, name: "world".to_string(), ranks: (0..world_size).collect() }))
    }

    /// Writes the file of this rank, which has the calls of all of its groups, into `folder`, and returns its path.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn write(&self, folder: &Path, reason: &str) -> Result<PathBuf> {
        self.recorder.write(folder, reason)
    }

    /// Registers `group`, whose calls are written from now on.
    pub(crate) fn register(&self, group: Weak<dyn Recorded>) {
        let Self { name, ranks, .. } = self.clone();
        let mut groups = lock(&self.recorder.groups);
        // A program may make sub-groups for as long as it runs.
        groups.retain(|registered| registered.group.strong_count() > 0);
        groups.push(Registered { name, ranks, group });
    }

    /// Returns the recording of a group that is split off this one; `ranks` are numbered as in this one.
    pub fn of_subgroup(&self, name: &str, ranks: &[usize]) -> Self {
        let ranks = ranks.iter().filter_map(|rank| self.ranks.get(*rank).copied()).collect();
        Self { recorder: Arc::clone(&self.recorder), name: format!("{}/{name}", self.name), ranks }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Group;

    impl Recorded for Group {
        fn record(&self) -> (Vec<CallRecord>, Option<String>) {
            (Vec::new(), None)
        }
    }

    #[test]
    fn groups_that_are_gone_take_no_memory() {
        let world = Recording::of_world(FlightRecorderOptions::default(), 0, 2).unwrap().unwrap();
        let recorder = Arc::clone(&world.recorder);
        let register = |recording: &Recording| {
            let group: Arc<dyn Recorded> = Arc::new(Group);
            recording.register(Arc::downgrade(&group));
            group
        };
        let _world = register(&world);
        for number in 0..100 {
            register(&world.of_subgroup(&number.to_string(), &[0]));
        }
        let last = register(&world.of_subgroup("last", &[0]));
        assert_eq!(
            lock(&recorder.groups).iter().map(|group| group.name.as_str()).collect::<Vec<_>>(),
            ["world", "world/last"]
        );
        drop(last);
        let folder = tempfile::tempdir().unwrap();
        let path = recorder.write(folder.path(), "a test").unwrap();
        let record: RankRecord = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        assert_eq!(record.groups.len(), 1);
    }

    /// Who may write to the folder cannot have another file overwritten.
    #[test]
    fn a_link_in_the_folder_is_replaced_and_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let victim = folder.path().join("victim");
        std::fs::write(&victim, "mine").unwrap();
        std::os::unix::fs::symlink(&victim, folder.path().join("rank0.flight.json")).unwrap();
        let recorder = FlightRecorder::new(FlightRecorderOptions::default(), 0, 1).unwrap().unwrap();
        let path = recorder.write(folder.path(), "a test").unwrap();
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "mine");
        assert!(path.symlink_metadata().unwrap().is_file());
    }
}
