//! Where the workers' output goes, and in which form.
use crate::{Ran, Running, Sandbox};
use std::fs::read_to_string;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

#[test]
fn lines_of_different_ranks_never_tear() {
    let sandbox = Sandbox::new();
    // Every line takes two writes, so a launcher that forwards bytes as they arrive would tear lines.
    let script =
        r#"i=0; while [ $i -lt 10000 ]; do printf "rank $RANK "; echo "line $i of ten thousand"; i=$((i + 1)); done"#;
    let ran = sandbox.run(&["--nproc-per-node", "2"], script);
    assert_eq!(ran.code, Some(0));
    let mut next = [0, 0];
    for line in ran.stdout.lines() {
        let rank: usize =
            line.split(' ').nth(1).and_then(|rank| rank.parse().ok()).unwrap_or_else(|| panic!("{line:?}"));
        assert_eq!(line, format!("rank {rank} line {} of ten thousand", next[rank]));
        next[rank] += 1;
    }
    assert_eq!(next, [10_000, 10_000]);
}

#[test]
fn streams_stay_separate_and_unfinished_lines_are_shown() {
    let ran = Sandbox::new().run(&[], "printf out; printf err >&2");
    assert_eq!((ran.stdout.as_str(), ran.stderr.as_str()), ("out", "err"));
}

#[test]
fn an_endless_line_is_shown_completely() {
    let ran = Sandbox::new().run(&[], "head -c 5000000 /dev/zero | tr '\\0' x");
    assert_eq!(ran.stdout.len(), 5_000_000);
    assert!(ran.stdout.bytes().all(|byte| byte == b'x'));
}

#[test]
fn stdout_and_stderr_in_one_place_keep_their_order() {
    let sandbox = Sandbox::new();
    let script = "i=0; while [ $i -lt 1000 ]; do echo $i; echo $i >&2; i=$((i + 1)); done";
    let (mut reader, writer) = std::io::pipe().unwrap();
    let mut command = sandbox.ddprun(&["sh", "-c", script]);
    let mut child = Running::new(command.stdout(writer.try_clone().unwrap()).stderr(writer));
    drop(command);
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    child.child().wait().unwrap();
    let expected: String = (0..1000).map(|n| format!("{n}\n{n}\n")).collect();
    assert_eq!(text, expected);
}

#[test]
fn redirects_go_to_files_in_the_layout_of_torchrun() {
    let sandbox = Sandbox::new();
    let script = "echo out $RANK; echo err $RANK >&2";
    let ran = sandbox.run(&["--nproc-per-node=2", "--log-dir=logs", "--run-id=a", "--redirects=0:1,1:3"], script);
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), ""));
    ran.says("err 0\n");
    assert!(!ran.stderr.contains("err 1"), "{}", ran.stderr);
    let read = |name: &str| read_to_string(sandbox.path("logs/a/attempt_0").join(name)).ok();
    assert_eq!(read("0/stdout.log").as_deref(), Some("out 0\n"));
    assert_eq!(read("0/stderr.log"), None);
    assert_eq!(read("1/stdout.log").as_deref(), Some("out 1\n"));
    assert_eq!(read("1/stderr.log").as_deref(), Some("err 1\n"));
}

#[test]
fn tee_goes_to_files_and_is_shown_with_a_prefix() {
    let sandbox = Sandbox::new();
    let script = "echo one; printf two; echo err >&2";
    let ran = sandbox.run(&["--nproc-per-node=2", "--log-dir=logs", "--run-id=a", "-t", "1", "--role=t"], script);
    // An unfinished last line is not continued by another rank.
    assert_eq!(ran.sorted(), ["[t0]:one", "[t0]:two", "[t1]:one", "[t1]:two"]);
    ran.says("\nerr\n");
    let log = read_to_string(sandbox.path("logs/a/attempt_0/1/stdout.log")).unwrap();
    assert_eq!(log, "one\ntwo");
}

#[test]
fn earlier_logs_are_not_overwritten() {
    let sandbox = Sandbox::new();
    for text in ["first", "second"] {
        sandbox.run(&["--log-dir=logs", "--run-id=a", "-r3"], &format!("echo {text}"));
    }
    assert_eq!(read_to_string(sandbox.path("logs/a/attempt_0/0/stdout.log")).unwrap(), "first\n");
    assert_eq!(read_to_string(sandbox.path("logs/a_2/attempt_0/0/stdout.log")).unwrap(), "second\n");
}

#[test]
fn log_files_in_the_default_folder_are_kept_and_named() {
    let sandbox = Sandbox::new();
    let ran = sandbox.run(&["-r3"], "echo text");
    let (_, folder) = ran.stderr.trim().split_once("log files are in ").unwrap();
    assert_eq!(read_to_string(format!("{folder}/attempt_0/0/stdout.log")).unwrap(), "text\n");
}

#[test]
fn the_summary_also_quotes_redirected_output() {
    let sandbox = Sandbox::new();
    let ran = sandbox.run(&["-r3"], "echo words >&2; exit 1");
    ran.says("its last lines:\n    words\n");
}

