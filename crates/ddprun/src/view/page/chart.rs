//! Curves of bounded length, and as SVG.
use super::html::{GRID, INK, curve, escape, legend, number, styled};
use plotters::coord::Shift;
use plotters::element::Circle;
use plotters::prelude::{ChartBuilder, DrawingArea, IntoDrawingArea, LineSeries, SVGBackend};
use plotters::style::{Color, IntoFont, TextStyle};

/// The most points of a curve: more than a chart has columns.
const POINTS: usize = 2048;

/// Points in the order of their positions. When they become too many, every second one is left out.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Series {
    points: Vec<(f64, f64)>,
    /// How many points one stands for.
    stride: usize,
    skipped: usize,
}

impl Default for Series {
    fn default() -> Self {
        Self { points: Vec::new(), stride: 1, skipped: 0 }
    }
}

impl Series {
    /// Adds a point. One at an earlier position takes the place of all that came after it: a run has gone back to a checkpoint.
    pub(super) fn push(&mut self, at: f64, value: f64) {
        while self.points.last().is_some_and(|(last, _)| *last >= at) {
            self.points.pop();
        }
        self.skipped += 1;
        if self.skipped < self.stride && !self.points.is_empty() {
            return;
        }
        self.skipped = 0;
        self.points.push((at, value));
        if self.points.len() > POINTS {
            let mut index = 0;
            self.points.retain(|_| {
                index += 1;
                index % 2 == 1
            });
            self.stride *= 2;
        }
    }

    pub(super) fn points(&self) -> &[(f64, f64)] {
        &self.points
    }
}

const SIZE: (u32, u32) = (560, 280);
/// The most curves in a chart.
pub(super) const MOST: usize = 16;

/// A curve: its name and its points.
pub(super) type Curve<'a> = (String, &'a [(f64, f64)]);

/// An area in the middle of drawing.
pub(super) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// What texts in charts look like.
pub(super) fn letters() -> TextStyle<'static> {
    ("sans-serif", 17).into_font().color(&INK)
}

/// A figure with the curves, of which each has a name; "" if none of them has a point that can be shown.
pub(super) fn figure(title: &str, position: &str, curves: &[Curve<'_>]) -> String {
    let shown = || curves.iter().flat_map(|(_, points)| points.iter()).filter(|(_, value)| value.is_finite());
    if shown().next().is_none() {
        return String::new();
    }
    let range = |of: fn(&(f64, f64)) -> f64| {
        let (low, high) =
            shown().map(of).fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), at| (low.min(at), high.max(at)));
        // A single value has room around it. Halves, since the whole might overflow.
        let margin = (high / 2. - low / 2.).max(low.abs() * 1e-3).max(1e-12) * 0.1;
        (low - margin).max(f64::MIN / 4.)..(high + margin).min(f64::MAX / 4.)
    };
    let (x, y) = (range(|point| point.0), range(|point| point.1));
    let drawn = svg(title, SIZE, |area| {
        let mut chart = ChartBuilder::on(area)
            .margin(10)
            .x_label_area_size(34)
            .y_label_area_size(74)
            .build_cartesian_2d(x, y)
            .map_err(drop)?;
        chart
            .configure_mesh()
            .x_labels(6)
            .y_labels(6)
            .max_light_lines(0)
            .bold_line_style(GRID.stroke_width(1))
            .axis_style(GRID.stroke_width(1))
            .label_style(letters())
            .x_label_formatter(&|value| number(*value))
            .y_label_formatter(&|value| number(*value))
            .draw()
            .map_err(drop)?;
        for (index, (_, points)) in curves.iter().enumerate() {
            let style = curve(index).stroke_width(2);
            // NaN and infinities are gaps.
            for part in points.split(|(_, value)| !value.is_finite()) {
                match part {
                    [] => {}
                    [point] => drop(chart.draw_series([Circle::new(*point, 3, curve(index).filled())]).map_err(drop)?),
                    _ => drop(chart.draw_series(LineSeries::new(part.iter().copied(), style)).map_err(drop)?),
                }
            }
        }
        Ok(())
    });
    let Some(svg) = drawn else { return String::new() };
    let lost = curves.iter().flat_map(|(_, points)| points.iter()).filter(|(_, value)| !value.is_finite()).count();
    let lost = if lost > 0 { format!(" ({lost} points are not finite)") } else { String::new() };
    let names: Vec<&str> = curves.iter().map(|(name, _)| name.as_str()).collect();
    let title = escape(title);
    let caption = format!("<figcaption>{title} <small>by {}{lost}</small></figcaption>", escape(position));
    format!(
        "<figure>{caption}{}{svg}</figure>\n",
        if names.len() > 1 || names[0] != title { legend(&names) } else { String::new() }
    )
}

/// What `draw` draws, with the page's colours. `None` if it could not be drawn.
pub(super) fn svg(title: &str, size: (u32, u32), draw: impl FnOnce(&Area<'_>) -> Result<(), ()>) -> Option<String> {
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
        draw(&area).ok()?;
        area.present().ok()?;
    }
    let label = format!("<svg role=\"img\" aria-label=\"{}\" ", escape(title));
    Some(styled(&text).replacen("<svg ", &label, 1))
}
