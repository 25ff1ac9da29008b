//! The state of a group, which all threads of this rank that wait for calls move on.
use crate::call::Call;
use crate::comm::{self, Comm, Notices};
use crate::library::MpiError;
use crate::lifetime;
use crate::notice::Notice;
use crate::options::MpiOptions;
use crate::patience::Patience;
use crate::queues::{Outcome, Queues};
use crate::retired;
use candle_core::Device;
use candle_ddp::backend::Collective;
use candle_ddp::{Error, Failure, Result};
use candle_ddp_base::panic::{lock, wait, wait_timeout};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, TryLockError};
use std::time::{Duration, Instant};

/// The notices and the clock are looked at once in so many polls.
const POLLS: u32 = 64;

pub(crate) struct Group {
    /// For the program's calls.
    comm: Comm,
    /// For notices, and for making further groups: those calls may come between other ones in any order.
    control: Comm,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) options: MpiOptions,
    state: Mutex<State>,
    changed: Condvar,
    /// The number of threads that wait for calls, and thereby move all of them on.
    waiting: AtomicUsize,
    /// Held while a further group is made.
    making: Mutex<()>,
}

struct State {
    queues: Queues,
    notices: Option<Notices>,
    outgoing: Vec<comm::Notice>,
    failure: Option<Failure>,
    polls: u32,
    closing: bool,
}

impl Group {
    /// The group of all ranks of `comm`, which it takes over. All ranks must call it.
    pub(crate) fn new(comm: Comm, options: MpiOptions) -> Result<Arc<Self>> {
        retired::sweep();
        let made = || -> Result<_, MpiError> {
            let (rank, world_size) = comm.place()?;
            let control = comm.duplicate()?;
            Ok((rank, world_size, control, Notices::listen(control)?))
        };
        let (rank, world_size, control, notices) = made().map_err(|error| error.of_rank(0))?;
        let state = State {
            queues: Queues::new(world_size),
            notices: Some(notices),
            outgoing: Vec::new(),
            failure: None,
            polls: 0,
            closing: false,
        };
        Ok(Arc::new(Self {
            comm,
            control,
            rank,
            world_size,
            options,
            state: Mutex::new(state),
            changed: Condvar::new(),
            waiting: AtomicUsize::new(0),
            making: Mutex::default(),
        }))
    }

    /// Checks a call and puts it into its queue.
    pub(crate) fn put(&self, collective: Collective) -> Result<Arc<Outcome>> {
        collective.check(self.rank, self.world_size, &Device::Cpu)?;
        let call = Call::new(self.rank, self.world_size, collective, self.options.piece_bytes)?;
        let mut state = lock(&self.state);
        if let Some(failure) = &state.failure {
            return Err(failure.clone().into());
        }
        Ok(state.queues.put(call))
    }

    /// Tells the thread in [`work`](Self::work) that there is a call. (This costs a system call, so not for calls that the
    /// caller waits for.)
    pub(crate) fn wake(&self) {
        self.changed.notify_one();
    }

