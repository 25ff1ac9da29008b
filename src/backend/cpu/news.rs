//! What a rank tells ranks of other hosts about those of its own: not every two ranks have a control connection.
use super::frame::Frame;
use super::gone::{Ended, Gone};
use super::group::{Group, QUERY_PATIENCE};
use super::state::{Relay, State};
use crate::backend::failure::{CallCounts, ProgressReport};
use crate::panic::lock;
use candle_ddp_rendezvous::wire::Reader;
use std::time::Instant;

impl Group {
    /// Tells the ranks of other hosts that `peer`, if it is on this host, has left or ended.
    pub(super) fn spread(&self, peer: usize) {
        let news = self.news(&lock(&self.state), peer);
        news.iter().for_each(|news| self.linked().for_each(|other| self.control.send(other, news)));
    }

    /// How `peer`, a rank of this host, has left or ended, if it has.
    fn news(&self, state: &State, peer: usize) -> Option<Frame> {
        self.hosts.member(peer)?;
        let known = &state.peers[peer];
        let left = known.left.map(|counts| (true, counts.collectives));
        let (left, last) = left.or_else(|| Some((false, known.gone.as_ref()?.last()?)))?;
        Some(Frame::News { rank: peer, left, last })
    }

    /// Tells `peer`, to which there is a new control connection, all that it should know.
    pub(super) fn greet(&self, state: &State, peer: usize) {
        let told = match &state.failure {
            Some(failure) => Some(Frame::Abort(failure.clone())),
            None if state.leaving => Some(state.goodbye(peer)),
            None => None,
        };
        let news = self.neighbours().filter_map(|(_, neighbour)| self.news(state, neighbour));
        news.chain(told).for_each(|frame| self.control.send(peer, &frame));
    }

    /// Called when a rank of its host has said how `rank` has left or ended.
    pub(super) fn on_news(&self, rank: usize, left: bool, last: u64) {
        let mut state = lock(&self.state);
        // Its own words, and the end of its connection, say more.
        let is_heard = self.control.link(rank).is_some() || self.hosts.member(rank).is_some();
        let Some(known) = state.peers.get_mut(rank).filter(|known| !is_heard && !known.closed) else { return };
        known.closed = true;
        // Ranks without a connection have exchanged no messages.
        if left {
            known.left = Some(CallCounts { collectives: last, sent: 0, received: 0 });
        } else {
            let finished = CallCounts { collectives: last + 1, sent: 1, received: 1 };
            known.gone = Some(Gone::new(Ended::Closed, Some(finished)));
        }
        self.fail_if_needed(state, rank);
        self.changed.notify_all();
    }

    /// Asks the other ranks of this host for `peer`, whose proxy this rank is.
    pub(super) fn relay(&self, peer: usize, id: u64) {
        let Some(shm) = self.shm.as_ref().filter(|_| self.hosts.is_proxy_of(peer)) else { return };
        let mut state = lock(&self.state);
        let asked = shm.board.ask();
        let until = Instant::now() + QUERY_PATIENCE;
        state.relays.push(Relay { peer, id, asked, missing: self.neighbours().collect(), until });
    }

    /// Passes on the answers that the ranks of this host have given.
    pub(super) fn pass_answers(&self, state: &mut State) {
        let Some(shm) = &self.shm else { return };
        state.relays.retain_mut(|relay| {
            let (peer, id) = (relay.peer, relay.id);
            relay.missing.retain(|(member, rank)| {
                let answer = shm.board.answer_of(*member, relay.asked);
                let report = answer.and_then(|answer| ProgressReport::decode(&mut Reader(&answer)));
                let report = report.map(|report| Frame::Answer { id, rank: *rank, report });
                report.iter().for_each(|answer| self.control.send(peer, answer));
                report.is_none()
            });
            !relay.missing.is_empty() && Instant::now() < relay.until
        });
    }
}
