//! Combining options, init method and environment.
use super::{Environment, InitMethod, Launcher, Location, RendezvousOptions};
use crate::{Error, Result};
use candle_ddp_base::MOST_RANKS;
use candle_ddp_env::PROCESS;
use std::path::PathBuf;

/// A rank's parameters of the rendezvous.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) store: StoreLocation,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    /// Local rank and local world size, if known beforehand.
    pub(super) local: Option<(usize, usize)>,
    pub(super) restart_count: u64,
    /// The launcher's run id, if the launcher also determined this rank.
    pub(super) run_id: Option<String>,
    /// Whether the store belongs to a launcher that knows no secret.
    pub(super) is_plain: bool,
    /// The origin of this rank's number and the world size.
    pub(super) origin: Origin,
}

/// The origin of this process's rank and the world size: a user must know it when the other ranks do not come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Origin {
    rank: Option<(&'static str, usize)>,
    world_size: Option<(&'static str, usize)>,
    launcher: Launcher,
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let set: Vec<_> = [self.rank, self.world_size].into_iter().flatten().collect();
        let names: Vec<&str> = set.iter().map(|(name, _)| *name).collect();
        let set: Vec<String> = set.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let (set, names, by) = (set.join(" and "), names.join(" and "), self.launcher.name());
        match (self.rank, self.world_size) {
            (None, None) => f.write_str("Rank and world size come from the program's options"),
            _ => write!(f, "This process has {set} ({by}): if nothing starts the other ranks, unset {names}"),
        }
    }
}

/// The variable in which `ddprun` gives its workers the address of its own store. If that is not the master's address,
/// another launcher hosts the store.
pub const STORE_VARIABLE: &str = "CANDLE_DDP_STORE";

/// The location of the store.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum StoreLocation {
    /// The store is served at this address, by the launcher or by rank 0.
    Tcp { host: String, port: u16, launcher_hosts: bool },
    /// The store is in a file.
    File(PathBuf),
    /// The store is in the memory of this process, which is the only rank.
    Memory,
}

const HOW_TO_START: &str = "start the program with a launcher (ddprun --nproc-per-node N PROGRAM, \
     torchrun --no-python PROGRAM, srun or mpirun), or give rank, world_size and an init method such as \
     tcp://host:port in the options";

impl Environment {
    /// The origin of a rank and a world size. The flags say which of the two come from this environment.
    fn origin(&self, has_rank: bool, has_world_size: bool) -> Origin {
        let [rank, world_size, ..] = self.launcher.variables();
        Origin {
            rank: self.rank.filter(|_| has_rank).map(|value| (rank, value)),
            world_size: self.world_size.filter(|_| has_world_size).map(|value| (world_size, value)),
            launcher: self.launcher,
        }
    }
}

impl Plan {
    pub(super) fn new(options: &RendezvousOptions) -> Result<Self> {
        Self::read(options, |name| PROCESS.raw(name))
    }

