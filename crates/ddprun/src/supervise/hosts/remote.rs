//! The end of `--hosts` on each machine: a ddprun whose standard input is its connection to the first one.
use super::AGENT;
use crate::console::message;
use crate::error::{Error, Result};
use crate::signal;
use candle_ddp_base::thread;
use candle_ddp_env::PROCESS;
use candle_ddp_rendezvous::Secret;
use rustix::process::{Signal, getpid, kill_process};
use std::io::{BufRead, BufReader, Stdin};

/// Whether this ddprun was started by that of `--hosts`.
pub(crate) fn is_agent() -> bool {
    PROCESS.is_set(AGENT)
}

/// Reads the run's secret from standard input, if it has one, and then ends this process as signals would: as the first ddprun
/// says, and when the connection to it ends.
pub(crate) fn follow() -> Result<Option<Secret>> {
    let mut input = BufReader::new(std::io::stdin());
    let mut line = String::new();
    input.read_line(&mut line).map_err(|error| Error::io("reading the secret from standard input", error))?;
    if !line.ends_with('\n') {
        return Err(Error::io("reading the secret from standard input", std::io::ErrorKind::UnexpectedEof));
    }
    let secret = Some(line.trim()).filter(|text| !text.is_empty()).map(Secret::new).transpose()?;
    thread::spawn("ddprun-hosts", move || obey(input))?;
    Ok(secret)
}

fn obey(input: BufReader<Stdin>) {
    for line in input.lines().map_while(std::io::Result::ok) {
        match signal::of_name(&line) {
            Some(signal) => raise(signal),
            // Its text is not shown: the secret comes the same way.
            None => message("the ddprun that started this one has sent a line that is no signal"),
        }
    }
    message("the connection to the ddprun that started this one has ended: ending the run");
    raise(Signal::TERM);
}

fn raise(signal: Signal) {
    // A process may signal itself.
    let _ = kill_process(getpid(), signal);
}
