//! Last wills: what the server does when a client is gone, as in MQTT. Only this crate's server supports them.
use super::TcpStore;
use super::protocol::Request;
use crate::Result;
use crate::{LastWill, Store};
use std::time::Duration;

/// How long the server may take to record a will.
const PATIENCE: Duration = Duration::from_secs(2);

/// The key under which a job's store holds its run id, or nothing if that is unknown.
pub const RUN_ID: &str = "candle_ddp/run_id";

impl TcpStore {
    /// Whether the server is this crate's; another would close the connection of a client that leaves a will.
    fn takes_wills(&self) -> Result<bool> {
        self.check(&[RUN_ID])
    }

    fn will(&self, request: &[u8]) -> Result<()> {
        self.tell(&|| "last_will".to_string(), &Request::LastWill(request.to_vec()))
    }

    /// If the server supports last wills, asks it to append `value` to the queue `key` when the connection of this call
    /// closes. A client that only one thread uses keeps this connection.
    #[doc(hidden)]
    pub fn will_to_queue(&self, key: &str, value: &[u8]) -> Result<()> {
        if !self.takes_wills()? {
            return Ok(());
        }
        let operation = "last_will";
        let (key, value) = (self.key(operation, key)?, self.value(operation, key, value)?);
        let mut request = Vec::new();
        Request::QueuePush { key, value }.encode(&mut request);
        self.will(&request)
    }

    /// [`Store::last_will`].
    pub(super) fn leave_will(&self, key: &str, value: &[u8]) -> Result<Option<LastWill>> {
        let client = self.alone(PATIENCE);
        if !client.takes_wills()? {
            return Ok(None);
        }
        let operation = "last_will";
        let (key, desired) = (self.key(operation, key)?, self.value(operation, key, value)?);
        let mut request = Vec::new();
        Request::CompareSet { key, expected: Vec::new(), desired }.encode(&mut request);
        client.will(&request)?;
        // Nobody else uses this client, so it keeps its connection.
        Ok(Some(LastWill::new(move || {
            if let Err(error) = client.will(&[]) {
                log::debug!("a last will cannot be withdrawn: {error}");
            }
        })))
    }
}
