//! Unread output never keeps a run from ending.
use crate::{Ran, Running, Sandbox};
use rustix::process::Signal;
use std::process::Stdio;

/// Arms the test after more output than a pipe holds, and then writes more than all pipes and buffers together hold.
const FLOOD: &str = "head -c 150000 /dev/zero; echo >armed; head -c 4000000 /dev/zero";

#[test]
fn a_signal_ends_a_run_with_unread_output() {
    let sandbox = Sandbox::new();
    let mut child = sandbox.start(&["--shutdown-timeout=0.5"], FLOOD);
    let _unread = child.child().stdout.take();
    sandbox.wait_for("armed");
    child.send(Signal::TERM);
    let ran = Ran::of(child);
    ran.ends(143, &["SIGTERM forwarded", "the output is not being read: "]);
}

#[test]
fn a_failure_ends_a_run_with_unread_output() {
    let sandbox = Sandbox::new();
    let script = format!(
        "[ $RANK = 0 ] && {{ {FLOOD}; }}; while [ ! -s armed ]; do sleep 0.01; done; sleep 0.3; \
                          echo 'Error: no data' >&2; exit 5"
    );
    let mut child = sandbox.start(&["--nproc-per-node=2", "--shutdown-timeout=0.5"], &script);
    let _unread = child.child().stdout.take();
    let ran = Ran::of(child);
    ran.ends(5, &["rank 1 failed first: it exited with code 5", "its last lines:\n    Error: no data\n"]);
}

/// Output that the workers could still write is counted as lost.
#[test]
fn a_success_ends_a_run_with_unread_output() {
    let sandbox = Sandbox::new();
    let mut child = sandbox.start(&["--shutdown-timeout=0.5"], "head -c 300000 /dev/zero; echo last >&2");
    let _unread = child.child().stdout.take();
    let ran = Ran::of(child);
    assert_eq!(ran.code, Some(0));
    // A pipe holds 64 KiB, or less for a user with many pipes.
    let lost = ran.stderr.split_once("the output is not being read: ").and_then(|(_, rest)| rest.split_once(" bytes"));
    let lost: usize = lost.unwrap_or_else(|| panic!("{ran:?}")).0.parse().unwrap();
    assert!((230_000..=300_000).contains(&lost), "{ran:?}");
    ran.says("last\n");
}

/// Lost output is reported, even if stderr is only read later.
#[test]
fn the_loss_is_reported_to_a_slow_reader() {
    use std::io::{Read, Write};
    let sandbox = Sandbox::new();
    let (mut reader, writer) = std::io::pipe().unwrap();
    // The pipe is full before ddprun starts, and has no room until the test reads it.
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    while (&writer).write(&[b'x'; 4096]).is_ok() {}
    while (&writer).write(b"x").is_ok() {}
    rustix::io::ioctl_fionbio(&writer, false).unwrap();
    let script = "head -c 300000 /dev/zero; echo >ended";
    let mut command = sandbox.ddprun(&["--shutdown-timeout=0.1", "sh", "-c", script]);
    let mut child = Running::new(command.stdout(Stdio::piped()).stderr(writer));
    drop(command);
    let _unread = child.child().stdout.take();
    sandbox.wait_for("ended");
    // Long enough for a ddprun that does not wait.
    std::thread::sleep(std::time::Duration::from_secs(3));
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    assert_eq!(child.child().wait().unwrap().code(), Some(0));
    assert!(text.contains("the output is not being read: "), "{}", text.trim_start_matches('x'));
}

/// A slow reader gets everything.
#[test]
fn a_slow_reader_is_waited_for() {
    let sandbox = Sandbox::new();
    let mut child = sandbox.start(&["--shutdown-timeout=20"], "head -c 300000 /dev/zero | tr '\\0' x");
    let mut stdout = child.child().stdout.take().unwrap();
    let reader = std::thread::spawn(move || {
        let (mut text, mut piece) = (Vec::new(), [0; 40_000]);
        while let Ok(count @ 1..) = std::io::Read::read(&mut stdout, &mut piece) {
            text.extend_from_slice(&piece[..count]);
            std::thread::sleep(std::time::Duration::from_millis(200));
        }
        text.len()
    });
    let ran = Ran::of(child);
    assert_eq!((ran.code, ran.stderr.as_str(), reader.join().unwrap()), (Some(0), "", 300_000));
}

/// Not even ddprun's own messages are read.
#[test]
fn unread_messages_do_not_block_ddprun() {
    let sandbox = Sandbox::new();
    let (unread, writer) = std::io::pipe().unwrap();
    let mut command = sandbox.ddprun(&["--shutdown-timeout=0.5", "sh", "-c", FLOOD]);
    let mut child = Running::new(command.stdout(writer.try_clone().unwrap()).stderr(writer));
    drop(command);
    sandbox.wait_for("armed");
    child.send(Signal::TERM);
    assert_eq!(Ran::of(child).code, Some(143));
    drop(unread);

    // The pipe is full before ddprun starts.
    let (unread, writer) = std::io::pipe().unwrap();
    let mut command = sandbox.ddprun(&["no-such-program"]);
    let full = r#"head -c 65536 /dev/zero >&2; exec "$0" "$@""#;
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", full]).arg(command.get_program()).args(command.get_args());
    let child = Running::new(shell.current_dir(sandbox.folder.path()).stdout(Stdio::null()).stderr(writer));
    drop((command.stdin(Stdio::null()), shell));
    assert_eq!(Ran::of(child).code, Some(127));
    drop(unread);
}
