//! Values of the store that are JSON.
use crate::{Error, Result};

/// A value of the store. What is written here cannot fail to be JSON.
pub fn encode(value: &impl serde::Serialize) -> Vec<u8> {
    serde_json::to_vec(value).unwrap_or_default()
}

/// What [`encode`] has written as the value of `key`.
pub fn decode<T: serde::de::DeserializeOwned>(key: &str, bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| Error::Store {
        operation: format!("reading {key}"),
        store: "of the run".to_string(),
        reason: format!("another version of ddprun has written it ({error}): run the same version on all nodes"),
    })
}
