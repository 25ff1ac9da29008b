//! Messages between the ranks of a host apart from data: who lives, who has left, why the group failed, and how far each
//! has come. It needs no connections, and no rank waits for another one.
//!
//! Every rank has a line of words that it alone writes, but for `BELL` and `GONE`, and two letters: texts in the file, which
//! are not mapped. A word that announces a letter is stored after it. Whoever learns that a rank of another host has left or ended
//! notes that too.
use super::segment::{Memory, Segment};
use super::sync::{AtomicU32, Ordering, futex_wait, futex_wake};
use crate::gone::{Fate, News};
use crate::question::Question;
use std::sync::Arc;
use std::time::Duration;

/// The board of a host, as one of its ranks uses it. Ranks are numbered by their position on the host.
pub(crate) struct Board {
    rank: usize,
    /// By rank: its line and its letters.
    places: Vec<usize>,
    memory: Arc<Memory>,
    words: Segment,
    /// The offset of the notes on ranks of other hosts.
    fates: usize,
    /// The offset of the letters in the file.
    letters: usize,
}

/// For how many ranks a host's memory is: those of the host, some of which may be unable to map it, and those of the group.
#[derive(Clone, Copy)]
pub(super) struct Room {
    pub(super) ranks: usize,
    pub(super) group: usize,
}

/// How a rank stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    /// It is a member, or has not come yet.
    Here,
    /// It has left in good order.
    Left,
    /// It has said why the group failed.
    Failed,
    /// It has ended: without a word, or after a failure.
    Gone { failed: bool },
}

impl Life {
    /// Whether it has said why the group failed.
    pub(crate) fn has_failed(self) -> bool {
        matches!(self, Self::Failed | Self::Gone { failed: true })
    }
}

/// Words of different ranks are two cache lines apart.
const LINE: usize = 128;
const PAGE: usize = 4096;
/// The number of questions of each kind that were asked, and of notes on ranks of other hosts.
const ASKED: [usize; 2] = [0, 8];
const NOTES: usize = 4;
/// The words of a note: the number of the rank's fate, stored last, its last collective, and the witness.
const FATE: usize = 0;
const LAST_LOW: usize = 4;
const LAST_HIGH: usize = 8;
const WITNESS: usize = 12;
const NOTE: usize = 16;
/// Somebody is writing the note.
const CLAIMED: u32 = u32::MAX;

/// The words of a rank's line.
const LIFE: usize = 0;
/// Set by whoever notices that its process has ended.
const GONE: usize = 4;
/// Counts the events that its monitor should look at.
const BELL: usize = 8;
/// Of each kind, the last question that it has answered, and how often it has begun and ended to write an answer.
const ANSWERED: [usize; 2] = [12, 32];
const WRITTEN: [usize; 2] = [16, 36];
/// Its process, and the descriptor of its file.
const PID: usize = 20;
const FD: usize = 24;
/// Whether it has ever sent or received a message.
const MESSAGES: usize = 28;

const HERE: u32 = 1;
const LEFT: u32 = 2;
const FAILED: u32 = 3;
const OVER: u32 = 4;

/// Letters are larger than the texts and calls that they hold, whose sizes are limited.
const FAILURE: usize = 256 << 10;
const ANSWER: usize = 64 << 10;
const LETTERS: usize = FAILURE + Question::ALL.len() * ANSWER;

impl Board {
    /// The size of the words, whole pages.
    pub(super) fn size(room: Room) -> usize {
        (Self::lines(room) + NOTE * room.group).next_multiple_of(PAGE)
    }

    fn lines(room: Room) -> usize {
        LINE * (1 + room.ranks)
    }

    /// The size of the letters of `ranks` ranks, of which only those that are written take memory.
    pub(super) fn letters(ranks: usize) -> usize {
        ranks * LETTERS
    }

    /// The board at the beginning of `memory`; its letters begin at `letters`. `places` are the places of the ranks there, which
    /// are fewer than there are places if some ranks cannot map the memory.
    pub(super) fn new(rank: usize, places: Vec<usize>, memory: Arc<Memory>, room: Room, letters: usize) -> Self {
        let words = Segment::new(&memory, 0..Self::size(room));
        Self { rank, places, memory, words, fates: Self::lines(room), letters }
    }

