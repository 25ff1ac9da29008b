//! The CPU engine under test, and the creation of communicators for a test's ranks.
use candle_core::{DType, Device, Tensor};
use candle_ddp::ReduceOp;
use candle_ddp::backend::cpu::{CpuCommunicator, CpuOptions, CpuTransport};
use candle_ddp::backend::{Collective, Communicator};
use candle_ddp::conformance::{self, Case, ConformanceOptions};
use candle_ddp::rendezvous::{HashStore, Store};
use std::sync::Arc;
use std::time::Duration;

/// The engine with one set of options.
pub(crate) struct Engine {
    pub(crate) name: &'static str,
    /// Maps a rank to its host.
    pub(crate) host: fn(usize) -> usize,
    options: CpuOptions,
}

/// It shows only that something hangs.
const TIMEOUT: Duration = Duration::from_secs(600);
const USUAL: &str = "with default options";
const TINY_SEGMENTS: &str = "in tiny segments";
const AT_ONCE: &str = "all at once";

/// All ranks on one host, over shared memory.
pub(crate) fn shared_memory() -> [Engine; 3] {
    engines(CpuTransport::SharedMemory, |_| 0)
}

/// All ranks connected over TCP.
pub(crate) fn tcp() -> [Engine; 3] {
    engines(CpuTransport::Tcp, |rank| rank)
}

/// Two neighbouring ranks per host: 2 + 1, 2 + 2, 2 + 2 + 2 + 1.
pub(crate) fn pairs() -> [Engine; 3] {
    engines(CpuTransport::Auto, |rank| rank / 2)
}

/// Two hosts with alternating ranks: 2 + 1, 2 + 2, 4 + 3.
pub(crate) fn two_hosts() -> [Engine; 3] {
    engines(CpuTransport::Auto, |rank| rank % 2)
}

/// Three hosts of very different sizes: 2 + 1, 2 + 1 + 1, 5 + 1 + 1.
pub(crate) fn uneven_hosts() -> [Engine; 3] {
    engines(CpuTransport::Auto, |rank| if matches!(rank, 1 | 3) { rank } else { 0 })
}

/// Default options, and sizes that select the other algorithms with little data.
fn engines(transport: CpuTransport, host: fn(usize) -> usize) -> [Engine; 3] {
    let usual = CpuOptions { timeout: TIMEOUT, transport: Some(transport), ..CpuOptions::default() };
    let tiny = CpuOptions { segment_bytes: Some(100), small_bytes: Some(0), ..usual.clone() };
    let at_once = CpuOptions { small_bytes: Some(usize::MAX), ..usual.clone() };
    [(USUAL, usual), (TINY_SEGMENTS, tiny), (AT_ONCE, at_once)].map(|(name, options)| Engine { name, host, options })
}

impl Engine {
    fn connect(&self, store: Arc<dyn Store>, rank: usize, world_size: usize) -> candle_ddp::Result<CpuCommunicator> {
        let options = CpuOptions { host: Some((self.host)(rank).to_string()), ..self.options.clone() };
        CpuCommunicator::new(store, rank, world_size, options)
    }

    /// Runs the conformance suite.
    pub(crate) fn conforms(&self) {
        let mut options =
            ConformanceOptions { average_is_rounded_once: true, timeout: TIMEOUT, ..ConformanceOptions::default() };
        if self.name != USUAL {
            // Seven threads on few processors mostly wait for each other.
            options.world_sizes.retain(|size| *size <= 4);
        }
        if self.name == TINY_SEGMENTS {
            // Ten thousand elements would be too many segments.
            options.counts.retain(|count| *count <= 1000);
            // 12 MiB would wake threads a hundred thousand times, each time behind all that a busy machine has to do.
            options.cases.retain(|case| *case != Case::LargeMessages);
        }
        if self.name == AT_ONCE {
            // Only these have another algorithm for little data, and with default options they use it up to 1000 elements.
            options.counts.retain(|count| *count > 1000);
            options.cases = vec![Case::AllReduce, Case::Broadcast, Case::SameBits, Case::InOrder, Case::TwoGroups];
        }
        let conforms =
            conformance::run(options, |store, rank, world_size| Ok(Box::new(self.connect(store, rank, world_size)?)));
        conforms.unwrap_or_else(|error| panic!("{}: {error}", self.name));
    }

    /// Runs `body` on every rank of a world, each on its own thread; returns the results by rank.
    pub(crate) fn on_ranks<T: Send>(&self, world_size: usize, body: impl Fn(&CpuCommunicator) -> T + Sync) -> Vec<T> {
        let store: Arc<dyn Store> = Arc::new(HashStore::new(TIMEOUT));
        std::thread::scope(|scope| {
            let rank = |rank| {
                let (store, body) = (store.clone(), &body);
                scope.spawn(move || body(&self.connect(store, rank, world_size).unwrap()))
            };
            let ranks: Vec<_> = (0..world_size).map(rank).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    /// Like `on_ranks`, with a second group of the same ranks.
    pub(crate) fn in_two_groups<T: Send>(
        &self,
        world_size: usize,
        body: impl Fn([&CpuCommunicator; 2]) -> T + Sync,
    ) -> Vec<T> {
        let second: Arc<dyn Store> = Arc::new(HashStore::new(TIMEOUT));
        self.on_ranks(world_size, |first| {
            let second = self.connect(second.clone(), first.rank(), world_size).unwrap();
            body([first, &second])
        })
    }
}

pub(crate) fn dropping_the_communicator_waits_for_dropped_works(engine: &Engine) {
    let results = engine.on_ranks(3, |communicator| {
        let tensor = Tensor::ones(5000, DType::F32, &Device::Cpu).unwrap();
        for _ in 0..4 {
            drop(communicator.start(Collective::AllReduce { tensor: tensor.clone(), op: ReduceOp::Sum }).unwrap());
        }
        tensor
    });
    for tensor in results {
        assert_eq!(tensor.to_vec1::<f32>().unwrap(), [81.0; 5000]);
    }
}
