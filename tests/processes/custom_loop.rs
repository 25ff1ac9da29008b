//! The example `custom_loop`: two processes that no launcher has started.
use crate::common::example;
use crate::common::free_port;
use std::process::{Command, Stdio};

#[test]
fn two_processes_meet_at_an_address() {
    let address = format!("tcp://127.0.0.1:{}", free_port());
    let ranks = ["0", "1"].map(|rank| {
        let arguments = ["--rank", rank, "--world-size", "2", "--address", &address];
        Command::new(example("custom_loop")).args(arguments).stdout(Stdio::piped()).spawn().unwrap()
    });
    for (rank, process) in ranks.into_iter().enumerate() {
        let output = process.wait_with_output().unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{stdout}");
        assert!(stdout.contains(&format!("rank {rank} of 2: y = 3.000 x + 1.000")), "{stdout}");
    }
}
