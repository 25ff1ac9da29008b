//! Last wills: what the server does when a client is gone, as in MQTT.
use super::TcpStore;
use super::protocol::Request;
use crate::Result;
use crate::rendezvous::Store;
use crate::rendezvous::hosting::RUN_ID;
use std::time::Duration;

/// How long the server has to take note.
const PATIENCE: Duration = Duration::from_secs(2);

impl TcpStore {
    /// Has the server append `value` to the queue `key` when the connection of this call closes, for whatever reason: MQTT's
    /// last will. A client that only one thread uses keeps this connection. Only this crate's server knows the request.
    pub(crate) fn last_will(&self, key: &str, value: &[u8]) -> Result<()> {
        let operation = || format!("last_will({key:?})");
        let request =
            Request::LastWill { key: self.key("last_will", key)?, value: self.value("last_will", key, value)? };
        self.tell(&operation, &request)
    }

    /// Leaves a last will on a connection of its own. Returns `None` if the server is not one of this crate.
    pub(in crate::rendezvous) fn leave_will(&self, key: &str, value: &[u8]) -> Result<Option<LastWill>> {
        let client = self.alone(PATIENCE);
        if !client.check(&[RUN_ID])? {
            return Ok(None);
        }
        client.last_will(key, value)?;
        Ok(Some(LastWill { client }))
    }
}

/// A last will, which is carried out when this process ends, or this is dropped.
pub(in crate::rendezvous) struct LastWill {
    client: TcpStore,
}

impl LastWill {
    /// Revokes it.
    pub(in crate::rendezvous) fn withdraw(self) {
        let request = Request::LastWill { key: Vec::new(), value: Vec::new() };
        if let Err(error) = self.client.tell(&|| "withdrawing a last will".to_string(), &request) {
            log::debug!("{error}");
        }
    }
}
