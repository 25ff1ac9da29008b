//! The quick start is one text: `examples/minimal.rs`, the README and the crate's documentation.

#[test]
fn the_quick_start_is_the_same_everywhere() {
    let example = include_str!("../../examples/minimal.rs");
    let program: Vec<&str> = example.lines().filter(|line| !line.starts_with("//!")).collect();
    assert!(include_str!("../../README.md").contains(&program.join("\n")));
    let documented: Vec<String> = program.iter().map(|line| format!("//! {line}").trim_end().to_string()).collect();
    assert!(include_str!("../../src/lib.rs").contains(&documented.join("\n")));
}
