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
    /// By rank: the host that it is on.
    pub(crate) host: fn(usize) -> usize,
    /// From the store, the rank and the world size.
    make: Box<Make>,
}

const TIMEOUT: Duration = Duration::from_secs(60);

/// The CPU engine over shared memory.
pub(crate) fn shared_memory() -> Vec<Engine> {
    cpu(CpuTransport::SharedMemory, |_| 0)
}

/// The CPU engine over TCP.
pub(crate) fn tcp() -> Vec<Engine> {
    cpu(CpuTransport::Tcp, |rank| rank)
}

/// The CPU engine between hosts of two neighbouring ranks: 2 + 1, 2 + 2, 2 + 2 + 2 + 1.
pub(crate) fn pairs() -> Vec<Engine> {
    cpu(CpuTransport::Auto, |rank| rank / 2)
}

/// The CPU engine between two hosts that share out the ranks in turn: 2 + 1, 2 + 2, 4 + 3.
pub(crate) fn two_hosts() -> Vec<Engine> {
    cpu(CpuTransport::Auto, |rank| rank % 2)
}

/// The CPU engine between three hosts of very different size: 2 + 1, 2 + 1 + 1, 5 + 1 + 1.
pub(crate) fn uneven_hosts() -> Vec<Engine> {
    cpu(CpuTransport::Auto, |rank| if matches!(rank, 1 | 3) { rank } else { 0 })
}

/// The CPU engine as it is, and with sizes that lead through the other algorithms with little data.
fn cpu(transport: CpuTransport, host: fn(usize) -> usize) -> Vec<Engine> {
    let usual = CpuOptions { timeout: TIMEOUT, transport, ..CpuOptions::default() };
    let tiny = CpuOptions { segment_bytes: Some(100), small_bytes: Some(0), ..usual.clone() };
    let at_once = CpuOptions { small_bytes: Some(usize::MAX), ..usual.clone() };
    [("as it is", usual), ("in tiny segments", tiny), ("all at once", at_once)]
        .into_iter()
        .map(|(name, options)| Engine {
            name,
            device: Device::Cpu,
            host,
            make: Box::new(move |store, rank, world_size| {
                let options = CpuOptions { host: Some(host(rank).to_string()), ..options.clone() };
                Box::new(CpuCommunicator::new(store, rank, world_size, options).unwrap())
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

    /// The same, with a second group of the same ranks.
    pub(crate) fn in_two_groups<T: Send>(
        &self,
        world_size: usize,
        body: impl Fn([&dyn Communicator; 2]) -> T + Sync,
    ) -> Vec<T> {
        let second: Arc<dyn Store> = Arc::new(HashStore::new(TIMEOUT));
        self.on_ranks(world_size, |first| {
            let second = (self.make)(second.clone(), first.rank(), world_size);
            body([first, &*second])
        })
    }
}
