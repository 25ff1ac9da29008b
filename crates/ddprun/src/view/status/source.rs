//! Where the launcher that hosts the store reads the status of its run.
use super::document::RunStatus;
use super::snapshot::{self, Snapshot};
use candle_ddp_base::panic::lock;
use candle_ddp_rendezvous::{Result, Secret, Store, TcpStore, TcpStoreOptions, TcpStoreServer};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long the store may take to answer.
const TIMEOUT: Duration = Duration::from_secs(2);
/// A snapshot serves for this long, however many ask.
const FRESH: Duration = Duration::from_secs(1);

/// The status of a run, for the threads of its launcher.
pub(crate) struct Source {
    secret: Option<Secret>,
    state: Mutex<State>,
}

struct State {
    /// The run, as the launcher knows it. Newer than the store's document if no rank uses that.
    run: RunStatus,
    /// The store of the workers that run now.
    host: String,
    port: u16,
    is_joined: Arc<AtomicBool>,
    client: Option<Arc<dyn Store>>,
    last: Option<(Instant, Arc<Snapshot>)>,
}

impl Source {
    pub(crate) fn new(server: &TcpStoreServer, secret: Option<Secret>, run: RunStatus) -> Self {
        Self { secret, state: Mutex::new(State::new(server, run)) }
    }

    /// Takes another store, for workers that start again.
    pub(crate) fn set_store(&self, server: &TcpStoreServer, run: RunStatus) {
        *lock(&self.state) = State::new(server, run);
    }

    /// The store, once the job uses it.
    pub(crate) fn store(&self) -> Result<Option<Arc<dyn Store>>> {
        lock(&self.state).connect(self.secret.as_ref())
    }

    /// Takes what the launcher knows about the run.
    pub(crate) fn set_run(&self, run: RunStatus) {
        let mut state = lock(&self.state);
        (state.run, state.last) = (run, None);
    }

    /// The status of the run as it is now.
    ///
    /// # Errors
    /// Those of [`snapshot`](Self::snapshot).
    pub(crate) fn now(&self) -> Result<Arc<Snapshot>> {
        lock(&self.state).last = None;
        self.snapshot()
    }

    /// The status of the run, at most a second old.
    ///
    /// # Errors
    /// Returns an error if the store does not answer, or has a document that no rank writes.
    pub(crate) fn snapshot(&self) -> Result<Arc<Snapshot>> {
        let mut state = lock(&self.state);
        if let Some((_, snapshot)) = state.last.as_ref().filter(|(at, _)| at.elapsed() < FRESH) {
            return Ok(Arc::clone(snapshot));
        }
        let read = state.read(self.secret.as_ref());
        if read.is_err() {
            // Another connection may be better.
            state.client = None;
        }
        let snapshot = Arc::new(read?);
        state.last = Some((Instant::now(), Arc::clone(&snapshot)));
        Ok(snapshot)
    }
}

impl State {
    fn new(server: &TcpStoreServer, run: RunStatus) -> Self {
        let (host, port, is_joined) = (server.own_host(), server.port(), server.joined());
        Self { run, host, port, is_joined, client: None, last: None }
    }

    fn read(&mut self, secret: Option<&Secret>) -> Result<Snapshot> {
        match self.connect(secret)? {
            Some(client) => snapshot::read(client, format!("{}:{}", self.host, self.port)),
            None => Ok(Snapshot::without_ranks(self.run.clone())),
        }
    }

    /// Until a worker proves that it knows the secret, the store may serve PyTorch's programs, which this launcher would drive out.
    fn connect(&mut self, secret: Option<&Secret>) -> Result<Option<Arc<dyn Store>>> {
        if self.client.is_none() && self.is_joined.load(Ordering::Relaxed) {
            let options = TcpStoreOptions { timeout: TIMEOUT, secret: secret.cloned() };
            self.client = Some(Arc::new(TcpStore::connect_with(&self.host, self.port, options)?));
        }
        Ok(self.client.clone())
    }
}