    fn read(options: &RendezvousOptions, lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let method: InitMethod = options.init_method.parse()?;
        let rank = options.rank.or(method.rank);
        let world_size = options.world_size.or(method.world_size);
        let environment = match (rank, world_size) {
            (Some(rank), Some(world_size)) => Environment::read_for(&lookup, rank, world_size)?,
            _ => Environment::read(&lookup)?,
        };
        if rank.is_none()
            && world_size.is_none()
            && !options.require_launcher
            && method.location == Location::Environment
            && environment == Environment::default()
        {
            return Ok(Self::alone());
        }
        let missing = |variable| Error::MissingEnvironment { variable, hint: HOW_TO_START.to_string() };
        let origin = environment.origin(rank.is_none(), world_size.is_none());
        let rank = rank.or(environment.rank).ok_or_else(|| missing("RANK"))?;
        let world_size = world_size.or(environment.world_size).ok_or_else(|| missing("WORLD_SIZE"))?;
        if world_size > MOST_RANKS {
            return Err(Error::invalid("world_size", format!("it must be at most {MOST_RANKS}, but is {world_size}")));
        }
        if rank >= world_size {
            return Err(Error::RankOutOfRange { rank, world_size });
        }
        let store = match method.location {
            Location::File(path) => StoreLocation::File(path),
            Location::Environment => {
                let hint = |what: &str| match environment.launcher {
                    Launcher::OpenMpi | Launcher::Mpich => format!(
                        "it is {what} of rank 0, which MPI does not provide when there are several hosts. Add `-x \
                         MASTER_ADDR=HOST -x MASTER_PORT=29500` to mpirun (Open MPI), or `-genv MASTER_ADDR HOST -genv \
                         MASTER_PORT 29500` to mpiexec (MPICH, Intel MPI), where HOST is the name of the first host"
                    ),
                    _ => format!(
                        "it is {what} of rank 0. A launcher sets it; otherwise, give an init method such as \
                         tcp://host:port in the options"
                    ),
                };
                let variable = "MASTER_ADDR";
                let host = environment
                    .master_addr
                    .clone()
                    .ok_or_else(|| Error::MissingEnvironment { variable, hint: hint("the host") })?;
                let variable = "MASTER_PORT";
                let port = environment
                    .master_port
                    .ok_or_else(|| Error::MissingEnvironment { variable, hint: hint("a free port on the host") })?;
                StoreLocation::Tcp { host, port, launcher_hosts: environment.use_agent_store }
            }
            Location::Tcp { host, port } => {
                // A launcher's store is only at its own address.
                let launcher_hosts = environment.use_agent_store
                    && environment.master_addr.as_ref() == Some(&host)
                    && environment.master_port == Some(port);
                StoreLocation::Tcp { host, port, launcher_hosts }
            }
        };
        let is_plain = match &store {
            StoreLocation::Tcp { host, port, launcher_hosts: true } => {
                lookup(STORE_VARIABLE) != Some(format!("{host}:{port}"))
            }
            _ => false,
        };
        if let StoreLocation::Tcp { port: 0, .. } = store
            && world_size > 1
        {
            return Err(Error::invalid("init_method", "port 0 means any free port, which the other ranks cannot know"));
        }
        // The environment's local rank is only valid for the environment's rank.
        let own = environment.rank == Some(rank) && environment.world_size == Some(world_size);
        let local = environment.local_rank.zip(environment.local_world_size).filter(|_| own);
        let local = if world_size == 1 { local.or(Some((0, 1))) } else { local };
        let Environment { restart_count, launcher, run_id, .. } = environment;
        // If ranks come from options, the variables may differ between the ranks of a job.
        let run_id = run_id.filter(|_| own && launcher != Launcher::None);
        Ok(Self { store, rank, world_size, local, restart_count, run_id, is_plain, origin })
    }

    /// The plan of a process that was started without a launcher.
    fn alone() -> Self {
        Self {
            store: StoreLocation::Memory,
            rank: 0,
            world_size: 1,
            local: Some((0, 1)),
            restart_count: 0,
            run_id: None,
            is_plain: false,
            origin: Origin::default(),
        }
    }

