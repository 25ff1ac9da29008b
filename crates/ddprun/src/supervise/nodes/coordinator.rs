//! The thread that decides for all nodes of a run. Its state machine is `Run`; this module connects it to the store.
use super::message::{Entry, Message, Slot, Welcome};
use super::run::{Action, Run};
use super::{INBOX, PREFIX, VERDICT, beat_key, decode, encode, entry_key, node_rank_key, welcome_key};
use crate::command::{Pace, Rendezvous, version};
use crate::console::message;
use crate::error::Result;
use crate::signal;
use crate::supervise::worker::Exit;
use crate::verdict::{How, Outcome, Verdict, Verdicts};
use crate::view::status::{RUN_STATUS, RunStatus};
use candle_ddp_base::host::host_name;
use candle_ddp_base::thread;
use candle_ddp_base::warnings::Warnings;
use candle_ddp_rendezvous::liveness::Silence;
use candle_ddp_rendezvous::{BEGUN, PrefixStore, RUN_ID, Secret, Store, TcpStore, TcpStoreOptions, TcpStoreServer};
use signal_hook::consts::SIGTERM;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The time-out of a call to the store, which is in this process.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How long the other nodes may take to end before the user is told.
const ANNOUNCE_AFTER: Duration = Duration::from_secs(1);
/// How often the status is published if it changes. It lists all nodes, so while they join, one for each change would cost as much
/// as the square of their number.
const STATUS_INTERVAL: Duration = Duration::from_secs(1);

/// How many messages are heard before the signs of life and the time get their turn.
const MESSAGES: usize = 1024;

/// The coordinator's thread.
pub(crate) struct Coordinator {
    /// Returns the run's exit code, and the reason.
    thread: JoinHandle<(u8, String)>,
    /// Whether nodes may come that do not know that the run was called off.
    awaits_news: Arc<AtomicBool>,
}

impl Coordinator {
    /// Coordinates the run whose store is `server`, which requires `secret`, and keeps its `verdicts`. If none of the nodes hosts the
    /// store, the run ends on all of them once `alone` has the number of a signal.
    pub(crate) fn start(
        server: &TcpStoreServer,
        secret: Option<Secret>,
        rendezvous: Rendezvous,
        verdicts: Verdicts,
        alone: Option<Arc<AtomicUsize>>,
    ) -> Result<Self> {
        let options = TcpStoreOptions { timeout: TIMEOUT, secret };
        let store = Arc::new(TcpStore::connect_with(&server.own_host(), server.port(), options)?);
        let keys = PrefixStore::new(PREFIX, Arc::clone(&store) as Arc<dyn Store>);
        let run = Run::new(rendezvous, Arc::clone(&store) as Arc<dyn Store>);
        let awaits_news = Arc::new(AtomicBool::new(false));
        let desk = Desk {
            store,
            keys,
            entries: 0,
            beats: BTreeMap::new(),
            told: None,
            tell_at: Instant::now(),
            warnings: Warnings::new("the coordinator of the nodes"),
            end: None,
            verdict: None,
            verdicts,
            awaits_news: Arc::clone(&awaits_news),
        };
        let work = move || serve(desk, run, alone.as_deref());
        Ok(Self { thread: thread::spawn("ddprun-coordinator", work)?, awaits_news })
    }

    /// Waits until the run is over. Returns its exit code, and the reason.
    pub(crate) fn serve_alone(self) -> (u8, String) {
        self.thread.join().unwrap_or_else(|_| (1, "the coordinator of the nodes has ended: this is a bug".to_string()))
    }

