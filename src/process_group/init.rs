use super::ProcessGroup;
use super::engine::{Backend, Settings};
use super::job::{self, Job};
use super::stack;
use super::stop::StopSignals;
use super::threads::{self, Affinity};
use crate::backend::{Construction, nccl};
use crate::error::{Failure, ranks};
use crate::flight_recorder::{FlightRecorderOptions, Recording};
use crate::kernels;
use crate::rendezvous::{self, InitWatcher, Rendezvous, RendezvousOptions, Secret, StoreReports};
use crate::warnings::warn_aloud;
use crate::{Error, Result};
use candle_core::Device;
use std::sync::Once;
use std::time::Duration;

/// Options of [`init_process_group`]. The default takes everything from the environment that `ddprun`, torchrun, Slurm,
/// Open MPI or MPICH sets.
#[derive(Clone, Debug)]
pub struct InitOptions {
    /// The engine. Default: `Auto`.
    pub backend: Backend,
    /// How ranks find each other: `env://` (default), `tcp://host:port` or `file:///path`.
    pub init_method: String,
    /// This process's rank. Default: from the environment.
    pub rank: Option<usize>,
    /// The number of ranks. Default: from the environment.
    pub world_size: Option<usize>,
    /// How long to wait for the other ranks, and how long each collective may take. Default: 10 minutes.
    pub timeout: Duration,
    /// Options of NCCL, in which `timeout` replaces theirs. Default: [`NcclOptions::default`](nccl::NcclOptions).
    pub nccl: nccl::NcclOptions,
    /// The device of this rank's tensors. Default: chosen by the engine.
    pub device: Option<Device>,
    /// Whether the kernel kills this process when its parent dies, in whatever way. This is for launchers such as
    /// torchrun, whose workers survive when it is killed by SIGKILL; `ddprun` sets it by itself. Linux only. Default:
    /// false.
    ///
    /// The parent is the thread that started this process. The setting belongs to the thread that calls
    /// [`init_process_group`] and ends with it. The death of a parent before the call goes unnoticed.
    pub die_with_parent: bool,
    /// The number of calls that this rank remembers, and where it writes them. Default: the last 2000, and the folder that
    /// `CANDLE_DDP_FLIGHT_RECORDER` names.
    pub flight_recorder: FlightRecorderOptions,
    /// The secret that ranks prove to each other and to the store, so that no other process can join. Default: the one
    /// in the environment ([`Secret::from_env`]), which `ddprun` sets. Without one, anyone who reaches the store can
    /// use it.
    pub secret: Option<Secret>,
    /// The signals that ask all ranks to stop, so that they can save their state first: see
    /// [`ProcessGroup::stop_requested`]. They count from the beginning of this call on. Default: none, and signals do
    /// what they usually do.
    pub stop_signals: StopSignals,
    /// Whether a process that was started without a launcher is an error. This concerns `env://` if none of a
    /// launcher's variables is set. By default, the process is a world of one rank, so that `cargo run` works, and a
    /// warning says so.
    pub require_launcher: bool,
    /// The number of micro-batches in a global batch, a power of two and at least the number of ranks. It makes a run's bits
    /// independent of the number of ranks: each rank computes some of the micro-batches, which its
    /// [`DataLoader::micro_batches`](crate::data::DataLoader::micro_batches) gives, and
    /// [`backward_with`](crate::backward_with) adds their gradients in an order that does not depend on the ranks
    /// (see `docs/virtual_ranks.md`). It holds for all models and loaders of the group, and of those that are split off. In an
    /// elastic run it stays when ranks come and go. All ranks must give the same. Default: None.
    pub virtual_ranks: Option<usize>,
}

impl Default for InitOptions {
    fn default() -> Self {
        Self {
            backend: Backend::Auto,
            init_method: "env://".to_string(),
            rank: None,
            world_size: None,
            timeout: Duration::from_secs(600),
            nccl: nccl::NcclOptions::default(),
            device: None,
            die_with_parent: false,
            flight_recorder: FlightRecorderOptions::default(),
            secret: None,
            stop_signals: StopSignals::default(),
            require_launcher: false,
            virtual_ranks: None,
        }
    }
}

impl InitOptions {
    /// How this process finds the others.
    pub(crate) fn rendezvous(&self) -> RendezvousOptions {
        RendezvousOptions {
            init_method: self.init_method.clone(),
            rank: self.rank,
            world_size: self.world_size,
            timeout: self.timeout,
            secret: self.secret.clone(),
            require_launcher: self.require_launcher,
        }
    }
}

