use super::Store;
use super::file_log::{Access, FileLog};
use super::hash_store::parse_counter;
use crate::{Error, Result};
use candle_ddp_base::deadline::deadline_after;
use candle_ddp_base::debug_fields;
use candle_ddp_base::panic::lock;
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The maximum length of a key, as in a [`TcpStore`](super::TcpStore).
const MAX_KEY: usize = 8192;
const MAX_VALUE: usize = 8 << 20;
/// The interval at which a waiting call polls the file, initially and later.
const FIRST_LOOK: Duration = Duration::from_micros(200);
const LATER_LOOK: Duration = Duration::from_millis(10);

type Map = HashMap<Vec<u8>, Vec<u8>>;

/// A store in a file that all ranks can write to, like PyTorch's `FileStore`. For hosts that share a file system with
/// working `flock` (local file systems, and NFS from version 3 with its lock service).
///
/// The store exists from the time its first user opens it until its last user drops it, which removes the file (and
/// `PATH.lock` next to it). Leftovers of a killed run are recognised, because the system has released their locks, and
/// cleared. So unlike PyTorch's, the store never needs manual cleanup. A file of another kind is never touched.
///
/// Only the owner can read and write the files. Symbolic links and files of other users are refused.
///
/// Every change is appended to the file, so the file grows with the number of calls. The store is meant for rendezvous,
/// not as a database. If a process dies during a change, the store remains as it was before.
pub struct FileStore {
    state: Arc<Mutex<State>>,
    path: String,
    timeout: Duration,
    /// The common deadline of all calls, if there is one.
    deadline: Option<Instant>,
}

debug_fields!(FileStore: path, timeout);

struct State {
    log: FileLog,
    map: Map,
}

impl FileStore {
    /// Opens or creates the store in the file `path`, whose folder must exist. `timeout` bounds each call.
    pub fn open(path: impl AsRef<Path>, timeout: Duration) -> Result<Self> {
        let log = FileLog::open(path.as_ref(), deadline_after(timeout))?;
        let path = log.path().display().to_string();
        let state = Arc::new(Mutex::new(State { log, map: Map::new() }));
        Ok(Self { state, path, timeout, deadline: None })
    }

    /// Returns the same store with a common `deadline` for all calls.
    pub(super) fn until(&self, deadline: Instant) -> Self {
        let Self { state, path, timeout, .. } = self;
        Self { state: Arc::clone(state), path: path.clone(), timeout: *timeout, deadline: Some(deadline) }
    }

    fn failed(&self, operation: &str, error: std::io::Error) -> Error {
        let (operation, store) = (operation.to_string(), self.path.clone());
        match error.kind() {
            std::io::ErrorKind::TimedOut => Error::StoreTimeout {
                operation,
                store,
                timeout: self.timeout,
                reason: "another process holds the file's lock and does not release it".to_string(),
            },
            _ => Error::io(format!("{operation} on the store {store}"), error),
        }
    }

    /// Reads the current map and appends the changes that `body` returns.
    fn access<T>(&self, operation: &str, body: impl FnOnce(&Map) -> Result<(T, Vec<Change>)>) -> Result<T> {
        let mut state = lock(&self.state);
        let State { log, map } = &mut *state;
        let deadline = deadline_after(self.timeout);
        let deadline = self.deadline.map_or(deadline, |end| end.min(deadline));
        let mut access = log.access(deadline).map_err(|error| self.failed(operation, error))?;
        access.read(|record| apply(map, record)).map_err(|error| self.failed(operation, error))?;
        let (result, changes) = body(map)?;
        self.write(operation, &mut access, map, changes)?;
        Ok(result)
    }

    fn write(&self, operation: &str, access: &mut Access, map: &mut Map, changes: Vec<Change>) -> Result<()> {
        for change in &changes {
            self.bounds(operation, change)?;
        }
        for change in changes {
            access.append(&change.encode()).map_err(|error| self.failed(operation, error))?;
            change.apply(map);
        }
        Ok(())
    }

    fn bounds(&self, operation: &str, change: &Change) -> Result<()> {
        let Change::Set(key, value) = change else { return Ok(()) };
        for (what, length, limit) in [("key", key.len(), MAX_KEY), ("value", value.len(), MAX_VALUE)] {
            if length > limit {
                let reason = format!("the {what} has {length} bytes, but a store accepts at most {limit}");
                return Err(Error::Store { operation: operation.to_string(), store: self.path.clone(), reason });
            }
        }
        Ok(())
    }

