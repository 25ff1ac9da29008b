use crate::algorithm::Tuning;
use crate::call::{Call, Channel};
use crate::construction::Construction;
use crate::data_path::DataPath;
use crate::deadline::deadline_after;
use crate::error::Failure;
use crate::group::Group;
use crate::host_monitor;
use crate::operation::Operation;
use crate::options::{CpuOptions, CpuTransport};
use crate::rendezvous::{Secret, Store, loopback};
use crate::standing::Membership;
use crate::tcp::connect::Connections;
use crate::tcp::connector::{Connector, Own};
use crate::tcp::control::Control;
use crate::tcp::door::Door;
use crate::tcp::handshake::HandshakeConfig;
use crate::tcp::monitor;
use crate::work_queue::WorkQueue;
use crate::{Error, Result, thread};
use candle_ddp_base::debug_fields;
use candle_ddp_env::PROCESS;
use candle_ddp_rendezvous::know_waits;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

/// One rank of a group. Ranks on one host share memory; between hosts, data travels over TCP.
///
/// Collectives run in the order in which they are started: with [`run`](WorkQueue::run) on the calling thread if no other call is
/// queued, otherwise on an engine thread. Messages between two ranks have their own order for each pair and direction, and
/// do not wait for collectives.
///
/// The memory of a call is locked only while bytes move. Calls of different channels work at the same time, so their
/// operands must not overlap where one of them is changed: callers check that.
///
/// Reductions take the ranks of each host in order, and then the hosts in the order of their lowest ranks. f16 and bf16
/// are accumulated in f32, and rounded for each host and at the end. So results are bit-identical on all ranks, and in
/// every run with the same ranks on the same hosts.
///
/// The first failure ends the group for all its ranks: a rank that leaves early or makes a different call, a call that
/// needs more data from a rank whose process has ended, or a call that exceeds the time-out. Every rank gets the same
/// cause, as a [`Failure`] that names the culprit. Data that a rank sent before its process ended still arrives.
///
/// Dropping it waits for the calls that were started and then tells the peers that this rank leaves, or, while
/// panicking, that it failed.
pub struct Engine {
    group: Arc<Group>,
    collectives: WorkQueue,
    /// By peer. The queues for this rank itself are never used.
    sends: Vec<WorkQueue>,
    recvs: Vec<WorkQueue>,
    monitors: Vec<JoinHandle<()>>,
}

debug_fields!(Engine: |this| rank = this.rank(), world_size = this.world_size());

impl Engine {
    /// Connects rank `rank` to the other ranks of a group of `world_size`, and returns once all are connected, unless
    /// `construction` ends it early.
    ///
    /// `store` must be shared by all ranks and used by this group only. It is not needed afterwards.
    ///
    /// # Errors
    /// Returns an error for a rank that does not exist, for invalid options, or if the ranks cannot all be connected.
    pub fn new(
        construction: Construction,
        store: Arc<dyn Store>,
        rank: usize,
        world_size: usize,
        options: CpuOptions,
    ) -> Result<Self> {
        if rank >= world_size {
            return Err(Error::RankOutOfRange { rank, world_size });
        }
        if u32::try_from(world_size).is_err() {
            return Err(Error::invalid("world_size", format!("{world_size} ranks cannot be numbered")));
        }
        let CpuOptions { timeout, lost_after, address, transport, segment_bytes, small_bytes, secret, .. } = options;
        let construction_timeout = options.construction_timeout.unwrap_or(timeout);
        let transport = CpuTransport::resolve(transport, PROCESS)?;
        let secret = match secret {
            Some(secret) => Some(secret),
            None => Secret::from_env()?,
        };
        let segment_bytes = segment_bytes.or(PROCESS.number("CANDLE_DDP_CPU_SEGMENT_BYTES")?);
        let small_bytes = small_bytes.or(PROCESS.number("CANDLE_DDP_CPU_SMALL_BYTES")?);
        let tune = |by_default: Tuning| by_default.or(segment_bytes, small_bytes);
        let term = |bytes: Option<usize>| bytes.map_or(u64::MAX, |bytes| bytes as u64);
        let latest = deadline_after(construction_timeout);
        let deadline = construction.deadline.map_or(latest, |deadline| deadline.min(latest));
        let config = HandshakeConfig {
            world_size,
            secret: secret.is_some(),
            segment: term(segment_bytes),
            small: term(small_bytes),
        };
        let connector = Connector {
            own: Own { rank, config, lost_after, timeout: construction_timeout },
            store: &*store,
            secret,
            address: address.unwrap_or_else(loopback),
            deadline,
            construction,
        };
        let making = construction.membership.and_then(Membership::make);
        let note = |_: &Error| {
            // If the job has ended, the program hears it from this error.
            let told = construction.membership.filter(|_| construction.check().is_err());
            told.into_iter().for_each(Membership::tell);
        };
        let DataPath { connections, hosts, shm, layout } = match world_size {
            1 => DataPath::none(),
            _ => {
                let segment = tune(Tuning::SHARED).segment;
                connector.join(transport, segment, options.host.as_deref()).inspect_err(note)?
            }
        };
        // From here on, this rank waits only for ranks that have come.
        drop(making);
        let tuning = match layout {
            None => tune(Tuning::TCP),
            Some(_) if hosts.count() == 1 => tune(Tuning::SHARED),
            Some(layout) => tune(Tuning::of_hosts(hosts.count())).within(layout),
        };
        let Connections { control, door } = connections;
        let links = Control::new(world_size).map_err(|error| Error::io("creating a pipe", error))?;
        for (peer, socket) in control.into_iter().enumerate() {
            socket.map(|socket| links.add(peer, socket, true));
        }
        know_waits();
        let group = Group::new(rank, world_size, timeout, hosts, shm, links);
        let group = match construction.recording {
            Some(recording) => group.recorded(Arc::clone(&recording.recorder)),
            None => group,
        };
        let group = Arc::new(match construction.membership {
            Some(membership) => group.member(membership.clone()),
            None => group,
        });
        if let Some(recording) = construction.recording {
            let group: Weak<Group> = Arc::downgrade(&group);
            recording.register(group);
        }
        let queue_of = |channel| WorkQueue::new(group.clone(), channel, tuning);
        let mut engine = Self {
            collectives: queue_of(Channel::Collectives),
            sends: (0..world_size).map(|peer| queue_of(Channel::SendTo(peer))).collect(),
            recvs: (0..world_size).map(|peer| queue_of(Channel::RecvFrom(peer))).collect(),
            monitors: Vec::new(),
            group,
        };
        engine.start_monitors(door)?;
        // From here on, a failure ends the group, and all ranks are told.
        match engine.collectives.run_first(Call::bare(Operation::Connect), deadline) {
            Ok(()) => {
                if world_size > 1 {
                    connector.forget();
                }
                engine.group.enter_job()?;
                Ok(engine)
            }
            // The peer may have given up before it could tell the group.
            Err(failure @ Failure::PeerGone { .. }) => Err(construction.cause(failure.into())),
            Err(failure) => Err(failure.into()),
        }
    }

