use super::{loopback, mpi, slurm};
use crate::{Error, Result};
use candle_ddp_base::MOST_RANKS;
use candle_ddp_env::{PROCESS, Variables};
use std::ffi::OsString;
use std::net::Ipv6Addr;
use std::str::FromStr;

/// The launcher that started this process, detected by its environment variables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Launcher {
    /// RANK and related variables: `ddprun`, `torchrun`, Kubernetes' PyTorchJob, or a script.
    Torchrun,
    /// SLURM_PROCID and related variables: Slurm's `srun`.
    Slurm,
    /// OMPI_COMM_WORLD_RANK and related variables: Open MPI's `mpirun`.
    OpenMpi,
    /// PMI_RANK and related variables: the `mpiexec` of MPICH or Intel MPI (Hydra).
    Mpich,
    /// No launcher.
    #[default]
    None,
}

/// This process's rank and rendezvous point, as given by environment variables.
///
/// Values are validated individually and against each other. A value without a variable is `None`. If the variables of
/// several launchers are present, torchrun's take precedence, then an MPI's, then Slurm's, because a Slurm job script
/// starts the other launchers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Environment {
    /// The rank of this process.
    pub rank: Option<usize>,
    /// The number of ranks.
    pub world_size: Option<usize>,
    /// The rank of this process among those on its host, which determines its GPU.
    pub local_rank: Option<usize>,
    /// The number of ranks on this host.
    pub local_world_size: Option<usize>,
    /// MASTER_ADDR: the host of rank 0. Under Slurm, defaults to the first node of the job step, and under an MPI to the
    /// loopback address if all ranks are on one host.
    pub master_addr: Option<String>,
    /// MASTER_PORT: the store's port. Under Slurm and MPI, defaults to a port derived from the job's id. (MPICH
    /// provides no id; the id of the process that started all ranks of a host serves instead.)
    pub master_port: Option<u16>,
    /// TORCHELASTIC_RESTART_COUNT: how often the launcher has restarted all ranks; initially 0.
    pub restart_count: u64,
    /// TORCHELASTIC_RUN_ID: the launcher's id of the run. Under Slurm, it is made from the ids of job and step, and
    /// under an MPI from the job's id.
    pub run_id: Option<String>,
    /// TORCHELASTIC_USE_AGENT_STORE: the launcher hosts the store at MASTER_ADDR:MASTER_PORT, so no rank hosts one.
    pub use_agent_store: bool,
    /// The launcher whose variables gave the rank.
    pub launcher: Launcher,
}

impl Environment {
    /// Reads the environment variables of this process.
    pub fn from_process() -> Result<Self> {
        Self::read(|name| PROCESS.raw(name))
    }

    /// Reads the variables through `lookup`.
    pub fn read(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let lookup = |name: &str| lookup(name).map(OsString::from);
        let launchers = Launchers(Variables::new(&lookup));
        let mut environment = launchers.run()?;
        launchers.place(&mut environment)?;
        Ok(environment)
    }

    /// Like [`Environment::read`], but for a given rank and world size. Local rank and local world size are used only
    /// if the variables agree with these.
    pub(super) fn read_for(lookup: impl Fn(&str) -> Option<String>, rank: usize, world_size: usize) -> Result<Self> {
        let lookup = |name: &str| lookup(name).map(OsString::from);
        let launchers = Launchers(Variables::new(&lookup));
        let mut environment = launchers.run()?;
        let mut place = environment.clone();
        if launchers.place(&mut place).is_ok() && (place.rank, place.world_size) == (Some(rank), Some(world_size)) {
            environment = place;
        }
        Ok(environment)
    }
}

impl Launcher {
    /// Its name in messages.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Torchrun | Self::None => "set by ddprun, torchrun or a script",
            Self::Slurm => "set by Slurm",
            Self::OpenMpi => "set by Open MPI",
            Self::Mpich => "set by MPICH or Intel MPI",
        }
    }

    /// Its variables for rank, world size, local rank and local world size.
    pub(super) fn variables(self) -> [&'static str; 4] {
        match self {
            Self::Torchrun | Self::None => TORCHRUN,
            Self::Slurm => SLURM,
            Self::OpenMpi => OPEN_MPI,
            Self::Mpich => MPICH,
        }
    }
}

/// Each launcher's variables for rank, world size, local rank and local world size.
const TORCHRUN: [&str; 4] = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"];
const OPEN_MPI: [&str; 4] =
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"];
const MPICH: [&str; 4] = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"];
const SLURM: [&str; 4] = ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"];

