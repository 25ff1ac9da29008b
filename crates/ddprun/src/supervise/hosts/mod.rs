//! `--hosts`: this ddprun starts one on each machine over ssh. These are the agents of an ordinary run with a fixed number of
//! nodes. This one forwards their output, and signals to them.
//!
//! A connection's standard input carries the secret in the first line, the variables of `--env` in the second, and then a line with
//! the name of each signal. When it ends, because this process or the connection does, the agent ends its workers.
mod start;

pub(crate) use start::run;

use crate::command::hosts::Variables;
use crate::console::message;
use crate::error::{Error, Result};
use crate::signal;
use candle_ddp_base::thread;
use candle_ddp_env::PROCESS;
use candle_ddp_rendezvous::{Secret, json};
use rustix::process::{Signal, getpid, kill_process};
use std::ffi::OsString;
use std::io::{BufRead, BufReader, ErrorKind, Stdin};
use std::os::unix::ffi::OsStringExt;

/// Is set for the agents.
const AGENT: &str = "CANDLE_DDP_HOSTS_AGENT";
const NNODES: &str = "PET_NNODES";
const NODE_RANK: &str = "PET_NODE_RANK";
const MASTER_ADDR: &str = "PET_MASTER_ADDR";

/// The variables by which agents know their part, which are not for their workers.
pub(crate) const OWN: [&str; 4] = [AGENT, NNODES, NODE_RANK, MASTER_ADDR];

/// Whether a ddprun with `--hosts` started this one.
pub(crate) fn is_agent() -> bool {
    PROCESS.is_set(AGENT)
}

/// Reads the run's secret, if it has one, and the variables of its workers from standard input, and then ends this process as signals
/// would: as the first ddprun says, and when the connection to it ends.
pub(crate) fn follow() -> Result<(Option<Secret>, Variables)> {
    let mut input = BufReader::new(std::io::stdin());
    let mut line = |what: &str| {
        let mut line = String::new();
        let read = input.read_line(&mut line).and_then(|_| match line.ends_with('\n') {
            true => Ok(()),
            false => Err(ErrorKind::UnexpectedEof.into()),
        });
        read.map(|()| line).map_err(|error| Error::io(format!("reading {what} from standard input"), error))
    };
    let (secret, variables) = (line("the secret")?, line("the variables of --env")?);
    let secret = Some(secret.trim()).filter(|text| !text.is_empty()).map(Secret::new).transpose()?;
    let variables: Vec<(String, Vec<u8>)> = json::decode("the variables of --env", variables.as_bytes())?;
    let variables = variables.into_iter().map(|(name, value)| (name, OsString::from_vec(value))).collect();
    thread::spawn("ddprun-hosts", move || obey(input))?;
    Ok((secret, variables))
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
