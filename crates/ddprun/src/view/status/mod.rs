//! `ddprun status`: shows the status of a run from its store. The launcher writes a document about the run and its
//! nodes ([`RunStatus`]), and each rank one about itself ([`RankStatus`](candle_ddp_rendezvous::RankStatus)).
mod document;
mod json;
pub(crate) mod prometheus;
mod record;
mod slow;
mod snapshot;
mod source;
mod table;

pub(crate) use document::{NodeStatus, Phase, RUN_STATUS, RunStatus};
pub(crate) use record::{Line, RECORD, Recorder, Told};
pub(crate) use slow::{Since, SlowRanks, holdup};
pub(crate) use snapshot::LISTED;
pub(crate) use source::Source;
pub(crate) use table::{UNKNOWN, or_unknown, table};

use crate::error::{Result, refuse};
use crate::tail::plain;
use candle_ddp_rendezvous::{InitMethod, Location, Secret, TcpStore, TcpStoreOptions};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// How long the store may take to answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The status, as text or as JSON, of the run whose store is at `address`.
pub(crate) fn of_run(address: &str, no_secret: bool, json: bool) -> Result<String> {
    let (host, port) = parse(address)?;
    let secret = if no_secret { None } else { Secret::from_env()? };
    let store = Arc::new(TcpStore::connect_with(&host, port, TcpStoreOptions { timeout: TIMEOUT, secret })?);
    let name = store.name();
    let snapshot = snapshot::read(store, name)?;
    let text = if json { json::text(&snapshot) } else { table::text(&snapshot, SystemTime::now()) };
    // Anyone who can write to the store can put control characters there.
    Ok(plain(&text))
}

fn parse(address: &str) -> Result<(String, u16)> {
    match format!("tcp://{address}").parse::<InitMethod>() {
        Ok(InitMethod { location: Location::Tcp { host, port }, rank: None, world_size: None, .. }) => Ok((host, port)),
        _ => {
            let reason = format!(
                "{address:?} must be HOST:PORT of the run's store: its --rdzv-endpoint, or its --master-addr and \
                 --master-port"
            );
            refuse("status", reason)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::snapshot::Snapshot;
    use super::*;
    use crate::verdict::{How, Verdict};
    use candle_ddp_rendezvous::{RankStatus, milliseconds};
    use candle_ddp_testing::assert_error;
    use std::time::UNIX_EPOCH;

    /// When the [snapshot](snapshot()) was taken.
    pub(crate) fn now() -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(951_827_696)
    }

    pub(crate) fn node(host: &str, node_rank: Option<usize>, is_alive: bool) -> NodeStatus {
        NodeStatus { host: host.to_string(), node_rank, is_alive }
    }

    /// The report of a rank.
    pub(crate) fn told() -> RankStatus {
        let metrics = [("loss", "0.5"), ("a \"b\"\\", "NaN")];
        RankStatus {
            host: "node0".to_string(),
            pid: 4711,
            generation: Some(2),
            steps: 812,
            steps_per_second: Some(40.125),
            last_step: Some(milliseconds(now()) - 2500),
            trained: 20.,
            waited: Some(5.),
            waiting: Some(0.25),
            metrics: metrics.map(|(name, value)| (name.to_string(), value.to_string())).into(),
        }
    }

    /// A run of three ranks, of which the last has not reported.
    pub(crate) fn snapshot() -> Snapshot {
        let told = told();
        let fresh = RankStatus { host: told.host.clone(), pid: told.pid, ..RankStatus::default() };
        let (at, host) = (milliseconds(now()), Some("node0".to_string()));
        let failure = Verdict::now(How::Signal, 137, "rank 1 was killed by SIGKILL");
        let failure = Verdict { at, rank: Some(1), node: Some(0), host, signal: Some(9), ..failure };
        let run = RunStatus {
            nodes: vec![node("node0", Some(0), true), node("other", Some(1), false), node("spare", None, true)],
            last_failure: Some(failure),
            ..RunStatus::for_tests()
        };
        let ranks = vec![(0, Some(told)), (1, Some(fresh)), (2, None)];
        Snapshot { run, generation: Some(2), ranks, unlisted: 0 }
    }

    #[test]
    fn addresses_have_a_host_and_a_port() {
        assert_eq!(parse("node0:29400").unwrap(), ("node0".to_string(), 29400));
        assert_eq!(parse("[::1]:29400").unwrap(), ("::1".to_string(), 29400));
        for wrong in ["", "node0", "node0:", ":1", "node0:1?rank=0", "node0:x"] {
            assert_error(parse(wrong), &["status: ", "HOST:PORT"]);
        }
    }
}