    /// Returns whether all ranks are known to be on this host.
    pub(super) fn is_one_host(&self) -> bool {
        self.local.is_some_and(|(_, local_world_size)| local_world_size == self.world_size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(options: RendezvousOptions, variables: &[(&str, &str)]) -> Result<Plan> {
        let find = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string());
        Plan::read(&options, find)
    }

    fn options(init_method: &str, rank: Option<usize>, world_size: Option<usize>) -> RendezvousOptions {
        RendezvousOptions { init_method: init_method.to_string(), rank, world_size, ..RendezvousOptions::default() }
    }

    fn tcp(host: &str, port: u16, launcher_hosts: bool) -> StoreLocation {
        StoreLocation::Tcp { host: host.to_string(), port, launcher_hosts }
    }

    const LAUNCHED: &[(&str, &str)] = &[
        ("RANK", "1"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "node0"),
        ("MASTER_PORT", "29500"),
        ("TORCHELASTIC_RESTART_COUNT", "3"),
        ("TORCHELASTIC_RUN_ID", "night"),
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
    ];

    #[test]
    fn from_the_environment() {
        let expected = Plan {
            store: tcp("node0", 29500, true),
            rank: 1,
            world_size: 4,
            local: Some((1, 2)),
            restart_count: 3,
            run_id: Some("night".to_string()),
            is_plain: true,
            origin: Origin {
                rank: Some(("RANK", 1)),
                world_size: Some(("WORLD_SIZE", 4)),
                launcher: Launcher::Torchrun,
            },
        };
        assert!(!expected.is_one_host());
        assert_eq!(plan(RendezvousOptions::default(), LAUNCHED).unwrap(), expected);
        assert_eq!(plan(options("tcp://node0:29500", None, None), LAUNCHED).unwrap(), expected);
        // At another port, the store is not the launcher's.
        let other = plan(options("tcp://node0:29501", None, None), LAUNCHED).unwrap();
        assert_eq!((other.store, other.is_plain), (tcp("node0", 29501, false), false));
        // The store of ddprun knows the secret, and that of another launcher below ddprun does not.
        for (store, is_plain) in [("node0:29500", false), ("127.0.0.1:29500", true)] {
            let variables = [LAUNCHED, &[(STORE_VARIABLE, store)]].concat();
            assert_eq!(plan(RendezvousOptions::default(), &variables).unwrap().is_plain, is_plain);
        }
    }

    #[test]
    fn options_take_precedence_over_the_query_and_the_environment() {
        let explicit = plan(options("tcp://h:1?rank=2&world_size=8", Some(5), None), LAUNCHED).unwrap();
        assert_eq!((explicit.rank, explicit.world_size, explicit.local), (5, 8, None));
        let explicit = plan(options("env://", Some(0), Some(2)), LAUNCHED).unwrap();
        assert_eq!((explicit.rank, explicit.world_size, explicit.local), (0, 2, None));
        let other_rank = plan(options("env://", Some(0), None), LAUNCHED).unwrap();
        assert_eq!((other_rank.rank, other_rank.world_size, other_rank.local), (0, 4, None));
        // If options and environment agree, the local rank is known.
        assert_eq!(plan(options("env://", Some(1), Some(4)), LAUNCHED).unwrap().local, Some((1, 2)));
        // A broken environment does no harm if nothing is read from it.
        let broken = [("RANK", "x"), ("WORLD_SIZE", "2")];
        assert_eq!(plan(options("tcp://h:1", Some(0), Some(2)), &broken).unwrap().store, tcp("h", 1, false));
        assert!(plan(options("tcp://h:1", Some(0), None), &broken).is_err());
        assert_eq!(plan(options("file:///f", Some(0), Some(1)), &[]).unwrap().local, Some((0, 1)));
    }

    #[test]
    fn only_a_launcher_that_numbers_all_ranks_sets_the_run_id() {
        let run_id = |options, variables: &[(&str, &str)]| plan(options, variables).unwrap().run_id;
        // Ranks that come from options may belong to different launchers.
        assert_eq!(run_id(options("tcp://h:1", Some(0), Some(2)), LAUNCHED), None);
        assert_eq!(run_id(options("env://", Some(0), None), LAUNCHED), None);
        let master = [("MASTER_ADDR", "h"), ("MASTER_PORT", "1"), ("TORCHELASTIC_RUN_ID", "night")];
        let slurm = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2"), ("SLURM_JOB_ID", "77"), ("SLURM_STEP_ID", "3")];
        let mpi = [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "2"), ("SLURM_JOB_ID", "77")];
        let own = |variables: &[(&'static str, &'static str)]| [variables, &master[..]].concat();
        assert_eq!(run_id(options("env://", None, None), &own(&slurm)).unwrap(), "slurm 77.3");
        assert_eq!(run_id(options("env://", None, None), &own(&mpi)), None);
        // The components of a heterogeneous job have their own ids.
        let parts = [&slurm[..], &[("SLURM_HET_SIZE", "2")]].concat();
        assert_eq!(run_id(options("env://", None, None), &own(&parts)), None);
        let by_hand = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "1")];
        assert_eq!(run_id(options("env://", None, None), &[&slurm[..], &by_hand].concat()), None);
    }

    #[test]
    fn without_a_launcher_there_is_one_rank_unless_a_launcher_is_required() {
        let alone = plan(RendezvousOptions::default(), &[("PATH", "/bin")]).unwrap();
        assert_eq!(
            (alone.store, alone.rank, alone.world_size, alone.local),
            (StoreLocation::Memory, 0, 1, Some((0, 1)))
        );
        let strict = RendezvousOptions { require_launcher: true, ..Default::default() };
        let error = plan(strict, &[]).unwrap_err().to_string();
        assert!(error.contains("variable RANK is not set: start the program with a launcher (ddprun"), "{error}");
    }

    #[test]
    fn the_ranks_of_an_mpi_job_on_one_host_meet_without_further_variables() {
        let job = |rank: &'static str, local: &'static str| {
            vec![
                ("OMPI_COMM_WORLD_RANK", rank),
                ("OMPI_COMM_WORLD_SIZE", "4"),
                ("OMPI_COMM_WORLD_LOCAL_RANK", rank),
                ("OMPI_COMM_WORLD_LOCAL_SIZE", local),
                ("PMIX_NAMESPACE", "738066433"),
            ]
        };
        let [first, last] = ["0", "3"].map(|rank| plan(RendezvousOptions::default(), &job(rank, "4")).unwrap());
        assert_eq!((&first.store, &first.run_id), (&last.store, &last.run_id));
        assert_eq!(first.run_id.as_deref(), Some("mpi 738066433"));
        let StoreLocation::Tcp { host, port, launcher_hosts } = first.store else { panic!("{:?}", first.store) };
        assert!(host == "127.0.0.1" && (10_000..30_000).contains(&port) && !launcher_hosts, "{host}:{port}");
        // What the user says counts, as far as it goes.
        let with = |more: &[(&'static str, &'static str)]| {
            plan(RendezvousOptions::default(), &[&job("0", "4"), more].concat()).unwrap().store
        };
        assert_eq!(with(&[("MASTER_PORT", "7")]), tcp("127.0.0.1", 7, false));
        assert_eq!(with(&[("MASTER_ADDR", "h")]), tcp("h", port, false));
        // Another allocation's first node, or another step's port, is not where these ranks are.
        let slurm = [("SLURM_PROCID", "0"), ("SLURM_JOB_NODELIST", "n[1-2]"), ("SLURM_JOB_ID", "7")];
        assert_eq!(with(&slurm), tcp("127.0.0.1", port, false));

        let several = job("0", "2");
        let error = plan(RendezvousOptions::default(), &several).unwrap_err().to_string();
        assert!(error.contains("MASTER_ADDR is not set") && error.contains("-x MASTER_ADDR=HOST"), "{error}");
        let slurm = plan(RendezvousOptions::default(), &[&several[..], &slurm].concat()).unwrap();
        assert_eq!(slurm.store, tcp("n1", port, false));
        let named = [&several[..], &[("MASTER_ADDR", "h")]].concat();
        assert_eq!(plan(RendezvousOptions::default(), &named).unwrap().store, tcp("h", port, false));
        // A launcher without an id has no port to derive.
        let unnamed: Vec<_> = job("0", "4").into_iter().filter(|(name, _)| *name != "PMIX_NAMESPACE").collect();
        let error = plan(RendezvousOptions::default(), &unnamed).unwrap_err().to_string();
        assert!(error.contains("MASTER_PORT is not set") && error.contains("-x MASTER_PORT=29500"), "{error}");
    }

    #[test]
    fn the_origin_of_rank_and_world_size_is_named() {
        let origin = |options, variables: &[(&str, &str)]| plan(options, variables).unwrap().origin.to_string();
        let slurm = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "1")];
        assert_eq!(
            origin(options("env://", None, None), &slurm),
            "This process has SLURM_PROCID=0 and SLURM_NTASKS=4 (set by Slurm): if nothing starts the other ranks, unset \
             SLURM_PROCID and SLURM_NTASKS"
        );
        let mixed = origin(options("tcp://h:1", Some(2), None), LAUNCHED);
        assert!(mixed.contains("has WORLD_SIZE=4 (set by ddprun, torchrun or a script)"), "{mixed}");
        let mpi = [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "2"), slurm[2], slurm[3]];
        assert!(origin(options("env://", None, None), &mpi).contains("OMPI_COMM_WORLD_SIZE=2 (set by Open MPI)"));
        let pmi = [("PMI_RANK", "0"), ("PMI_SIZE", "2"), slurm[2], slurm[3]];
        assert!(origin(options("env://", None, None), &pmi).contains("PMI_SIZE=2 (set by MPICH or Intel MPI)"));
        let own = origin(options("tcp://h:1", Some(0), Some(2)), LAUNCHED);
        assert_eq!(own, "Rank and world size come from the program's options");
    }

    #[test]
    fn errors_name_what_is_missing() {
        for (init_method, rank, world_size, variables, expected) in [
            ("tcp://h:1", None, None, &[][..], "ddprun --nproc-per-node"),
            ("env://", None, None, &[("MASTER_ADDR", "h")], "RANK is not set: start the program"),
            ("env://", None, None, &[("LOCAL_RANK", "0")], "RANK is not set: start the program"),
            ("env://", None, None, &[("RANK", "0")], "WORLD_SIZE is not set"),
            ("env://", Some(0), None, &[], "WORLD_SIZE is not set: start the program"),
            ("env://?world_size=2", None, None, &[], "RANK is not set: start the program"),
            ("tcp://h:1", Some(0), None, &[], "WORLD_SIZE is not set: start the program"),
            ("env://", Some(0), Some(2), &[], "MASTER_ADDR is not set"),
            ("env://", Some(0), Some(2), &[("MASTER_ADDR", "h")], "MASTER_PORT is not set"),
            ("env://", Some(4), None, LAUNCHED, "rank 4 is outside of a world of 4"),
            ("tcp://h:0", Some(0), Some(2), &[], "port 0"),
            ("tcp://h:1", Some(0), Some(1 << 40), &[], "world_size: it must be at most 1048576, but is 1099511627776"),
            (
                "tcp://h:1?rank=0&world_size=18446744073709551615",
                None,
                None,
                &[],
                "world_size: it must be at most 1048576",
            ),
            ("tcp://h", Some(0), Some(2), &[], "port is missing"),
        ] {
            let error = plan(options(init_method, rank, world_size), variables).unwrap_err().to_string();
            assert!(error.contains(expected), "{error} lacks {expected}");
        }
    }
}
