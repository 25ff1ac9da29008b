//! The state of a server and its replies, independent of sockets: keys, queues, and waiting clients.
use super::output::Output;
use super::protocol::{MAX_MESSAGE, MAX_VALUE, Malformed, NOT_READY, READY, Request, WAIT_CANCELED};
use super::shared::{Meter, Shared};
use crate::hash_store::parse_counter;
use std::collections::{HashMap, VecDeque};

/// A connection's id, which is never reused.
pub(super) type ClientId = u64;

/// The maximum number of keys, queue elements and last wills in the store.
const MAX_KEYS: usize = 1 << 20;
/// The approximate overhead of a key that clients wait for, and of each client that waits for it.
const WAITED_KEY: usize = 128;
const WAIT: usize = 24;

/// What a client waits for.
enum Wait {
    /// These keys, of which `missing` are not set yet.
    Keys { keys: Vec<Shared>, missing: usize },
    /// This counter reaching `world_size`.
    Barrier { key: Shared, world_size: i64 },
}

impl Wait {
    fn keys(&self) -> &[Shared] {
        match self {
            Self::Keys { keys, .. } => keys,
            Self::Barrier { key, .. } => std::slice::from_ref(key),
        }
    }
}

pub(super) struct State {
    /// The maximum size of keys and values in bytes, including those of replies that clients have not read.
    max_bytes: usize,
    meter: Meter,
    keys: HashMap<Shared, Shared>,
    queues: HashMap<Shared, VecDeque<Shared>>,
    /// The number of elements in `queues`.
    queued: usize,
    /// Last wills: the requests to execute when a client leaves.
    wills: HashMap<ClientId, Shared>,
    waits: HashMap<ClientId, Wait>,
    /// The number of keys in `waits`.
    waited: usize,
    /// The clients in `waits` that wait for each key, in order of arrival.
    waiting: HashMap<Shared, Vec<ClientId>>,
    woken: Vec<ClientId>,
}

impl State {
    pub(super) fn new(max_bytes: usize) -> Self {
        Self {
            max_bytes,
            meter: Meter::default(),
            keys: HashMap::new(),
            queues: HashMap::new(),
            queued: 0,
            wills: HashMap::new(),
            waits: HashMap::new(),
            waited: 0,
            waiting: HashMap::new(),
            woken: Vec::new(),
        }
    }

    /// Executes `request` and appends the reply to `reply` if there is one already. Afterwards, the clients of
    /// [`State::take_woken`] must each be sent a [`READY`]. On an error, this client must be closed.
    pub(super) fn handle(&mut self, client: ClientId, request: Request, reply: &mut Output) -> Result<(), Malformed> {
        match request {
            Request::Validate(_) => return Err(Malformed("VALIDATE is only allowed once, at the start".to_string())),
            Request::Prove { .. } => return Err(Malformed("a proof that was not asked for".to_string())),
            Request::Ping(nonce) => reply.put(&nonce.to_le_bytes()),
            Request::Set { key, value } => self.set(key, value)?,
            Request::CompareSet { key, expected, desired } => self.compare_set(key, expected, desired, reply)?,
            Request::Get(key) => self.put_value(&key, reply),
            Request::Add { key, amount } => reply.put_i64(self.add(key, amount)?),
            Request::Check(keys) => {
                reply.put(&[if keys.iter().all(|key| self.is_set(key)) { READY } else { NOT_READY }]);
            }
            Request::Wait(keys) => {
                let mut missing: Vec<_> = keys.into_iter().filter(|key| !self.is_set(key)).collect();
                missing.sort_unstable();
                missing.dedup();
                if missing.is_empty() {
                    reply.put(&[READY]);
                } else {
                    let keys = self.enrol(client, missing)?;
                    let missing = keys.len();
                    self.waits.insert(client, Wait::Keys { keys, missing });
                }
            }
            Request::NumKeys => reply.put_i64(self.keys.len() as i64),
            Request::Delete(key) => reply.put_i64(i64::from(self.keys.remove(&key[..]).is_some())),
            Request::Append { key, value } => {
                let length = self.value(&key).len() + value.len();
                if length > MAX_VALUE {
                    return Err(Malformed(format!("an appended value would have {length} bytes")));
                }
                let value = [self.value(&key), &value].concat();
                self.set(key, value)?;
            }
            Request::MultiGet(keys) => {
                fits_reply(keys.iter().map(|key| 8 + self.value(key).len()).sum())?;
                keys.iter().for_each(|key| self.put_value(key, reply));
            }
            Request::MultiSet(pairs) => {
                for (key, value) in pairs {
                    self.set(key, value)?;
                }
            }
            Request::CancelWait => {
                self.forget(client);
                reply.put(&[WAIT_CANCELED]);
            }
            Request::QueuePush { key, value } => {
                self.reserve(key.len() + value.len(), 1)?;
                self.push(self.meter.share(key), self.meter.share(value));
            }
            Request::LastWill(request) if request.is_empty() => {
                self.wills.remove(&client);
            }
            Request::LastWill(request) => {
                Request::of_will(&request)?;
                // Its place is reserved from now on.
                self.reserve(request.len(), 1)?;
                self.wills.insert(client, self.meter.share(request));
            }
            Request::QueuePop(key) => match self.pop(&key) {
                Some(value) => {
                    reply.put_i64(1);
                    reply.put_shared(&value);
                }
                None => reply.put_i64(0),
            },
            Request::QueueLen(key) => reply.put_i64(self.queues.get(&key[..]).map_or(0, |queue| queue.len() as i64)),
            Request::ListKeys => {
                fits_reply(self.keys.keys().map(|key| 8 + key.len()).sum())?;
                reply.put_i64(self.keys.len() as i64);
                self.keys.keys().for_each(|key| reply.put_shared(key));
            }
            Request::Barrier { key, world_size } => self.barrier(client, key, world_size, reply)?,
        }
        Ok(())
    }

