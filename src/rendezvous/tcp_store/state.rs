//! What a server knows and how it answers, apart from any socket: keys, queues, and who waits for what.
use super::protocol::{
    MAGIC, MAX_MESSAGE, MAX_VALUE, Malformed, NOT_READY, READY, Request, WAIT_CANCELED, put_bytes, put_i64,
};
use crate::rendezvous::hash_store::parse_counter;
use std::collections::{BTreeSet, HashMap, VecDeque};

/// A connection's number; none is used twice.
pub(super) type ClientId = u64;

/// The most keys and queue elements that the store holds.
const MAX_KEYS: usize = 1 << 20;
/// The most bytes that they may have together.
const MAX_STORED: usize = 1 << 30;

/// What a client waits for.
enum Wait {
    /// All of these, of which so many are not set yet.
    Keys { keys: BTreeSet<Vec<u8>>, missing: usize },
    /// This counter reaching `world_size`.
    Barrier { key: Vec<u8>, world_size: i64 },
}

#[derive(Default)]
pub(super) struct State {
    keys: HashMap<Vec<u8>, Vec<u8>>,
    queues: HashMap<Vec<u8>, VecDeque<Vec<u8>>>,
    /// Bytes in `keys` and `queues`.
    stored: usize,
    queued: usize,
    waits: HashMap<ClientId, Wait>,
    /// Those of `waits` that each key concerns, in the order in which they came.
    waiting: HashMap<Vec<u8>, Vec<ClientId>>,
    woken: Vec<ClientId>,
}

impl State {
    /// Carries out `request` and appends the answer, if there is one already, to `reply`. The clients of
    /// [`State::take_woken`] then have a [`READY`] to come. An error means that this client must go.
    pub(super) fn handle(&mut self, client: ClientId, request: Request, reply: &mut Vec<u8>) -> Result<(), Malformed> {
        match request {
            Request::Validate(_) => return Err(Malformed("VALIDATE comes once, at the start".to_string())),
            Request::Ping(nonce) => reply.extend_from_slice(&nonce.to_le_bytes()),
            Request::Set { key, value } => self.set(key, value)?,
            Request::CompareSet { key, expected, desired } => self.compare_set(key, expected, desired, reply)?,
            Request::Get(key) => put_bytes(reply, self.value(&key)),
            Request::Add { key, amount } => put_i64(reply, self.add(key, amount)?),
            Request::Check(keys) => {
                reply.push(if keys.iter().all(|key| self.is_set(key)) { READY } else { NOT_READY });
            }
            Request::Wait(keys) => {
                let keys: BTreeSet<_> = keys.into_iter().collect();
                let missing: Vec<_> = keys.iter().filter(|key| !self.is_set(key)).cloned().collect();
                if missing.is_empty() {
                    reply.push(READY);
                } else {
                    self.enrol(client, &missing)?;
                    self.waits.insert(client, Wait::Keys { keys, missing: missing.len() });
                }
            }
            Request::NumKeys => put_i64(reply, self.keys.len() as i64),
            Request::Delete(key) => put_i64(reply, i64::from(self.delete(&key))),
            Request::Append { key, value } => {
                let length = self.value(&key).len() + value.len();
                if length > MAX_VALUE {
                    return Err(Malformed(format!("an appended value would have {length} bytes")));
                }
                let value = [self.value(&key), &value].concat();
                self.set(key, value)?;
            }
            Request::MultiGet(keys) => {
                let size: usize = keys.iter().map(|key| 8 + self.value(key).len()).sum();
                fits_reply(size)?;
                keys.iter().for_each(|key| put_bytes(reply, self.value(key)));
            }
            Request::MultiSet(pairs) => {
                for (key, value) in pairs {
                    self.set(key, value)?;
                }
            }
            Request::CancelWait => {
                self.forget(client);
                reply.push(WAIT_CANCELED);
            }
            Request::QueuePush { key, value } => {
                self.reserve(key.len() + value.len(), 1)?;
                self.stored += key.len() + value.len();
                self.queued += 1;
                self.queues.entry(key.clone()).or_default().push_back(value);
                self.wake_one(&key);
            }
            Request::QueuePop(key) => match self.pop(&key) {
                Some(value) => {
                    put_i64(reply, 1);
                    put_bytes(reply, &value);
                }
                None => put_i64(reply, 0),
            },
            Request::QueueLen(key) => put_i64(reply, self.queues.get(&key).map_or(0, |queue| queue.len() as i64)),
            Request::ListKeys => {
                fits_reply(self.keys.keys().map(|key| 8 + key.len()).sum())?;
                put_i64(reply, self.keys.len() as i64);
                self.keys.keys().for_each(|key| put_bytes(reply, key));
            }
            Request::Barrier { key, world_size } => self.barrier(client, key, world_size, reply)?,
        }
        Ok(())
    }

    /// The clients whose wait has ended since the last call.
    pub(super) fn take_woken(&mut self) -> Vec<ClientId> {
        std::mem::take(&mut self.woken)
    }

    /// Ends what `client` waits for, if anything, without an answer.
    pub(super) fn forget(&mut self, client: ClientId) {
        let wait = self.waits.remove(&client);
        let mut leave = |key: &Vec<u8>| {
            if let Some(clients) = self.waiting.get_mut(key) {
                clients.retain(|other| *other != client);
                if clients.is_empty() {
                    self.waiting.remove(key);
                }
            }
        };
        match wait {
            Some(Wait::Keys { keys, .. }) => keys.iter().for_each(&mut leave),
            Some(Wait::Barrier { key, .. }) => leave(&key),
            None => {}
        }
    }

