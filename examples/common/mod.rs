//! Shared code of the programs: everything around a training loop that is not part of it.
#![allow(dead_code)] // each program uses only some of it
pub(crate) mod accuracy;
pub(crate) mod cache;
pub(crate) mod digits;
pub(crate) mod hash;
pub(crate) mod median;
pub(crate) mod memory;
pub(crate) mod options;
pub(crate) mod progress;
pub(crate) mod run;
pub(crate) mod summary;
pub(crate) mod text;
pub(crate) mod training;

use candle_ddp::{InitOptions, ProcessGroup, Result, init_process_group};
use clap::Parser;
use std::process::ExitCode;

// Training on the CPU constantly frees and allocates large tensors, which this allocator does without the kernel.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Reads the command line, joins the other ranks and runs `program`. If it fails on this rank, the others end with its
/// error instead of waiting for it.
pub(crate) fn main<O: Parser>(program: impl FnOnce(&ProcessGroup, &O) -> Result<()>) -> ExitCode {
    main_with(|_| InitOptions::default(), program)
}

/// The same, with options for the group that depend on the command line.
pub(crate) fn main_with<O: Parser>(
    init: impl FnOnce(&O) -> InitOptions,
    program: impl FnOnce(&ProcessGroup, &O) -> Result<()>,
) -> ExitCode {
    let options = O::parse();
    let run = || {
        let pg = init_process_group(init(&options))?;
        pg.abort_on_error(|| program(&pg, &options))
    };
    exit_code(run())
}

/// Prints the error, if there is one.
pub(crate) fn exit_code(result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
