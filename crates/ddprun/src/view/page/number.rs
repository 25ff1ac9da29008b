//! Numbers as texts.

/// A few digits.
pub(super) fn text(value: f64) -> String {
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