#[test]
fn a_reader_that_leaves_ends_the_run() {
    let sandbox = Sandbox::new();
    let mut child = sandbox.start(&["--nproc-per-node", "2"], "exec yes");
    let mut line = String::new();
    BufReader::new(child.child().stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "y\n");
    let ran = Ran::of(child);
    ran.ends(128 + 13, &["SIGPIPE"]);
}

/// A full disk, such as /dev/full, must not end the training.
#[test]
#[cfg(target_os = "linux")]
fn unwritable_output_is_reported_and_still_drained() {
    let sandbox = Sandbox::new();
    // More than a pipe holds, on both streams.
    let script = "i=0; while [ $i -lt 20000 ]; do echo line $i; echo line $i >&2; i=$((i + 1)); done; echo > done";
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let run = |args: &[&str], out: Stdio, err: Stdio| {
        let _ = std::fs::remove_file(sandbox.path("done"));
        let mut command = sandbox.ddprun(&[args, &["sh", "-c", script]].concat());
        let ran = Ran::of(Running::new(command.stdout(out).stderr(err)));
        assert_eq!(ran.code, Some(0), "{ran:?}");
        assert!(sandbox.path("done").exists());
        ran
    };
    let ran = run(&[], full().into(), Stdio::piped());
    assert_eq!(ran.stderr.matches("ddprun: cannot write the workers' output to stdout: No space left").count(), 1);
    assert!(ran.stderr.contains("\nline 19999\n"), "{ran:?}");
    let ran = run(&[], Stdio::piped(), full().into());
    assert!(ran.stdout.ends_with("\nline 19999\n"), "{ran:?}");
    run(&[], full().into(), full().into());
    // Log files remain complete.
    let ran = run(&["--log-dir=logs", "--run-id=a", "-t1"], full().into(), Stdio::piped());
    assert_eq!(ran.stderr.matches("cannot write the workers' output to stdout").count(), 1);
    assert!(read_to_string(sandbox.path("logs/a/attempt_0/0/stdout.log")).unwrap().ends_with("\nline 19999\n"));
    // Output lost at the very end is reported as well.
    let mut command = sandbox.ddprun(&["sh", "-c", "printf unfinished"]);
    let ran = Ran::of(Running::new(command.stdout(full()).stderr(Stdio::piped())));
    ran.ends(0, &["cannot write the workers' output to stdout: No space left"]);
}

/// A file that reaches the limit of its size is like a full disk.
#[test]
fn a_limit_on_files_does_not_end_the_run() {
    let sandbox = Sandbox::new();
    let script = "i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i + 1)); done; echo > done";
    let ddprun = sandbox.ddprun(&["--log-dir=logs", "--run-id=a", "-r1", "sh", "-c", script]);
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -f 8; exec \"$0\" \"$@\""]).arg(ddprun.get_program()).args(ddprun.get_args());
    command.current_dir(ddprun.get_current_dir().unwrap()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let ran = Ran::of(Running::new(&mut command));
    assert!(ran.code == Some(0) && sandbox.path("done").exists(), "{ran:?}");
    ran.says("stdout.log: File too large (os error 27). The file is incomplete from here on");
}

#[test]
fn the_prefix_of_tee_may_say_which_rank_of_the_run_and_on_which_host() {
    let sandbox = Sandbox::new();
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let option = "--log-line-prefix-template=<${host} ${rank} $role_name$$> ";
    let ran = sandbox.run(&["--nproc-per-node=2", "--tee=3", option], "echo out; echo err >&2");
    let lines = |stream: &str| [0, 1].map(|rank| format!("<{host} {rank} default$> {stream}"));
    assert_eq!(ran.sorted(), lines("out"));
    lines("err").iter().for_each(|line| ran.says(line));
    // torchrun's variable.
    let mut ddprun = sandbox.ddprun(&["--tee=1", "sh", "-c", "echo out"]);
    let ran = Ran::new(ddprun.env("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank${rank}]: "));
    assert_eq!(ran.stdout, "[rank0]: out\n");
    let ran = sandbox.run(&["--log-line-prefix-template=$nobody"], "echo started");
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""));
    ran.says("${nobody} is unknown: use ${role_name}");
}

#[test]
fn only_some_ranks_are_shown_but_all_are_logged_and_reported() {
    let sandbox = Sandbox::new();
    let script = "echo out $RANK; echo err $RANK >&2; : >here$RANK
        until [ -e here0 ] && [ -e here2 ]; do sleep 0.01; done
        [ $RANK != 1 ] || exit 3; sleep 1000";
    let ran = sandbox
        .run(&["--nproc-per-node=3", "--local-ranks-filter=0,2", "--log-dir=logs", "--run-id=a", "--tee=1:1"], script);
    assert_eq!((ran.code, ran.sorted()), (Some(3), vec!["out 0", "out 2"]));
    assert_eq!(read_to_string(sandbox.path("logs/a/attempt_0/1/stdout.log")).unwrap(), "out 1\n");
    ran.says("err 0\n");
    // As the last line of the rank that failed.
    assert_eq!(ran.stderr.matches("err 1").count(), 1, "{}", ran.stderr);
    ran.says("rank 1 ");
}