    /// Says that the rank at `place` is here, before the others count on it. From then on they notice its end.
    pub(super) fn enter(memory: &Arc<Memory>, place: usize, room: Room) {
        let words = Segment::new(memory, 0..Self::size(room));
        let own = |word: usize| words.word(LINE * (1 + place) + word);
        let (pid, fd) = memory.place();
        own(PID).store(pid, Ordering::Relaxed);
        own(FD).store(fd, Ordering::Relaxed);
        own(LIFE).store(HERE, Ordering::Release);
    }

    fn word(&self, rank: usize, word: usize) -> &AtomicU32 {
        self.words.word(LINE * (1 + self.places[rank]) + word)
    }

    fn own(&self, word: usize) -> &AtomicU32 {
        self.word(self.rank, word)
    }

    /// The offset of its letters.
    fn letter(&self, rank: usize) -> usize {
        self.letters + self.places[rank] * LETTERS
    }

    fn answer_letter(&self, rank: usize, question: Question) -> usize {
        self.letter(rank) + FAILURE + question as usize * ANSWER
    }

    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank;
        (0..self.places.len()).filter(move |peer| *peer != rank)
    }

    /// The number of events so far, for [`wait`](Self::wait).
    pub(crate) fn events(&self) -> u32 {
        self.own(BELL).load(Ordering::Acquire)
    }

    /// Waits for an event after the first `seen`, at most for `longest`, which is less than a second.
    pub(crate) fn wait(&self, seen: u32, longest: Duration) -> Result<(), String> {
        futex_wait(self.own(BELL), seen, longest)
    }

    /// Makes rank `rank` look at the board.
    fn ring(&self, rank: usize) {
        let bell = self.word(rank, BELL);
        bell.fetch_add(1, Ordering::Release);
        futex_wake(bell);
    }

    /// Makes this rank itself look at the board.
    pub(crate) fn ring_here(&self) {
        self.ring(self.rank);
    }

    fn ring_all(&self) {
        self.peers().for_each(|peer| self.ring(peer));
    }

    /// How rank `peer` stands.
    pub(crate) fn life(&self, peer: usize) -> Life {
        // Read in this order: its last word comes before its end.
        let gone = self.word(peer, GONE).load(Ordering::Acquire) != 0;
        match self.word(peer, LIFE).load(Ordering::Acquire) {
            LEFT => Life::Left,
            OVER => Life::Gone { failed: true },
            FAILED if gone => Life::Gone { failed: true },
            FAILED => Life::Failed,
            _ if gone => Life::Gone { failed: false },
            _ => Life::Here,
        }
    }

    /// Whether the process of rank `peer`, which is here, has ended. Then all ranks are told.
    pub(crate) fn check(&self, peer: usize) {
        let [life, pid, fd] = [LIFE, PID, FD].map(|word| self.word(peer, word).load(Ordering::Acquire));
        if [HERE, FAILED].contains(&life) && !self.memory.is_open(pid, fd) {
            self.word(peer, GONE).store(1, Ordering::Release);
            self.ring_all();
            self.ring_here();
        }
    }

    /// Says that this rank leaves: in good order, or after a failure. Its peers see it at their next look.
    pub(crate) fn leave(&self) {
        let life = self.own(LIFE);
        match life.load(Ordering::Relaxed) {
            FAILED => {
                life.store(OVER, Ordering::Release);
                self.ring_all();
            }
            _ => life.store(LEFT, Ordering::Release),
        }
    }

    /// Says why the group has failed.
    pub(crate) fn fail(&self, reason: &[u8]) {
        let start = self.letter(self.rank);
        let reason = &reason[..reason.len().min(FAILURE - 4)];
        let letter = [&(reason.len() as u32).to_le_bytes(), reason].concat();
        if let Err(error) = self.memory.write_at(&letter, start) {
            log::warn!("the other ranks of this host cannot be told why the group failed: {error}");
        }
        self.own(LIFE).store(FAILED, Ordering::Release);
        self.ring_all();
    }

    /// The reason why the group has failed, in the words of rank `peer`, which has [failed](Life::Failed).
    pub(crate) fn failure(&self, peer: usize) -> Option<Vec<u8>> {
        self.read(self.letter(peer), FAILURE)
    }

    /// Reads a letter of at most `longest` bytes.
    fn read(&self, start: usize, longest: usize) -> Option<Vec<u8>> {
        let mut length = [0; 4];
        self.memory.read_at(&mut length, start).ok()?;
        let length = u32::from_le_bytes(length) as usize;
        let mut letter = vec![0; length.min(longest - 4)];
        self.memory.read_at(&mut letter, start + 4).ok()?;
        Some(letter)
    }

    /// Asks all ranks. Returns the number of the question among questions of its kind.
    pub(crate) fn ask(&self, question: Question) -> u32 {
        let asked = self.words.word(ASKED[question as usize]).fetch_add(1, Ordering::AcqRel).wrapping_add(1);
        self.ring_all();
        asked
    }

    /// The number of the newest question of this kind, if this rank has not answered it yet.
    pub(crate) fn asked(&self, question: Question) -> Option<u32> {
        let asked = self.words.word(ASKED[question as usize]).load(Ordering::Acquire);
        (asked != self.own(ANSWERED[question as usize]).load(Ordering::Relaxed)).then_some(asked)
    }

    /// Answers the question of this kind and number, and all before it.
    pub(crate) fn answer(&self, question: Question, asked: u32, report: &[u8]) {
        let report = &report[..report.len().min(ANSWER - 4)];
        let letter = [&(report.len() as u32).to_le_bytes(), report].concat();
        // Odd while it is written.
        self.own(WRITTEN[question as usize]).fetch_add(1, Ordering::AcqRel);
        let written = self.memory.write_at(&letter, self.answer_letter(self.rank, question));
        self.own(WRITTEN[question as usize]).fetch_add(1, Ordering::AcqRel);
        if written.is_ok() {
            // Whoever has asked sees it at the next look: with very many ranks, too many would be woken for nothing.
            self.own(ANSWERED[question as usize]).store(asked, Ordering::Release);
        }
    }

    /// The answer of rank `peer` to a question, once it has given one.
    pub(crate) fn answer_of(&self, peer: usize, question: Question, asked: u32) -> Option<Vec<u8>> {
        let answered = self.word(peer, ANSWERED[question as usize]).load(Ordering::Acquire);
        if (answered.wrapping_sub(asked) as i32) < 0 {
            return None;
        }
        let written = || self.word(peer, WRITTEN[question as usize]).load(Ordering::Acquire);
        let before = written();
        let letter = self.read(self.answer_letter(peer, question), ANSWER)?;
        // If the answer to a later question has replaced it meanwhile, another look will see that one.
        (before.is_multiple_of(2) && before == written()).then_some(letter)
    }

    /// Notes how `rank` of the group, which is on another host, has left or ended, unless somebody has.
    pub(crate) fn note(&self, News { rank, fate, witness }: News) {
        let word = |word: usize| self.words.word(self.fates + NOTE * rank + word);
        if word(FATE).compare_exchange(0, CLAIMED, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return;
        }
        let (number, last) = fate.encode();
        word(LAST_LOW).store(last as u32, Ordering::Relaxed);
        word(LAST_HIGH).store((last >> 32) as u32, Ordering::Relaxed);
        word(WITNESS).store(witness as u32, Ordering::Relaxed);
        word(FATE).store(number.into(), Ordering::Release);
        self.words.word(NOTES).fetch_add(1, Ordering::Release);
        self.ring_all();
    }

    /// The number of such notes so far.
    pub(crate) fn notes(&self) -> u32 {
        self.words.word(NOTES).load(Ordering::Acquire)
    }

    /// The note on `rank` of the group.
    pub(crate) fn noted(&self, rank: usize) -> Option<News> {
        let word = |word: usize, order| self.words.word(self.fates + NOTE * rank + word).load(order);
        let number = u8::try_from(word(FATE, Ordering::Acquire)).ok()?;
        let [low, high] = [LAST_LOW, LAST_HIGH].map(|half| u64::from(word(half, Ordering::Relaxed)));
        let fate = Fate::decode(number, high << 32 | low)?;
        Some(News { rank, fate, witness: word(WITNESS, Ordering::Relaxed) as usize })
    }

    /// Says that this rank sends or receives messages.
    pub(super) fn use_messages(&self) {
        self.own(MESSAGES).store(1, Ordering::Relaxed);
    }

    /// Whether rank `peer` has ever sent or received a message.
    pub(super) fn uses_messages(&self, peer: usize) -> bool {
        self.word(peer, MESSAGES).load(Ordering::Relaxed) != 0
    }
}