/// The variables of launchers.
struct Launchers<'a>(Variables<'a>);

impl Launchers<'_> {
    fn has(&self, name: &str) -> bool {
        self.0.is_set(name)
    }

    fn text(&self, name: &str) -> Option<String> {
        self.0.text(name)
    }

    /// The name or address of a host.
    fn host(&self, name: &str) -> Result<Option<String>> {
        let Some(host) = self.text(name) else { return Ok(None) };
        // The interface of a link-local address follows.
        let address = host.split_once('%').map_or(&*host, |(address, _)| address);
        if host.contains(|c: char| c.is_whitespace() || c.is_control()) {
            Err(invalid(name, host, "it must be the name or address of one host"))
        } else if address.contains(':') && address.parse::<Ipv6Addr>().is_err() {
            let reason = "it must be the name or address of one host, without a port, which MASTER_PORT gives, and without brackets";
            Err(invalid(name, host, reason))
        } else {
            Ok(Some(host))
        }
    }

    fn number<T: FromStr>(&self, name: &'static str) -> Result<Option<T>> {
        Ok(self.0.number(name)?)
    }

    fn count(&self, name: &'static str) -> Result<Option<usize>> {
        let count = self.number(name)?;
        match count {
            Some(count) if count > MOST_RANKS => {
                Err(invalid(name, count, format!("it must be at most {MOST_RANKS}, the largest number of ranks")))
            }
            count => Ok(count),
        }
    }

    /// Reads everything that is the same on all ranks.
    fn run(&self) -> Result<Environment> {
        let mut environment = Environment {
            master_addr: self.host("MASTER_ADDR")?,
            master_port: self.number("MASTER_PORT")?,
            restart_count: self.number("TORCHELASTIC_RESTART_COUNT")?.unwrap_or(0),
            run_id: self.text("TORCHELASTIC_RUN_ID"),
            use_agent_store: self.0.switch("TORCHELASTIC_USE_AGENT_STORE")?.unwrap_or(false),
            ..Environment::default()
        };
        if self.has("SLURM_PROCID") {
            self.slurm_master(&mut environment)?;
        }
        Ok(environment)
    }

    fn place(&self, environment: &mut Environment) -> Result<()> {
        let launcher = self.launcher();
        let [rank, world_size, local_rank, local_world_size] = launcher.variables();
        environment.launcher = launcher;
        environment.rank = self.count(rank)?;
        environment.world_size = self.count(world_size)?;
        environment.local_rank = self.count(local_rank)?;
        environment.local_world_size = match launcher {
            Launcher::Slurm => self.slurm_local_world_size()?,
            _ => self.count(local_world_size)?,
        };
        match launcher {
            Launcher::Slurm => environment.run_id = self.slurm_run(),
            Launcher::OpenMpi | Launcher::Mpich => self.mpi_master(environment),
            Launcher::Torchrun | Launcher::None => {}
        }
        match (environment.rank, environment.world_size) {
            (Some(_), None) => return Err(missing(world_size, format!("{rank} is set, so it must be set as well"))),
            (None, Some(_)) => return Err(missing(rank, format!("{world_size} is set, so it must be set as well"))),
            _ => {}
        }
        within((rank, environment.rank), (world_size, environment.world_size))?;
        within((local_rank, environment.local_rank), (local_world_size, environment.local_world_size))?;
        if let (Some(local), Some(world)) = (environment.local_world_size, environment.world_size)
            && local > world
        {
            return Err(invalid(local_world_size, local, format!("it must be at most {world_size}={world}")));
        }
        if launcher != Launcher::Torchrun
            && let Some(said) = self.count("WORLD_SIZE")?
            && environment.world_size.is_some_and(|world| world != said)
        {
            let world = environment.world_size.unwrap_or_default();
            return Err(invalid("WORLD_SIZE", said, format!("it contradicts {world_size}={world}; unset one of them")));
        }
        Ok(())
    }

    fn launcher(&self) -> Launcher {
        let others = self.has(OPEN_MPI[0]) || self.has(MPICH[0]) || self.has(SLURM[0]);
        if self.has("RANK") || (self.has("WORLD_SIZE") && !others) {
            Launcher::Torchrun
        } else if self.has(OPEN_MPI[0]) {
            Launcher::OpenMpi
        } else if self.has(MPICH[0]) && (self.has(MPICH[2]) || !self.has(SLURM[0])) {
            // srun sets PMI_RANK too, but no local rank; its own variables are more complete.
            Launcher::Mpich
        } else if self.has(SLURM[0]) {
            Launcher::Slurm
        } else {
            // A LOCAL_RANK without other variables is still useful.
            Launcher::None
        }
    }

    /// Returns the id of the job step, which is the same for all tasks. The components of a heterogeneous job are
    /// separate jobs, so a heterogeneous job has no common id.
    fn slurm_run(&self) -> Option<String> {
        if self.has("SLURM_HET_SIZE") || self.has("SLURM_PACK_SIZE") {
            return None;
        }
        let job = self.text("SLURM_JOB_ID").or_else(|| self.text("SLURM_JOBID"))?;
        Some(format!("slurm {job}.{}", self.text("SLURM_STEP_ID")?))
    }

    /// Returns the number of tasks on this node; the step's count takes precedence over the job's.
    fn slurm_local_world_size(&self) -> Result<Option<usize>> {
        let node = self.count("SLURM_NODEID")?;
        for name in ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"] {
            if let Some(list) = self.text(name)
                && let Some(tasks) = slurm::tasks_on_node(&list, node)
            {
                return Ok(Some(tasks));
            }
        }
        self.count("SLURM_NTASKS_PER_NODE")
    }

    /// Sets where the ranks of an MPI job meet, unless the user did. Slurm's variables are not used: they may belong to
    /// another job of the same allocation.
    fn mpi_master(&self, environment: &mut Environment) {
        let is_one_host = environment.world_size.is_some() && environment.world_size == environment.local_world_size;
        let job = match environment.launcher {
            Launcher::OpenMpi => mpi::open_mpi_job(|name| self.text(name)),
            _ if is_one_host => mpi::hydra_job(),
            _ => None,
        };
        if is_one_host && self.text("MASTER_ADDR").is_none() {
            environment.master_addr = Some(loopback().to_string());
        }
        if let (Some(job), None) = (&job, self.text("MASTER_PORT")) {
            environment.master_port = Some(mpi::port(job));
        }
        environment.run_id = job.map(|job| format!("mpi {job}"));
    }

    fn slurm_master(&self, environment: &mut Environment) -> Result<()> {
        if environment.master_addr.is_none() {
            for name in ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"] {
                let Some(list) = self.text(name) else { continue };
                let first = slurm::first_node(&list);
                environment.master_addr =
                    Some(first.ok_or_else(|| {
                        invalid(name, list, "it must be a list of nodes such as node[003-005,9],gpu-a")
                    })?);
                break;
            }
        }
        if environment.master_port.is_none() {
            let job = match self.number("SLURM_JOB_ID")? {
                Some(job) => Some(job),
                None => self.number("SLURM_JOBID")?,
            };
            // srun sets a number; the job script's own shell may have a word.
            let step = self.text("SLURM_STEP_ID").and_then(|step| step.parse().ok()).unwrap_or(0);
            environment.master_port = job.map(|job| slurm::port(job, step));
        }
        Ok(())
    }
}

