//! How the ranks of a test get their communicators.
use candle_core::Device;
use candle_ddp::backend::Communicator;
use candle_ddp::backend::cpu::{CpuCommunicator, CpuOptions, CpuTransport};
use candle_ddp::rendezvous::{HashStore, Store};
use std::sync::Arc;
use std::time::Duration;

type Make = dyn Fn(Arc<dyn Store>, usize, usize) -> Box<dyn Communicator> + Sync;

/// An engine under test.
pub(crate) struct Engine {
    pub(crate) name: &'static str,
    pub(crate) device: Device,
    /// From the store, the rank and the world size.
    make: Box<Make>,
}

const TIMEOUT: Duration = Duration::from_secs(60);

/// The CPU engine over shared memory.
pub(crate) fn shared_memory() -> Vec<Engine> {
    cpu(CpuTransport::SharedMemory)
}

/// The CPU engine over TCP.
pub(crate) fn tcp() -> Vec<Engine> {
    cpu(CpuTransport::Tcp)
}

/// The CPU engine as it is, and with sizes that lead through the other algorithms with little data.
fn cpu(transport: CpuTransport) -> Vec<Engine> {
    let usual = CpuOptions { timeout: TIMEOUT, transport, ..CpuOptions::default() };
    let tiny = CpuOptions { segment_bytes: Some(100), small_bytes: Some(0), ..usual.clone() };
    let at_once = CpuOptions { small_bytes: Some(usize::MAX), ..usual.clone() };
    [("as it is", usual), ("in tiny segments", tiny), ("all at once", at_once)]
        .into_iter()
        .map(|(name, options)| Engine {
            name,
            device: Device::Cpu,
            make: Box::new(move |store, rank, world_size| {
                Box::new(CpuCommunicator::new(store, rank, world_size, options.clone()).unwrap())
            }),
        })
        .collect()
}

impl Engine {
    /// Runs `body` on every rank of a world, each on a thread of its own; what they return, by rank.
    pub(crate) fn on_ranks<T: Send>(&self, world_size: usize, body: impl Fn(&dyn Communicator) -> T + Sync) -> Vec<T> {
        let store: Arc<dyn Store> = Arc::new(HashStore::new(TIMEOUT));
        std::thread::scope(|scope| {
            let rank = |rank| {
                let (store, body) = (store.clone(), &body);
                scope.spawn(move || body(&*(self.make)(store, rank, world_size)))
            };
            let ranks: Vec<_> = (0..world_size).map(rank).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }
}
