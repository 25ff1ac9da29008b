//! Which rank holds the others up.
//!
//! Hosts have different clocks, so nobody compares the times at which ranks come to a collective. A rank reports for how long its
//! program has stood still until the last of the others had come. Those that the others wait for wait least.
use super::snapshot::Snapshot;
use candle_ddp_rendezvous::RankStatus;

/// The shortest time to judge: this many steps of every rank, and seconds, in which each reports several times. Two in a row must
/// agree, so that something that happens once, such as a checkpoint of rank 0, is not said.
const STEPS: u64 = 50;
const SECONDS: f64 = 5.;
/// The share of their time that the others must lose.
const COSTLY: f64 = 0.1;

/// Follows the waits of a run's ranks.
#[derive(Default)]
pub(crate) struct SlowRanks {
    /// The report of each rank at the beginning of the time that is judged next.
    from: Vec<(usize, RankStatus)>,
    /// Those that were slow in the last such time, and those of whom the user knows.
    last: Vec<usize>,
    told: Vec<usize>,
}

/// The steps and waits of a rank in some time, such as since its last report that counts.
pub(crate) struct Since {
    pub(crate) rank: usize,
    pub(crate) host: String,
    /// The share of its time for which it waited.
    pub(crate) waited: f64,
    pub(crate) steps: u64,
}

/// Names the ranks that have held the others up, if they have cost these much time.
pub(crate) fn holdup(ranks: &mut [Since]) -> Option<String> {
    slow(ranks).map(|(slow, others)| describe(slow, others))
}

impl SlowRanks {
    /// Looks at the newest reports. Returns what the user should know, once for the same ranks.
    pub(crate) fn look(&mut self, snapshot: &Snapshot) -> Option<String> {
        let told = |(rank, told): &(usize, Option<RankStatus>)| Some((*rank, told.clone()?));
        let now: Vec<(usize, RankStatus)> = snapshot.ranks.iter().map(told).collect::<Option<_>>()?;
        let is_same = |(old, new): (&(usize, RankStatus), &(usize, RankStatus))| {
            let process =
                |(rank, told): &(usize, RankStatus)| (*rank, told.pid, told.generation, told.waited.is_some());
            process(old) == process(new)
        };
        if self.from.len() != now.len() || !self.from.iter().zip(&now).all(is_same) {
            self.from = now;
            self.last.clear();
            return None;
        }
        let mut ranks: Vec<Since> = self.from.iter().zip(&now).map(since).collect::<Option<_>>()?;
        self.from = now;
        let slow = slow(&mut ranks);
        let list: Vec<usize> = slow.map_or_else(Vec::new, |(slow, ..)| slow.iter().map(|of| of.rank).collect());
        let is_confirmed = self.last == list;
        self.last = list;
        let (slow, others) = slow.filter(|_| is_confirmed && self.last != self.told)?;
        self.told.clone_from(&self.last);
        Some(describe(slow, others))
    }
}

/// Returns `None` while the time is too short, or if the rank's engine does not know its waits.
fn since(((rank, from), (_, to)): (&(usize, RankStatus), &(usize, RankStatus))) -> Option<Since> {
    let (steps, seconds) = (to.steps.checked_sub(from.steps)?, to.trained - from.trained);
    let waited = to.waited? - from.waited?;
    let is_enough = steps >= STEPS && seconds >= SECONDS;
    is_enough.then(|| Since { rank: *rank, host: to.host.clone(), waited: waited / seconds, steps })
}

/// The ranks that the others wait for, if these lose much time: those below the widest gap between two ranks' waits, if they are not
/// more than half of all. Both parts are in the order of their ranks.
fn slow(ranks: &mut [Since]) -> Option<(&[Since], &[Since])> {
    ranks.sort_by(|a, b| a.waited.total_cmp(&b.waited));
    let gap = |below: &usize| ranks[*below].waited - ranks[below - 1].waited;
    let widest = (1..ranks.len()).max_by(|a, b| gap(a).total_cmp(&gap(b)))?;
    if gap(&widest) <= COSTLY || 2 * widest > ranks.len() {
        return None;
    }
    let (slow, others) = ranks.split_at_mut(widest);
    slow.sort_by_key(|of| of.rank);
    Some((slow, others))
}

