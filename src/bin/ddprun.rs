//! `ddprun`: starts the ranks of a distributed program and looks after them.
use candle_ddp::launch;
use std::process::ExitCode;

fn main() -> ExitCode {
    match launch::parse() {
        Ok(cli) => launch::run(cli),
        Err(code) => code,
    }
}
