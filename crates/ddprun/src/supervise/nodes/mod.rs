//! The agents of several nodes. Each `ddprun` is an agent; those of one run meet through the store, which one of them
//! hosts.
//!
//! - The host of the store also runs the run's [`Coordinator`], a thread that decides everything: when workers start, and
//!   with which nodes; what follows a failure; when the run is over. So no two agents ever act on different decisions, and
//!   the run ends with its store.
//! - An agent reports events on its node through a queue in the store ([`Message`]), and follows the coordinator's
//!   log ([`Entry`]). Both arrive at once, since waiting for a key needs no polling.
//! - Every agent gives signs of life. An agent is considered dead when these stop, and at once when its connection
//!   closes without a goodbye: the store then sends its last will ([`Message::Gone`]). An agent that cannot give
//!   signs of life ends its workers, because the store is gone.
#[cfg(test)]
mod arrivals;
mod coordinator;
mod elastic;
#[cfg(test)]
mod flood;
mod link;
mod losses;
#[cfg(test)]
mod many;
mod meeting;
mod message;
#[cfg(test)]
mod newcomers;
mod reports;
mod run;
#[cfg(test)]
mod tests;

pub(crate) use coordinator::Coordinator;
pub(crate) use link::{Address, Link, News};
pub(crate) use message::{Admission, Entry, Exited, Message, Node, Replacement, Round, Slot};

use candle_ddp_rendezvous::json::{self, encode};

/// Comes before the keys of the agents.
const PREFIX: &str = "candle_ddp/nodes";
/// The counter of nodes.
const SLOTS: &str = "slots";
/// The queue of messages to the coordinator.
const INBOX: &str = "inbox";
/// The verdict, after a failed run.
const VERDICT: &str = "verdict";

fn beat_key(slot: Slot) -> String {
    format!("beat/{slot}")
}

fn welcome_key(slot: Slot) -> String {
    format!("welcome/{slot}")
}

fn entry_key(number: u64) -> String {
    format!("log/{number}")
}

/// The rank of a node in a round, if it belongs to it.
fn node_rank_key(attempt: u64, slot: Slot) -> String {
    format!("node_rank/{attempt}/{slot}")
}

fn decode<T: serde::de::DeserializeOwned>(key: &str, bytes: &[u8]) -> candle_ddp_rendezvous::Result<T> {
    json::decode(&format!("{PREFIX}/{key}"), bytes)
}
