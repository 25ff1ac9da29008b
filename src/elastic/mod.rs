//! Training that continues in the surviving processes when a rank dies.
//!
//! [`run`] makes the process group and calls the training loop with it. When the group fails because a peer is gone,
//! the loop returns the group's error. The surviving ranks then form another group, either without the dead process or
//! with one that takes its place. They return to the last commit of the rank that is furthest ahead, and call the loop
//! again. Processes, models and data stay where they are. `docs/elastic.md` describes the rest.
mod membership;
mod options;
mod placement;
mod shard;
mod shards;
mod state;
mod synchronise;
#[cfg(test)]
mod tests;

pub use options::ElasticOptions;
pub use state::State;

use crate::error::Failure;
use crate::panic::panic_message;
use crate::process_group::ProcessGroup;
use crate::state::Parts;
use crate::warnings::warn_aloud;
use crate::{Error, Result};
use membership::Membership;
use shards::ELASTIC;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};
use synchronise::{Entrance, synchronise};

/// Joins this process to the others of its job and calls `train`, repeatedly if necessary, until it has succeeded on
/// all ranks: Horovod Elastic's `hvd.elastic.run`.
///
/// ```
/// use candle_ddp::elastic::{self, State};
/// use candle_ddp::nn::{Linear, linear};
/// use candle_ddp::prelude::*;
///
/// /// Everything that must be the same on all ranks for training to continue.
/// struct Training {
///     varmap: VarMap,
///     optimizer: AdamW,
///     step: u64,
/// }
///
/// impl Parts for Training {
///     fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
///         vec![("model", &mut self.varmap), ("optimizer", &mut self.optimizer), ("step", &mut self.step)]
///     }
/// }
///
/// fn net(vb: VarBuilder) -> candle_core::Result<Linear> {
///     linear(4, 1, vb)
/// }
///
/// fn main() -> Result<()> {
///     // Before there is a group: the variables, and an optimizer over them.
///     let varmap = VarMap::new();
///     net(VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?;
///     let optimizer = AdamW::new(&varmap, ParamsAdamW::default())?;
///     let mut state = State::new(Training { varmap, optimizer, step: 0 });
///     elastic::run(InitOptions::default(), &mut state, train)
/// }
///
/// /// Called with the first group, and again with each group after it.
/// fn train(pg: &ProcessGroup, state: &mut State<Training>) -> Result<()> {
///     let ddp = DistributedDataParallel::new(pg, &state.varmap, net)?;
///     while state.step < 10 {
///         let x = Tensor::randn(0f32, 1., (8, 4), pg.device())?; // your batch of this step and rank
///         let grads = ddp.backward(&ddp.forward(&x)?.sqr()?.mean_all()?)?;
///         state.optimizer.step(&grads)?;
///         state.step += 1;
///         state.commit()?; // from here on, training continues when a rank dies
///     }
///     Ok(())
/// }
/// ```
///
/// `ddprun --nproc-per-node 4 --max-restarts 5 target/release/my-training` starts it. By itself, it is the only rank.
/// `train` gets the group of the present generation of ranks, and `state` as of the last commit. It makes everything
/// that depends on the group, such as [`DistributedDataParallel`](crate::DistributedDataParallel) and samplers, and
/// calls [`State::commit`] after each step. When it is called again, the world size and this process's rank may have
/// changed.
///
/// When a rank dies, the launcher decides:
/// - `ddprun --max-restarts N` starts a process in its place, which has the same rank and gets the state from the
///   others. When all restarts are used up, the others continue without it, down to [`ElasticOptions::min_world_size`].
///   When all ranks die at once, no commit survives: the run continues from the program's checkpoint
///   ([`State::on_total_loss`]), or starts from scratch and says so, unless [`ElasticOptions::start_over`] is false.
/// - Under Slurm (without `--kill-on-bad-exit`), mpirun or by hand, the surviving ranks agree through the store and
///   continue without it, down to `min_world_size`. If rank 0 hosted the store (`env://`, `tcp://`), its death ends the
///   run.
/// - torchrun restarts all ranks. `run` then returns the group's error, and the new processes continue from the
///   program's checkpoint, as after the loss of all ranks.
///
/// A process may call this only once.
///
/// # Errors
/// An error of the program itself, that is, one that `train` returns while the group is well, is not retried: the other
/// ranks get it as [`Failure::PeerFailed`]. The same holds for a panic, and for [`Failure::Desync`] and
/// [`Failure::TimedOut`], after which all ranks still exist. When too few ranks remain, or the store is gone, every
/// rank gets an error that says so, at the latest after [`InitOptions::timeout`](crate::InitOptions::timeout).
pub fn run<S, T, E>(
    options: impl Into<ElasticOptions>,
    state: &mut State<S>,
    mut train: impl FnMut(&ProcessGroup, &mut State<S>) -> Result<T, E>,
) -> Result<T, E>
where
    S: Parts,
    E: From<Error> + Display,
{
    let mut membership = Membership::open(options.into())?;
    state.commit_first()?;
    let (mut lost, mut value, mut is_new) = (None, None, true);
    loop {
        let Some(pg) = membership.next(lost.as_ref())? else {
            // All ranks have finished, this one included.
            return value.ok_or_else(|| finished_without().into());
        };
        if let Some(lost) = lost.as_ref().filter(|_| pg.rank() == 0) {
            let (generation, ranks) = (membership.generation(), pg.world_size());
            warn_aloud(format_args!(
                "generation {generation} begins with {ranks} rank(s), since the last one has ended: {lost}"
            ));
        }
        let trained = catch_unwind(AssertUnwindSafe(|| -> Result<T, E> {
            let entrance = Entrance {
                generation: membership.generation(),
                is_new,
                has_begun: is_new && membership.has_begun()?,
                start_over: membership.starts_over(),
            };
            synchronise(state, &pg, entrance)?;
            if is_new {
                membership.note_begun()?;
            }
            is_new = false;
            // Until all ranks have the commit, it may be lost with a single one.
            ELASTIC.during(|| pg.barrier())?;
            if !membership.continues() {
                // Nobody continues without this rank.
                state.shards.unlink();
            }
            train(&pg, state)
        }));
        state.shards.unlink();
        lost = match trained {
            Ok(Ok(done)) => {
                let done = value.insert(done);
                if membership.finish(&pg)? {
                    let _ = done;
                    return value.ok_or_else(|| finished_without().into());
                }
                failure_of(&pg)
            }
            Ok(Err(error)) => {
                match failure_of(&pg).filter(|failure| membership.is_superseded() || is_lost_peer(failure, &pg)) {
                    Some(failure) if membership.continues() => Some(failure),
                    _ => {
                        fail(&membership, &pg, &format!("{error:#}"));
                        return Err(error);
                    }
                }
            }
            Err(panic) => {
                fail(&membership, &pg, &panic_message(&*panic));
                resume_unwind(panic)
            }
        };
        if let Some(lost) = &lost {
            let (rank, generation) = (membership.rank(), membership.generation());
            log::info!("rank {rank}: generation {generation} has ended: {lost}");
        }
        membership.leave(pg);
    }
}