/// Joins this process to the others of its job and creates the engine that connects them: PyTorch's
/// `torch.distributed.init_process_group`. Every rank must call it; it returns when all have done so.
///
/// ```
/// use candle_core::Tensor;
/// use candle_ddp::{InitOptions, ReduceOp, Result, init_process_group};
/// use std::time::Duration;
///
/// fn main() -> Result<()> {
///     // `ddprun --nproc-per-node 2` starts this program as two ranks. By itself it is the only one.
///     let pg = init_process_group(InitOptions { timeout: Duration::from_secs(60), ..Default::default() })?;
///     pg.abort_on_error(|| {
///         let x = Tensor::ones(3, candle_core::DType::F32, pg.device())?;
///         pg.all_reduce(&x, ReduceOp::Sum)?;
///         assert_eq!(x.to_vec1::<f32>()?, [pg.world_size() as f32; 3]);
///         Ok(())
///     })
/// }
/// ```
/// With `Backend::Auto` and no device given, a rank that sees a GPU uses NCCL on the GPU with its local rank as number,
/// and other ranks use the CPU engine. All ranks must end up with the same engine. A build with the feature `cuda` and without
/// `nccl` uses the CPU as well, with a warning, unless a GPU is given as the device: it then creates a group of one rank.
///
/// If several ranks share a host and `RAYON_NUM_THREADS` is not set, for example because ranks were started by hand,
/// each would use all processors. rayon's threads are then limited to the rank's share, unless they are already
/// running, and a warning says so.
///
/// A process that was started without a launcher is a world of one rank, unless [`InitOptions::require_launcher`] is
/// set.
///
/// # Errors
/// Returns an error if the environment is incomplete or contradictory, if an engine is not available, or if ranks do
/// not arrive within the time-out. Each error names the variable, address or rank, and says what to do. If a rank
/// arrives and then fails, for example because it has no device or another engine than the others, all ranks get an
/// error at once ([`Failure::PeerFailed`]); if its process dies, they get one within ten seconds. The time-out limits
/// the whole call.
pub fn init_process_group(options: InitOptions) -> Result<ProcessGroup> {
    stack::grow();
    let rank = options.rank;
    init(options).inspect_err(|error| job::tell_error(rank, error, Some))
}

fn init(options: InitOptions) -> Result<ProcessGroup> {
    let joining = Joining::new(&options)?;
    let (found, watcher) = rendezvous::meet(&options.rendezvous())?;
    let ranks = (0..found.world_size).collect();
    joining.join(found, watcher, ranks)
}

/// How this process joins groups of ranks that have met.
pub(crate) struct Joining {
    backend: Backend,
    /// The reason why a program that is built for GPUs trains on the CPU.
    no_gpu: Option<String>,
    device: Option<Device>,
    timeout: Duration,
    nccl: nccl::NcclOptions,
    flight_recorder: FlightRecorderOptions,
    virtual_ranks: Option<usize>,
}

impl Joining {
    /// Chooses the engine.
    pub(crate) fn new(options: &InitOptions) -> Result<Self> {
        options.stop_signals.handle()?;
        if options.die_with_parent {
            super::parent::die_with_parent()?;
        }
        let backend = choose(options.backend, options.device.as_ref(), nccl::device_count, nccl::version)?;
        let has_a_choice = options.backend == Backend::Auto && options.device.is_none();
        Ok(Self {
            backend,
            no_gpu: if has_a_choice { no_gpu(cfg!(feature = "cuda"), nccl::device_count()) } else { None },
            device: options.device.clone(),
            timeout: options.timeout,
            nccl: options.nccl.clone(),
            flight_recorder: options.flight_recorder.clone(),
            virtual_ranks: options.virtual_ranks,
        })
    }

    /// Connects this process to the ranks that it has met, which the launcher numbers as `ranks`.
    pub(crate) fn join(&self, found: Rendezvous, watcher: InitWatcher, ranks: Vec<usize>) -> Result<ProcessGroup> {
        let made = self.connect(found, &watcher, Job::new(ranks));
        watcher.conclude(made, Error::failure).inspect(|_| job::take_back())
    }

