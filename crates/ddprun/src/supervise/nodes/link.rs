//! An agent's connection to the coordinator of its run.
use super::coordinator::Coordinator;
use super::message::{Entry, Message, Node, Slot, Welcome};
use super::{INBOX, PREFIX, SLOTS, VERDICT, beat_key, decode, encode, entry_key, node_rank_key, welcome_key};
use crate::command::{Pace, Terms};
use crate::error::Result;
use crate::verdict::Verdict;
use candle_ddp_base::deadline::deadline_after;
use candle_ddp_base::thread;
use candle_ddp_rendezvous::{PrefixStore, Secret, Store, TcpStore, TcpStoreOptions, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long the node that hosts the store waits at the end until the others no longer need it.
const GOODBYE: Duration = Duration::from_secs(5);

/// The news for an agent.
#[derive(Debug)]
pub(crate) enum News {
    /// This node was given a number, and waits for the others, or as a spare.
    Joined {
        slot: Slot,
        is_spare: bool,
    },
    Entry(Entry),
    /// This node cannot take part, or the store cannot be reached any more.
    Lost(String),
}

/// Where the agents of the run meet.
pub(crate) struct Address {
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) secret: Option<Secret>,
}

impl Address {
    fn connect(&self, timeout: Duration) -> std::result::Result<TcpStore, News> {
        let options = TcpStoreOptions { timeout, secret: self.secret.clone() };
        TcpStore::connect_with(&self.host, self.port, options).map_err(|error| lost(&error))
    }
}

/// The connection. Its threads end when it is dropped, or with the process.
pub(crate) struct Link {
    outbox: Sender<Message>,
    verdict: Receiver<Verdict>,
    speaker: JoinHandle<()>,
    is_connected: Arc<AtomicBool>,
    coordinator: Option<Coordinator>,
}

impl Link {
    /// Introduces this node. `coordinator` runs in this process if this process hosts the store. `tell` gets the news.
    pub(crate) fn join(
        address: Address,
        node: Node,
        pace: &Pace,
        coordinator: Option<Coordinator>,
        tell: impl Fn(News) + Clone + Send + 'static,
    ) -> Result<Self> {
        let (outbox, messages) = channel();
        let (reporter, verdict) = channel();
        let pace = pace.clone();
        let is_connected = Arc::new(AtomicBool::new(false));
        let connected = Arc::clone(&is_connected);
        let speak = move || {
            if let Err(news) = speak(&address, node, &pace, &connected, &messages, reporter, &tell) {
                tell(news);
            }
        };
        let speaker = thread::spawn("ddprun-speaker", speak)?;
        Ok(Self { outbox, verdict, speaker, is_connected, coordinator })
    }

    /// Sends the coordinator a message, as soon as there is a connection.
    pub(crate) fn tell(&self, message: Message) {
        // Without a connection, the news has said so.
        let _ = self.outbox.send(message);
    }

    /// Reports the verdict on this node's workers in a run that has failed, and returns the one on which all nodes agree, if it
    /// comes in time.
    pub(crate) fn agree(&self, own: Option<Verdict>) -> Option<Verdict> {
        self.tell(Message::Report(own));
        // The others' reports may take that long, plus some time to arrive.
        self.verdict.recv_timeout(super::reports::REPORTS + Duration::from_secs(1)).ok()
    }

    /// Says goodbye. If this process hosts the store, waits until the others have done so as well: for a moment, or for
    /// `patience` if workers of other nodes have that long to exit. `interrupted` ends the wait.
    pub(crate) fn leave(self, patience: Duration, mut interrupted: impl FnMut() -> bool) {
        self.tell(Message::Bye);
        let until = Instant::now() + GOODBYE;
        // A node that still looks for the store has nothing to say.
        while self.is_connected.load(Ordering::Relaxed) && !self.speaker.is_finished() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(2));
        }
        let until = until.max(deadline_after(patience));
        if let Some(coordinator) = self.coordinator {
            coordinator.finish(until, &mut interrupted);
        }
    }
}

fn lost(error: &candle_ddp_rendezvous::Error) -> News {
    News::Lost(error.to_string())
}

