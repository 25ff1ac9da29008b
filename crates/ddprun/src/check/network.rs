//! The connections between ranks: each pair's latency and bandwidth, collectives, and the clocks of nodes.
use super::compute::{Effort, median};
use super::group::{Buffer, Group};
use candle_ddp_rendezvous::Result;
use serde::{Deserialize, Serialize};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// The bytes of a message whose time is the latency, and of one whose time is the bandwidth.
const SMALL: usize = 8;
const LARGE: usize = 4 << 20;
/// The number of exchanges in which clocks are compared. The fastest counts.
const CLOCK: usize = 20;
/// With more ranks than this, only one rank of each node exchanges messages with those of other nodes: every pair takes its time.
pub(super) const MOST_PAIRED: usize = 64;

/// What all-reduce is measured with, in bytes.
pub(super) const SIZES: [(usize, &str); 3] = [(8, "8 B"), (1 << 20, "1 MiB"), (64 << 20, "64 MiB")];

/// Messages between this rank and another one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Link {
    pub(super) peer: usize,
    /// Microseconds of a message of 8 bytes.
    pub(super) latency: f64,
    /// GB/s of messages of 4 MiB.
    pub(super) bandwidth: f64,
}

/// Exchanges messages with each of `ranks`, which all of them call with the same list; the others return nothing. In each round,
/// every rank has one partner.
pub(super) fn links(group: &Group, ranks: &[usize], effort: Effort) -> Result<Vec<Link>> {
    let Some(own) = ranks.iter().position(|rank| *rank == group.rank) else { return Ok(Vec::new()) };
    let peers = (0..rounds(ranks.len())).filter_map(|round| ranks.get(partner(own, round, ranks.len())?));
    peers.map(|peer| link(group, *peer, effort)).collect()
}

/// The number of rounds in which each of `count` meets each other once.
fn rounds(count: usize) -> usize {
    count.next_multiple_of(2).saturating_sub(1)
}

/// Whom `own` meets in a round: the circle method, in which the last one stays in its place. `None`: it pauses.
fn partner(own: usize, round: usize, count: usize) -> Option<usize> {
    let places = count.next_multiple_of(2);
    let circle = places - 1;
    let partner = if own == circle {
        // Half of the round's number, modulo the circle, which is odd.
        (0..circle).find(|other| 2 * other % circle == round % circle)?
    } else {
        let other = (round + circle - own % circle) % circle;
        if other == own { circle } else { other }
    };
    (partner < count).then_some(partner)
}

/// The lower rank sends first.
fn link(group: &Group, peer: usize, effort: Effort) -> Result<Link> {
    let first = group.rank < peer;
    let time = |bytes: usize, exchanges: usize| -> Result<f64> {
        let buffer = Buffer::bytes(bytes);
        let once = || -> Result<f64> {
            let begun = Instant::now();
            match first {
                true => group.send(&buffer, peer).and_then(|()| group.recv(&buffer, peer))?,
                false => group.recv(&buffer, peer).and_then(|()| group.send(&buffer, peer))?,
            }
            Ok(begun.elapsed().as_secs_f64() / 2.0)
        };
        // The first exchange makes the connection.
        once().and_then(|_| (0..exchanges).map(|_| once()).collect()).map(median)
    };
    let ([small, large], bytes) = (effort.exchanges, LARGE.min(effort.most_bytes));
    let (latency, large) = (time(SMALL, small)?, time(bytes, large)?);
    Ok(Link { peer, latency: latency * 1e6, bandwidth: bytes as f64 / large.max(1e-9) / 1e9 })
}

/// Microseconds of an all-reduce of each of [`SIZES`], up to the largest that is allowed: medians.
pub(super) fn all_reduce(group: &Group, effort: Effort) -> Result<Vec<f64>> {
    if group.world_size == 1 {
        return Ok(Vec::new());
    }
    SIZES
        .iter()
        .filter(|(bytes, _)| *bytes <= effort.most_bytes)
        .map(|(bytes, _)| all_reduce_of(group, *bytes, effort))
        .collect()
}

fn all_reduce_of(group: &Group, bytes: usize, effort: Effort) -> Result<f64> {
    let buffer = Buffer::bytes(bytes);
    let once = || -> Result<f64> {
        let begun = Instant::now();
        group.all_reduce(&buffer)?;
        Ok(begun.elapsed().as_secs_f64())
    };
    once()?;
    // All ranks must make the same number of calls: as many as the slowest has time for.
    let slowest = group.max(i64::try_from((once()? * 1e9) as u128).unwrap_or(i64::MAX))?;
    let count = effort.collective.as_nanos() / u128::try_from(slowest).unwrap_or(1).max(1);
    let times: Result<Vec<f64>> = (0..count.clamp(3, 1000)).map(|_| once()).collect();
    Ok(median(times?) * 1e6)
}

/// Seconds by which this node's clock is ahead of that of the first of `leaders`, which has rank 0. Only the first rank of each
/// node, a leader, takes part.
pub(super) fn clock(group: &Group, leaders: &[usize]) -> Result<Option<f64>> {
    if group.rank != 0 {
        return if leaders.contains(&group.rank) { offset(group).map(Some) } else { Ok(None) };
    }
    for peer in leaders.iter().filter(|rank| **rank != 0) {
        let asked = Buffer::bytes(8);
        for _ in 0..CLOCK {
            group.recv(&asked, *peer)?;
            group.send(&Buffer::number(now()), *peer)?;
        }
    }
    Ok(Some(0.0))
}

/// As NTP does: the clock of rank 0 was read in the middle between question and answer.
fn offset(group: &Group) -> Result<f64> {
    let (question, answer) = (Buffer::bytes(8), Buffer::bytes(8));
    let mut best = (i64::MAX, 0.0);
    for _ in 0..CLOCK {
        let asked = now();
        group.send(&question, 0)?;
        group.recv(&answer, 0)?;
        let answered = now();
        let took = answered.saturating_sub(asked);
        if took < best.0 {
            best = (took, (asked + took / 2 - answer.first()) as f64 / 1e9);
        }
    }
    Ok(best.1)
}

/// Nanoseconds since 1970.
fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn each_meets_each_other_once() {
        for count in 0..10 {
            let mut met = BTreeSet::new();
            for round in 0..rounds(count) {
                for own in 0..count {
                    let Some(other) = partner(own, round, count) else { continue };
                    assert_eq!(
                        partner(other, round, count),
                        Some(own),
                        "{own} and {other} in round {round} of {count}"
                    );
                    assert!(own != other && met.insert((own, other)), "{own} and {other} of {count}");
                }
            }
            assert_eq!(met.len(), count * count.saturating_sub(1), "{count}");
        }
    }
}
