//! Starting the agents, and following them.
use super::{AGENT, MASTER_ADDR, NNODES, NODE_RANK};
use crate::child;
use crate::command::hosts::Host;
use crate::command::{Cli, Options, Processes, RunSecret};
use crate::console::{Target, message};
use crate::error::{Error, Result, refuse};
use crate::signal;
use crate::supervise::events::{Event, Events};
use crate::supervise::lines::Lines;
use crate::supervise::output::{Intake, Source};
use crate::supervise::worker::Exit;
use crate::tail::Tail;
use candle_ddp_env::beginning_with;
use candle_ddp_rendezvous::json::encode;
use rustix::io::Errno;
use rustix::process::{Pid, WaitOptions, wait};
use signal_hook::consts::SIGCHLD;
use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::num::NonZeroUsize;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

/// ssh asks for no password, since its input is the agent's, and notices within 15 s that the other machine is gone or cannot be
/// reached. Nothing of this machine is forwarded there, such as the user's ssh-agent, whatever the user's configuration says.
const SSH: &str = "ssh -T -a -x -o ClearAllForwardings=yes -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=5 \
                   -o ServerAliveCountMax=3";
/// ssh's exit code if the connection fails.
const NO_CONNECTION: i32 = 255;
/// How long agents may take to end, in addition to --shutdown-timeout, when they should.
const REST: Duration = Duration::from_secs(15);

/// How long the other agents may take to end by themselves when one has failed: those of a run end together, but one that has ended
/// before it met the others would be waited for.
const TOGETHER: Duration = Duration::from_secs(5);

/// Variables that reach the workers on all machines begin with one of these; others do not.
const FORWARDED: [&str; 4] = ["CANDLE_DDP_", "NCCL_", "PET_", "RUST_"];

/// A ddprun on another machine.
struct Agent {
    host: String,
    process: Child,
    /// `None` once it was told to end.
    input: Option<ChildStdin>,
    ended: Option<Exit>,
}

/// Runs the program of `cli` on `hosts`, with one ddprun on each, and returns the exit code: that of the first one that failed.
pub(crate) fn run(cli: &Cli, hosts: &[Host]) -> Result<u8> {
    check(cli, hosts)?;
    let variables = variables(&cli.ranks.env)?;
    let options = &cli.options;
    let secret = RunSecret::resolve(options.no_secret, 1)?;
    let events = Events::listen(&options.signals_to_handle)?;
    let intake = events.forward()?;
    let mut first_lines = format!("{}\n", secret.get().map_or("", |secret| secret.reveal())).into_bytes();
    first_lines.extend(encode(&variables));
    first_lines.push(b'\n');
    let start = |(node_rank, host): (usize, &Host)| {
        start(cli, &host.name, &command(cli, hosts, node_rank)?, &first_lines, &intake, node_rank)
    };
    let mut agents: Vec<Agent> = hosts.iter().enumerate().map(start).collect::<Result<_>>()?;
    Ok(follow(&mut agents, intake, &events, options))
}

/// Refuses what contradicts `--hosts`.
fn check(cli: &Cli, hosts: &[Host]) -> Result<()> {
    let ranks = &cli.ranks;
    let given = [
        ("--nnodes", ranks.nnodes != "1"),
        ("--node-rank", ranks.node_rank.is_some()),
        ("--standalone", ranks.standalone),
        ("--rdzv-endpoint", ranks.rdzv_endpoint.is_some()),
        ("--rdzv-backend", !matches!(ranks.rdzv_backend.as_deref(), None | Some("" | "static"))),
    ];
    if let Some((option, _)) = given.into_iter().find(|(_, is_given)| *is_given) {
        return refuse(option, "follows from --hosts: omit one of the two");
    }
    let default = ranks.nproc_per_node;
    let is_ignored = |host: &Host| host.workers.is_some_and(|workers| Processes::Count(workers) != default);
    if default != Processes::Count(NonZeroUsize::MIN) && hosts.iter().all(is_ignored) {
        return refuse("--nproc-per-node", "has no effect, since --hosts has a number for each machine: omit it");
    }
    Ok(())
}

/// The values of the variables of `--env`.
fn variables(names: &[String]) -> Result<Vec<(String, Vec<u8>)>> {
    let value = |name: String| {
        let reason = || format!("{name:?} must be the name of a variable that is set here: export it, or omit it");
        let found = candle_ddp_env::beginning_with(&[&name]).into_iter().find(|(found, _)| *found == *name);
        let (_, value) = found.ok_or_else(|| Error::usage("--env", reason()))?;
        Ok((name, value.into_vec()))
    };
    names.iter().cloned().map(value).collect()
}