    /// Waits until all `keys` are set, then reads the map.
    fn wait_then<T>(&self, operation: &str, keys: &[&str], timeout: Duration, read: impl Fn(&Map) -> T) -> Result<T> {
        let deadline = deadline_after(timeout);
        let mut pause = FIRST_LOOK;
        let mut look = true;
        let mut seen = 0;
        loop {
            if look {
                seen = lock(&self.state).log.offset();
                let found = self.access(operation, |map| {
                    let missing = missing(map, keys);
                    Ok((if missing.is_empty() { Ok(read(map)) } else { Err(missing) }, Vec::new()))
                })?;
                let missing = match found {
                    Ok(result) => return Ok(result),
                    Err(missing) => missing,
                };
                if Instant::now() >= deadline {
                    return Err(Error::StoreTimeout {
                        operation: operation.to_string(),
                        store: self.path.clone(),
                        timeout,
                        reason: format!("no rank set {missing:?}"),
                    });
                }
            }
            // The lock is not held here, so other threads can proceed.
            std::thread::sleep(pause.min(deadline.saturating_duration_since(Instant::now())));
            pause = (pause * 2).min(LATER_LOOK);
            // Another thread may have read the new records, so checking the file's length is not enough.
            let log = &lock(&self.state).log;
            look = log.has_grown().map_err(|error| self.failed(operation, error))?
                || log.offset() != seen
                || Instant::now() >= deadline;
        }
    }
}

fn missing<'a>(map: &Map, keys: &[&'a str]) -> Vec<&'a str> {
    keys.iter().copied().filter(|key| !map.contains_key(key.as_bytes())).collect()
}

/// A change of the map: a record of the log.
enum Change {
    Set(Vec<u8>, Vec<u8>),
    Delete(Vec<u8>),
}

const SET: u8 = 0;
const DELETE: u8 = 1;

impl Change {
    fn set(key: &str, value: &[u8]) -> Vec<Self> {
        vec![Self::Set(key.as_bytes().to_vec(), value.to_vec())]
    }

    /// Encodes the change as a byte for the kind, the key's length as u16, the key, and the value.
    fn encode(&self) -> Vec<u8> {
        let (kind, key, value) = match self {
            Self::Set(key, value) => (SET, key, value.as_slice()),
            Self::Delete(key) => (DELETE, key, &[][..]),
        };
        let length = u16::try_from(key.len()).unwrap_or(u16::MAX).to_le_bytes();
        [&[kind], &length[..], key, value].concat()
    }

    fn decode(record: &[u8]) -> Option<Self> {
        let ([kind, a, b], rest) = record.split_first_chunk()?;
        let (key, value) = rest.split_at_checked(u16::from_le_bytes([*a, *b]).into())?;
        match *kind {
            SET => Some(Self::Set(key.to_vec(), value.to_vec())),
            DELETE => Some(Self::Delete(key.to_vec())),
            _ => None,
        }
    }

    fn apply(self, map: &mut Map) {
        match self {
            Self::Set(key, value) => map.insert(key, value),
            Self::Delete(key) => map.remove(&key),
        };
    }
}

fn apply(map: &mut Map, record: &[u8]) {
    // The hash was right, so an unknown record can only come from another version.
    if let Some(change) = Change::decode(record) {
        change.apply(map);
    }
}

impl Store for FileStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.access("set", |_| Ok(((), Change::set(key, value))))
    }

    fn get(&self, key: &str) -> Result<Vec<u8>> {
        let read = |map: &Map| map.get(key.as_bytes()).cloned().unwrap_or_default();
        self.wait_then("get", &[key], self.timeout, read)
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        self.access("add", |map| {
            let old = map.get(key.as_bytes()).map_or(Ok(0), |value| parse_counter(key, &self.path, value))?;
            let new = old.wrapping_add(amount);
            Ok((new, Change::set(key, new.to_string().as_bytes())))
        })
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.access("compare_set", |map| {
            let current = map.get(key.as_bytes());
            if current.map_or(expected.is_empty(), |value| value == expected) {
                return Ok((desired.to_vec(), Change::set(key, desired)));
            }
            Ok((current.map_or_else(|| expected.to_vec(), Vec::clone), Vec::new()))
        })
    }

    fn wait(&self, keys: &[&str], timeout: Option<Duration>) -> Result<()> {
        self.wait_then("wait", keys, timeout.unwrap_or(self.timeout), |_| ())
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.access("check", |map| Ok((missing(map, keys).is_empty(), Vec::new())))
    }

    fn delete(&self, key: &str) -> Result<bool> {
        self.access("delete", |map| match map.contains_key(key.as_bytes()) {
            true => Ok((true, vec![Change::Delete(key.as_bytes().to_vec())])),
            false => Ok((false, Vec::new())),
        })
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.access("append", |map| {
            let old = map.get(key.as_bytes()).map_or(&[][..], Vec::as_slice);
            Ok(((), Change::set(key, &[old, value].concat())))
        })
    }

    fn multi_get(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>> {
        let read = |map: &Map| keys.iter().map(|key| map.get(key.as_bytes()).cloned().unwrap_or_default()).collect();
        self.wait_then("multi_get", keys, self.timeout, read)
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        let changes = pairs.iter().flat_map(|(key, value)| Change::set(key, value)).collect();
        self.access("multi_set", |_| Ok(((), changes)))
    }

    fn num_keys(&self) -> Result<usize> {
        self.access("num_keys", |map| Ok((map.len(), Vec::new())))
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }
}
