use super::job::Job;
use super::{Backend, ProcessGroup, Settings};
use crate::backend::Construction;
use crate::error::Failure;
use crate::flight_recorder::{FlightRecorderOptions, Recording};
use crate::panic::panic_message;
use crate::rendezvous::{Cancellation, HashStore, Reason, Secret, Store};
use crate::thread::not_started;
use crate::{Error, Result};
use candle_core::Device;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// candle's backward pass recurses once per operation of the graph, which exceeds a thread's usual 2 MiB.
pub(crate) const STACK_BYTES: usize = 64 << 20;

/// Options of [`spawn_with`].
#[derive(Clone, Copy, Debug)]
pub struct SpawnOptions {
    /// The number of ranks.
    pub world_size: usize,
    /// How long a collective may take. Default: 10 minutes.
    pub timeout: Duration,
    /// See [`InitOptions::virtual_ranks`](crate::InitOptions::virtual_ranks). Default: None.
    pub virtual_ranks: Option<usize>,
}

impl Default for SpawnOptions {
    fn default() -> Self {
        Self { world_size: 1, timeout: Duration::from_secs(600), virtual_ranks: None }
    }
}

/// Runs `work` on `world_size` ranks that are threads of this process, connected by the CPU engine, and returns their
/// results in rank order. This is for tests and first steps; for real training, run processes under `ddprun`.
///
/// Ranks must not share tensors that collectives change, since all of them would change the same bytes at once. A
/// thread cannot be ended from outside, so this returns when `work` has returned on every rank. Collectives end within
/// their time-out, but an endless loop in `work` never ends.
///
/// # Errors
/// Returns the error of the rank that failed first, not the errors that it caused on the others. A panic is
/// [`Error::RankFailed`].
pub fn spawn<T: Send>(world_size: usize, work: impl Fn(ProcessGroup) -> Result<T> + Sync) -> Result<Vec<T>> {
    spawn_with(SpawnOptions { world_size, ..Default::default() }, work)
}

/// Like [`spawn`], with options.
///
/// # Errors
/// As [`spawn`], and [`Error::InvalidArgument`] for options that a group refuses, such as 0 ranks.
pub fn spawn_with<T: Send>(options: SpawnOptions, work: impl Fn(ProcessGroup) -> Result<T> + Sync) -> Result<Vec<T>> {
    let SpawnOptions { world_size, timeout, virtual_ranks } = options;
    if world_size == 0 {
        return Err(Error::invalid("world_size", "it must be at least 1, not 0"));
    }
    let store: Arc<dyn Store> = Arc::new(HashStore::new(timeout));
    let secret = Secret::random()?;
    let deadline = Instant::now().checked_add(timeout);
    let cancellation = Cancellation::default();
    let cancel = |peer: usize, error: &Error| {
        cancellation.cancel(Reason::Failed(Failure::PeerFailed { peer, reason: error.to_string() }))
    };
    let run = |rank: usize| -> Result<T> {
        let settings = Settings {
            backend: Backend::Cpu,
            device: Device::Cpu,
            timeout,
            nccl: Default::default(),
            local_rank: rank,
            local_world_size: world_size,
            address: None,
            secret: Some(secret.clone()),
            virtual_ranks,
        };
        let cancelled = || cancellation.check();
        let recording = Recording::of_world(FlightRecorderOptions::default(), rank, world_size).map_err(Error::from);
        let recording = recording.inspect_err(|error| cancel(rank, error))?;
        let (cancelled, recording): (_, Option<&Recording>) = (Some(&cancelled as _), recording.as_ref());
        let construction = Construction { deadline, cancelled, recording, membership: None };
        let job = Job::without_launcher(world_size);
        let pg = ProcessGroup::connect(construction, Arc::clone(&store), world_size, rank, settings, job)
            .inspect_err(|error| cancel(rank, error))?;
        pg.abort_on_error(|| work(pg.clone()))
    };
    on_ranks(world_size, run, cancel)
}

/// Calls `run` for every rank, each on its own thread, and returns the results in rank order. If a rank's thread cannot
/// be started, `cancel` gets the error.
///
/// # Errors
/// Returns the error of the rank that failed first, not the errors that it caused on the others. A panic is
/// [`Error::RankFailed`].
pub(crate) fn on_ranks<T: Send>(
    world_size: usize,
    run: impl Fn(usize) -> Result<T> + Sync,
    cancel: impl Fn(usize, &Error),
) -> Result<Vec<T>> {
    let run = &run;
    let outcomes: Vec<(Instant, Result<T>)> = thread::scope(|scope| {
        let ranks: Vec<_> = (0..world_size)
            .map(|rank| {
                let body = move || {
                    // The time is taken on the rank's thread, to tell the first failure from those that it caused.
                    let result = catch_unwind(AssertUnwindSafe(|| run(rank)))
                        .unwrap_or_else(|panic| Err(Error::RankFailed { rank, reason: panic_message(&*panic) }));
                    (Instant::now(), result)
                };
                let name = format!("rank{rank}");
                thread::Builder::new()
                    .name(name.clone())
                    .stack_size(STACK_BYTES)
                    .spawn_scoped(scope, body)
                    .map_err(|error| not_started(&name, error).into())
                    // The others would wait for it.
                    .inspect_err(|error| cancel(rank, error))
            })
            .collect();
        ranks
            .into_iter()
            .enumerate()
            .map(|(rank, thread)| match thread {
                Ok(thread) => thread.join().unwrap_or_else(|panic| {
                    (Instant::now(), Err(Error::RankFailed { rank, reason: panic_message(&*panic) }))
                }),
                Err(error) => (Instant::now(), Err(error)),
            })
            .collect()
    });
    let mut results = Vec::with_capacity(world_size);
    let mut failures = Vec::new();
    for (rank, (at, result)) in outcomes.into_iter().enumerate() {
        match result {
            Ok(value) => results.push(value),
            Err(error) => failures.push((error.is_echo(rank), at, error)),
        }
    }
    match failures.into_iter().min_by_key(|(echo, at, _)| (*echo, *at)) {
        Some((_, _, error)) => Err(error),
        None => Ok(results),
    }
}
