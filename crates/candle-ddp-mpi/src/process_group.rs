//! A process group of all ranks of an MPI job.
use crate::comm::Comm;
use crate::communicator::MpiCommunicator;
use crate::lifetime::library;
use crate::options::MpiOptions;
use candle_core::{Device, Tensor};
use candle_ddp::backend::{Collective, Communicator, bytes};
use candle_ddp::rendezvous::{
    PrefixStore, Secret, Store, TcpStore, TcpStoreOptions, TcpStoreServer, TcpStoreServerOptions,
};
use candle_ddp::{CustomOptions, Error, ProcessGroup, Result};
use candle_ddp_base::panic::lock;
use candle_ddp_env::PROCESS;
use std::fmt::Display;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Joins this process to the others of its MPI job, which mpirun, srun or another launcher of MPI started. Every rank must
/// call it. Rank, world size, and which ranks share a host come from MPI; no variables are needed.
///
/// Rank 0 hosts the group's store, and tells the others its address and a secret over MPI, so that no other process can use
/// it. It is for names and small values: tensors travel over MPI.
///
/// # Errors
/// Returns [`Error::Unavailable`] if MPI cannot be initialised, does not allow calls from several threads, or does not know the
/// other tasks of srun, [`Error::Engine`] for its other errors, and an error if rank 0's store cannot be hosted or reached.
pub fn init_process_group(options: MpiOptions) -> Result<ProcessGroup> {
    /// Distinguishes the groups of this process, which all ranks make in the same order.
    static CALLS: AtomicU64 = AtomicU64::new(0);
    let (timeout, address, virtual_ranks) = (options.timeout, options.address.clone(), options.virtual_ranks);
    let engine = MpiCommunicator::world(options)?;
    let (rank, world_size) = (engine.rank(), engine.world_size());
    if let Some(tasks) = tasks_without_mpi(world_size, |name| PROCESS.raw(name)) {
        let hint = format!(
            "srun started {tasks} tasks, but MPI sees only one, so each would train alone: name the interface of this MPI, as \
             in `srun --mpi=pmix` (Open MPI) or `srun --mpi=pmi2` (MPICH, Intel MPI); `srun --mpi=list` shows those of Slurm"
        );
        return Err(Error::Unavailable { what: "MPI".to_string(), hint });
    }
    let of_host = Comm::world(library()?).of_host().and_then(|host| {
        let place = host.place();
        host.free().and(place)
    });
    let (local_rank, local_world_size) = of_host.map_err(|error| error.of_rank(rank))?;
    let hosted = match rank {
        0 => host(address, local_world_size == world_size).inspect_err(|error| {
            // The others wait for the store's address.
            engine.abort(&error.to_string());
        })?,
        _ => String::new(),
    };
    let hosted = tell(&engine, &hosted)?;
    let unclear = || Error::Engine { rank, operation: "MPI_Ibcast".into(), reason: "rank 0 sent no address".into() };
    let [port, name, secret]: [&str; 3] =
        hosted.splitn(3, '\n').collect::<Vec<_>>().try_into().map_err(|_| unclear())?;
    let store_options = TcpStoreOptions { timeout, secret: Some(Secret::new(secret)?) };
    let store = TcpStore::connect_with(name, port.parse().map_err(|_| unclear())?, store_options)?;
    let call = CALLS.fetch_add(1, Ordering::Relaxed);
    let store: Arc<dyn Store> = Arc::new(PrefixStore::new(format!("candle_ddp_mpi/{call}"), Arc::new(store)));
    log::info!("rank {rank} of {world_size}: over MPI, with the store at {name}:{port}");
    let options = CustomOptions { device: Device::Cpu, timeout, local_rank, local_world_size, virtual_ranks };
    ProcessGroup::with_communicator(store, Box::new(engine), options)
}

