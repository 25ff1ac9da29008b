//! Line charts with two logarithmic axes, as SVG.
use crate::size;
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use std::error::Error;

/// A label, and points of bytes and GB/s. Curves whose labels are equal up to a comma share a colour; the rest of the
/// label selects the dashes.
pub(crate) type Curve = (String, Vec<(f64, f64)>);

/// Okabe and Ito's palette, which colour-blind readers can distinguish.
const COLOURS: [RGBColor; 7] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0x56, 0xb4, 0xe9),
    BLACK,
];
/// The lengths of dashes and of the gaps between them.
const DASHES: [(u32, u32); 4] = [(1, 0), (7, 4), (2, 3), (12, 3)];

pub(crate) fn draw(title: &str, curves: &[Curve]) -> Result<String, Box<dyn Error + Send + Sync>> {
    let shown = |point: &&(f64, f64)| point.0 > 0. && point.1 > 0.;
    let points = || curves.iter().flat_map(|(_, points)| points).filter(shown);
    let (x, y) = (powers(points().map(|point| point.0), 2.), powers(points().map(|point| point.1), 10.));
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (860, 520)).into_drawing_area();
        area.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&area)
            .caption(title, ("sans-serif", 20))
            .margin(10)
            .margin_right(30)
            .x_label_area_size(50)
            .y_label_area_size(70)
            .build_cartesian_2d(x.log_scale().base(2.), y.log_scale())?;
        chart
            .configure_mesh()
            .x_labels(10)
            .x_desc("size")
            .y_desc("bus bandwidth (GB/s)")
            .label_style(("sans-serif", 15))
            .x_label_formatter(&|bytes| size::format(*bytes))
            .y_label_formatter(&|speed| if *speed < 1e-4 { format!("{speed:e}") } else { format!("{speed}") })
            .draw()?;
        let (mut colours, mut dashes) = (Vec::new(), Vec::new());
        for (label, points) in curves {
            let (group, kind) = label.split_once(',').unwrap_or((label, ""));
            let style = COLOURS[position(&mut colours, group.trim()) % COLOURS.len()].stroke_width(2);
            let (dash, gap) = DASHES[position(&mut dashes, kind.trim()) % DASHES.len()];
            let points = || points.iter().filter(shown).copied();
            let series = if gap == 0 {
                chart.draw_series(LineSeries::new(points(), style))?
            } else {
                chart.draw_series(DashedLineSeries::new(points(), dash, gap, style))?
            };
            series.label(label).legend(move |(x, y)| DashedPathElement::new([(x, y), (x + 30, y)], dash, gap, style));
            chart.draw_series(points().map(|point| Circle::new(point, 3, style.filled())))?;
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .legend_area_size(40)
            .label_font(("sans-serif", 15))
            .background_style(WHITE.mix(0.8))
            .draw()?;
        area.present()?;
    }
    Ok(svg)
}

/// The smallest range between two powers of `base` that has all numbers.
fn powers(numbers: impl Iterator<Item = f64>, base: f64) -> std::ops::Range<f64> {
    let logs = numbers.map(|number| number.log(base));
    let (low, high) = logs.fold((f64::MAX, f64::MIN), |(low, high), log| (low.min(log), high.max(log)));
    // Rounding errors must not push a power of the base up to the next one.
    let (low, high) = ((low + 1e-9).floor(), (high - 1e-9).ceil());
    let (low, high) = if low <= high { (low as i32, high as i32) } else { (0, 1) };
    base.powi(low)..base.powi(high.max(low + 1))
}

/// Returns the index of `name` in `names`, appending it if necessary.
fn position<'a>(names: &mut Vec<&'a str>, name: &'a str) -> usize {
    names.iter().position(|other| *other == name).unwrap_or_else(|| {
        names.push(name);
        names.len() - 1
    })
}
