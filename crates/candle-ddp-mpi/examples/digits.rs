//! The example `digits` of candle-ddp over MPI:
//!
//! ```text
//! cargo build --release --example digits
//! mpirun -n 2 target/release/examples/digits
//! ```
#[path = "../../../examples/digits/main.rs"]
#[allow(dead_code)]
mod digits;

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let options = digits::Options::parse();
    digits::common::exit_code(candle_ddp_mpi::run(|pg| digits::train(pg, &options)))
}
