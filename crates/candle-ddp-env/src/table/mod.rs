//! Every variable that the project reads or sets.
mod ddprun;
mod hardware;
mod launchers;
mod measurements;
mod records;

use crate::row::{Kind, Row};

/// A heading of `docs/environment.md`, and the variables under it.
pub const SECTIONS: &[(&str, &[Row])] = &[
    ("Who am I, and where do we meet", launchers::ROWS),
    ("Options of `ddprun`", ddprun::ROWS),
    ("Processors, memory and GPUs", hardware::ROWS),
    ("Seeing what happens", records::ROWS),
    ("Measurements, tests and scripts", measurements::ROWS),
];

/// The kind of the variable `name`.
pub(crate) fn kind(name: &str) -> Kind {
    let is = |listed: &&str| *listed == name || listed.strip_suffix('*').is_some_and(|start| name.starts_with(start));
    let row = SECTIONS.iter().flat_map(|(_, rows)| *rows).find(|row| row.names.iter().any(is));
    debug_assert!(row.is_some(), "candle-ddp-env's table lacks {name}");
    row.map_or(Kind::Text("text"), |row| row.kind)
}
