//! Building and running cargo targets.
use crate::{Ran, Sandbox};
use std::path::Path;
use std::process::Command;

const PROGRAM: &str = r#"fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    println!("{} {} {args:?} {}", NAME, std::env::var("RANK").unwrap(), cfg!(debug_assertions));
}
"#;

/// A package without dependencies, which builds without a network.
fn package(folder: &Path, name: &str, target: &str) {
    let manifest =
        format!("[package]\nname = \"{name}\"\nversion = \"0.0.0\"\nedition = \"2024\"\n[features]\nextra = []\n");
    let program = format!("const NAME: &str = \"{name}\";\n{PROGRAM}");
    let files = [("Cargo.toml", manifest.as_str()), ("src/lib.rs", ""), (target, program.as_str())];
    for (path, text) in files {
        let path = folder.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
}

fn cargo_environment(command: &mut Command) -> &mut Command {
    // The test itself runs under cargo.
    command.env_remove("CARGO_TARGET_DIR").env_remove("CARGO_BUILD_TARGET_DIR").env_remove("RUSTFLAGS")
}

#[test]
fn an_example_is_built_and_run() {
    let sandbox = Sandbox::new();
    package(sandbox.folder.path(), "alone", "examples/hello.rs");
    let mut command =
        sandbox.ddprun(&["--nproc-per-node", "2", "--example", "hello", "--", "--epochs", "3", "--", "x"]);
    let ran = Ran::new(cargo_environment(&mut command).env("CARGO_TARGET_DIR", sandbox.path("elsewhere")));
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let line = |rank: usize| format!(r#"alone {rank} ["--epochs", "3", "--", "x"] false"#);
    assert_eq!(ran.sorted(), [line(0), line(1)]);
    ran.says("Compiling alone");
    assert!(sandbox.path("elsewhere/release").is_dir());
}

#[test]
fn a_binary_of_a_workspace_is_built_and_run() {
    let sandbox = Sandbox::new();
    std::fs::write(sandbox.path("Cargo.toml"), "[workspace]\nmembers = [\"a\", \"b\"]\nresolver = \"3\"\n").unwrap();
    for name in ["a", "b"] {
        package(&sandbox.path(name), name, "src/bin/train.rs");
    }
    let args = ["--bin", "train", "-p", "b", "--features", "extra", "--debug", "--", "--lr=1"];
    let mut command = sandbox.ddprun(&args);
    let ran = Ran::new(cargo_environment(&mut command).current_dir(sandbox.path("a")));
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "b 0 [\"--lr=1\"] true\n"), "{ran:?}");
    assert!(sandbox.path("target/debug/train").is_file());
}

#[test]
fn a_failed_build_shows_the_reason_and_returns_cargos_code() {
    let sandbox = Sandbox::new();
    package(sandbox.folder.path(), "alone", "examples/hello.rs");
    std::fs::write(sandbox.path("examples/broken.rs"), "fn main() { no_such_function() }\n").unwrap();
    for (example, hint) in [("broken", "no_such_function"), ("missing", "missing")] {
        let mut command = sandbox.ddprun(&["--example", example, "--debug"]);
        let ran = Ran::new(cargo_environment(&mut command));
        ran.ends(101, &[hint]);
        assert_eq!(ran.stdout, "");
    }
}

#[test]
fn cargo_itself_may_be_missing() {
    let sandbox = Sandbox::new();
    let ran = Ran::new(sandbox.ddprun(&["--example", "x"]).env("CARGO", "/no/such/cargo"));
    ran.ends(127, &["CARGO"]);
}
