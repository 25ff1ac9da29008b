//! The binaries of the examples.
#![cfg(feature = "launcher")]
use std::path::PathBuf;
use std::process::Command;

/// Returns an example's binary, which `cargo test` builds along with the tests, but `cargo test --test processes` does
/// not.
pub(crate) fn example(name: &str) -> PathBuf {
    let binaries = PathBuf::from(env!("CARGO_BIN_EXE_ddprun"));
    let profile = binaries.parent().unwrap();
    let path = profile.join("examples").join(format!("{name}{}", std::env::consts::EXE_SUFFIX));
    if !path.exists() {
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--example", name, "--target-dir"]).arg(profile.parent().unwrap());
        if profile.ends_with("release") {
            build.arg("--release");
        }
        assert!(build.status().unwrap().success());
    }
    path
}
