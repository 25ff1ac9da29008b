//! How many blocks the kernels of a communicator may have, and whether those of all communicators find room on their GPU at once.
//!
//! A kernel of NCCL waits for other ranks, and begins when the GPU has room for all of its blocks, each of which takes a multiprocessor. Ranks
//! launch the calls of different communicators in different orders. So all of them must be able to run at once: otherwise kernels that wait
//! for other ranks keep out the ones for which those wait.
use super::NcclOptions;
use crate::backend::Role;
use crate::panic::lock;
use crate::warnings::warn_aloud;
use crate::{Result, rendezvous};
use candle_ddp_env::PROCESS;
use std::ffi::c_int;
use std::sync::{Mutex, Once};

/// NCCL's variable with which kernels start in the order of their launches.
const ORDER: &str = "NCCL_LAUNCH_ORDER_IMPLICIT";
/// NCCL's variable that counts more than the limit of any communicator.
const MOST: &str = "NCCL_MAX_CTAS";

/// The purpose of a communicator, which decides how many blocks its kernels may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Limit {
    /// A group that was not made from another one.
    Main,
    /// A group that was made from another one.
    Of(Role),
    /// Messages from one rank to another.
    Messages,
}

impl Limit {
    /// Whether ranks make its calls at other times than those of the group to which it belongs.
    pub(super) fn is_companion(self) -> bool {
        matches!(self, Self::Of(Role::Companion | Role::Gathers) | Self::Messages)
    }

    fn name(self) -> &'static str {
        match self {
            Self::Main => "a group",
            Self::Of(Role::Group) => "a sub-group",
            Self::Of(Role::Copies) => "a group of copies",
            Self::Of(Role::Companion) => "a companion",
            Self::Of(Role::Gathers) => "the gathers of blocks",
            Self::Messages => "messages",
        }
    }
}

/// The least and the greatest number of blocks of a communicator's kernels. `None`: NCCL chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ctas {
    pub(super) least: Option<u32>,
    pub(super) most: Option<u32>,
}

impl Ctas {
    /// The greatest number that NCCL chooses.
    const CHOSEN: u32 = 32;
    /// Few, of which many communicators find room.
    const FEW: u32 = 4;
    /// As many as NVLink needs for most of its rate, and a network.
    const ENOUGH: u32 = 16;

    /// On the rank with the fewest `multiprocessors`, since NCCL wants the same numbers on all ranks. A group, its parts, a companion and the
    /// gathers of blocks have them all together, from 64 on.
    pub(super) fn new(options: &NcclOptions, limit: Limit, multiprocessors: u32) -> Self {
        /// From then on, the gathers of blocks find room for more.
        const MANY: u32 = 100;
        let own = match limit {
            Limit::Main => (multiprocessors / 2).min(Self::CHOSEN),
            Limit::Of(Role::Group) => (multiprocessors / 4).min(Self::CHOSEN),
            Limit::Of(Role::Copies) => (multiprocessors / 8).min(Self::ENOUGH),
            Limit::Of(Role::Gathers) if multiprocessors >= MANY => Self::ENOUGH,
            Limit::Of(Role::Companion | Role::Gathers) | Limit::Messages => Self::FEW,
        };
        let few = matches!(limit, Limit::Of(Role::Companion) | Limit::Messages);
        let least = if few { Some(1) } else { options.min_ctas };
        let wanted = own.max(1).max(least.unwrap_or(1));
        let most = options.max_ctas.map_or(wanted, |most| most.min(wanted));
        let is_free = limit == Limit::Main && own == Self::CHOSEN;
        Self { least: least.map(|least| least.min(most)), most: if is_free { options.max_ctas } else { Some(most) } }
    }

    /// The numbers in the form of NCCL's configuration.
    pub(super) fn numbers(self) -> [c_int; 2] {
        [self.least, self.most].map(number)
    }
}

/// A number in the form of NCCL's configuration.
pub(super) fn number(own: Option<u32>) -> c_int {
    const UNDEFINED: c_int = c_int::MIN;
    own.map_or(UNDEFINED, |own| c_int::try_from(own).unwrap_or(c_int::MAX))
}

/// A communicator whose kernels may run on a GPU.
struct Living {
    number: u64,
    device: usize,
    limit: Limit,
    world_size: usize,
    blocks: u32,
}

/// The communicators of this process, and the number of the next one.
static LIVING: Mutex<(Vec<Living>, u64)> = Mutex::new((Vec::new(), 0));

/// The room of a communicator's kernels on its GPU, as long as it lives.
pub(super) struct Room(u64);

impl Room {
    /// Warns once, on rank 0 of the group, if all communicators of the GPU may need more than it has.
    pub(super) fn take(
        device: usize,
        [rank, world_size]: [usize; 2],
        (limit, ctas): (Limit, Ctas),
        multiprocessors: u32,
    ) -> Self {
        static SAID: Once = Once::new();
        let forced = PROCESS.raw(MOST).and_then(|value| value.trim().parse().ok());
        let blocks = forced.or(ctas.most).unwrap_or(Ctas::CHOSEN);
        let mut living = lock(&LIVING);
        let (all, next) = &mut *living;
        let number = *next;
        *next += 1;
        all.push(Living { number, device, limit, world_size, blocks });
        let warning = crowd(all.iter().filter(|other| other.device == device), multiprocessors);
        drop(living);
        if let Some(warning) = warning.filter(|_| rank == 0) {
            SAID.call_once(|| warn_aloud(format_args!("{warning}")));
        }
        Self(number)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        lock(&LIVING).0.retain(|living| living.number != self.0);
    }
}

