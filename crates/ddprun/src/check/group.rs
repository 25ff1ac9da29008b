//! The ranks of a check, connected by the CPU engine as the ranks of a run are.
use candle_ddp_engine::{
    Call, Channel, Construction, CpuOptions, Element, Engine, Memory, Operands, Operation, ReduceOp, Slice,
};
use candle_ddp_rendezvous::{Error, RendezvousOptions, Result, Store, json, meet};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

/// How long ranks wait for each other, and for each call.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Memory for calls, as numbers of 64 bits.
pub(super) struct Buffer(RwLock<Vec<u64>>);

impl Buffer {
    /// Zeros.
    pub(super) fn bytes(count: usize) -> Self {
        Self(RwLock::new(vec![0; count.div_ceil(8)]))
    }

    pub(super) fn number(number: i64) -> Self {
        Self(RwLock::new(vec![number.cast_unsigned()]))
    }

    /// Its first number.
    pub(super) fn first(&self) -> i64 {
        let words = self.0.read().unwrap_or_else(PoisonError::into_inner);
        words.first().map_or(0, |word| word.cast_signed())
    }

    /// In bytes.
    fn len(&self) -> usize {
        8 * self.0.read().unwrap_or_else(PoisonError::into_inner).len()
    }
}

/// A rank has one call at a time, so nobody waits for the lock.
impl Memory for Buffer {
    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    fn read(&self, _: Option<Duration>, work: &mut dyn FnMut(&[u8])) -> bool {
        work(bytemuck::cast_slice(&self.0.read().unwrap_or_else(PoisonError::into_inner)));
        true
    }

    fn write(&self, _: Option<Duration>, work: &mut dyn FnMut(&mut [u8])) -> bool {
        work(bytemuck::cast_slice_mut(&mut self.0.write().unwrap_or_else(PoisonError::into_inner)));
        true
    }
}

/// One rank.
pub(super) struct Group {
    engine: Engine,
    store: Arc<dyn Store>,
    pub(super) rank: usize,
    pub(super) world_size: usize,
}

impl Group {
    /// Meets the others where `ddprun` says.
    pub(super) fn join() -> Result<Self> {
        let (found, watcher) =
            meet(&RendezvousOptions { timeout: TIMEOUT, require_launcher: true, ..RendezvousOptions::default() })?;
        let options = CpuOptions {
            timeout: TIMEOUT,
            address: found.address,
            secret: found.secret.clone(),
            ..CpuOptions::default()
        };
        let cancelled = || watcher.check();
        let construction =
            Construction { deadline: Some(watcher.deadline()), cancelled: Some(&cancelled), ..Construction::default() };
        let (rank, world_size) = (found.rank, found.world_size);
        let engine = Engine::new(construction, Arc::clone(&found.store), rank, world_size, options);
        let engine = watcher.conclude(engine, Error::failure)?;
        Ok(Self { engine, store: found.store, rank, world_size })
    }

    fn run(&self, channel: Channel, call: Call, operands: Operands<'_>) -> Result<()> {
        match self.engine.queue(channel)?.run(call, operands) {
            Some(result) => Ok(result?),
            None => Err(Error::invalid("call", "another call of this rank is in flight")),
        }
    }

    pub(super) fn barrier(&self) -> Result<()> {
        self.run(Channel::Collectives, Call::bare(Operation::Barrier), Operands::default())
    }

    /// Adds the buffers of all ranks, as f32.
    pub(super) fn all_reduce(&self, buffer: &Buffer) -> Result<()> {
        self.reduce(buffer, Element::F32, ReduceOp::Sum)
    }

    /// The largest of all ranks' numbers.
    pub(super) fn max(&self, number: i64) -> Result<i64> {
        let buffer = Buffer::number(number);
        self.reduce(&buffer, Element::I64, ReduceOp::Max).map(|()| buffer.first())
    }

    fn reduce(&self, buffer: &Buffer, element: Element, op: ReduceOp) -> Result<()> {
        let count = (buffer.len() / element.size()) as u64;
        let call = Call { element: Some(element), reduction: Some(op), count, ..Call::bare(Operation::AllReduce) };
        let output = Some(Slice::new(buffer, 0..buffer.len()));
        self.run(Channel::Collectives, call, Operands { output, input: None })
    }

    pub(super) fn send(&self, buffer: &Buffer, peer: usize) -> Result<()> {
        let input = Some(Slice::new(buffer, 0..buffer.len()));
        self.run(Channel::SendTo(peer), message(Operation::Send, buffer), Operands { output: None, input })
    }

    pub(super) fn recv(&self, buffer: &Buffer, peer: usize) -> Result<()> {
        let output = Some(Slice::new(buffer, 0..buffer.len()));
        self.run(Channel::RecvFrom(peer), message(Operation::Recv, buffer), Operands { output, input: None })
    }

    /// Publishes this rank's value and returns those of all ranks, by rank.
    pub(super) fn all_gather<T: Serialize + DeserializeOwned>(&self, name: &str, own: &T) -> Result<Vec<T>> {
        let keys: Vec<String> = (0..self.world_size).map(|rank| format!("check/{name}/{rank}")).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        self.store.set(keys.get(self.rank).copied().unwrap_or_default(), &json::encode(own))?;
        self.store.wait(&keys, Some(TIMEOUT))?;
        keys.iter().zip(self.store.multi_get(&keys)?).map(|(key, bytes)| json::decode(key, &bytes)).collect()
    }
}

fn message(operation: Operation, buffer: &Buffer) -> Call {
    Call { element: Some(Element::U8), count: buffer.len() as u64, ..Call::bare(operation) }
}