/// The loss of a store that was there before.
fn gone(error: &candle_ddp_rendezvous::Error) -> News {
    News::Lost(format!(
        "the store of the run is gone, and the nodes have lost each other: the ddprun that hosts it was killed, or its \
         machine cannot be reached any more. Start the run again, from its last checkpoint ({error})"
    ))
}

/// Joins, then sends messages and signs of life until the agent says goodbye.
fn speak(
    address: &Address,
    node: Node,
    pace: &Pace,
    is_connected: &AtomicBool,
    messages: &Receiver<Message>,
    verdict: Sender<Verdict>,
    tell: &(impl Fn(News) + Clone + Send + 'static),
) -> std::result::Result<(), News> {
    // The host of the store may come late; afterwards, it must answer each call at once.
    address.connect(pace.join_timeout)?;
    is_connected.store(true, Ordering::Relaxed);
    // Nobody else uses this client, so everything below goes over one connection, which closes when the agent ends.
    let store = Arc::new(address.connect(pace.patience())?);
    let keys = PrefixStore::new(PREFIX, Arc::clone(&store) as Arc<dyn Store>);
    let inbox = format!("{PREFIX}/{INBOX}");
    let terms = node.terms.clone();
    let join = || -> candle_ddp_rendezvous::Result<(Slot, Welcome)> {
        let slot = u64::try_from(keys.add(SLOTS, 1)? - 1).unwrap_or(0);
        keys.add(&beat_key(slot), 1)?;
        // The coordinator ignores the end of a node that has not joined.
        store.will_to_queue(&inbox, &encode(&(slot, Message::Gone)))?;
        store.queue_push(&inbox, &encode(&(slot, Message::Join(node))))?;
        let key = welcome_key(slot);
        Ok((slot, decode(&key, &keys.get(&key)?)?))
    };
    let (slot, welcome) = join().map_err(|error| lost(&error))?;
    let (from, is_spare) = match welcome {
        Welcome::From { entry, is_spare, version } => {
            // An older ddprun does not look at this one's version.
            if let Some(difference) = (Terms { version, ..terms.clone() }).difference(&terms) {
                return Err(News::Lost(difference.text("here")));
            }
            (entry, is_spare)
        }
        Welcome::Refused { reason } => return Err(News::Lost(reason)),
    };
    tell(News::Joined { slot, is_spare });
    let listener = PrefixStore::new(PREFIX, Arc::new(address.connect(pace.patience())?) as Arc<dyn Store>);
    let told = tell.clone();
    let listen = move || {
        if let Err(error) = listen(&listener, (slot, from), &verdict, &told) {
            told(gone(&error));
        }
    };
    thread::spawn("ddprun-listener", listen).map_err(|error| News::Lost(error.to_string()))?;
    loop {
        let message = match messages.recv_timeout(pace.keep_alive_interval) {
            Ok(message) => Some(message),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        };
        let is_last = message == Some(Message::Bye);
        let say = || -> candle_ddp_rendezvous::Result<()> {
            if let Some(message) = message {
                store.queue_push(&inbox, &encode(&(slot, message)))?;
            }
            keys.add(&beat_key(slot), 1).map(|_| ())
        };
        say().map_err(|error| gone(&error))?;
        if is_last {
            return Ok(());
        }
    }
}

/// Passes on the log from entry `from` on to the agent of node `slot`, until the run has ended.
fn listen(
    keys: &PrefixStore,
    (slot, from): (Slot, u64),
    verdict: &Sender<Verdict>,
    tell: &impl Fn(News),
) -> candle_ddp_rendezvous::Result<()> {
    let read = |key: &str| {
        keys.wait(&[key], Some(Duration::MAX))?;
        keys.get(key)
    };
    for number in from.. {
        let key = entry_key(number);
        let mut entry: Entry = decode(&key, &read(&key)?)?;
        if let Entry::Start(round) = &mut entry {
            round.node_rank = json::read(keys, &node_rank_key(round.attempt, slot))?;
        }
        let (is_failure, is_last) = (matches!(entry, Entry::Failed { signal: None, .. }), entry.is_last());
        tell(News::Entry(entry));
        if is_failure {
            // If the agent has ended without it, nobody listens.
            let _ = verdict.send(decode(VERDICT, &read(VERDICT)?)?);
        }
        if is_last {
            break;
        }
    }
    Ok(())
}
