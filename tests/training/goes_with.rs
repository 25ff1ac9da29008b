//! All pairs of features, as `docs/combining.md` lists them: a pair trains like one process that has the whole batch, also after it has been
//! saved and loaded by another number of ranks, or it is the page's error on every rank.
mod program;

use crate::common::with_virtual_ranks;
use candle_ddp::{ProcessGroup, spawn};
use program::{STEPS, VIRTUAL, Values};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, JoinHandle};

/// So many pairs train at a time.
const AT_A_TIME: usize = 4;

/// The features, and the list of all.
macro_rules! features {
    ($($feature:ident)*) => {
        /// A feature, by the words of the page.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        enum Feature {
            $($feature),*
        }
        use Feature::*;

        const ALL: &[Feature] = &[$($feature),*];
    };
}

features! {
    ShardedOptimizer HybridOptimizer ShardedBlocks HybridBlocks VirtualRanks CommHook Join NoSync Into Count
    BackwardAndStep GradScaler OnNonFinite ReplicaCheck Clipping Adapters Averager Outer Norms Muon SyncBatchNorm WithGrad
    Checkpoint Frozen Evaluation ChannelsLast TwoModels
}

impl Feature {
    /// The page's word for those that cannot be combined with all others.
    fn word(self) -> Option<&'static str> {
        Some(match self {
            ShardedOptimizer | HybridOptimizer => "Sharding::Optimizer",
            ShardedBlocks | HybridBlocks => "Sharding::Blocks",
            VirtualRanks => "InitOptions.virtual_ranks",
            CommHook => "register_comm_hook",
            Join => "join",
            NoSync => "no_sync",
            Into => "Backward.into",
            BackwardAndStep => "backward_and_step",
            GradScaler => "GradScaler",
            SyncBatchNorm => "sync_batch_norm",
            WithGrad => "collectives with a gradient",
            Outer => "PeriodicModelAverager with an outer optimizer",
            _ => return None,
        })
    }

    /// Whether other numbers come out with it.
    fn is_another_training(self) -> bool {
        [Into, Clipping, Adapters, Outer, Norms, Muon, SyncBatchNorm, WithGrad, Frozen, ChannelsLast, TwoModels]
            .contains(&self)
    }

    /// Whether it says the same thing as the other, so that a program has only one of them.
    fn excludes(self, other: Self) -> bool {
        let kinds: [&[Self]; 8] = [
            &[Averager, Outer],
            &[ShardedOptimizer, HybridOptimizer, ShardedBlocks, HybridBlocks],
            &[Norms, Muon],
            &[Into, BackwardAndStep],
            // Which has no such argument.
            &[Clipping, BackwardAndStep],
            &[Count, BackwardAndStep],
            // These are for one model.
            &[TwoModels, BackwardAndStep],
            &[TwoModels, Join],
        ];
        self == other || kinds.iter().any(|kind| kind.contains(&self) && kind.contains(&other))
    }
}

/// A rank's values, or its error.
type Found = Result<Values, String>;
type Job = (Vec<Feature>, Range<usize>, PathBuf);

/// Ranks that train for one pair after the other, since it takes time to make a group.
struct Team {
    jobs: Vec<Sender<Job>>,
    found: Vec<Receiver<Found>>,
    thread: Option<JoinHandle<()>>,
}

impl Team {
    fn new(number: usize, is_virtual: bool) -> Self {
        let (jobs, for_ranks): (Vec<_>, Vec<_>) = (0..number).map(|_| channel::<Job>()).unzip();
        let (of_ranks, found): (Vec<_>, Vec<_>) = (0..number).map(|_| channel()).unzip();
        let ends: Vec<_> = for_ranks.into_iter().zip(of_ranks).map(|ends| Mutex::new(Some(ends))).collect();
        let run = move |pg: ProcessGroup| {
            let (jobs, all_found) = ends[pg.rank()].lock().unwrap().take().unwrap();
            for (with, steps, folder) in jobs {
                let found = program::run(&pg, &with, steps, &folder).map_err(|error| error.to_string());
                // The other ranks hear of an error by this rank's leaving.
                let fails = found.is_err();
                if all_found.send(found).is_err() || fails {
                    break;
                }
            }
            Ok(())
        };
        let thread = thread::spawn(move || {
            let ended = if is_virtual { with_virtual_ranks(VIRTUAL, number, run) } else { spawn(number, run) };
            ended.unwrap();
        });
        Self { jobs, found, thread: Some(thread) }
    }

    fn train(&self, with: &[Feature], steps: &Range<usize>, folder: &Path) -> Vec<Found> {
        for jobs in &self.jobs {
            // A rank that has ended is found below.
            _ = jobs.send((with.to_vec(), steps.clone(), folder.to_path_buf()));
        }
        let found = |found: &Receiver<Found>| found.recv().unwrap_or_else(|_| Err("the rank has ended".to_string()));
        self.found.iter().map(found).collect()
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.jobs.clear();
        // A panic of its has been reported as the error of a rank.
        _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Teams that are free, by their number of ranks, and whether they have virtual ranks.
#[derive(Default)]
struct Teams(Mutex<BTreeMap<(usize, bool), Vec<Team>>>);

impl Teams {
    /// Runs the program on so many ranks, and returns each rank's result.
    fn ranks(&self, number: usize, with: &[Feature], steps: Range<usize>, folder: &Path) -> Vec<Found> {
        let kind = (number, with.contains(&VirtualRanks));
        let free = self.0.lock().unwrap().get_mut(&kind).and_then(Vec::pop);
        let team = free.unwrap_or_else(|| Team::new(kind.0, kind.1));
        let found = team.train(with, &steps, folder);
        if found.iter().all(Result::is_ok) {
            self.0.lock().unwrap().entry(kind).or_default().push(team);
        }
        found
    }
}

/// The page's error for two features, by its table.
fn refusals() -> BTreeMap<(String, String), String> {
    let page = include_str!("../../docs/combining.md");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `")).map(|line| {
        let cells: Vec<_> = line.trim_end_matches(" |").splitn(3, " | ").collect();
        let word = |cell: &str| cell.trim_matches('`').to_string();
        ((word(cells[0]), word(cells[1])), cells[2].replace("\\|", "|"))
    });
    rows.collect()
}