/// Runs a distributed program: [`init_process_group`] with default options, then `program` under
/// [`ProcessGroup::abort_on_error`]. If `program` fails on this rank, the other ranks get its error at once.
///
/// # Errors
/// The errors of [`init_process_group`] and of `program`. The error type can be `anyhow::Error` or a type of the program.
pub fn run<T, E: Display + From<Error>>(program: impl FnOnce(&ProcessGroup) -> Result<T, E>) -> Result<T, E> {
    let group = init_process_group(MpiOptions::default())?;
    group.abort_on_error(|| program(&group))
}

/// The number of tasks that srun started without telling MPI of them. MPI then takes each for a job of one rank.
fn tasks_without_mpi(world_size: usize, variable: impl Fn(&str) -> Option<String>) -> Option<usize> {
    // A launcher of MPI that srun has started tells its ranks more than srun does.
    const TOLD: [&str; 4] = ["PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_MPI_TYPE"];
    if world_size > 1 || TOLD.iter().any(|name| variable(name).is_some_and(|value| value != "none")) {
        return None;
    }
    variable("SLURM_STEP_NUM_TASKS")?.parse().ok().filter(|tasks| *tasks > 1)
}

/// Hosts the store, and returns its port, its secret and the host's name. The server stays until the process ends: other
/// ranks may need it longer than this one.
fn host(address: Option<String>, is_one_host: bool) -> Result<String> {
    static SERVER: Mutex<Option<(TcpStoreServer, Secret)>> = Mutex::new(None);
    let address = address.or_else(|| PROCESS.text("MASTER_ADDR"));
    let name = match address {
        Some(name) => name,
        None if is_one_host => Ipv4Addr::LOCALHOST.to_string(),
        None => mpi::environment::processor_name().map_err(|error| Error::Engine {
            rank: 0,
            operation: "MPI_Get_processor_name".to_string(),
            reason: format!("{error}; set MASTER_ADDR to the name of rank 0's host"),
        })?,
    };
    let mut server = lock(&SERVER);
    let (server, secret) = match &mut *server {
        Some(server) => server,
        empty => {
            let secret = match Secret::from_env()? {
                Some(secret) => secret,
                None => Secret::random()?,
            };
            let options = TcpStoreServerOptions { secret: Some(secret.clone()), ..Default::default() };
            let here = if is_one_host { Ipv4Addr::LOCALHOST } else { Ipv4Addr::UNSPECIFIED };
            empty.insert((TcpStoreServer::bind((here, 0), options)?, secret))
        }
    };
    Ok(format!("{}\n{name}\n{}", server.port(), secret.reveal()))
}

/// Rank 0's text.
fn tell(engine: &MpiCommunicator, text: &str) -> Result<String> {
    const LONGEST: usize = 4096;
    if text.len() > LONGEST {
        return Err(Error::InvalidArgument {
            argument: "address",
            reason: format!("{} bytes are too long", text.len()),
        });
    }
    let mut own = text.as_bytes().to_vec();
    own.resize(LONGEST, 0);
    let tensor = Tensor::from_vec(own, LONGEST, &Device::Cpu)?;
    engine.run(Collective::Broadcast { tensor: tensor.clone(), root: 0 })?;
    bytes(&tensor, |bytes| String::from_utf8_lossy(bytes).trim_end_matches('\0').to_string())
}

#[cfg(test)]
mod tests {
    use super::tasks_without_mpi;

    #[test]
    fn tasks_of_which_mpi_knows_nothing_are_noticed() {
        for (world_size, variables, expected) in [
            (1, vec![("SLURM_STEP_NUM_TASKS", "2")], Some(2)),
            (1, vec![("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_MPI_TYPE", "none")], Some(2)),
            (1, vec![("SLURM_STEP_NUM_TASKS", "1")], None),
            // `mpirun -n 1` in a job of two tasks.
            (1, vec![("SLURM_NTASKS", "2")], None),
            (1, vec![("SLURM_STEP_NUM_TASKS", "2"), ("PMI_RANK", "0")], None),
            (2, vec![("SLURM_STEP_NUM_TASKS", "2")], None),
        ] {
            let value = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string());
            assert_eq!(tasks_without_mpi(world_size, value), expected, "{variables:?}");
        }
    }
}
