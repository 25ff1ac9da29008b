//! The table and the page that shows it.
#![allow(clippy::unwrap_used)] // a failed test may panic

use candle_ddp_env::{Row, SECTIONS};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The table of a section, as Markdown.
fn table(rows: &[Row]) -> String {
    let mut table =
        "| variable | value | set by | read by | meaning | default |\n|---|---|---|---|---|---|\n".to_string();
    for Row { names, kind, set_by, read_by, meaning, default } in rows {
        let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
        let (names, value) = (names.join(", "), kind.accepted());
        table += &format!("| {names} | {value} | {set_by} | {read_by} | {meaning} | {default} |\n");
    }
    table
}

/// The page, with its tables replaced by those of `SECTIONS`.
fn with_tables(page: &str) -> String {
    let mut parts = page.split("\n## ");
    let mut result = parts.next().unwrap().to_string();
    for part in parts {
        let title = part.lines().next().unwrap();
        let (_, rows) = SECTIONS.iter().find(|(heading, _)| *heading == title).unwrap();
        let start = part.find("\n| ").unwrap() + 1;
        let rest = part[start..].find("\n\n").map_or("", |end| &part[start + end + 1..]);
        result += &format!("\n## {}{}{rest}", &part[..start], table(rows));
    }
    result
}

/// With `CANDLE_DDP_TEST_UPDATE=1`, the tables are written to the page.
#[test]
fn the_page_has_the_tables() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/environment.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let headings = page.lines().filter_map(|line| line.strip_prefix("## "));
    assert!(headings.eq(SECTIONS.iter().map(|(heading, _)| *heading)), "the page has other sections");
    let expected = with_tables(&page);
    if std::env::var_os("CANDLE_DDP_TEST_UPDATE").is_some() {
        return std::fs::write(path, expected).unwrap();
    }
    let line = page.lines().zip(expected.lines()).find(|(found, expected)| found != expected);
    let update = "CANDLE_DDP_TEST_UPDATE=1 cargo test -p candle-ddp-env writes the tables to the page";
    assert!(page == expected, "docs/environment.md differs from the table of candle-ddp-env: {line:#?}; {update}");
}

#[test]
fn a_name_is_in_one_row() {
    let mut names = BTreeSet::new();
    for name in SECTIONS.iter().flat_map(|(_, rows)| *rows).flat_map(|row| row.names) {
        assert!(names.insert(name), "{name} is there twice");
    }
}

/// The Rust files of a folder, with their texts.
fn files(folder: &Path) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            found.extend(files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push((path.clone(), std::fs::read_to_string(path).unwrap()));
        }
    }
    found
}

/// All crates read variables through this one, so that all are read alike and the table has them. Helpers of tests may read those of
/// the tests.
#[test]
fn nothing_else_reads_the_environment() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let crates = std::fs::read_dir(root.join("crates")).unwrap().map(|entry| entry.unwrap().path());
    let others =
        crates.filter(|path| !["candle-ddp-env", "candle-ddp-testing"].iter().any(|name| path.ends_with(name)));
    let sources: Vec<_> = others.chain([root]).flat_map(|path| files(&path.join("src"))).collect();
    assert!(sources.len() > 500, "only {} files", sources.len());
    for (path, text) in sources {
        let line = text.lines().position(|line| line.contains("env::var"));
        assert!(line.is_none(), "{}: line {}: read it by candle_ddp_env", path.display(), line.unwrap_or_default() + 1);
    }
}
