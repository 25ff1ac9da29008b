//! Questions to all ranks of a group, and their answers.
use crate::failure::{ProgressReport, RankState};
use crate::group::Group;
use crate::panic::lock;
use crate::question::Question;
use crate::standing::Membership;
use crate::state::Query;
use crate::tcp::frame::Frame;
use crate::tcp::handshake::Kind;
use candle_ddp_base::wire::{Reader, Writer};
use std::time::{Duration, Instant};

/// Monitors answer at once, even on a busy machine: a process that does not is stopped or unreachable.
pub(crate) const PATIENCE: Duration = Duration::from_secs(3);

impl Group {
    /// Asks all peers for their progress. Returns the states by rank, including this one.
    pub(crate) fn query(&self) -> Vec<RankState> {
        let decode = |answer: Option<Vec<u8>>| ProgressReport::decode(&mut Reader(&answer?));
        let mut answers: Vec<_> = self.put(Question::Progress).into_iter().map(decode).collect();
        let state = lock(&self.state);
        answers[self.rank] = Some(state.collectives.report(self.locks.any()));
        // A rank that this one does not know is asked by its proxy there.
        let is_asked: Vec<bool> = (0..self.world_size)
            .map(|peer| {
                let is_linked = self.hosts.member(peer).is_some() || self.control.link(peer).is_some();
                let is_known = is_linked || state.peers[peer].answers_calls;
                is_known || answers[self.hosts.proxy_beside(peer)].is_some()
            })
            .collect();
        let states = answers.into_iter().zip(is_asked).enumerate();
        states.map(|(peer, (answer, is_asked))| state.rank_state(peer, answer, is_asked)).collect()
    }

    /// Asks all peers. Returns the answers by rank.
    pub(crate) fn put(&self, question: Question) -> Vec<Option<Vec<u8>>> {
        let mut state = lock(&self.state);
        let id = state.next_query;
        state.next_query += 1;
        let asked = self.shm.as_ref().map(|shm| shm.board.ask(question));
        state.queries.insert(id, Query { question, asked, answers: vec![None; self.world_size] });
        drop(state);
        self.linked().for_each(|peer| self.control.send(peer, &Frame::Query { id, question }));
        // Those that are called now are asked as soon as there is a connection.
        let unlinked: Vec<usize> = self.hosts.proxies().filter(|peer| self.control.link(*peer).is_none()).collect();
        self.want(&unlinked, Kind::Control);
        self.wait_until(Instant::now() + PATIENCE, |state| {
            let answers = &state.queries.get(&id)?.answers;
            let complete = self.peers().all(|peer| answers[peer].is_some() || state.peers[peer].closed);
            (complete || state.failure.is_some() || state.leaving).then_some(())
        });
        let query = lock(&self.state).queries.remove(&id);
        query.map_or_else(|| vec![None; self.world_size], |query| query.answers)
    }

    /// This rank's answer to a question.
    pub(crate) fn report(&self, question: Question) -> Vec<u8> {
        match question {
            Question::Progress => {
                let mut writer = Writer::default();
                lock(&self.state).collectives.report(self.locks.any()).encode(&mut writer);
                writer.0
            }
            Question::Standing => self.membership.as_ref().map(Membership::report).unwrap_or_default(),
        }
    }

    /// Takes the answers that the ranks of this host have given.
    pub(crate) fn collect_answers(&self) {
        let Some(shm) = &self.shm else { return };
        let mut state = lock(&self.state);
        self.pass_answers(&mut state);
        for query in state.queries.values_mut() {
            for (member, peer) in self.neighbours() {
                if let (None, Some(asked)) = (&query.answers[peer], query.asked) {
                    query.answers[peer] = shm.board.answer_of(member, query.question, asked);
                    self.changed.notify_all();
                }
            }
        }
    }
}