    /// Returns the clients whose wait has ended since the last call.
    pub(super) fn take_woken(&mut self) -> Vec<ClientId> {
        std::mem::take(&mut self.woken)
    }

    /// Carries out the last will of `client`, whose connection has closed, after cancelling its wait. Afterwards, as after
    /// [`State::handle`], clients may have to be woken.
    pub(super) fn leave(&mut self, client: ClientId) {
        self.forget(client);
        // The wait may have ended just before.
        self.woken.retain(|other| *other != client);
        let Some(will) = self.wills.remove(&client).map(|will| Request::of_will(&will)) else { return };
        if let Err(Malformed(reason)) = will.and_then(|will| self.handle(client, will, &mut Output::default())) {
            log::debug!("the last will of a client of the store cannot be carried out: {reason}");
        }
    }

    /// Cancels the wait of `client`, if any, without a reply.
    pub(super) fn forget(&mut self, client: ClientId) {
        let Some(wait) = self.waits.remove(&client) else { return };
        self.waited -= wait.keys().len();
        for key in wait.keys() {
            if let Some(clients) = self.waiting.get_mut(key) {
                clients.retain(|other| *other != client);
                if clients.is_empty() {
                    self.waiting.remove(key);
                }
            }
        }
    }

    /// Adds `client` to the lists of `keys`, and returns the keys as these lists share them.
    fn enrol(&mut self, client: ClientId, keys: Vec<Vec<u8>>) -> Result<Vec<Shared>, Malformed> {
        if self.waits.contains_key(&client) {
            return Err(Malformed("it is already waiting".to_string()));
        }
        self.reserve(keys.iter().map(|key| key.len() + WAITED_KEY + WAIT).sum(), 0)?;
        self.waited += keys.len();
        let mut shared = Vec::with_capacity(keys.len());
        for key in keys {
            let key = match self.waiting.get_key_value(&key[..]) {
                Some((key, _)) => key.clone(),
                None => self.meter.share(key),
            };
            self.waiting.entry(key.clone()).or_default().push(client);
            shared.push(key);
        }
        Ok(shared)
    }

    fn value(&self, key: &[u8]) -> &[u8] {
        self.keys.get(key).map_or(&[], |value| value)
    }

    fn put_value(&self, key: &[u8], reply: &mut Output) {
        match self.keys.get(key) {
            Some(value) => reply.put_shared(value),
            None => reply.put_bytes(&[]),
        }
    }

    /// Returns whether `key` is set. A queue counts as set while it has elements; an empty queue is removed.
    fn is_set(&self, key: &[u8]) -> bool {
        self.keys.contains_key(key) || self.queues.contains_key(key)
    }

    fn reserve(&self, bytes: usize, elements: usize) -> Result<(), Malformed> {
        if self.keys.len() + self.queued + self.wills.len() + elements > MAX_KEYS {
            return Err(Malformed(format!("the store is full: it holds {MAX_KEYS} keys")));
        }
        let used = self.meter.bytes() + self.waiting.len() * WAITED_KEY + self.waited * WAIT;
        if used + bytes > self.max_bytes {
            return Err(Malformed(format!("the store is full: it holds {} bytes", self.max_bytes)));
        }
        Ok(())
    }

