//! Line charts with two logarithmic axes, as SVG.
use crate::size;
use std::fmt::Write;

/// A label, and points of bytes and GB/s. Curves whose labels are equal up to a comma share a colour; the rest of the
/// label selects the dashes.
pub(crate) type Curve = (String, Vec<(f64, f64)>);

const WIDTH: f64 = 860.;
const HEIGHT: f64 = 520.;
const LEFT: f64 = 74.;
const RIGHT: f64 = 22.;
const TOP: f64 = 44.;
const BOTTOM: f64 = 62.;
/// Okabe and Ito's palette, which colour-blind readers can distinguish.
const COLOURS: [&str; 7] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"];
const DASHES: [&str; 4] = ["none", "7 4", "2 3", "10 3 2 3"];
/// The maximum number of labels below the chart.
const MOST_SIZES: usize = 10;

pub(crate) fn draw(title: &str, curves: &[Curve]) -> String {
    let points = || curves.iter().flat_map(|(_, points)| points);
    let x = Axis::new(points().map(|(bytes, _)| *bytes), 2., LEFT, WIDTH - RIGHT);
    let y = Axis::new(points().map(|(_, bandwidth)| *bandwidth), 10., HEIGHT - BOTTOM, TOP);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" \
         height=\"{HEIGHT}\" font-family=\"sans-serif\" font-size=\"13\" fill=\"#222222\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
    );
    text(&mut svg, (LEFT, 26.), "font-size=\"16\" font-weight=\"bold\"", title);
    grid(&mut svg, &x, &y);
    let (mut colours, mut dashes) = (Vec::new(), Vec::new());
    for (index, (label, points)) in curves.iter().enumerate() {
        let (group, kind) = label.split_once(',').unwrap_or((label, ""));
        let colour = COLOURS[position(&mut colours, group.trim()) % COLOURS.len()];
        let dash = DASHES[position(&mut dashes, kind.trim()) % DASHES.len()];
        let style = format!("stroke=\"{colour}\" stroke-width=\"2\" stroke-dasharray=\"{dash}\"");
        curve(&mut svg, &style, colour, label, points.iter().map(|(bytes, speed)| (x.place(*bytes), y.place(*speed))));
        let line = TOP + 20. + 20. * index as f64;
        let (start, end) = (LEFT + 14., LEFT + 50.);
        push(&mut svg, format_args!("<path d=\"M{start} {line}H{end}\" {style}/>"));
        text(&mut svg, (end + 8., line + 4.5), "stroke=\"#ffffff\" stroke-width=\"4\" paint-order=\"stroke\"", label);
    }
    svg.push_str("</svg>\n");
    svg
}

/// A logarithmic scale between two powers of `base`.
struct Axis {
    base: f64,
    low: i32,
    high: i32,
    start: f64,
    end: f64,
}

impl Axis {
    fn new(numbers: impl Iterator<Item = f64>, base: f64, start: f64, end: f64) -> Self {
        let logs = numbers.filter(|number| *number > 0.).map(|number| number.log(base));
        let (low, high) = logs.fold((f64::MAX, f64::MIN), |(low, high), log| (low.min(log), high.max(log)));
        // Rounding errors must not push a power of the base up to the next one.
        let (low, high) = ((low + 1e-9).floor(), (high - 1e-9).ceil());
        let (low, high) = if low <= high { (low as i32, high as i32) } else { (0, 1) };
        Self { base, low, high: high.max(low + 1), start, end }
    }

    fn place(&self, number: f64) -> f64 {
        let (low, high) = (f64::from(self.low), f64::from(self.high));
        let log = number.log(self.base).max(low);
        ((log - low) / (high - low) * (self.end - self.start) + self.start).mul_add(100., 0.5).floor() / 100.
    }

    /// Returns every `step`-th power of the base.
    fn powers(&self, step: usize) -> impl Iterator<Item = f64> {
        let base = self.base;
        (self.low..=self.high).step_by(step).map(move |power| base.powi(power))
    }
}

fn grid(svg: &mut String, x: &Axis, y: &Axis) {
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    let step = (1..).find(|step| x.powers(*step).count() <= MOST_SIZES).unwrap_or(1);
    for bytes in x.powers(step) {
        let at = x.place(bytes);
        push(svg, format_args!("<path d=\"M{at} {TOP}V{bottom}\" stroke=\"#cccccc\"/>"));
        text(svg, (at, bottom + 20.), "text-anchor=\"middle\"", &size::format(bytes));
    }
    for power in y.powers(1) {
        for (factor, colour) in
            (1..10).map(|factor| (f64::from(factor), if factor == 1 { "#bbbbbb" } else { "#ececec" }))
        {
            let at = y.place(power * factor);
            if at < TOP {
                break;
            }
            push(svg, format_args!("<path d=\"M{LEFT} {at}H{right}\" stroke=\"{colour}\"/>"));
        }
        let number = if power < 1e-4 { format!("{power:e}") } else { format!("{power}") };
        text(svg, (LEFT - 8., y.place(power) + 4.5), "text-anchor=\"end\"", &number);
    }
    let (width, height) = (right - LEFT, bottom - TOP);
    push(
        svg,
        format_args!(
            "<rect x=\"{LEFT}\" y=\"{TOP}\" width=\"{width}\" height=\"{height}\" fill=\"none\" stroke=\"#222222\"/>"
        ),
    );
    text(svg, ((LEFT + right) / 2., HEIGHT - 16.), "text-anchor=\"middle\"", "size");
    let middle = (TOP + bottom) / 2.;
    let turned = format!("text-anchor=\"middle\" transform=\"rotate(-90 18 {middle})\"");
    text(svg, (18., middle), &turned, "bus bandwidth (GB/s)");
}

fn curve(svg: &mut String, style: &str, colour: &str, label: &str, points: impl Iterator<Item = (f64, f64)> + Clone) {
    let path: Vec<String> = points.clone().map(|(x, y)| format!("{x},{y}")).collect();
    push(
        svg,
        format_args!(
            "<polyline points=\"{}\" fill=\"none\" {style}><title>{}</title></polyline>",
            path.join(" "),
            escape(label)
        ),
    );
    for (x, y) in points {
        push(svg, format_args!("<circle cx=\"{x}\" cy=\"{y}\" r=\"3\" fill=\"{colour}\"/>"));
    }
}

fn text(svg: &mut String, (x, y): (f64, f64), attributes: &str, text: &str) {
    push(svg, format_args!("<text x=\"{x}\" y=\"{y}\" {attributes}>{}</text>", escape(text)));
}

fn push(svg: &mut String, element: std::fmt::Arguments) {
    // Writing to a string cannot fail.
    let _ = writeln!(svg, "{element}");
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Returns the index of `name` in `names`, appending it if necessary.
fn position<'a>(names: &mut Vec<&'a str>, name: &'a str) -> usize {
    names.iter().position(|other| *other == name).unwrap_or_else(|| {
        names.push(name);
        names.len() - 1
    })
}