    /// Moves all calls on until `outcome` is known.
    pub(crate) fn wait(&self, outcome: &Outcome) -> Result<()> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let mut patience = Patience::default();
        let result = loop {
            if let Some((result, _)) = outcome.get() {
                break result.clone();
            }
            self.poll(&mut lock(&self.state));
            if outcome.get().is_none() {
                patience.pause();
            }
        };
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        Ok(result?)
    }

    /// Moves all calls on, unless another thread does.
    pub(crate) fn nudge(&self) {
        match self.state.try_lock() {
            Ok(mut state) => self.poll(&mut state),
            Err(TryLockError::Poisoned(state)) => self.poll(&mut state.into_inner()),
            Err(TryLockError::WouldBlock) => {}
        }
    }

    /// The body of the thread that moves calls on for which nobody waits.
    pub(crate) fn work(&self) {
        /// Polls take the processor from the threads that compute.
        const PAUSE: Duration = Duration::from_micros(20);
        /// How often to see whether the waiting threads are gone.
        const LOOK: Duration = Duration::from_millis(1);
        let mut state = lock(&self.state);
        loop {
            if state.queues.are_empty() {
                if state.closing || state.failure.is_some() {
                    return;
                }
                state = wait(&self.changed, state);
            } else if self.waiting.load(Ordering::Relaxed) > 0 {
                state = wait_timeout(&self.changed, state, LOOK);
            } else {
                self.poll(&mut state);
                drop(state);
                std::thread::sleep(PAUSE);
                state = lock(&self.state);
            }
        }
    }

    fn poll(&self, state: &mut State) {
        if state.failure.is_some() {
            return;
        }
        if let Err((call, error)) = state.queues.advance(self.comm) {
            return self.fail(state, Failure::PeerFailed { peer: self.rank, reason: format!("{call}: {error}") });
        }
        state.polls = state.polls.wrapping_add(1);
        if state.polls.is_multiple_of(POLLS) {
            self.look(state);
        }
    }

    /// Reads notices, and looks whether calls can still be over.
    fn look(&self, state: &mut State) {
        while state.failure.is_none() {
            match state.notices.as_mut().map(Notices::next) {
                Some(Ok(Some((peer, bytes)))) => match Notice::decode(peer, &bytes) {
                    Notice::Left(counts) => state.queues.note_left(peer, counts),
                    Notice::Failed(failure) => return self.end(state, failure),
                },
                Some(Err(error)) => {
                    return self.fail(state, Failure::PeerFailed { peer: self.rank, reason: error.to_string() });
                }
                Some(Ok(None)) | None => break,
            }
        }
        if let Some(failure) = state.queues.overdue(self.rank, self.options.timeout, Instant::now()) {
            self.fail(state, failure);
        }
    }

    /// The reason why the group has failed.
    pub(crate) fn failure(&self) -> Option<Error> {
        let mut state = lock(&self.state);
        if state.failure.is_none() {
            self.look(&mut state);
        }
        state.failure.clone().map(Error::from)
    }

    /// Ends the group because of something that this rank noticed, and tells the others.
    pub(crate) fn abort(&self, failure: Failure) {
        let mut state = lock(&self.state);
        if state.failure.is_none() {
            self.fail(&mut state, failure);
        }
    }

    fn fail(&self, state: &mut State, failure: Failure) {
        self.tell(state, |_, _| Notice::Failed(failure.clone()));
        self.end(state, failure);
    }

    /// Ends the group on this rank. Its communicators stay, since calls may be in flight.
    fn end(&self, state: &mut State, failure: Failure) {
        lifetime::failed();
        state.queues.fail(&failure);
        state.failure = Some(failure);
        self.changed.notify_all();
    }

    /// Sends a notice to every other rank, as far as MPI still works, and gives MPI a moment to send them.
    fn tell(&self, state: &mut State, notice: impl Fn(&Queues, usize) -> Notice) {
        const MOMENT: Duration = Duration::from_millis(500);
        let until = Instant::now() + MOMENT;
        for peer in (0..self.world_size).filter(|peer| *peer != self.rank) {
            let bytes = notice(&state.queues, peer).encode();
            match comm::Notice::send(self.control, peer, bytes) {
                Ok(notice) => state.outgoing.push(notice),
                Err(error) => log::warn!("rank {}: rank {peer} could not be told why: {error}", self.rank),
            }
        }
        let mut patience = Patience::default();
        let is_sent = |notice: &mut comm::Notice| notice.is_over().unwrap_or(true);
        while !state.outgoing.iter_mut().all(is_sent) && Instant::now() < until {
            patience.pause();
        }
    }

    /// The communicator of a further group of the ranks that give a `place`. All ranks must call it.
    pub(crate) fn make(&self, place: Option<usize>) -> Result<Option<Comm>> {
        let _turn = lock(&self.making);
        // MPI itself would wait without a time-out, and would not learn that the group has failed.
        self.meet()?;
        self.control.split(place).map_err(|error| error.of_rank(self.rank))
    }

    /// Waits until all ranks have come to make a group.
    fn meet(&self) -> Result<()> {
        let mut barrier = self.control.start_barrier().map_err(|error| error.of_rank(self.rank))?;
        let (begun, mut patience) = (Instant::now(), Patience::default());
        while !barrier.test().map_err(|error| error.of_rank(self.rank))? {
            if let Some(failure) = self.failure() {
                return Err(failure);
            }
            if begun.elapsed() >= self.options.timeout {
                let reason = "not all ranks came to make a further group".to_string();
                let (rank, timeout) = (self.rank, self.options.timeout);
                let call = "MPI_Comm_split".to_string();
                self.abort(Failure::TimedOut { rank, call, sequence: 0, timeout, waiting_for: Vec::new(), reason });
            }
            patience.pause();
        }
        Ok(())
    }

    /// Leaves the group after all calls are over, or with an error while panicking.
    pub(crate) fn leave(&self) {
        if std::thread::panicking() {
            self.abort(Failure::PeerFailed { peer: self.rank, reason: "it panicked".to_string() });
        }
        let mut patience = Patience::default();
        let mut state = loop {
            let mut state = lock(&self.state);
            self.poll(&mut state);
            if state.queues.are_empty() {
                break state;
            }
            drop(state);
            patience.pause();
        };
        state.closing = true;
        self.changed.notify_all();
        if state.failure.is_some() {
            return;
        }
        self.tell(&mut state, |queues, peer| Notice::Left(queues.counts(peer)));
        if let Some(notices) = state.notices.take() {
            let outgoing = std::mem::take(&mut state.outgoing);
            let expected = self.world_size - 1 - state.queues.left;
            retired::retire(retired::Retired { comms: [self.comm, self.control], notices, outgoing, expected });
        }
    }
}
