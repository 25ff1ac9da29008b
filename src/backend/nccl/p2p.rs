//! Messages between two ranks in one direction.
//!
//! NCCL runs the calls on a communicator one after the other. On one communicator, two ranks that both send first and
//! then receive would wait for each other, and a message behind a collective would wait for all ranks; neither may
//! happen. So each pair of ranks has a communicator of two ranks and a stream for each direction in which it sends
//! messages. A thread creates them with the first message, since both ranks must take part.
use super::NcclOptions;
use super::comm::{Comm, UniqueId, WaitError};
use super::comm_stream::CommStream;
use super::comm_streams::CommStreams;
use super::device::check_queues;
use super::identity::await_id;
use super::launcher::Launcher;
use super::limit::{Ctas, Limit, Room, check_order};
use super::status::NcclFailure;
use super::stream::Streams;
use crate::Result;
use crate::rendezvous::{self, Store, discard};
use candle_ddp_engine::device_group::DeviceGroup;
use std::sync::Arc;

/// The messages from one rank to another, on either of the two.
pub(super) struct P2p {
    pub(super) launcher: Launcher,
    pub(super) streams: Streams,
}

/// The two ranks of a pair, and what connecting them needs.
pub(super) struct Pair {
    pub(super) group: Arc<DeviceGroup>,
    pub(super) comm_streams: Arc<CommStreams>,
    pub(super) store: Arc<dyn Store>,
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) streams: Streams,
    pub(super) options: NcclOptions,
    pub(super) multiprocessors: u32,
}

impl P2p {
    pub(super) fn start(pair: Pair) -> Result<Self> {
        let (group, streams) = (Arc::clone(&pair.group), pair.streams.clone());
        let name = format!("{}-to-{}", pair.from, pair.to);
        Ok(Self { launcher: Launcher::start(&group, &name, move || pair.connect())?, streams })
    }
}

impl Pair {
    /// Connects to the peer.
    fn connect(&self) -> std::result::Result<Arc<CommStream>, WaitError> {
        let sends = self.group.rank == self.from;
        let key = format!("message/{}-{}", self.from, self.to);
        let cannot = |error: rendezvous::Error| {
            WaitError::Nccl(NcclFailure::other("meeting the peer of a message", &error.to_string()))
        };
        let settings = check_queues().and_then(|()| check_order(self.streams.device()));
        settings.map_err(|error| NcclFailure::other("meeting the peer of a message", &error.to_string()))?;
        self.streams.bind().map_err(super::cuda_failure)?;
        self.streams.trim_pool();
        let id = if sends {
            let id = UniqueId::new()?;
            self.store.set(&key, &id.to_bytes()).map_err(cannot)?;
            id
        } else {
            let id = await_id(&*self.store, &key, &self.group, "meeting the peer of a message")?;
            discard(&*self.store, &key);
            id
        };
        let mut check = || self.group.failure().map_or(Ok(()), Err);
        let ctas = Ctas::new(&self.options, Limit::Messages, self.multiprocessors);
        let comm = Comm::connect(&id, usize::from(!sends), 2, &self.options, ctas, &mut check)?;
        let room =
            Room::take(self.streams.device(), [self.group.rank, 2], (Limit::Messages, ctas), self.multiprocessors);
        let comm_stream = Arc::new(CommStream::new(comm, room, self.streams.clone()));
        self.comm_streams.add(self.from, self.to, Arc::clone(&comm_stream))?;
        Ok(comm_stream)
    }
}
