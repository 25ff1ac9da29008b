//! ddprun on a terminal: a pseudo-terminal whose other end the test holds.
use crate::{Running, Sandbox};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use std::os::fd::OwnedFd;
use std::process::Stdio;

/// A terminal on which ddprun runs.
struct Terminal {
    ours: OwnedFd,
    child: Running,
    shown: String,
}

impl Terminal {
    fn start(sandbox: &Sandbox, args: &[&str], script: &str) -> Self {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let ours = openpt(flags).unwrap();
        grantpt(&ours).unwrap();
        unlockpt(&ours).unwrap();
        tcsetwinsize(&ours, Winsize { ws_row: 31, ws_col: 97, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
        let theirs = ioctl_tiocgptpeer(&ours, flags).unwrap();
        let mut command = sandbox.ddprun(&[args, &["sh", "-c", script]].concat());
        command.stdin(theirs.try_clone().unwrap()).stdout(theirs.try_clone().unwrap()).stderr(Stdio::from(theirs));
        let child = Running::new(&mut command);
        Self { ours, child, shown: String::new() }
    }

    /// Reads until `done` returns true, or to the end.
    #[track_caller]
    fn read(&mut self, done: impl Fn(&str) -> bool) -> &str {
        let mut buffer = [0; 4096];
        while !done(&self.shown) {
            let patience = Timespec { tv_sec: 60, tv_nsec: 0 };
            let ready = poll(&mut [PollFd::new(&self.ours, PollFlags::IN)], Some(&patience)).unwrap();
            assert!(ready > 0, "no more output after {:?}", self.shown);
            match rustix::io::read(&self.ours, &mut buffer) {
                Ok(count) if count > 0 => self.shown.push_str(std::str::from_utf8(&buffer[..count]).unwrap()),
                _ => break,
            }
        }
        &self.shown
    }

    fn end(mut self) -> (Option<i32>, String) {
        self.read(|_| false);
        (self.child.child().wait().unwrap().code(), self.shown)
    }
}

#[test]
fn workers_see_a_terminal_of_the_same_size() {
    let sandbox = Sandbox::new();
    let terminal =
        Terminal::start(&sandbox, &[], "test -t 1 && test -t 2 && stty size <&1; test -t 0 || echo no stdin");
    assert_eq!(terminal.end(), (Some(0), "31 97\r\nno stdin\r\n".into()));
}

#[test]
fn a_redirected_stream_is_not_a_terminal() {
    let sandbox = Sandbox::new();
    let terminal =
        Terminal::start(&sandbox, &["-r1", "--log-dir=logs", "--run-id=a"], "test -t 2 && ! test -t 1; echo $?");
    assert_eq!(terminal.end().0, Some(0));
    assert_eq!(std::fs::read_to_string(sandbox.path("logs/a/attempt_0/0/stdout.log")).unwrap(), "0\n");
}

#[test]
fn a_progress_bar_is_shown_while_it_is_drawn_and_makes_room_for_lines() {
    let sandbox = Sandbox::new();
    let script = r#"
        if [ $RANK = 0 ]; then
            printf '\r\033[2Khalf' >&2; while [ ! -e seen ]; do sleep 0.01; done
            printf '\r\033[2Kfull\n' >&2
        else
            while [ ! -e drawn ]; do sleep 0.01; done; echo a line
        fi"#;
    let mut terminal = Terminal::start(&sandbox, &["--nproc-per-node=2"], script);
    terminal.read(|shown| shown.ends_with("half"));
    std::fs::write(sandbox.path("drawn"), "").unwrap();
    terminal.read(|shown| shown.ends_with("a line\r\n"));
    std::fs::write(sandbox.path("seen"), "").unwrap();
    let (code, shown) = terminal.end();
    assert_eq!(code, Some(0));
    let (_, shown) = shown.split_once("\r\n").unwrap();
    assert_eq!(shown, "\r\x1b[2Khalf\r\x1b[2Ka line\r\n\r\x1b[2Kfull\r\n");
}

#[test]
fn the_summary_starts_on_a_line_of_its_own() {
    let sandbox = Sandbox::new();
    let terminal = Terminal::start(&sandbox, &[], r"printf '\r50%%'; exit 1");
    let (code, shown) = terminal.end();
    assert_eq!(code, Some(1));
    assert!(shown.starts_with("\r50%\r\nddprun: rank 0 failed"), "{shown:?}");
}

/// Output written just before the end is not lost, however the system buffers it.
#[test]
fn the_last_output_is_not_lost() {
    let sandbox = Sandbox::new();
    for _ in 0..20 {
        let (code, shown) = Terminal::start(&sandbox, &[], "seq 1000").end();
        assert_eq!((code, shown.lines().count(), shown.ends_with("\r\n1000\r\n")), (Some(0), 1000, true));
    }
}