    /// Waits until no agent needs the coordinator any more, but no longer than `until`, or until `interrupted`.
    pub(super) fn finish(self, until: Instant, interrupted: &mut impl FnMut() -> bool) {
        let mut announce = Some(Instant::now() + ANNOUNCE_AFTER);
        let awaits_news = || self.awaits_news.load(Ordering::Relaxed);
        while !self.thread.is_finished() && (Instant::now() < until || awaits_news()) && !interrupted() {
            if announce.take_if(|at| *at <= Instant::now()).is_some() {
                message(match awaits_news() {
                    true => "waiting for the other nodes for a moment, to tell them that the run does not start",
                    false => {
                        "waiting for the other nodes, which need the store on this one until their workers have exited"
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn serve(mut desk: Desk, mut run: Run, alone: Option<&AtomicUsize>) -> (u8, String) {
    let Pace { keep_alive_interval, keep_alive_max_attempt, .. } = run.pace;
    let mut tick = Instant::now() + keep_alive_interval;
    run.has_host = alone.is_some();
    while !run.is_over() {
        let number = alone.map_or(0, |signal| signal.load(Ordering::Relaxed));
        if number > 0 && !run.has_ended() {
            let number = i32::try_from(number).unwrap_or(SIGTERM);
            let text = format!("the host of the store received {}", signal::name(number));
            let stopped = Verdict::now(How::Stopped, Exit::Signal(number).code(), text);
            run.fail(Verdict { signal: Some(number), host: Some(host_name()), ..stopped }, None);
        }
        let now = Instant::now();
        let worked = if now >= tick {
            tick = now + keep_alive_interval;
            desk.hear_beats(&mut run, keep_alive_max_attempt)
        } else {
            desk.hear_messages(&mut run, tick.min(desk.tell_at).saturating_duration_since(now))
        };
        run.on_time(Instant::now());
        desk.awaits_news.store(run.awaits_news(), Ordering::Relaxed);
        if let Err(error) = worked.and_then(|()| desk.carry_out(&mut run)).and_then(|()| desk.tell(&run)) {
            // The store is in this process, so only the end of the process takes it away.
            log::debug!("the coordinator: {error}");
            return (1, error.to_string());
        }
    }
    let (code, reason) = desk.end.take().unwrap_or_else(|| (0, "the run has ended".to_string()));
    if code == 0 || run.has_saved() {
        desk.verdicts.succeed(run.restart_count);
        return (0, reason);
    }
    if let Some(verdict) = desk.verdict.or(run.why) {
        desk.verdicts.add(verdict, Outcome::Failed, run.restart_count);
    }
    (code, reason)
}

struct Desk {
    store: Arc<TcpStore>,
    keys: PrefixStore,
    /// The number of entries of the log.
    entries: u64,
    /// The signs of life of each node.
    beats: BTreeMap<Slot, Silence>,
    /// The last published status of the run.
    told: Option<RunStatus>,
    /// When to publish it again.
    tell_at: Instant,
    warnings: Warnings,
    /// The exit code of the run, and the reason, once it has ended.
    end: Option<(u8, String)>,
    verdict: Option<Verdict>,
    verdicts: Verdicts,
    awaits_news: Arc<AtomicBool>,
}

impl Desk {
    fn hear_messages(&mut self, run: &mut Run, timeout: Duration) -> candle_ddp_rendezvous::Result<()> {
        match self.keys.wait(&[INBOX], Some(timeout)) {
            Err(candle_ddp_rendezvous::Error::StoreTimeout { .. }) => return Ok(()),
            result => result?,
        }
        for _ in 0..MESSAGES {
            let Some(bytes) = self.store.queue_pop(&format!("{PREFIX}/{INBOX}"))? else { break };
            match decode::<(Slot, Message)>(INBOX, &bytes) {
                Ok((slot, message)) => run.on_message(slot, message),
                Err(error) => self.warnings.warn(format_args!("{error}")),
            }
        }
        Ok(())
    }

    fn hear_beats(&mut self, run: &mut Run, most: u32) -> candle_ddp_rendezvous::Result<()> {
        let slots: Vec<Slot> = run.nodes.keys().copied().collect();
        self.beats.retain(|slot, _| slots.contains(slot));
        let keys: Vec<String> = slots.iter().map(|slot| beat_key(*slot)).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        if keys.is_empty() {
            return Ok(());
        }
        // Agents give the first sign of life before they join.
        for (slot, beat) in slots.into_iter().zip(self.keys.multi_get(&keys)?) {
            match self.beats.entry(slot).or_default().saw(&beat) {
                0 => run.on_beat(slot),
                missed if missed >= most => run.on_silence(slot),
                _ => {}
            }
        }
        Ok(())
    }

    fn carry_out(&mut self, run: &mut Run) -> candle_ddp_rendezvous::Result<()> {
        for action in std::mem::take(&mut run.actions) {
            match action {
                Action::Write(entry) => {
                    match &entry {
                        Entry::Failed { reason, code, .. } => self.end = Some((*code, reason.clone())),
                        Entry::Failure(verdict) => {
                            self.verdicts.add((**verdict).clone(), Outcome::Continues, run.restart_count);
                        }
                        Entry::Done => self.end = Some((0, "the run has ended well".to_string())),
                        _ => {}
                    }
                    self.write(&entry)?;
                }
                Action::Start(round, slots) => {
                    let key_of = |(rank, slot): (usize, &Slot)| (node_rank_key(round.attempt, *slot), encode(&rank));
                    let ranks: Vec<(String, Vec<u8>)> = slots.iter().enumerate().map(key_of).collect();
                    let pairs: Vec<(&str, &[u8])> = ranks.iter().map(|(key, rank)| (&key[..], &rank[..])).collect();
                    // Agents look for their ranks when they read the entry.
                    self.keys.multi_set(&pairs)?;
                    self.write(&Entry::Start(round))?;
                }
                Action::Welcome(slot, refusal) => {
                    let welcome = match refusal {
                        None => Welcome::From { entry: self.entries, is_spare: run.is_spare(slot), version: version() },
                        Some(reason) => Welcome::Refused { reason },
                    };
                    self.keys.set(&welcome_key(slot), &encode(&welcome))?;
                }
                Action::Clear => self.store.delete_all_except(&[PREFIX, RUN_ID, RUN_STATUS, BEGUN])?,
                Action::Conclude(verdict) => {
                    // Before the nodes know, and end.
                    self.tell_at = Instant::now();
                    self.tell(run)?;
                    self.keys.set(VERDICT, &encode(&verdict))?;
                    self.end = Some((verdict.code, verdict.summary()));
                    self.verdict = Some(*verdict);
                }
            }
        }
        Ok(())
    }

    /// Writes an entry of the log.
    fn write(&mut self, entry: &Entry) -> candle_ddp_rendezvous::Result<()> {
        self.keys.set(&entry_key(self.entries), &encode(entry))?;
        self.entries += 1;
        Ok(())
    }

    /// Publishes the status of the run, if it is time and the status has changed.
    fn tell(&mut self, run: &Run) -> candle_ddp_rendezvous::Result<()> {
        let now = Instant::now();
        if now < self.tell_at {
            return Ok(());
        }
        self.tell_at = now + STATUS_INTERVAL;
        let status = run.status();
        if self.told.as_ref() != Some(&status) {
            self.store.set(RUN_STATUS, &encode(&status))?;
            self.told = Some(status);
        }
        Ok(())
    }
}
