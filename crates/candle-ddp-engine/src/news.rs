//! Messages between ranks about third ones, since not every two ranks have a control connection: to ranks of other hosts about the
//! ranks of this one, and to ranks of this host about all others.
use crate::failure::CallCounts;
use crate::gone::{Fate, Gone, News};
use crate::group::Group;
use crate::panic::lock;
use crate::query::PATIENCE;
use crate::question::Question;
use crate::state::{Relay, State};
use crate::tcp::frame::Frame;
use std::time::Instant;

impl Group {
    /// Tells all that have not noticed by themselves that `peer` has left or ended, if it has.
    pub(crate) fn spread(&self, peer: usize) {
        let Some(news) = lock(&self.state).news(self.rank, peer) else { return };
        let News { rank, fate, .. } = news;
        match (self.hosts.member(peer), &self.shm) {
            (Some(_), _) => self.linked().for_each(|other| self.control.send(other, &Frame::News { rank, fate })),
            (None, Some(shm)) => shm.board.note(news),
            (None, None) => {}
        }
    }

    /// Tells `peer`, to which there is a new control connection, all that it should know.
    pub(crate) fn greet(&self, state: &State, peer: usize) {
        let told = match &state.failure {
            Some(failure) => Some(Frame::Abort(failure.clone())),
            None if state.leaving => Some(state.goodbye(peer)),
            None => None,
        };
        let news = |(_, rank)| Some(Frame::News { rank, fate: state.news(self.rank, rank)?.fate });
        let queries = state.queries.iter().map(|(id, query)| Frame::Query { id: *id, question: query.question });
        let frames = self.neighbours().filter_map(news).chain(queries).chain(told);
        frames.for_each(|frame| self.control.send(peer, &frame));
    }

    /// Takes what other ranks of this host have noted about ranks of other hosts.
    pub(crate) fn read_notes(&self) {
        let Some(shm) = &self.shm else { return };
        let others = self.hosts.others().flat_map(|(_, ranks)| ranks);
        let mut state = lock(&self.state);
        for rank in others.filter(|rank| self.control.link(**rank).is_none()) {
            let news = shm.board.noted(*rank).filter(|_| !state.peers[*rank].closed);
            state.heard.extend(news);
        }
        drop(state);
        self.control.wake();
    }

    /// Called when another rank has said how `rank` has left or ended. By then, this rank must have looked at the door once more:
    /// `rank` may have called and sent data before.
    pub(crate) fn on_news(&self, News { rank, fate, witness }: News) {
        let mut state = lock(&self.state);
        // Its own words, and the end of its connection, say more.
        let is_heard = self.control.link(rank).is_some() || self.hosts.member(rank).is_some();
        let Some(known) = state.peers.get_mut(rank).filter(|known| !is_heard && !known.closed) else { return };
        known.closed = true;
        // Ranks without a connection have exchanged no messages.
        match fate {
            Fate::Left(last) => known.left = Some(CallCounts { collectives: last, sent: 0, received: 0 }),
            Fate::Gone(last) => {
                let finished = last.map(|last| CallCounts { collectives: last + 1, sent: 1, received: 1 });
                known.gone = Some(Gone::told_by(witness, finished));
            }
        }
        self.fail_if_needed(state, rank);
        self.changed.notify_all();
        self.spread(rank);
    }

    /// Asks the other ranks of this host for `peer`, whose proxy this rank is.
    pub(crate) fn relay(&self, peer: usize, id: u64, question: Question) {
        let Some(shm) = self.shm.as_ref().filter(|_| self.hosts.is_proxy_of(peer)) else { return };
        let mut state = lock(&self.state);
        let asked = shm.board.ask(question);
        let until = Instant::now() + PATIENCE;
        state.relays.push(Relay { peer, id, question, asked, missing: self.neighbours().collect(), until });
    }

    /// Passes on the answers that the ranks of this host have given.
    pub(crate) fn pass_answers(&self, state: &mut State) {
        let Some(shm) = &self.shm else { return };
        state.relays.retain_mut(|relay| {
            let (peer, id) = (relay.peer, relay.id);
            relay.missing.retain(|(member, rank)| {
                let report = shm.board.answer_of(*member, relay.question, relay.asked);
                let report = report.map(|report| Frame::Answer { id, rank: *rank, report });
                report.iter().for_each(|answer| self.control.send(peer, answer));
                report.is_none()
            });
            !relay.missing.is_empty() && Instant::now() < relay.until
        });
    }
}