fn describe(slow: &[Since], others: &[Since]) -> String {
    let mean = |ranks: &[Since]| ranks.iter().map(|of| of.waited).sum::<f64>() / ranks.len() as f64;
    let hosts: Vec<&str> = slow.iter().map(|of| of.host.as_str()).collect();
    let is_one_host = hosts.iter().all(|host| *host == hosts[0]);
    let names: Vec<String> = match is_one_host {
        true => slow.iter().map(|of| of.rank.to_string()).collect(),
        false => slow.iter().map(|of| format!("{} on {}", of.rank, of.host)).collect(),
    };
    let on = if is_one_host { format!(" on {}", hosts[0]) } else { String::new() };
    let (word, verb) = if slow.len() == 1 { ("rank", "holds") } else { ("ranks", "hold") };
    let [lost, waited] = [others, slow].map(|ranks| 100. * mean(ranks));
    let steps = others.iter().map(|of| of.steps).min().unwrap_or(0);
    format!(
        "{word} {}{on} {verb} the others up: over the last {steps} steps, these spent {lost:.0} % of their time in collectives \
         until {word} {} came, which waited for {waited:.0} %. See \"One rank is slow\" in candle-ddp's docs/ranks_that_differ.md",
        names.join(", "),
        slow.iter().map(|of| of.rank.to_string()).collect::<Vec<_>>().join(", "),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::status::RunStatus;

    const STEP: f64 = 0.2;

    /// A snapshot after `steps` steps of 0.2 s; of each rank, its host, its process, and the share of its time for which it waits.
    fn at(steps: u64, ranks: &[(&str, u32, Option<f64>)]) -> Snapshot {
        let trained = steps as f64 * STEP;
        let told = |&(host, pid, waiting): &(&str, u32, Option<f64>)| RankStatus {
            host: host.to_string(),
            pid,
            steps,
            trained,
            waited: waiting.map(|waiting| waiting * trained),
            waiting,
            ..RankStatus::default()
        };
        let ranks = ranks.iter().map(|rank| Some(told(rank))).enumerate().collect();
        Snapshot { ranks, ..Snapshot::without_ranks(RunStatus::for_tests()) }
    }

    /// What is said while the ranks wait so.
    fn said(watch: &mut SlowRanks, from: u64, ranks: &[(&str, u32, Option<f64>)]) -> Vec<String> {
        (0..200).step_by(10).filter_map(|steps| watch.look(&at(from + steps, ranks))).collect()
    }

    const SLOW: [(&str, u32, Option<f64>); 4] =
        [("a", 1, Some(0.31)), ("a", 2, Some(0.3)), ("b", 3, Some(0.29)), ("b", 4, Some(0.02))];

    #[test]
    fn the_rank_that_waits_least_is_named_once() {
        let mut watch = SlowRanks::default();
        let first = said(&mut watch, 0, &SLOW);
        assert_eq!(first.len(), 1, "{first:?}");
        let expected = "rank 3 on b holds the others up: over the last 50 steps, these spent 30 % of their time in collectives until \
                        rank 3 came, which waited for 2 %";
        assert!(first[0].starts_with(expected), "{first:?}");
        assert_eq!(said(&mut watch, 200, &SLOW), [""; 0]);
        // It recovers, and is slow again: that is known. Another rank is news.
        let even = SLOW.map(|(host, pid, _)| (host, pid, Some(0.05)));
        assert_eq!(said(&mut watch, 400, &even), [""; 0]);
        assert_eq!(said(&mut watch, 600, &SLOW), [""; 0]);
        let other = [("a", 1, Some(0.)), ("a", 2, Some(0.4)), ("b", 3, Some(0.4)), ("b", 4, Some(0.4))];
        let news = said(&mut watch, 800, &other);
        assert!(news.len() == 1 && news[0].starts_with("rank 0 on a holds"), "{news:?}");
    }

    #[test]
    fn slow_ranks_of_one_host_are_named_together_and_half_of_all_at_most() {
        let host = [("a", 1, Some(0.3)), ("a", 2, Some(0.28)), ("b", 3, Some(0.01)), ("b", 4, Some(0.))];
        let news = said(&mut SlowRanks::default(), 0, &host);
        assert!(news.len() == 1 && news[0].starts_with("ranks 2, 3 on b hold the others up"), "{news:?}");
        let hosts = [("a", 1, Some(0.)), ("a", 2, Some(0.28)), ("b", 3, Some(0.01)), ("b", 4, Some(0.3))];
        let news = said(&mut SlowRanks::default(), 0, &hosts);
        assert!(news.len() == 1 && news[0].starts_with("ranks 0 on a, 2 on b hold the others up"), "{news:?}");
        // One rank that waits much is not held up by all the others: they do not come late to each other.
        let fast = [("a", 1, Some(0.3)), ("a", 2, Some(0.)), ("b", 3, Some(0.)), ("b", 4, Some(0.))];
        assert_eq!(said(&mut SlowRanks::default(), 0, &fast), [""; 0]);
        let two = [("a", 1, Some(0.)), ("b", 2, Some(0.11))];
        assert_eq!(said(&mut SlowRanks::default(), 0, &two).len(), 1);
        assert_eq!(said(&mut SlowRanks::default(), 0, &[("a", 1, Some(0.)), ("b", 2, Some(0.09))]), [""; 0]);
    }

    #[test]
    fn reports_may_come_one_by_one() {
        let mut watch = SlowRanks::default();
        let mut first = at(0, &SLOW);
        first.ranks[2].1 = None;
        assert_eq!(watch.look(&first), None);
        let unknown = SLOW.map(|(host, pid, _)| (host, pid, None));
        assert_eq!(watch.look(&at(0, &unknown)), None);
        assert_eq!(said(&mut watch, 0, &SLOW).len(), 1);
    }

    #[test]
    fn what_happens_once_is_not_said() {
        let mut watch = SlowRanks::default();
        let even = SLOW.map(|(host, pid, _)| (host, pid, Some(0.)));
        assert_eq!(watch.look(&at(0, &even)), None);
        // All others wait for 6 s once, in different windows.
        let mut waited = [0.; 4];
        for (number, steps) in (50..1000).step_by(50).enumerate() {
            if number == 3 {
                waited = [6., 6., 0., 0.];
            } else if number == 4 {
                waited = [6., 6., 6., 0.];
            }
            let mut ranks = even;
            (0..4).for_each(|rank| ranks[rank].2 = Some(waited[rank] / (steps as f64 * STEP)));
            assert_eq!(watch.look(&at(steps, &ranks)), None, "{steps}");
        }
    }

    #[test]
    fn nothing_is_said_of_engines_that_do_not_know_and_of_other_processes() {
        let unknown = SLOW.map(|(host, pid, _)| (host, pid, None));
        assert_eq!(said(&mut SlowRanks::default(), 0, &unknown), [""; 0]);
        let mut watch = SlowRanks::default();
        for steps in (0..1000).step_by(25) {
            // A rank is replaced all the time, and its process counts anew.
            let mut ranks = SLOW;
            ranks[1].1 = steps as u32;
            assert_eq!(watch.look(&at(steps, &ranks)), None);
        }
    }
}