#[cfg(test)]
mod tests {
    use super::super::peer_info::name;
    use super::*;
    use crate::random::random_bytes;

    /// The boards of all ranks of a host, each with its own descriptor.
    fn boards(ranks: usize) -> Vec<Board> {
        let room = Room { ranks, group: ranks + 2 };
        let (mapped, name) = (Board::size(room), name(u128::from_le_bytes(random_bytes().unwrap())));
        let size = mapped + Board::letters(ranks);
        let first = Arc::new(Memory::create(&name, mapped, size).unwrap());
        let (pid, fd) = first.place();
        let open = |_| Arc::new(Memory::open(pid, fd, &name, mapped, size).unwrap());
        let memories: Vec<_> = std::iter::once(first.clone()).chain((1..ranks).map(open)).collect();
        let board = |(rank, memory)| {
            Board::enter(&memory, rank, room);
            Board::new(rank, (0..ranks).collect(), memory, room, mapped)
        };
        memories.into_iter().enumerate().map(board).collect()
    }

    const SOON: Duration = Duration::from_millis(900);

    #[test]
    fn a_failure_is_told_with_its_reason() {
        let boards = boards(3);
        let seen = boards[2].events();
        assert_eq!(boards[2].life(1), Life::Here);
        boards[1].fail(b"out of luck");
        boards[2].wait(seen, SOON).unwrap();
        assert_ne!(boards[2].events(), seen);
        assert_eq!((boards[2].life(1), boards[2].life(0)), (Life::Failed, Life::Here));
        assert_eq!(boards[2].failure(1).unwrap(), b"out of luck");
        boards[1].leave();
        assert_eq!(boards[0].life(1), Life::Gone { failed: true });
        // Longer than any text of this engine.
        boards[0].fail(&vec![7; 2 * FAILURE]);
        assert_eq!(boards[2].failure(0).unwrap().len(), FAILURE - 4);
    }

