//! JSON values in the store.
use crate::{Error, Result, Store};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Encodes a value for the store. The types that this crate encodes always have a JSON form.
pub fn encode(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).unwrap_or_default()
}

/// Decodes the value of `key`, which [`encode`] wrote.
pub fn decode<T: DeserializeOwned>(key: &str, bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| Error::Store {
        operation: format!("reading {key}"),
        store: "of the run".to_string(),
        reason: format!(
            "another version of candle-ddp or ddprun wrote it ({error}): use the same version everywhere in a run"
        ),
    })
}

/// Writes `value` under `key` unless another process has written there first; returns the value that counts for all.
pub fn decide<T: Serialize + DeserializeOwned>(store: &dyn Store, key: &str, value: &T) -> Result<T> {
    decode(key, &store.compare_set(key, b"", &encode(value))?)
}

/// The value of `key`, if it is set.
pub fn read<T: DeserializeOwned>(store: &dyn Store, key: &str) -> Result<Option<T>> {
    if !store.check(&[key])? {
        return Ok(None);
    }
    decode(key, &store.get(key)?).map(Some)
}