    fn enrol(&mut self, client: ClientId, keys: &[Vec<u8>]) -> Result<(), Malformed> {
        if self.waits.contains_key(&client) {
            return Err(Malformed("it waits already".to_string()));
        }
        for key in keys {
            self.waiting.entry(key.clone()).or_default().push(client);
        }
        Ok(())
    }

    fn value(&self, key: &[u8]) -> &[u8] {
        self.keys.get(key).map_or(&[], Vec::as_slice)
    }

    /// A queue counts as set while it has elements; an emptied one is removed.
    fn is_set(&self, key: &[u8]) -> bool {
        self.keys.contains_key(key) || self.queues.contains_key(key)
    }

    fn reserve(&self, bytes: usize, elements: usize) -> Result<(), Malformed> {
        if self.keys.len() + self.queued + elements > MAX_KEYS {
            return Err(Malformed(format!("the store is full: it holds {MAX_KEYS} keys")));
        }
        if self.stored + bytes > MAX_STORED {
            return Err(Malformed(format!("the store is full: it holds {MAX_STORED} bytes")));
        }
        Ok(())
    }

    fn set(&mut self, key: Vec<u8>, value: Vec<u8>) -> Result<(), Malformed> {
        let old = self.keys.get(&key).map(|old| key.len() + old.len());
        self.reserve((key.len() + value.len()).saturating_sub(old.unwrap_or(0)), usize::from(old.is_none()))?;
        self.stored += key.len() + value.len();
        self.stored -= old.unwrap_or(0);
        if self.waiting.contains_key(&key) {
            self.keys.insert(key.clone(), value);
            self.wake_all(&key);
        } else {
            self.keys.insert(key, value);
        }
        Ok(())
    }

    fn compare_set(
        &mut self,
        key: Vec<u8>,
        expected: Vec<u8>,
        desired: Vec<u8>,
        reply: &mut Vec<u8>,
    ) -> Result<(), Malformed> {
        let current = self.keys.get(&key);
        if current.map_or(expected.is_empty(), |current| *current == expected) {
            put_bytes(reply, &desired);
            return self.set(key, desired);
        }
        put_bytes(reply, current.unwrap_or(&expected));
        Ok(())
    }

    fn add(&mut self, key: Vec<u8>, amount: i64) -> Result<i64, Malformed> {
        let old = match self.keys.get(&key) {
            Some(value) => parse_counter(&String::from_utf8_lossy(&key), "", value)
                .map_err(|_| Malformed(format!("{:?} is no counter", String::from_utf8_lossy(&key))))?,
            None => 0,
        };
        let new = old.wrapping_add(amount);
        self.set(key, new.to_string().into_bytes())?;
        Ok(new)
    }

    fn delete(&mut self, key: &[u8]) -> bool {
        let old = self.keys.remove(key);
        self.stored -= old.as_ref().map_or(0, |value| key.len() + value.len());
        old.is_some()
    }

    fn pop(&mut self, key: &[u8]) -> Option<Vec<u8>> {
        let queue = self.queues.get_mut(key)?;
        let value = queue.pop_front();
        if queue.is_empty() {
            self.queues.remove(key);
        }
        let value = value?;
        self.stored -= key.len() + value.len();
        self.queued -= 1;
        Some(value)
    }

    /// The counter stays behind as a plain key, and a barrier once passed stays open: as PyTorch's.
    fn barrier(
        &mut self,
        client: ClientId,
        key: Vec<u8>,
        world_size: i64,
        reply: &mut Vec<u8>,
    ) -> Result<(), Malformed> {
        let count = self.add(key.clone(), 1)?;
        if count < world_size {
            self.enrol(client, std::slice::from_ref(&key))?;
            self.waits.insert(client, Wait::Barrier { key, world_size });
            return Ok(());
        }
        reply.push(READY);
        for other in self.waiting.get(&key).cloned().unwrap_or_default() {
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
        let clients = self.waiting.remove(key).unwrap_or_default();
        let (clients, barriers): (Vec<_>, Vec<_>) =
            clients.into_iter().partition(|client| matches!(self.waits.get(client), Some(Wait::Keys { .. })));
        if !barriers.is_empty() {
            self.waiting.insert(key.to_vec(), barriers);
        }
        for client in clients {
            self.found(client);
        }
    }

    /// An element of a queue is for one client only.
    fn wake_one(&mut self, key: &[u8]) {
        let Some(clients) = self.waiting.get_mut(key) else { return };
        let waits = &self.waits;
        let first = clients.iter().position(|client| matches!(waits.get(client), Some(Wait::Keys { .. })));
        if let Some(first) = first {
            let client = clients.remove(first);
            self.found(client);
        }
    }

    /// One of the keys that `client` waits for is there, and `client` is off that key's list.
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
        return Err(Malformed(format!("an answer would have {size} bytes, at most {MAX_MESSAGE} are allowed")));
    }
    Ok(())
}

/// The first request of every client must be this.
pub(super) fn is_greeting(request: &Request) -> bool {
    *request == Request::Validate(MAGIC)
}
