//! The page around the charts, the texts in it, and its colours.
use plotters::style::RGBColor;
use std::path::Path;

/// Text between tags, or in an attribute.
pub(super) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '\'' => escaped += "&#39;",
            // Terminals' and others' control characters, and those that turn the direction of text.
            letter if letter.is_control() && letter != '\n' => escaped.push('\u{fffd}'),
            '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => escaped.push('\u{fffd}'),
            letter => escaped.push(letter),
        }
    }
    escaped
}

/// A number with a few digits.
pub(super) fn number(value: f64) -> String {
    let size = value.abs();
    let cut = |text: String| match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_string(),
        false => text,
    };
    match size {
        _ if !value.is_finite() => value.to_string(),
        0.0 => "0".to_string(),
        _ if !(1e-4..1e7).contains(&size) => format!("{value:.2e}"),
        _ if size < 1. => cut(format!("{value:.5}")),
        _ if size < 100. => cut(format!("{value:.2}")),
        _ => cut(format!("{value:.1}")),
    }
}

/// A folder's name in headings and notes, relative to the folder of the page.
pub(super) fn place(folder: &Path, of: &Path) -> String {
    let name = of.strip_prefix(folder).unwrap_or(of);
    if name.as_os_str().is_empty() { "this folder".to_string() } else { name.display().to_string() }
}

/// The names of curves with their colours.
pub(super) fn legend(names: &[&str]) -> String {
    let entry = |(index, name): (usize, &&str)| {
        format!("<span><i style=\"background:{}\"></i>{}</span>", variable(index), escape(name))
    };
    format!("<p class=legend>{}</p>", names.iter().enumerate().map(entry).collect::<String>())
}

pub(super) fn section(title: &str, content: &str) -> String {
    format!("<section><h2>{}</h2>\n{content}</section>\n", escape(title))
}

/// A table; its cells are texts.
pub(super) fn table<const N: usize>(header: [&str; N], rows: &[[String; N]]) -> String {
    let cells = |tag: &str, cells: &[String]| -> String {
        cells.iter().map(|cell| format!("<{tag}>{}</{tag}>", escape(cell))).collect()
    };
    let head = cells("th", &header.map(str::to_string));
    let body: String = rows.iter().map(|row| format!("<tr>{}</tr>\n", cells("td", row))).collect();
    format!("<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>\n")
}

/// The whole page.
pub(super) fn document(folder: &Path, body: &str, notes: &[String]) -> String {
    let name = folder.canonicalize().unwrap_or_else(|_| folder.to_path_buf());
    let title = escape(&name.display().to_string());
    let notes: String = notes.iter().map(|note| format!("<li>{}</li>\n", escape(note))).collect();
    let notes =
        if notes.is_empty() { notes } else { section("What could not be read", "") + &format!("<ul>{notes}</ul>") };
    let [light, dark] = [LIGHT, DARK].map(|[ink, paper, grid, muted, colours]| {
        let colours = colours.split(' ').take(CURVES).enumerate();
        let curves: String = colours.map(|(index, colour)| format!("--curve-{index}:{colour};")).collect();
        format!(":root{{--ink:{ink};--paper:{paper};--grid:{grid};--muted:{muted};{curves}}}")
    });
    format!(
        "<!DOCTYPE html>\n<html lang=en><head><meta charset=utf-8>\n\
         <meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <meta name=viewport content=\"width=device-width, initial-scale=1\">\n<title>Run {title}</title>\n\
         <style>{light}@media(prefers-color-scheme:dark){{{dark}}}{STYLE}</style></head>\n\
         <body><h1>Run <code>{title}</code></h1>\n{body}{notes}<footer>ddprun {}</footer></body></html>\n",
        env!("CARGO_PKG_VERSION")
    )
}

// plotters writes the colours of charts as numbers; the page replaces these by its own colours, which differ in the dark.

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

// Ink, paper, grid, muted text, and the curves: Okabe and Ito's colours, which differ for the colour-blind as well.
const LIGHT: [&str; 5] =
    ["#1b1f24", "#ffffff", "#d5d9de", "#57606a", "#0072b2 #d55e00 #009e73 #cc79a7 #e69f00 #56b4e9 #7f6000 #6e7781"];
const DARK: [&str; 5] =
    ["#e6e9ed", "#14171b", "#3a4048", "#9aa4af", "#4cb1ec #ff8a3d #2fd3a3 #e7a0c8 #f5c04a #9ad7fb #c9a94a #a9b2bc"];

const STYLE: &str = "
:root{color-scheme:light dark}
body{background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif;margin:0 auto;max-width:80rem;padding:1rem}
h1{font-size:1.3rem;overflow-wrap:anywhere}h2{font-size:1.1rem;margin-top:2rem;overflow-wrap:anywhere}
.charts{display:grid;gap:1rem;grid-template-columns:repeat(auto-fill,minmax(min(100%,32rem),1fr))}
figure{margin:0;min-width:0}figcaption{font-weight:600}small,footer{color:var(--muted);font-weight:400}
svg{display:block;height:auto;max-width:100%}.wide svg{max-width:none;min-width:40rem;width:100%}
.scroll{overflow-x:auto}.legend{display:flex;flex-wrap:wrap;gap:0 1rem;margin:.2rem 0}
.legend i{border-radius:2px;display:inline-block;height:.7em;margin-right:.4em;width:.7em}
table{border-collapse:collapse}th,td{border-bottom:1px solid var(--grid);padding:.25rem .75rem .25rem 0;text-align:left;vertical-align:top}
td{white-space:pre-wrap}footer{margin-top:2rem}";
