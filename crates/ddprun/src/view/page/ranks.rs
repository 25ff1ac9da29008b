//! How long each rank waited, from the reports that ddprun records in its log folder.
use super::chart::Series;
use super::{chart, find, html};
use crate::view::status::{LISTED, Line, Since, Told, holdup};
use std::collections::BTreeMap;
use std::path::Path;

/// The longest line that counts. It has a report of each of [`LISTED`] ranks.
const LONGEST: u64 = 8 << 20;
/// The most ranks in the table.
const ROWS: usize = 256;

#[derive(Debug, Default)]
struct Ranks {
    ranks: BTreeMap<usize, Rank>,
    restarts: u32,
    /// Of the ranks that waited least, by seconds: the percentage of the time for which they waited.
    curves: BTreeMap<usize, Series>,
}

/// A rank, with all processes that it has had.
#[derive(Debug, Default)]
struct Rank {
    host: String,
    steps: u64,
    trained: f64,
    /// `None`: its engine does not know.
    waited: Option<f64>,
    last: Option<Told>,
}

/// What a report adds to the last one.
struct Gain {
    steps: u64,
    trained: f64,
    waited: Option<f64>,
}

/// What `told` adds to the `last` report of the same rank, which may be of another process.
fn gain(last: Option<&Told>, told: &Told) -> Gain {
    let same = last.filter(|last| last.pid == told.pid && last.host == told.host && last.steps <= told.steps);
    let since =
        |now: f64, then: Option<f64>| Some(now - then.unwrap_or(0.)).filter(|gain| gain.is_finite() && *gain >= 0.);
    Gain {
        steps: told.steps - same.map_or(0, |last| last.steps),
        trained: since(told.trained, same.map(|last| last.trained)).unwrap_or(0.),
        waited: told.waited.and_then(|waited| since(waited, same.and_then(|last| last.waited))),
    }
}

/// The section about the record of a run; "" if no rank has made steps.
pub(super) fn html(folder: &Path, file: &Path, notes: &mut Vec<String>) -> String {
    let name = file.strip_prefix(folder).unwrap_or(file).display().to_string();
    let mut ranks = Ranks::default();
    let parse = |text: &[u8]| {
        let mut line: Line = serde_json::from_slice(text).ok()?;
        line.ranks.retain(|told| told.rank < LISTED);
        Some(line)
    };
    let (mut torn, mut begun, mut last) = (0, None, BTreeMap::new());
    let add = |text: &[u8]| match parse(text) {
        Some(line) => ranks.add(line),
        None => torn += 1,
    };
    let read = find::lines(file, LONGEST, add).and_then(|()| {
        ranks.choose();
        find::lines(file, LONGEST, |text| {
            let Some(line) = parse(text) else { return };
            let at = line.at.saturating_sub(*begun.get_or_insert(line.at)) as f64 / 1e3;
            ranks.draw(at, line, &mut last);
        })
    });
    if let Err(error) = read {
        notes.push(format!("{name} cannot be read: {error}"));
    }
    if torn > 0 {
        notes.push(format!("{name}: {torn} lines are torn, or no ddprun has written them"));
    }
    if ranks.ranks.is_empty() {
        return String::new();
    }
    let place = html::place(folder, file.parent().unwrap_or(folder));
    html::section(&format!("Waits of the ranks: {place}"), &ranks.html())
}

impl Ranks {
    fn add(&mut self, line: Line) {
        self.restarts = line.restarts;
        for told in line.ranks {
            let rank = self.ranks.entry(told.rank).or_default();
            let Gain { steps, trained, waited } = gain(rank.last.as_ref(), &told);
            rank.steps = rank.steps.saturating_add(steps);
            rank.trained += trained;
            rank.waited = match (rank.waited, waited) {
                (Some(before), Some(waited)) => Some(before + waited),
                (before, waited) => before.or(waited),
            };
            rank.host.clone_from(&told.host);
            rank.last = Some(told);
        }
    }

    /// Chooses the ranks that have a curve: those that waited least.
    fn choose(&mut self) {
        let known = self.ranks.iter().filter_map(|(rank, of)| Some((*rank, of.share()?)));
        let mut known: Vec<(usize, f64)> = known.collect();
        known.sort_by(|(_, a), (_, b)| a.total_cmp(b));
        self.curves = known.into_iter().take(chart::MOST).map(|(rank, _)| (rank, Series::default())).collect();
    }

    fn draw(&mut self, at: f64, line: Line, last: &mut BTreeMap<usize, Told>) {
        for told in line.ranks {
            let Some(curve) = self.curves.get_mut(&told.rank) else { continue };
            let Gain { trained, waited, .. } = gain(last.get(&told.rank), &told);
            if let Some(waited) = waited.filter(|_| trained > 0.) {
                curve.push(at, 100. * waited / trained);
            }
            last.insert(told.rank, told);
        }
    }

    fn html(&self) -> String {
        let curves: Vec<_> = self.curves.iter().map(|(rank, curve)| (format!("rank {rank}"), curve.points())).collect();
        let chart = chart::figure("Waiting for the others, in % of the time", "second of the record", &curves);
        let row = |(rank, of): (&usize, &Rank)| {
            let or_unknown = |value: Option<f64>| value.map_or_else(|| "-".to_string(), html::number);
            let speed = (of.trained > 0.).then(|| of.steps as f64 / of.trained);
            let share = of.share().map(|share| 100. * share);
            let [speed, waited, share] = [speed, of.waited, share].map(or_unknown);
            [rank.to_string(), of.host.clone(), of.steps.to_string(), speed, waited, share]
        };
        let rows: Vec<_> = self.ranks.iter().take(ROWS).map(row).collect();
        let header = ["rank", "host", "steps", "steps per second", "waited (s)", "% of its time"];
        let mut text = format!("<div class=charts>{chart}</div>{}", html::table(header, &rows));
        let more = self.ranks.len().saturating_sub(ROWS);
        if more > 0 {
            text += &format!("<p>And {more} more ranks. The curves are those of the ranks that waited least.</p>\n");
        }
        text += &format!("<p>{}</p>\n", html::escape(&self.verdict()));
        text + &format!("<p>Restarts used: {}.</p>\n", self.restarts)
    }

    fn verdict(&self) -> String {
        let since = |(rank, of): (&usize, &Rank)| {
            Some(Since { rank: *rank, host: of.host.clone(), waited: of.share()?, steps: of.steps })
        };
        let known: Option<Vec<Since>> = self.ranks.iter().map(since).collect();
        match known {
            None => {
                "How long some ranks waited is unknown: they have made few steps, or their engine does not tell it, as \
                     NCCL and MPI. CANDLE_DDP_TRACE records timelines there."
                    .to_string()
            }
            Some(mut known) => holdup(&mut known).unwrap_or_else(|| {
                "No rank has held the others up by more than 10 % of their time, on average over the run.".to_string()
            }),
        }
    }
}

impl Rank {
    /// The share of its time for which it waited.
    fn share(&self) -> Option<f64> {
        self.waited.filter(|_| self.trained > 0.).map(|waited| waited / self.trained)
    }
}