    pub(super) fn set(&mut self, key: Vec<u8>, value: Vec<u8>) -> Result<(), Malformed> {
        let old = self.keys.get(&key[..]).map(Shared::exclusive);
        let added = if old.is_some() { value.len() } else { key.len() + value.len() };
        self.reserve(added.saturating_sub(old.unwrap_or(0)), usize::from(old.is_none()))?;
        let value = self.meter.share(value);
        match self.keys.get_mut(&key[..]) {
            Some(old) => *old = value,
            None => {
                self.keys.insert(self.meter.share(key.clone()), value);
            }
        }
        self.wake_all(&key);
        Ok(())
    }

    fn compare_set(
        &mut self,
        key: Vec<u8>,
        expected: Vec<u8>,
        desired: Vec<u8>,
        reply: &mut Output,
    ) -> Result<(), Malformed> {
        let current = self.keys.get(&key[..]);
        if current.map_or(expected.is_empty(), |current| **current == *expected) {
            self.set(key.clone(), desired)?;
            self.put_value(&key, reply);
            return Ok(());
        }
        match current {
            Some(current) => reply.put_shared(current),
            None => reply.put_bytes(&expected),
        }
        Ok(())
    }

    fn add(&mut self, key: Vec<u8>, amount: i64) -> Result<i64, Malformed> {
        let old = match self.keys.get(&key[..]) {
            Some(value) => parse_counter(&String::from_utf8_lossy(&key), "", value)
                .map_err(|_| Malformed(format!("{:?} is not a counter", String::from_utf8_lossy(&key))))?,
            None => 0,
        };
        let new = old.wrapping_add(amount);
        self.set(key, new.to_string().into_bytes())?;
        Ok(new)
    }

    fn push(&mut self, key: Shared, value: Shared) {
        self.queued += 1;
        self.queues.entry(key.clone()).or_default().push_back(value);
        self.wake_one(&key);
    }

    fn pop(&mut self, key: &[u8]) -> Option<Shared> {
        let queue = self.queues.get_mut(key)?;
        let value = queue.pop_front();
        if queue.is_empty() {
            self.queues.remove(key);
        }
        let value = value?;
        self.queued -= 1;
        Some(value)
    }

    /// As in PyTorch, the counter remains as a plain key, and a barrier that was passed stays open.
    fn barrier(
        &mut self,
        client: ClientId,
        key: Vec<u8>,
        world_size: i64,
        reply: &mut Output,
    ) -> Result<(), Malformed> {
        let count = self.add(key.clone(), 1)?;
        if count < world_size {
            if let Some(key) = self.enrol(client, vec![key])?.pop() {
                self.waits.insert(client, Wait::Barrier { key, world_size });
            }
            return Ok(());
        }
        reply.put(&[READY]);
        for other in self.waiting.get(&key[..]).cloned().unwrap_or_default() {
            if let Some(Wait::Barrier { world_size, .. }) = self.waits.get(&other)
                && *world_size <= count
            {
                self.forget(other);
                self.woken.push(other);
            }
        }
        Ok(())
    }

    fn wake_all(&mut self, key: &[u8]) {
        let Some((key, clients)) = self.waiting.remove_entry(key) else { return };
        let (clients, barriers): (Vec<_>, Vec<_>) =
            clients.into_iter().partition(|client| matches!(self.waits.get(client), Some(Wait::Keys { .. })));
        if !barriers.is_empty() {
            self.waiting.insert(key, barriers);
        }
        for client in clients {
            self.found(client);
        }
    }

    /// Wakes a single client, because an element of a queue is for one client only.
    fn wake_one(&mut self, key: &[u8]) {
        let Some(clients) = self.waiting.get_mut(key) else { return };
        let waits = &self.waits;
        let first = clients.iter().position(|client| matches!(waits.get(client), Some(Wait::Keys { .. })));
        if let Some(first) = first {
            let client = clients.remove(first);
            self.found(client);
        }
    }

    /// Records that one of the keys that `client` waits for is set; `client` has been removed from that key's list.
    fn found(&mut self, client: ClientId) {
        let Some(Wait::Keys { missing, .. }) = self.waits.get_mut(&client) else { return };
        *missing -= 1;
        if *missing == 0 {
            self.forget(client);
            self.woken.push(client);
        }
    }
}

fn fits_reply(size: usize) -> Result<(), Malformed> {
    if size > MAX_MESSAGE {
        return Err(Malformed(format!("the reply would have {size} bytes, but at most {MAX_MESSAGE} are allowed")));
    }
    Ok(())
}