/// A warning if the kernels of these communicators may not find room on a GPU at once. In a world of one, none waits for another rank.
fn crowd<'a>(living: impl Iterator<Item = &'a Living>, multiprocessors: u32) -> Option<String> {
    let living: Vec<_> = living.filter(|living| living.world_size > 1).collect();
    let sum: u32 = living.iter().map(|living| living.blocks).sum();
    if sum <= multiprocessors {
        return None;
    }
    let each = (multiprocessors / living.len() as u32).max(1);
    let names: Vec<_> = living
        .iter()
        .map(|Living { limit, world_size, blocks, .. }| format!("{} of {world_size} ranks: {blocks}", limit.name()))
        .collect();
    Some(format!(
        "NCCL's kernels of a GPU may take {sum} multiprocessors at once, but it has {multiprocessors}: if ranks use these groups at the same time, \
         in different orders, they may wait for each other for ever. Make fewer groups, or set NcclOptions::max_ctas, or {MOST}, which counts more, to {each} ({})",
        names.join(", ")
    ))
}

/// Refuses a further communicator on the GPU if NCCL orders the kernels of all communicators by the time of their launch, which differs between
/// ranks: they would wait for each other, or NCCL would complain of threads that race.
pub(super) fn check_order(device: usize) -> Result<()> {
    let Some(value) = PROCESS.raw(ORDER).filter(|value| !["", "0"].contains(&value.trim())) else { return Ok(()) };
    if !lock(&LIVING).0.iter().any(|living| living.device == device) {
        return Ok(());
    }
    let reason = "NCCL would order the calls of all groups of a GPU by the time of their launch, but each group has its own thread for that, and \
                  the times differ between ranks: unset it, or use one group without messages, SyncBatchNorm or sharding";
    Err(rendezvous::Error::InvalidEnvironment { variable: ORDER.to_string(), value, reason: reason.to_string() }.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Limit; 6] = [
        Limit::Main,
        Limit::Of(Role::Group),
        Limit::Of(Role::Copies),
        Limit::Of(Role::Companion),
        Limit::Of(Role::Gathers),
        Limit::Messages,
    ];

    fn most(options: &NcclOptions, multiprocessors: u32) -> [Option<u32>; 6] {
        ALL.map(|limit| Ctas::new(options, limit, multiprocessors).most)
    }

    #[test]
    fn the_limits_of_a_hybrid_model_add_up() {
        let options = NcclOptions::default();
        assert_eq!(most(&options, 132), [None, Some(32), Some(16), Some(4), Some(16), Some(4)]);
        assert_eq!(most(&options, 80), [None, Some(20), Some(10), Some(4), Some(4), Some(4)]);
        assert_eq!(most(&options, 48), [Some(24), Some(12), Some(6), Some(4), Some(4), Some(4)]);
        for multiprocessors in 64..200 {
            let sum: u32 = most(&options, multiprocessors)[..5].iter().map(|most| most.unwrap_or(Ctas::CHOSEN)).sum();
            assert!(sum <= multiprocessors, "{sum} of {multiprocessors}");
        }
        assert_eq!(most(&options, 0), [1, 1, 1, 4, 4, 4].map(Some));
    }

    #[test]
    fn options_limit_all_and_raise_all_but_companions() {
        let few = NcclOptions { max_ctas: Some(8), min_ctas: Some(2), ..Default::default() };
        assert_eq!(most(&few, 132), [8, 8, 8, 4, 8, 4].map(Some));
        let least = ALL.map(|limit| Ctas::new(&few, limit, 132).least);
        assert_eq!(least, [2, 2, 2, 1, 2, 1].map(Some));
        let many = NcclOptions { min_ctas: Some(24), ..Default::default() };
        assert_eq!(most(&many, 132), [None, Some(32), Some(24), Some(4), Some(24), Some(4)]);
        let one = NcclOptions { max_ctas: Some(1), min_ctas: Some(2), ..Default::default() };
        assert_eq!(Ctas::new(&one, Limit::Of(Role::Group), 132).numbers(), [1, 1]);
    }

    #[test]
    fn a_crowd_is_a_warning_that_names_the_groups() {
        let living = |limit, world_size, blocks| Living { number: 0, device: 0, limit, world_size, blocks };
        let mut all =
            vec![living(Limit::Main, 4, 32), living(Limit::Of(Role::Group), 2, 32), living(Limit::Main, 1, 32)];
        assert_eq!(crowd(all.iter(), 64), None);
        all.push(living(Limit::Messages, 2, 4));
        let warning = crowd(all.iter(), 64).unwrap();
        let named = "(a group of 4 ranks: 32, a sub-group of 2 ranks: 32, messages of 2 ranks: 4)";
        assert!(
            warning.contains("68 multiprocessors at once, but it has 64") && warning.contains("to 21 ("),
            "{warning}"
        );
        assert!(warning.ends_with(named), "{warning}");
    }
}