fn within((name, value): (&str, Option<usize>), (size_name, size): (&str, Option<usize>)) -> Result<()> {
    match (value, size) {
        (_, Some(0)) => Err(invalid(size_name, 0, "it must be at least 1")),
        (Some(value), Some(size)) if value >= size => {
            Err(invalid(name, value, format!("{size_name}={size}, so it must be between 0 and {}", size - 1)))
        }
        _ => Ok(()),
    }
}

fn invalid(variable: &str, value: impl ToString, reason: impl Into<String>) -> Error {
    Error::InvalidEnvironment { variable: variable.to_string(), value: value.to_string(), reason: reason.into() }
}

fn missing(variable: &'static str, hint: String) -> Error {
    Error::MissingEnvironment { variable, hint }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Environment> {
        Environment::read(|name| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string()))
    }

    fn place(environment: &Environment) -> [Option<usize>; 4] {
        [environment.rank, environment.world_size, environment.local_rank, environment.local_world_size]
    }

    #[test]
    fn empty() {
        assert_eq!(read(&[]).unwrap(), Environment::default());
    }

    const TORCHRUN: &[(&str, &str)] = &[
        ("RANK", "5"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "4"),
        ("MASTER_ADDR", "node0"),
        ("MASTER_PORT", "29500"),
        ("TORCHELASTIC_RESTART_COUNT", "2"),
        ("TORCHELASTIC_RUN_ID", "abc"),
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
    ];

    #[test]
    fn torchrun_takes_precedence() {
        let expected = Environment {
            rank: Some(5),
            world_size: Some(8),
            local_rank: Some(1),
            local_world_size: Some(4),
            master_addr: Some("node0".to_string()),
            master_port: Some(29500),
            restart_count: 2,
            run_id: Some("abc".to_string()),
            use_agent_store: true,
            launcher: Launcher::Torchrun,
        };
        assert_eq!(read(TORCHRUN).unwrap(), expected);
        let others = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2"), ("OMPI_COMM_WORLD_RANK", "1"), ("PMI_RANK", "x")];
        assert_eq!(read(&[TORCHRUN, &others].concat()).unwrap(), expected);
    }

    const SLURM: &[(&str, &str)] = &[
        ("SLURM_PROCID", "6"),
        ("SLURM_NTASKS", "7"),
        ("SLURM_LOCALID", "0"),
        ("SLURM_NODEID", "3"),
        ("SLURM_STEP_TASKS_PER_NODE", "2(x3),1"),
        ("SLURM_NTASKS_PER_NODE", "2"),
        ("SLURM_JOB_NODELIST", "gpu-a,node[003-005,9]"),
        ("SLURM_STEP_NODELIST", "node[003-005,9],gpu-a"),
        ("SLURM_JOB_ID", "4242"),
    ];

    #[test]
    fn slurm() {
        let environment = read(SLURM).unwrap();
        assert_eq!(environment.launcher, Launcher::Slurm);
        assert_eq!(place(&environment), [Some(6), Some(7), Some(0), Some(1)]);
        assert_eq!(environment.master_addr.as_deref(), Some("node003"));
        assert_eq!(environment.master_port, Some(slurm::port(4242, 0)));
        let set = read(&[SLURM, &[("MASTER_ADDR", "m"), ("MASTER_PORT", "7"), ("WORLD_SIZE", "7")]].concat()).unwrap();
        assert_eq!((set.master_addr.as_deref(), set.master_port), (Some("m"), Some(7)));
        let plain = read(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_NTASKS_PER_NODE", "2")]).unwrap();
        assert_eq!(place(&plain), [Some(0), Some(4), None, Some(2)]);
        assert_eq!((plain.master_addr, plain.master_port), (None, None));
    }

    #[test]
    fn mpi() {
        let open_mpi = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ];
        let hydra = [("PMI_RANK", "3"), ("PMI_SIZE", "4"), ("MPI_LOCALRANKID", "0"), ("MPI_LOCALNRANKS", "1")];
        for (variables, launcher, expected) in
            [(open_mpi, Launcher::OpenMpi, [1, 4, 1, 2]), (hydra, Launcher::Mpich, [3, 4, 0, 1])]
        {
            // The same variables inside a Slurm job whose script started mpirun.
            for variables in [variables.to_vec(), [&variables[..], SLURM].concat()] {
                let environment = read(&variables).unwrap();
                assert_eq!(environment.launcher, launcher);
                assert_eq!(place(&environment), expected.map(Some));
            }
        }
        let srun = read(&[SLURM, &[("PMI_RANK", "6"), ("PMI_SIZE", "7")]].concat()).unwrap();
        assert_eq!((srun.launcher, srun.local_rank), (Launcher::Slurm, Some(0)));
    }

    #[test]
    fn blanks_around_values_do_not_count() {
        let padded = |variables: &'static [(&str, &str)]| {
            let pad = |name: &str, value: &str| {
                if name == "MASTER_PORT" { format!("\t{value}\n") } else { format!(" {value} ") }
            };
            Environment::read(|name| variables.iter().find(|(key, _)| *key == name).map(|(key, value)| pad(key, value)))
        };
        for variables in [TORCHRUN, SLURM] {
            assert_eq!(padded(variables).unwrap(), read(variables).unwrap());
        }
        assert_eq!(read(&[("MASTER_ADDR", "  ")]).unwrap(), Environment::default());
    }

    #[test]
    fn names_the_variable_and_the_value() {
        type Texts = &'static [&'static str];
        let cases: &[(&[(&str, &str)], Texts)] = &[
            (&[("RANK", "4"), ("WORLD_SIZE", "4")], &["RANK=\"4\"", "WORLD_SIZE=4", "between 0 and 3"]),
            (&[("RANK", "1")], &["WORLD_SIZE is not set", "RANK is set"]),
            (&[("WORLD_SIZE", "2")], &["variable RANK is not set", "WORLD_SIZE is set"]),
            (&[("RANK", "one"), ("WORLD_SIZE", "2")], &["RANK=\"one\"", "a non-negative number"]),
            (&[("RANK", ""), ("WORLD_SIZE", "2")], &["RANK=\"\"", "a non-negative number"]),
            (&[("RANK", "-1"), ("WORLD_SIZE", "2")], &["RANK=\"-1\"", "a non-negative number"]),
            (&[("RANK", "0"), ("WORLD_SIZE", "0")], &["WORLD_SIZE=\"0\"", "at least 1"]),
            (
                &[("RANK", "0"), ("WORLD_SIZE", "18446744073709551615")],
                &["WORLD_SIZE=\"18446744073709551615\"", "at most 1048576"],
            ),
            (&[("RANK", "0"), ("WORLD_SIZE", "99999999999999999999")], &["WORLD_SIZE=\"99999999999999999999\""]),
            (&[("RANK", "0"), ("WORLD_SIZE", "1048577")], &["WORLD_SIZE=\"1048577\"", "at most 1048576"]),
            (
                &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "9000000000")],
                &["SLURM_NTASKS=\"9000000000\"", "at most 1048576"],
            ),
            (
                &[("PMI_RANK", "0"), ("PMI_SIZE", "9000000000"), ("MPI_LOCALRANKID", "0")],
                &["PMI_SIZE=", "at most 1048576"],
            ),
            (&[("LOCAL_RANK", "18446744073709551615")], &["LOCAL_RANK=", "at most 1048576"]),
            (&[("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "-2")], &["LOCAL_WORLD_SIZE=\"-2\""]),
            (&[("MASTER_PORT", " ")], &["MASTER_PORT=\" \"", "a port"]),
            (&[("MASTER_PORT", "-1")], &["MASTER_PORT=\"-1\"", "a port"]),
            (&[("MASTER_ADDR", "node0 node1")], &["MASTER_ADDR=\"node0 node1\"", "the name or address of one host"]),
            (&[("MASTER_ADDR", "127.0.0.1:29500")], &["MASTER_ADDR=\"127.0.0.1:29500\"", "without a port"]),
            (&[("MASTER_ADDR", "node0:29500")], &["MASTER_ADDR=\"node0:29500\"", "which MASTER_PORT gives"]),
            (&[("MASTER_ADDR", "[::1]:29500")], &["MASTER_ADDR=\"[::1]:29500\"", "without brackets"]),
            (&[("MASTER_ADDR", "a\tb")], &["MASTER_ADDR=\"a\\tb\"", "the name or address of one host"]),
            (&[("MASTER_PORT", "65536")], &["MASTER_PORT=\"65536\"", "a port"]),
            (&[("TORCHELASTIC_RESTART_COUNT", "x")], &["TORCHELASTIC_RESTART_COUNT=\"x\""]),
            (&[("TORCHELASTIC_USE_AGENT_STORE", "maybe")], &["TORCHELASTIC_USE_AGENT_STORE=\"maybe\"", "1 or 0"]),
            (
                &[("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "2"), ("LOCAL_WORLD_SIZE", "2")],
                &["LOCAL_RANK=\"2\"", "LOCAL_WORLD_SIZE=2"],
            ),
            (
                &[("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "3")],
                &["LOCAL_WORLD_SIZE=\"3\"", "WORLD_SIZE=2"],
            ),
            (&[("SLURM_PROCID", "0")], &["SLURM_NTASKS is not set"]),
            (&[("SLURM_PROCID", "2"), ("SLURM_NTASKS", "2")], &["SLURM_PROCID=\"2\"", "SLURM_NTASKS=2"]),
            (
                &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2"), ("WORLD_SIZE", "4")],
                &["WORLD_SIZE=\"4\"", "SLURM_NTASKS=2"],
            ),
            (
                &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1"), ("SLURM_NODELIST", "node[")],
                &["SLURM_NODELIST=\"node[\"", "list of nodes"],
            ),
            (&[("OMPI_COMM_WORLD_RANK", "1")], &["OMPI_COMM_WORLD_SIZE is not set"]),
            (&[("PMI_RANK", "9"), ("PMI_SIZE", "2")], &["PMI_RANK=\"9\"", "PMI_SIZE=2"]),
        ];
        for (variables, expected) in cases {
            let error = read(variables).unwrap_err().to_string();
            for part in *expected {
                assert!(error.contains(part), "{variables:?}: {error} lacks {part}");
            }
        }
    }
}
