//! The programs that tests start as processes.
#![allow(dead_code, clippy::unwrap_used)] // each test file uses only some of them, and a failed test may panic
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The launcher: next to this program where scripts/gpu_suite.sh has packed both. Otherwise cargo builds it, since it is
/// another package than these tests.
pub(crate) fn ddprun() -> &'static Path {
    static DDPRUN: OnceLock<PathBuf> = OnceLock::new();
    DDPRUN.get_or_init(|| {
        let packed = std::env::current_exe().unwrap().with_file_name("ddprun");
        if packed.exists() { packed } else { built(&["--package", "ddprun"], "ddprun") }
    })
}

/// The binary of an example, from the folder that CANDLE_DDP_TEST_EXAMPLES names, if it does. `cargo test` builds all of them along with the
/// tests, `cargo test --test processes` does not.
pub(crate) fn example(name: &str) -> PathBuf {
    if let Some(folder) = std::env::var_os("CANDLE_DDP_TEST_EXAMPLES") {
        return Path::new(&folder).join(name);
    }
    let path = profile().join("examples").join(name);
    if path.exists() { path } else { built(&["--example", name], &format!("examples/{name}")) }
}

/// The folder of cargo's profile: the programs of tests lie in `deps` there.
fn profile() -> PathBuf {
    std::env::current_exe().unwrap().ancestors().nth(2).unwrap().to_path_buf()
}

/// Has cargo build something into this program's folder, and returns its path there.
fn built(target: &[&str], path: &str) -> PathBuf {
    let profile = profile();
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--quiet", "--locked"]).args(target).arg("--target-dir").arg(profile.parent().unwrap());
    build.current_dir(env!("CARGO_MANIFEST_DIR"));
    if profile.ends_with("release") {
        build.arg("--release");
    }
    assert!(build.status().unwrap().success(), "{build:?}");
    profile.join(path)
}
