//! Last wills: what the server does when a client is gone, as in MQTT. Only this crate's server knows them.
use super::TcpStore;
use super::protocol::Request;
use crate::Result;
use crate::rendezvous::Store;
use crate::rendezvous::hosting::RUN_ID;
use std::time::Duration;

/// How long the server has to take note.
const PATIENCE: Duration = Duration::from_secs(2);

/// A last will, which a [`Store`] carries out when this process ends or this value is dropped; see [`Store::last_will`].
pub struct LastWill {
    /// Nobody else uses it, so it keeps its connection.
    client: TcpStore,
}

impl LastWill {
    /// Revokes it.
    pub fn withdraw(self) {
        if let Err(error) = self.client.will(&[]) {
            log::debug!("a last will cannot be withdrawn: {error}");
        }
    }
}

impl std::fmt::Debug for LastWill {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LastWill").field("store", &self.client.name()).finish()
    }
}

impl TcpStore {
    fn will(&self, request: &[u8]) -> Result<()> {
        self.tell(&|| "last_will".to_string(), &Request::LastWill(request.to_vec()))
    }

    /// Has the server append `value` to the queue `key` when the connection of this call closes. A client that only one thread
    /// uses keeps this connection.
    #[cfg(feature = "launcher")]
    pub(crate) fn will_to_queue(&self, key: &str, value: &[u8]) -> Result<()> {
        let operation = "last_will";
        let (key, value) = (self.key(operation, key)?, self.value(operation, key, value)?);
        let mut request = Vec::new();
        Request::QueuePush { key, value }.encode(&mut request);
        self.will(&request)
    }

    /// [`Store::last_will`].
    pub(super) fn leave_will(&self, key: &str, value: &[u8]) -> Result<Option<LastWill>> {
        let client = self.alone(PATIENCE);
        if !client.check(&[RUN_ID])? {
            return Ok(None);
        }
        let operation = "last_will";
        let (key, desired) = (self.key(operation, key)?, self.value(operation, key, value)?);
        let mut request = Vec::new();
        Request::CompareSet { key, expected: Vec::new(), desired }.encode(&mut request);
        client.will(&request)?;
        Ok(Some(LastWill { client }))
    }
}