    /// Starts the threads that listen to the other ranks: one for other hosts, one for this host.
    fn start_monitors(&mut self, door: Option<Door>) -> Result<()> {
        let rank = self.group.rank;
        if let Some(door) = door {
            self.start_monitor(format!("ddp-{rank}-monitor"), |group| {
                monitor::run(group, door).map_err(|e| e.to_string())
            })?;
        }
        if self.group.shm.is_some() {
            self.start_monitor(format!("ddp-{rank}-host"), host_monitor::run)?;
        }
        Ok(())
    }

    fn start_monitor(
        &mut self,
        name: String,
        run: impl FnOnce(&Group) -> Result<(), String> + Send + 'static,
    ) -> Result<()> {
        let group = self.group.clone();
        let body = move || {
            let reason = match catch_unwind(AssertUnwindSafe(|| run(&group))) {
                Ok(Ok(())) => return,
                Ok(Err(error)) => format!("its monitor cannot listen: {error}"),
                Err(_) => "its monitor panicked".into(),
            };
            group.fail(Failure::PeerFailed { peer: group.rank, reason });
        };
        self.monitors.push(thread::spawn(name, body)?);
        Ok(())
    }

    fn queues(&self) -> impl Iterator<Item = &WorkQueue> {
        std::iter::once(&self.collectives).chain(&self.sends).chain(&self.recvs)
    }

    /// This process's rank in the group.
    #[inline]
    pub fn rank(&self) -> usize {
        self.group.rank
    }

    /// The number of ranks in the group.
    #[inline]
    pub fn world_size(&self) -> usize {
        self.group.world_size
    }

    /// The queue of the calls of `channel`.
    ///
    /// # Errors
    /// Returns [`Error::RankOutOfRange`] for a peer that does not exist, and
    /// [`InvalidArgument`](candle_ddp_base::Error::InvalidArgument) for this rank itself.
    #[inline]
    pub fn queue(&self, channel: Channel) -> Result<&WorkQueue> {
        if let Channel::SendTo(peer) | Channel::RecvFrom(peer) = channel {
            if peer >= self.world_size() {
                return Err(Error::RankOutOfRange { rank: peer, world_size: self.world_size() });
            }
            if peer == self.rank() {
                return Err(Error::invalid(
                    "channel",
                    format!("rank {peer} is this rank itself, which needs no message"),
                ));
            }
        }
        Ok(match channel {
            Channel::Collectives => &self.collectives,
            Channel::SendTo(peer) => &self.sends[peer],
            Channel::RecvFrom(peer) => &self.recvs[peer],
        })
    }

    /// The reason why the group has failed, or why calls of all its ranks can no longer succeed, as far as this rank knows without
    /// asking the others.
    pub fn failure(&self) -> Option<Failure> {
        self.group.failure()
    }

    /// The peers that are known to have ended, or to have left the group after it had failed.
    pub fn gone(&self) -> Vec<usize> {
        self.group.gone()
    }

    /// Ends the group on every rank with `failure`.
    pub fn fail(&self, failure: Failure) {
        self.group.fail(failure);
    }

    /// Ends the group on every rank: this one failed, with `reason`.
    pub fn abort(&self, reason: &str) {
        self.fail(Failure::PeerFailed { peer: self.group.rank, reason: reason.to_string() });
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let group = &self.group;
        if std::thread::panicking() {
            self.abort("its thread panicked");
        }
        // Each call has its own deadline; together they get at most one time-out.
        let deadline = deadline_after(group.timeout);
        if !self.queues().all(|queue| queue.drain(deadline)) {
            self.abort("it left while its calls were not over");
        }
        self.queues().for_each(WorkQueue::close);
        group.leave();
        group.leave_job();
        group.end_monitors();
        for monitor in self.monitors.drain(..) {
            if monitor.join().is_err() {
                log::error!("rank {}: a monitor thread panicked", group.rank);
            }
        }
    }
}

#[cfg(test)]
mod tests;
