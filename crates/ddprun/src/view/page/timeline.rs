//! The last steps of all ranks, side by side.
use super::chart::{Area, Series, letters, svg};
use super::html::{self, GRID, curve};
use plotters::element::{PathElement, Rectangle, Text};
use plotters::style::Color;
use std::collections::VecDeque;

/// The recording of one rank.
#[derive(Debug)]
pub(super) struct Rank {
    pub(super) rank: usize,
    /// In milliseconds, by step.
    pub(super) waits: Series,
    pub(super) steps: u64,
    pub(super) waited: f64,
    pub(super) longest: f64,
    pub(super) spans: VecDeque<Span>,
}

impl Rank {
    /// Counts a step that has waited for so many milliseconds, if there was one.
    pub(super) fn end_step(&mut self, waited: Option<f64>) {
        let Some(waited) = waited else { return };
        self.steps += 1;
        self.waited += waited;
        self.longest = self.longest.max(waited);
        self.waits.push(self.steps as f64, waited);
    }
}

/// A phase of a rank, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Span {
    pub(super) kind: Kind,
    pub(super) start: f64,
    pub(super) end: f64,
}

/// An activity of a rank, which has a colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Forward,
    Backward,
    Wait,
    Optimizer,
    Communication,
    Other,
}

impl Kind {
    const NAMES: [&'static str; 6] = ["forward", "backward", "wait", "optimizer", "communication", "other"];

    /// The kind of the phase `name` in the row `row` of a trace.
    pub(super) fn of(name: &str, row: u64) -> Self {
        match name {
            _ if row > 0 => Self::Communication,
            "forward" => Self::Forward,
            "backward" => Self::Backward,
            "optimizer" => Self::Optimizer,
            name if name.starts_with("wait") => Self::Wait,
            _ => Self::Other,
        }
    }
}

/// How many steps are shown.
const STEPS: usize = 3;
const WIDTH: i32 = 1180;
/// Where the rows begin, right of their names.
const LEFT: i32 = 90;
const ROW: i32 = 18;

/// The last steps of the first rank, and what the others did at the same time; "" if it has not made any.
pub(super) fn figure(ranks: &[Rank]) -> String {
    let Some((start, end)) = ranks.first().and_then(window) else { return String::new() };
    let height = ranks.len() as i32 * (2 * ROW + 14) + 40;
    let drawn = svg("The last steps", (WIDTH as u32, height as u32), |area| draw(area, ranks, start, end, height));
    let Some(svg) = drawn else { return String::new() };
    let caption = "<figcaption>The last steps <small>by milliseconds; above the phases of each rank, below its communication</small></figcaption>";
    format!("<figure class=wide>{caption}{}<div class=scroll>{svg}</div></figure>\n", html::legend(&Kind::NAMES))
}

/// From the beginning of a forward pass to the end of the last step after it. A step ends when its buckets are there or, if the optimizer is
/// recorded as well, with that.
fn window(rank: &Rank) -> Option<(f64, f64)> {
    let mut spans: Vec<Span> = rank.spans.iter().copied().collect();
    spans.sort_by(|a, b| a.start.total_cmp(&b.start));
    let ends = |kind| spans.iter().filter(move |span| span.kind == kind).map(|span| span.end);
    let end = ends(Kind::Wait).chain(ends(Kind::Optimizer)).reduce(f64::max)?;
    // The end of each step's last wait.
    let mut waits = Vec::new();
    let mut is_new = true;
    for span in &spans {
        match span.kind {
            Kind::Backward => is_new = true,
            Kind::Wait => {
                if !std::mem::take(&mut is_new) {
                    waits.pop();
                }
                waits.push(span.end);
            }
            _ => {}
        }
    }
    let before = waits.len().checked_sub(STEPS + 1).and_then(|index| waits.get(index)).copied();
    let start = spans.iter().find(|span| span.start >= before.unwrap_or(f64::MIN) && span.kind == Kind::Forward)?.start;
    (start < end).then_some((start, end))
}

fn draw(area: &Area<'_>, ranks: &[Rank], start: f64, end: f64, height: i32) -> Result<(), ()> {
    let right = f64::from(WIDTH - LEFT - 40);
    let x = |at: f64| LEFT + ((at - start) / (end - start) * right) as i32;
    let bottom = height - 30;
    for tick in 0..=5 {
        let at = (end - start) * f64::from(tick) / 5.;
        let line = [(x(start + at), 4), (x(start + at), bottom)];
        area.draw(&PathElement::new(line, GRID.stroke_width(1))).map_err(drop)?;
        area.draw(&Text::new(html::number(at), (x(start + at) - 8, bottom + 8), letters())).map_err(drop)?;
    }
    for (index, rank) in ranks.iter().enumerate() {
        let top = 8 + index as i32 * (2 * ROW + 14);
        area.draw(&Text::new(format!("rank {}", rank.rank), (4, top + ROW / 2), letters())).map_err(drop)?;
        for span in rank.spans.iter().filter(|span| span.end > start && span.start < end) {
            let y = if span.kind == Kind::Communication { top + ROW + 2 } else { top };
            let (from, to) = (x(span.start.max(start)), x(span.end.min(end)));
            // A span that is shorter than a pixel can still be seen.
            let corners = [(from, y), (to.max(from + 1), y + ROW)];
            area.draw(&Rectangle::new(corners, curve(span.kind as usize).filled())).map_err(drop)?;
        }
    }
    Ok(())
}
