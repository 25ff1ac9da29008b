//! How processes find out through a store that another one has ended: what joining ranks ([`InitWatcher`](crate::InitWatcher)),
//! the engines over a store and the nodes of `ddprun` have in common.
//!
//! Each rank writes its heartbeats and watches those of the next rank in a [`Ring`]. The first failure that a rank writes is the
//! failure of all ([`decide`](crate::json::decide)); for a rank whose process ends, the store writes one
//! ([`leave_will`]). A process that hosts the store ends last ([`await_heard`]).
use crate::{LastWill, Result, Store};
use candle_ddp_base::wire::Writer;
use std::time::{Duration, Instant};

/// How many times in a row a heartbeat was read that had not changed.
///
/// This is no time: this process may have been stopped together with the one that it watches, or the store may not have answered.
/// Neither says anything about the other process.
#[derive(Debug, Default)]
pub struct Silence {
    last: Vec<u8>,
    missed: u32,
}

impl Silence {
    /// Takes a heartbeat that was just read.
    pub fn saw(&mut self, heartbeat: &[u8]) -> u32 {
        if heartbeat == self.last {
            self.missed += 1;
        } else {
            *self = Self { last: heartbeat.to_vec(), missed: 0 };
        }
        self.missed
    }
}

/// The ranks of a group, each of which watches the next one that has not left, so the store has little work.
#[derive(Debug)]
pub struct Ring {
    rank: usize,
    world_size: usize,
    /// This rank itself if all others have left.
    watched: usize,
    silence: Silence,
}

impl Ring {
    /// The ring as seen by rank `rank`.
    pub fn new(rank: usize, world_size: usize) -> Self {
        Self { rank, world_size, watched: (rank + 1) % world_size, silence: Silence::default() }
    }

    /// The rank whose heartbeat is to be read; `None` if all others have left.
    pub fn watched(&self) -> Option<usize> {
        (self.watched != self.rank).then_some(self.watched)
    }

    /// Whether the watched rank has had a heartbeat.
    pub fn has_begun(&self) -> bool {
        !self.silence.last.is_empty()
    }

    /// Takes the heartbeat of the watched rank. Returns how many times in a row it has not changed.
    pub fn saw(&mut self, heartbeat: &[u8]) -> u32 {
        if !has_left(heartbeat) {
            return self.silence.saw(heartbeat);
        }
        (self.watched, self.silence) = ((self.watched + 1) % self.world_size, Silence::default());
        0
    }
}

/// The key of a rank's heartbeat.
pub fn heartbeat_key(rank: usize) -> String {
    format!("heartbeat/{rank}")
}

const ALIVE: u8 = 0;
const LEFT: u8 = 1;

/// Heartbeat `number` of a rank, which differs from the one before.
pub fn heartbeat(number: u64) -> Vec<u8> {
    let mut writer = Writer::default();
    writer.u8(ALIVE).u64(number);
    writer.0
}

/// The last heartbeat of a rank, which needs no watching any more. Others may read `notice` in it.
pub fn goodbye(notice: &[u8]) -> Vec<u8> {
    [&[LEFT], notice].concat()
}

/// Whether a heartbeat is a [`goodbye`]. A value that cannot be read is none, since a stray value must not end a group.
pub fn has_left(heartbeat: &[u8]) -> bool {
    notice(heartbeat).is_some()
}

/// The value that a rank has left with its [`goodbye`].
pub fn notice(heartbeat: &[u8]) -> Option<&[u8]> {
    heartbeat.split_first().filter(|(kind, _)| **kind == LEFT).map(|(_, notice)| notice)
}

/// Asks `store` to write `value` under `key`, unless that is set, when the process of rank `rank` ends. If the store cannot, the
/// others have to find out without it.
pub fn leave_will(store: &dyn Store, rank: usize, key: &str, value: &[u8]) -> Option<LastWill> {
    store.last_will(key, value).unwrap_or_else(|error| {
        log::debug!("rank {rank}: leaving a last will with the store: {error}");
        None
    })
}

/// How long the process that hosts the store waits, before it ends, until the others have heard of a failure or of the run's end. The
/// thread of a rank on a busy machine may take seconds.
pub const HEARING: Duration = Duration::from_secs(5);

/// In the process that hosts the store: waits until the others have read what they would otherwise lose with the store, as
/// `have_heard` tells, but not longer than `until`.
pub fn await_heard(until: Instant, mut have_heard: impl FnMut() -> Result<bool>) -> Result<()> {
    const PAUSE: Duration = Duration::from_millis(10);
    while Instant::now() < until && !have_heard()? {
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_heartbeats_that_are_read_count() {
        let mut silence = Silence::default();
        let missed = [7, 7, 7, 8, 8, 7].map(|number| silence.saw(&heartbeat(number)));
        assert_eq!(missed, [0, 1, 2, 0, 1, 0]);
    }

    #[test]
    fn each_rank_watches_the_next_one_that_has_not_left() {
        let mut ring = Ring::new(2, 4);
        assert!(ring.watched() == Some(3) && !ring.has_begun());
        assert_eq!([ring.saw(&heartbeat(1)), ring.saw(&heartbeat(1)), ring.saw(b"stray")], [0, 1, 0]);
        assert!(ring.has_begun());
        assert_eq!(ring.saw(&goodbye(b"")), 0);
        assert!(ring.watched() == Some(0) && !ring.has_begun());
        assert_eq!((ring.saw(&goodbye(b"so long")), ring.watched()), (0, Some(1)));
        assert_eq!((ring.saw(&goodbye(b"")), ring.watched()), (0, None));
        assert_eq!(Ring::new(0, 1).watched(), None);
    }

    #[test]
    fn a_notice_comes_with_a_goodbye_only() {
        assert_eq!(notice(&goodbye(b"so long")), Some(&b"so long"[..]));
        for other in [heartbeat(1), Vec::new(), vec![2]] {
            assert_eq!(notice(&other), None);
        }
    }
}