/// The command of the agent on a machine, for a shell there.
fn command(cli: &Cli, hosts: &[Host], node_rank: usize) -> Result<String> {
    let first = hosts.first().map_or("", |host| &host.name);
    let first = first.rsplit_once('@').map_or(first, |(_, name)| name);
    let variables: Vec<(&str, String)> = vec![
        (AGENT, "1".to_string()),
        (NNODES, hosts.len().to_string()),
        (NODE_RANK, node_rank.to_string()),
        (MASTER_ADDR, cli.ranks.master_addr.clone().unwrap_or_else(|| first.to_string())),
    ];
    let is_own = |name: &OsStr| {
        let name = name.to_string_lossy();
        name.contains("SECRET") || variables.iter().any(|(own, _)| *own == name)
    };
    let others: Vec<_> = beginning_with(&FORWARDED).into_iter().filter(|(name, _)| !is_own(name)).collect();
    let folder = std::env::current_dir().map_err(|error| Error::io("finding the current folder", error))?;
    let program = std::env::current_exe().map_err(|error| Error::io("finding the program of ddprun", error))?;
    let host = hosts.get(node_rank).map_or("", |host| &host.name);
    let says = |text: String, code: u8| -> OsString {
        let text = quoted(OsStr::new(&format!("ddprun: {host}: {text}")));
        format!("|| {{ echo {} >&2; exit {code}; }};", text.to_string_lossy()).into()
    };
    let (shown, of_program) = (folder.display(), program.display());
    let mut words: Vec<OsString> = vec![
        "cd".into(),
        quoted(folder.as_os_str()),
        says(format!("cannot enter the folder {shown}: all machines of --hosts must have it"), 126),
        // Positional parameters, since a variable may be in the environment of that machine.
        "set --".into(),
        quoted(program.as_os_str()),
        "; [ -f \"$1\" ] && [ -x \"$1\" ] || set -- ddprun; command -v \"$1\" >/dev/null".into(),
        says(format!("there is no ddprun: neither {of_program} nor one in PATH"), 127),
        "exec env".into(),
    ];
    let variables = variables.into_iter().map(|(name, value)| (name.into(), value.into()));
    words.extend(variables.chain(others).map(|(name, value)| quoted(&OsString::from_iter([name, "=".into(), value]))));
    words.push("\"$1\"".into());
    // Each agent takes --hosts for what it is.
    words.extend(std::env::args_os().skip(1).map(|argument| quoted(&argument)));
    Ok(for_any_shell(&words.join(OsStr::new(" "))))
}

/// A command that runs `script` with `sh`, whatever the user's shell is on the other machine. Shells do not agree on quotes,
/// backslashes, exclamation marks and line breaks within quotes: all of these are written as numbers.
fn for_any_shell(script: &OsStr) -> String {
    let written = |byte: &u8| match (b' '..=b'~').contains(byte) && !b"'\"$`\\!%".contains(byte) {
        true => char::from(*byte).to_string(),
        false => format!("\\{byte:03o}"),
    };
    let script: String = script.as_bytes().iter().map(written).collect();
    format!("exec sh -c 'eval \"$(printf \"{script}\")\"'")
}

/// A word for a POSIX shell, with quotes only if it needs them.
fn quoted(word: &OsStr) -> OsString {
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"_./=:,@+-".contains(byte);
    if !word.is_empty() && word.as_bytes().iter().all(is_plain) {
        return word.to_os_string();
    }
    let parts: Vec<&[u8]> = word.as_bytes().split(|byte| *byte == b'\'').collect();
    OsString::from_vec([&b"'"[..], &parts.join(&br"'\''"[..]), b"'"].concat())
}

fn start(cli: &Cli, host: &str, script: &str, first_lines: &[u8], intake: &Intake, node_rank: usize) -> Result<Agent> {
    let mut words = cli.ranks.rsh.as_deref().unwrap_or(SSH).split_whitespace();
    let program = words.next().ok_or_else(|| Error::usage("--rsh", "is empty"))?;
    let mut command = Command::new(program);
    command.args(words).arg(host).arg(script);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // The terminal's signals are for this process, which forwards them.
    command.process_group(0);
    child::bind_to_launcher(&mut command);
    let hint = "it starts ddprun on the machines of --hosts: install it, or give another program by --rsh".to_string();
    let started = command.spawn();
    let mut process = started.map_err(|error| Error::Program { program: program.to_string(), error, hint })?;
    let (stdout, stderr) = (process.stdout.take().map(Into::into), process.stderr.take().map(Into::into));
    for (target, fd) in [(Target::Stdout, stdout), (Target::Stderr, stderr)] {
        let (shown, tail) = (Some(Lines::new(None, false)), Tail::default());
        intake.add(Source { fd, local_rank: node_rank, restart_count: 0, target, shown, file: None, tail });
    }
    let mut input = process.stdin.take();
    // If the connection has failed already, its end says so.
    let _ = input.as_mut().map(|input| input.write_all(first_lines));
    Ok(Agent { host: host.to_string(), process, input, ended: None })
}