    /// Creates the engine after the rendezvous.
    fn connect(&self, found: Rendezvous, watcher: &InitWatcher, job: Job) -> Result<ProcessGroup> {
        let (backend, device, timeout) = (self.backend, self.device.clone(), self.timeout);
        let device = match backend {
            Backend::Nccl => nccl::choose_device(device, found.local_rank)?,
            Backend::Single => device.unwrap_or(Device::Cpu),
            _ => Device::Cpu,
        };
        kernels::keep_memory(&device)?;
        let (rank, world_size) = (found.rank, found.world_size);
        if let Some(warning) = self.no_gpu.as_ref().filter(|_| rank == 0) {
            static ONCE: Once = Once::new();
            ONCE.call_once(|| warn_aloud(format_args!("{warning}")));
        }
        let reports = StoreReports { store: &*found.store, topic: "backend", rank, world_size };
        threads::limit(rank, &agree_on_backend(&reports, backend)?);
        log::info!("rank {} of {}: backend {backend:?}, device {device:?}", found.rank, found.world_size);
        let settings = Settings {
            backend,
            device,
            timeout,
            nccl: self.nccl.clone(),
            local_rank: found.local_rank,
            local_world_size: found.local_world_size,
            address: found.address,
            secret: found.secret,
            virtual_ranks: self.virtual_ranks,
        };
        let cancelled = || watcher.check();
        let recording = Recording::of_world(self.flight_recorder.clone(), rank, world_size)?;
        let (deadline, recording) = (Some(watcher.deadline()), recording.as_ref());
        let construction = Construction { deadline, cancelled: Some(&cancelled), recording, membership: None };
        ProcessGroup::connect(construction, found.store, world_size, rank, settings, job)
    }

    /// Further groups get the same device.
    pub(crate) fn keep_device(&mut self, device: &Device) {
        self.device = Some(device.clone());
    }
}

fn unavailable(what: &str, hint: impl Into<String>) -> Error {
    Error::Unavailable { what: what.to_string(), hint: hint.into() }
}

/// The warning of a program that is built for GPUs and finds none.
fn no_gpu(is_built_for_gpus: bool, device_count: Result<usize>) -> Option<String> {
    let reason = device_count.err().filter(|_| is_built_for_gpus)?;
    Some(format!(
        "this program is built for GPUs (feature `cuda`) and trains on the CPU: {reason}. For one rank on a GPU, without NCCL, set \
         InitOptions.device to Device::new_cuda_with_stream(0); if the CPU is meant, to Device::Cpu"
    ))
}

/// The engine to use. `device_count` gives the number of GPUs, or why there are none; `nccl_version` fails without
/// NCCL.
fn choose(
    backend: Backend,
    device: Option<&Device>,
    device_count: impl Fn() -> Result<usize>,
    nccl_version: impl Fn() -> Result<i32>,
) -> Result<Backend> {
    let is_cpu = device.map(Device::is_cpu);
    match (backend, is_cpu) {
        (Backend::Auto, Some(true)) => Ok(Backend::Cpu),
        (Backend::Auto, Some(false)) => match nccl_version() {
            Ok(_) => Ok(Backend::Nccl),
            Err(reason) => {
                log::debug!("Backend::Auto takes Backend::Single: {reason}");
                Ok(Backend::Single)
            }
        },
        (Backend::Single, _) => Ok(Backend::Single),
        (Backend::Auto, None) => match device_count() {
            Ok(_) => Ok(Backend::Nccl),
            Err(reason) => {
                log::debug!("Backend::Auto takes the CPU engine: {reason}");
                Ok(Backend::Cpu)
            }
        },
        (Backend::Cpu, Some(false)) => Err(unavailable(
            "a process group for tensors on a GPU",
            "the CPU engine moves tensors in host memory only, so give InitOptions.device = None, or use Backend::Nccl",
        )),
        (Backend::Cpu, _) => Ok(Backend::Cpu),
        (Backend::Nccl, Some(true)) => Err(Error::invalid(
            "device",
            "Backend::Nccl moves tensors on GPUs, but this is the CPU: give Device::new_cuda_with_stream(…), or None \
             to let the engine choose",
        )),
        (Backend::Nccl, _) => {
            // Whether there is a GPU is checked after the rendezvous, so that a rank without one can tell the others.
            nccl_version()?;
            Ok(Backend::Nccl)
        }
        (Backend::Custom, _) => {
            Err(Error::invalid("backend", "pass an external engine to ProcessGroup::with_communicator instead"))
        }
    }
}

