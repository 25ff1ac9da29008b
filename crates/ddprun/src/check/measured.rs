//! What each rank has measured.
use super::compute::Products;
use super::facts::Facts;
use super::network::Link;
use serde::{Deserialize, Serialize};

/// Everything that a check has found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Report {
    pub(super) ranks: Vec<Measured>,
    #[serde(flatten)]
    pub(super) verdict: Verdict,
}

/// The findings.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Verdict {
    /// Each is a reason not to start a run.
    pub(super) outliers: Vec<String>,
    /// What may be intended.
    pub(super) notes: Vec<String>,
}

/// A rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Measured {
    pub(super) rank: usize,
    pub(super) node_rank: usize,
    pub(super) host: String,
    /// Equal for ranks whose kernel is the same.
    pub(super) host_id: String,
    /// Of its cores.
    pub(super) products: Products,
    /// GB/s.
    pub(super) copy: f64,
    pub(super) links: Vec<Link>,
    /// Microseconds, for each of [`SIZES`](super::network::SIZES).
    pub(super) all_reduce: Vec<f64>,
    /// On the first rank of each node: seconds by which its clock is ahead of rank 0's.
    pub(super) clock: Option<f64>,
    /// On the first rank of each node.
    pub(super) facts: Option<Facts>,
}

impl Measured {
    pub(super) fn name(&self) -> String {
        format!("rank {} (node {}, host {})", self.rank, self.node_rank, self.host)
    }

    pub(super) fn node_name(&self) -> String {
        format!("node {} (host {})", self.node_rank, self.host)
    }

    /// The slowest core's speed.
    pub(super) fn product(&self) -> f64 {
        self.products.iter().map(|(_, speed)| *speed).min_by(f64::total_cmp).unwrap_or(0.0)
    }
}

/// A node: its first rank, with the facts that it tells.
pub(super) type Node<'a> = (&'a Measured, &'a Facts);

/// The nodes of all ranks.
pub(super) fn nodes(ranks: &[Measured]) -> Vec<Node<'_>> {
    ranks.iter().filter_map(|rank| Some((rank, rank.facts.as_ref()?))).collect()
}
