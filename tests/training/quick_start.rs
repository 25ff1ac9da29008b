//! The quick start is one text: `examples/minimal.rs`, the README and the crate's documentation.

#[test]
fn the_quick_start_is_the_same_everywhere() {
    let example = include_str!("../../examples/minimal.rs");
    let program: Vec<&str> = example.lines().filter(|line| !line.starts_with("//!")).collect();
    assert!(include_str!("../../README.md").contains(&program.join("\n")));
    let documented: Vec<String> = program.iter().map(|line| format!("//! {line}").trim_end().to_string()).collect();
    assert!(include_str!("../../src/lib.rs").contains(&documented.join("\n")));
}

#[test]
fn the_quick_start_has_at_most_20_lines_next_to_the_model() {
    let (_, main) = include_str!("../../examples/minimal.rs").split_once("fn main() -> Result<()> {\n").unwrap();
    let (body, _) = main.split_once("\n}\n").unwrap();
    let lines = body.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//"));
    assert!(lines.clone().count() <= 20, "{} lines", lines.count());
}