/// Waits for all agents, and forwards signals to them.
fn follow(agents: &mut [Agent], intake: Intake, events: &Events, options: &Options) -> u8 {
    let (mut failed, mut deadline, mut is_read, mut is_signalled) = (None, None, false, false);
    loop {
        reap(agents, &mut failed, &mut deadline, options);
        if agents.iter().all(|agent| agent.ended.is_some()) {
            break;
        }
        // A second signal would not let workers save.
        let alone = failed.as_ref().and_then(|failed: &Failed| failed.alone).filter(|_| !is_signalled);
        match events.next(alone.into_iter().chain(deadline).min()) {
            Some(Event::Signal(SIGCHLD) | Event::News(_)) => {}
            Some(Event::Signal(number)) => {
                let is_last = options.signals_to_handle.contains(&number);
                let is_known = is_last || signal::FOR_WORKERS.contains(&number);
                tell(agents, number, is_known);
                is_signalled |= is_last;
                if is_last && deadline.is_none() {
                    deadline = Instant::now().checked_add(options.shutdown_timeout.saturating_add(REST));
                }
            }
            Some(Event::Output(_)) => is_read = true,
            None if alone.is_some_and(|alone| alone <= Instant::now()) => {
                let Some(Failed { host, how, alone }) = &mut failed else { continue };
                message(format_args!(
                    "the ddprun on {host} has {how}, and its output is above. Those on {} have not ended: ending them",
                    left(agents)
                ));
                *alone = None;
                agents.iter_mut().for_each(|agent| agent.input = None);
            }
            None => {
                message(format_args!(
                    "no longer waiting for {}: look for workers that may be left there",
                    left(agents)
                ));
                for agent in agents.iter_mut().filter(|agent| agent.ended.is_none()) {
                    agent.input = None;
                    // It may have ended in the meantime.
                    let _ = agent.process.kill();
                }
                failed.get_or_insert(Failed { host: String::new(), how: Exit::Code(1), alone: None });
                break;
            }
        }
    }
    // No more output comes, except for what the agents wrote last.
    drop(intake);
    if !is_read {
        events.last_output(Instant::now() + REST);
    }
    failed.map_or(0, |failed| failed.how.code())
}

/// The first agent that has failed.
struct Failed {
    host: String,
    how: Exit,
    /// When the others are told to end, if they have not ended by themselves.
    alone: Option<Instant>,
}

/// The hosts of the agents that have not ended.
fn left(agents: &[Agent]) -> String {
    let late = agents.iter().filter(|agent| agent.ended.is_none());
    late.map(|agent| agent.host.as_str()).collect::<Vec<_>>().join(", ")
}

fn tell(agents: &mut [Agent], number: i32, is_known: bool) {
    let line = format!("{}\n", signal::name(number));
    for input in agents.iter_mut().filter_map(|agent| agent.input.as_mut()).filter(|_| is_known) {
        // If the connection has failed, its end says so.
        let _ = input.write_all(line.as_bytes());
    }
}

/// Notes the agents that have ended. The others would wait for one that has not come as far as to meet them.
fn reap(agents: &mut [Agent], failed: &mut Option<Failed>, deadline: &mut Option<Instant>, options: &Options) {
    loop {
        let (pid, status) = match wait(WaitOptions::NOHANG) {
            Ok(Some(ended)) => ended,
            Err(Errno::INTR) => continue,
            Ok(None) | Err(_) => return,
        };
        let Some(agent) = agents.iter_mut().find(|agent| Pid::from_child(&agent.process) == pid) else { continue };
        let how = Exit::new(status);
        (agent.ended, agent.input) = (Some(how), None);
        if let Exit::Signal(_) | Exit::Code(NO_CONNECTION) = how {
            message(format_args!("the connection to {} has ended ({how}): its output is above", agent.host));
        }
        // The agents of a run end together, and say why.
        let alone = match how {
            Exit::Code(0) => continue,
            Exit::Signal(_) | Exit::Code(NO_CONNECTION | 2 | 126 | 127) => None,
            Exit::Code(_) | Exit::NotReplaced => Instant::now().checked_add(TOGETHER),
        };
        let first = failed.get_or_insert(Failed { host: agent.host.clone(), how, alone });
        if alone.is_none() {
            first.alone = None;
            agents.iter_mut().for_each(|agent| agent.input = None);
        }
        let end = Instant::now().checked_add(options.shutdown_timeout.saturating_add(REST));
        *deadline = deadline.or(end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever shell the user has on the other machine.
    #[test]
    fn all_shells_read_a_command_alike() {
        let words = [
            "it's",
            "'1 ''77",
            "a\\b",
            "\\'",
            "two\nlines\n",
            "!1 !! wow!",
            "$HOME `id`",
            "100 %s",
            "\u{fc}\u{2192}",
            "\"q\"",
            "",
            "* ~ [a] {b,c} ; & | > #",
            "-n",
            "^a^b",
            "\t",
        ];
        let quoted: Vec<OsString> = words.iter().map(|word| quoted(OsStr::new(word))).collect();
        let script = ["printf \"<%s>\"".into(), quoted.join(OsStr::new(" "))].join(OsStr::new(" "));
        let expected: String = words.iter().map(|word| format!("<{word}>")).collect();
        for shell in ["sh", "bash", "zsh", "csh", "fish"] {
            match Command::new(shell).args(["-c", &for_any_shell(&script)]).output() {
                Ok(output) => assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{shell}: {output:?}"),
                Err(_) => candle_ddp_testing::skip(
                    "all_shells_read_a_command_alike",
                    format_args!("{shell} is not installed"),
                ),
            }
        }
    }
}