    #[test]
    fn whoever_notices_an_end_tells_all() {
        let mut boards = boards(3);
        boards[0].leave();
        let ended = boards.remove(1);
        let bells = [0, 1].map(|index: usize| boards[index].events());
        boards[0].check(1);
        assert_eq!([0, 1].map(|index: usize| boards[index].events()), bells, "it lives");
        drop(ended);
        boards[0].check(1);
        assert_ne!([0, 1].map(|index: usize| boards[index].events()), bells);
        assert_eq!((boards[1].life(1), boards[1].life(0)), (Life::Gone { failed: false }, Life::Left));
    }

    #[test]
    fn the_first_note_on_a_rank_stays() {
        let boards = boards(2);
        let seen = boards[1].events();
        assert_eq!((boards[1].notes(), boards[1].noted(2)), (0, None));
        let first = News { rank: 2, fate: Fate::Left(5 << 40 | 3), witness: 7 };
        boards[0].note(first);
        boards[1].note(News { fate: Fate::Gone(None), ..first });
        assert_eq!((boards[1].notes(), boards[1].noted(2)), (1, Some(first)));
        assert_ne!(boards[1].events(), seen);
        let other = News { rank: 3, fate: Fate::Gone(None), witness: 0 };
        boards[1].note(other);
        assert_eq!((boards[0].notes(), boards[0].noted(3)), (2, Some(other)));
    }

    #[test]
    fn an_answer_is_to_its_question_or_a_later_one() {
        let boards = boards(2);
        for question in Question::ALL {
            assert_eq!(boards[1].asked(question), None);
            let first = boards[0].ask(question);
            assert_eq!((boards[1].asked(question), boards[0].answer_of(1, question, first)), (Some(first), None));
            boards[1].answer(question, first, b"one");
            let answer = boards[0].answer_of(1, question, first).unwrap();
            assert_eq!((boards[1].asked(question), answer), (None, b"one".to_vec()));
            let second = boards[0].ask(question);
            assert_eq!(boards[0].answer_of(1, question, second), None);
            boards[1].answer(question, second, b"two!");
            let answers = [first, second].map(|asked| boards[0].answer_of(1, question, asked).unwrap());
            assert_eq!(answers, [b"two!", b"two!"]);
        }
    }
}
