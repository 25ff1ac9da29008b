//! The colours of charts. plotters writes numbers; the page replaces them by its own colours, which differ in the dark.
use plotters::style::RGBColor;

/// Texts and axes.
pub(super) const INK: RGBColor = RGBColor(1, 2, 254);
/// The lines of the grid.
pub(super) const GRID: RGBColor = RGBColor(1, 2, 253);
/// How many colours curves have.
pub(super) const CURVES: usize = 8;

/// The colour of curve `index`.
pub(super) fn curve(index: usize) -> RGBColor {
    RGBColor(1, 3, (index % CURVES) as u8)
}

/// The name of a curve's colour in the page's style.
pub(super) fn variable(index: usize) -> String {
    format!("var(--curve-{})", index % CURVES)
}

/// The SVG with the page's colours.
pub(super) fn styled(svg: &str) -> String {
    let hex = |RGBColor(r, g, b)| format!("\"#{r:02X}{g:02X}{b:02X}\"");
    let mut svg = svg.replace(&hex(INK), "\"var(--ink)\"").replace(&hex(GRID), "\"var(--grid)\"");
    for index in 0..CURVES {
        svg = svg.replace(&hex(curve(index)), &format!("\"{}\"", variable(index)));
    }
    svg
}
