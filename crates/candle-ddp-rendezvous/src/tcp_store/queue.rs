//! The calls of a [`TcpStore`] that only the launcher's agents need: PyTorch's queues, and removing old keys.
use super::TcpStore;
use super::link::LinkError;
use super::protocol::{Request, user_key};
use crate::Result;
use crate::Store;

#[doc(hidden)]
impl TcpStore {
    /// Appends `value` to the queue `key`: PyTorch's `queue_push`. A queue that is not empty counts as a key that is set.
    pub fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        let operation = || format!("queue_push({key:?})");
        let request =
            Request::QueuePush { key: self.key("queue_push", key)?, value: self.value("queue_push", key, value)? };
        self.tell(&operation, &request)
    }

    /// Takes the first value of the queue `key`, if there is one: PyTorch's `queue_pop` that does not block.
    pub fn queue_pop(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let request = Request::QueuePop(self.key("queue_pop", key)?);
        self.ask(&|| format!("queue_pop({key:?})"), &request, |link, deadline| match link.receive_i64(deadline)? {
            0 => Ok(None),
            _ => link.receive_bytes(deadline).map(Some),
        })
    }

    /// Removes all keys, PyTorch clients' included, except those that begin with one of `kept`.
    pub fn delete_all_except(&self, kept: &[&str]) -> Result<()> {
        let keys = self.ask(&|| "list_keys".to_string(), &Request::ListKeys, |link, deadline| {
            let count = link.receive_i64(deadline)?;
            (0..count).map(|_| link.receive_bytes(deadline)).collect::<std::result::Result<Vec<_>, LinkError>>()
        })?;
        let root = user_key("");
        for key in keys {
            let Some(name) = key.strip_prefix(root.as_slice()).and_then(|name| std::str::from_utf8(name).ok()) else {
                continue;
            };
            if !kept.iter().any(|kept| name.starts_with(kept)) {
                self.delete(name)?;
            }
        }
        Ok(())
    }
}
