//! The programs that tests start as processes.
use crate::{free_port, test_arguments, test_process};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

/// The launcher: next to this program where scripts/gpu_suite.sh has packed both. Otherwise cargo builds it, since it is
/// another package than these tests.
pub fn ddprun() -> &'static Path {
    static DDPRUN: OnceLock<PathBuf> = OnceLock::new();
    DDPRUN.get_or_init(|| {
        let packed = std::env::current_exe().unwrap().with_file_name("ddprun");
        if packed.exists() { packed } else { built(&["--bin", "ddprun"], "ddprun") }
    })
}

/// The binary of an example, from the folder that CANDLE_DDP_TEST_EXAMPLES names, if it does. `cargo test` builds all of them along with the
/// tests, `cargo test --test processes` does not.
pub fn example(name: &str) -> PathBuf {
    if let Some(folder) = std::env::var_os("CANDLE_DDP_TEST_EXAMPLES") {
        return Path::new(&folder).join(name);
    }
    let path = profile().join("examples").join(name);
    if path.exists() { path } else { built(&["--example", name], &format!("examples/{name}")) }
}

/// The launcher of `ranks` processes of an example.
pub fn launch_example(name: &str, ranks: usize) -> Command {
    let mut launcher = Command::new(ddprun());
    launcher.args(["--standalone", "--nproc-per-node", &ranks.to_string()]).arg(example(name));
    launcher
}

/// The launcher of `ranks` processes of this program, each of which runs the test `rank_of_another_test` of `module`.
pub fn launch_test(module: &str, ranks: usize, options: &[&str]) -> Command {
    let mut launcher = Command::new(ddprun());
    launcher.args(["--nproc-per-node", &ranks.to_string()]).args(options).arg(std::env::current_exe().unwrap());
    launcher.args(test_arguments(module, "rank_of_another_test"));
    launcher
}

/// The same for `nodes` launchers, of `ranks` processes each.
pub fn launch_nodes(module: &str, nodes: usize, ranks: usize, options: &[&str]) -> Vec<Command> {
    let (count, port) = (nodes.to_string(), free_port().to_string());
    let node = |node: usize| {
        let node = node.to_string();
        let several = ["--nnodes", &count, "--node-rank", &node, "--no-secret"];
        let several = [&several[..], &["--master-addr", "127.0.0.1", "--master-port", &port]].concat();
        launch_test(module, ranks, &[options, if nodes > 1 { &several[..] } else { &[] }].concat())
    };
    (0..nodes).map(node).collect()
}

/// Starts `ranks` processes like those of [`launch_test`] without a launcher. They meet at `INIT_METHOD`, and print nothing.
pub fn start_ranks(module: &str, ranks: usize, variables: &[(&str, String)]) -> Vec<Child> {
    let init_method = format!("tcp://127.0.0.1:{}", free_port());
    let rank = |rank: usize| {
        let mut command = test_process(module, "rank_of_another_test");
        command.env("INIT_METHOD", &init_method).env("RANK", rank.to_string()).env("WORLD_SIZE", ranks.to_string());
        command.envs(variables.iter().cloned()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    (0..ranks).map(rank).collect()
}

/// Runs a test of this program, which must pass, where no file can have more than `blocks`.
#[track_caller]
pub fn pass_on_a_full_disk(blocks: usize, module: &str, name: &str, (variable, path): (&str, &Path)) {
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$0\" \"$@\"")]);
    shell.arg(std::env::current_exe().unwrap()).args(test_arguments(module, name)).env(variable, path);
    let [stdout, _] = succeed(&mut shell);
    assert!(stdout.contains("1 passed"), "{stdout}");
}

/// Runs a program that must succeed, and returns what it has printed.
#[track_caller]
pub fn succeed(command: &mut Command) -> [String; 2] {
    let output = command.output().unwrap();
    let [stdout, stderr] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(output.status.success(), "{command:?}: {stdout}{stderr}");
    [stdout, stderr]
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
    build.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    if profile.ends_with("release") {
        build.arg("--release");
    }
    assert!(build.status().unwrap().success(), "{build:?}");
    profile.join(path)
}