/// Tells the other ranks this one's engine and checks that all use the same. Returns the processors of all ranks.
fn agree_on_backend(reports: &StoreReports, backend: Backend) -> Result<Vec<Affinity>> {
    reports.tell(Ok(format!("{backend:?}\n{}", Affinity::of_this_process()).as_bytes()))?;
    let rank = reports.rank;
    let missing = |absent: Vec<usize>, late: rendezvous::Error| match late {
        rendezvous::Error::StoreTimeout { store, timeout, .. } => {
            let reason = format!(
                "rank(s) {} have not chosen their devices. Look for the first error in their output, or give them more \
                 time (timeout)",
                ranks(&absent)
            );
            let operation = format!("init_process_group of rank {rank}");
            rendezvous::Error::RanksMissing { operation, store, timeout, ranks: absent, reason }
        }
        error => error,
    };
    let told = reports.hear(None, missing)?.map_err(|(peer, reason)| Failure::PeerFailed { peer, reason })?;
    let told: Vec<_> = told.iter().map(|told| String::from_utf8_lossy(told)).collect();
    let (names, affinities): (Vec<&str>, Vec<Affinity>) = told
        .iter()
        .map(|told| told.split_once('\n').unwrap_or((told, "")))
        .map(|(name, affinity)| (name, Affinity::parse(affinity)))
        .unzip();
    let Some(peer) = names.iter().position(|name| *name != names[0]) else { return Ok(affinities) };
    let [first, other] = [0, peer].map(|rank| names[rank]);
    let reason = format!(
        "rank 0 works with Backend::{first}, rank {peer} with Backend::{other}: give all ranks the same \
         InitOptions.backend (Auto takes NCCL where it sees a GPU); seen by rank {rank}"
    );
    Err(Error::invalid("backend", reason))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::HashStore;

    fn none() -> Result<usize> {
        Err(unavailable("a CUDA device", "none here"))
    }

    fn two() -> Result<usize> {
        Ok(2)
    }

    #[test]
    fn auto_takes_a_gpu_where_there_is_one() {
        assert_eq!(choose(Backend::Auto, None, two, nccl::version).unwrap(), Backend::Nccl);
        assert_eq!(choose(Backend::Auto, None, none, nccl::version).unwrap(), Backend::Cpu);
        assert_eq!(choose(Backend::Nccl, None, none, nccl::version).is_ok(), cfg!(feature = "nccl"));
        assert_eq!(choose(Backend::Auto, Some(&Device::Cpu), two, nccl::version).unwrap(), Backend::Cpu);
        assert_eq!(choose(Backend::Cpu, None, two, nccl::version).unwrap(), Backend::Cpu);
    }

    #[test]
    fn a_program_for_gpus_says_why_it_takes_the_cpu() {
        let text = no_gpu(true, none()).unwrap();
        assert!(text.contains("trains on the CPU") && text.contains("none here"), "{text}");
        assert_eq!(no_gpu(true, two()), None);
        assert_eq!(no_gpu(false, none()), None);
    }

    #[test]
    fn one_rank_needs_no_nccl() {
        assert_eq!(choose(Backend::Single, None, none, || Err(unavailable("NCCL", ""))).unwrap(), Backend::Single);
        assert_eq!(choose(Backend::Single, Some(&Device::Cpu), two, || Ok(1)).unwrap(), Backend::Single);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        assert!(
            choose(Backend::Nccl, Some(&Device::Cpu), two, nccl::version)
                .unwrap_err()
                .to_string()
                .contains("this is the CPU")
        );
        assert!(
            choose(Backend::Custom, None, two, nccl::version).unwrap_err().to_string().contains("with_communicator")
        );
    }

    #[test]
    fn ranks_with_different_engines_all_hear_of_it() {
        use Backend::{Cpu, Nccl};
        for (backends, are_equal) in [([Nccl, Cpu], false), ([Nccl, Nccl], true)] {
            let store = HashStore::new(Duration::from_secs(120));
            std::thread::scope(|scope| {
                for (rank, backend) in backends.into_iter().enumerate() {
                    let reports = StoreReports { store: &store, topic: "backend", rank, world_size: 2 };
                    scope.spawn(move || match agree_on_backend(&reports, backend) {
                        Ok(_) => assert!(are_equal),
                        Err(error) => {
                            let text = "rank 0 works with Backend::Nccl, rank 1 with Backend::Cpu";
                            assert!(!are_equal && error.to_string().contains(text), "{error}");
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn a_rank_without_a_word_is_named() {
        let store = HashStore::new(Duration::from_millis(20));
        let reports = StoreReports { store: &store, topic: "backend", rank: 1, world_size: 3 };
        let error = agree_on_backend(&reports, Backend::Cpu).unwrap_err().to_string();
        assert!(error.contains("init_process_group of rank 1 timed out after 20ms"), "{error}");
        assert!(error.contains("rank(s) [0, 2] have not chosen their devices"), "{error}");
    }
}
