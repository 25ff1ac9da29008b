//! Parsing and formatting sizes.

/// Parses bytes from `8`, `16K`, `64M` or `1G` (powers of 1024), optionally followed by `B` or `iB`; at least 1.
pub(crate) fn parse(text: &str) -> Result<usize, String> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        _ => return Err(format!("the unit {unit:?} is not one of K, M and G")),
    };
    let number: usize = number.parse().map_err(|error| format!("not a number of bytes: {error}"))?;
    match number.checked_mul(1 << shift) {
        None => Err("more than this machine can address".to_string()),
        Some(0) => Err("must be at least one byte".to_string()),
        Some(bytes) => Ok(bytes),
    }
}

/// Formats bytes, for example 65536 as `64 KiB`. Meant for sizes that are round in one unit.
pub(crate) fn format(bytes: f64) -> String {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units.iter().map(|(unit, shift)| (unit, bytes / f64::from(1 << shift))).find(|(_, number)| *number >= 1.) {
        Some((unit, number)) => format!("{number} {unit}"),
        None => format!("{bytes} B"),
    }
}
