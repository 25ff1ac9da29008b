//! Tests that start their own program again.
use std::process::Command;

/// Returns a command that runs the test `name` of the module `module` (`module_path!()`) in a separate process. Such a test
/// is ignored otherwise.
pub fn test_process(module: &str, name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(test_arguments(module, name));
    command
}

/// Returns the arguments with which this test binary runs only the test `name` of the module `module`.
pub fn test_arguments(module: &str, name: &str) -> [String; 5] {
    let name = match module.split_once("::") {
        Some((_, module)) => format!("{module}::{name}"),
        None => name.to_string(),
    };
    ["--exact", &name, "--include-ignored", "--nocapture", "--test-threads=1"].map(str::to_string)
}
