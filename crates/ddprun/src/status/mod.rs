//! `ddprun status`: shows the status of a run from its store. The launcher writes a document about the run and its
//! nodes ([`RunStatus`]), and each rank one about itself ([`RankStatus`](candle_ddp_rendezvous::RankStatus)).
mod document;
mod snapshot;
mod table;

pub(super) use table::table;

pub(super) use document::{LastFailure, NodeStatus, Phase, RUN_STATUS, RunStatus};

use super::error::{Error, Result};
use super::tail::plain;
use candle_ddp_rendezvous::{InitMethod, Location, Secret, TcpStore, TcpStoreOptions};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// How long the store may take to answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The status, as text, of the run whose store is at `address`.
pub(super) fn of_run(address: &str, no_secret: bool) -> Result<String> {
    let (host, port) = parse(address)?;
    let secret = if no_secret { None } else { Secret::from_env()? };
    let store = Arc::new(TcpStore::connect_with(&host, port, TcpStoreOptions { timeout: TIMEOUT, secret })?);
    let name = store.name();
    // Anyone who can write to the store can put control characters there.
    Ok(plain(&table::text(&snapshot::read(store, name)?, SystemTime::now())))
}

fn parse(address: &str) -> Result<(String, u16)> {
    match format!("tcp://{address}").parse::<InitMethod>() {
        Ok(InitMethod { location: Location::Tcp { host, port }, rank: None, world_size: None, .. }) => Ok((host, port)),
        _ => {
            let reason = format!(
                "{address:?} must be HOST:PORT of the run's store: its --rdzv-endpoint, or its --master-addr and \
                 --master-port"
            );
            Err(Error::usage("status", reason))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_a_host_and_a_port() {
        assert_eq!(parse("node0:29400").unwrap(), ("node0".to_string(), 29400));
        assert_eq!(parse("[::1]:29400").unwrap(), ("::1".to_string(), 29400));
        for wrong in ["", "node0", "node0:", ":1", "node0:1?rank=0", "node0:x"] {
            let error = parse(wrong).unwrap_err().to_string();
            assert!(error.starts_with("status: ") && error.contains("HOST:PORT"), "{wrong}: {error}");
        }
    }
}