fn finished_without() -> Error {
    Error::RankFailed { rank: 0, reason: "all other ranks have finished before this one began".to_string() }
}

/// The reason why the group has ended. This rank may learn of it a moment after the error that it has caused: in a group that was split
/// off, ranks that know it have left or failed.
fn failure_of(pg: &ProcessGroup) -> Option<Error> {
    const PATIENCE: Duration = Duration::from_millis(500);
    /// A rank that has left such a group because the run's group has failed ends the run's group as soon as its program returns.
    const PATIENCE_FOR_OTHERS: Duration = Duration::from_secs(30);
    let since = Instant::now();
    loop {
        let failure = pg.end_of_job();
        let patience = if pg.has_echo() { PATIENCE_FOR_OTHERS.min(pg.timeout()) } else { PATIENCE };
        if failure.is_some() || since.elapsed() >= patience {
            return failure;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether the group may have failed because a peer is gone. A peer's own error looks the same here: the log has it.
fn is_lost_peer(failure: &Error, pg: &ProcessGroup) -> bool {
    match failure {
        Error::Group(Failure::Desync { .. } | Failure::TimedOut { .. }) => false,
        Error::Group(Failure::PeerFailed { peer, .. }) if *peer == pg.rank() => !pg.was_aborted(),
        // If no call has said so, this rank's program has failed by itself, and the others have only noticed that it left a group.
        Error::Group(Failure::PeerFailed { .. } | Failure::PeerLeft { .. }) => pg.has_echo(),
        _ => true,
    }
}

/// Ends the run on all ranks.
fn fail(membership: &Membership, pg: &ProcessGroup, reason: &str) {
    // The log comes first, so that any rank that sees the group fail finds the reason there.
    membership.fail(reason);
    pg.fail(reason);
    let _ = membership.hear_last();
}