/// All that the pairs have in common.
struct Pairs {
    refusals: BTreeMap<(String, String), String>,
    teams: Teams,
    /// The values of one process, by the features that make it another training.
    of_one: Mutex<BTreeMap<String, Arc<OnceLock<Values>>>>,
}

impl Pairs {
    fn refusal(&self, with: &[Feature]) -> Option<&String> {
        let word = |feature: &Feature| feature.word().unwrap_or_default().to_string();
        let words = (word(&with[0]), word(with.last().unwrap()));
        self.refusals.get(&words).or_else(|| self.refusals.get(&(words.1, words.0)))
    }

    /// The errors of a pair, if they are not the page's.
    fn refuse(&self, with: &[Feature], refusal: &str) -> Option<String> {
        (2..=4).find_map(|number| {
            let folder = tempfile::tempdir().unwrap();
            let found = self.teams.ranks(number, with, 0..1, folder.path());
            let is_right = found.iter().all(|found| found.as_ref().is_err_and(|error| error.contains(refusal)));
            (!is_right).then(|| format!("{with:?} on {number} ranks: {found:?}, not {refusal}"))
        })
    }

    /// The values of one process.
    fn expected(&self, with: &[Feature]) -> Arc<OnceLock<Values>> {
        let splits = [SyncBatchNorm, WithGrad].iter().any(|feature| with.contains(feature));
        let mut of_one = with.to_vec();
        of_one.retain(|feature| feature.is_another_training() || (splits && *feature == NoSync));
        let expected = Arc::clone(self.of_one.lock().unwrap().entry(format!("{of_one:?}")).or_default());
        expected.get_or_init(|| {
            let folder = tempfile::tempdir().unwrap();
            let found = self.teams.ranks(1, &of_one, 0..STEPS, folder.path()).remove(0);
            found.unwrap_or_else(|error| panic!("{of_one:?}: {error}"))
        });
        expected
    }

    /// The difference between a pair's training and one process's, if there is one. Of these numbers of ranks, the first begins, and the second ends it.
    fn train(&self, with: &[Feature], numbers: (usize, usize)) -> Option<String> {
        let expected = self.expected(with);
        let expected = expected.get().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let mut last = Vec::new();
        for (number, steps) in [(numbers.0, 0..2), (numbers.1, 2..STEPS)] {
            let found: Result<Vec<_>, _> = self.teams.ranks(number, with, steps, folder.path()).into_iter().collect();
            match found {
                Err(error) => return Some(format!("{with:?} on {number} ranks: {error}")),
                Ok(found) => last = found,
            }
        }
        let differs = |found: &Values| {
            let mut pairs = found.values().flatten().zip(expected.values().flatten());
            !found.keys().eq(expected.keys()) || pairs.any(|(a, b)| (a - b).abs() > 1e-12)
        };
        last.iter().any(differs).then(|| {
            let values = |name: &str| (last[0].get(name).map(|v| v[0]), expected.get(name).map(|v| v[0]));
            let values: Vec<_> = expected.keys().map(|name| (name, values(name))).collect();
            format!("{with:?}: other values, {values:?}")
        })
    }

    /// The fault of the pair that has this number, if it has one.
    fn check(&self, index: usize, with: &[Feature]) -> Option<String> {
        if let Some(refusal) = self.refusal(with) {
            return self.refuse(with, refusal);
        }
        // Of four ranks, two have a hybrid model together.
        let is_hybrid = with.contains(&HybridOptimizer) || with.contains(&HybridBlocks);
        let numbers = if is_hybrid { [(4, 3), (4, 1), (3, 4), (1, 4)] } else { [(2, 3), (4, 1), (3, 4), (1, 2)] };
        self.train(with, numbers[index % 4])
    }
}

#[test]
fn every_pair_of_features_trains_like_one_process_or_is_the_error_of_the_page() {
    let pairs = Pairs { refusals: refusals(), teams: Teams::default(), of_one: Mutex::default() };
    assert!(pairs.refusals.len() > 10);
    let seconds = |index: usize, first: Feature| {
        let fits = move |second: &Feature| first == *second || !first.excludes(*second);
        ALL[index..].iter().copied().filter(fits).map(move |second| (first, second))
    };
    let all = ALL.iter().copied().enumerate().flat_map(|(index, first)| seconds(index, first));
    let all = all.map(|(first, second)| if first == second { vec![first] } else { vec![first, second] });
    let only = std::env::var("CANDLE_DDP_TEST_PAIR").unwrap_or_default();
    let all: Vec<_> = (1..).zip(all).filter(|(_, with)| format!("{with:?}").contains(&only)).collect();
    let (left, failures) = (Mutex::new(all.iter()), Mutex::new(Vec::new()));
    let next = || left.lock().unwrap().next();
    thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                while let Some((index, with)) = next() {
                    failures.lock().unwrap().extend(pairs.check(*index, with));
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    let no = all.iter().filter(|(_, with)| pairs.refusal(with).is_some()).count();
    println!("{} pairs that train, {no} errors", all.len() - no);
    assert!(failures.is_empty(), "{} of {}:\n{}", failures.len(), all.len(), failures.join("\n"));
}
