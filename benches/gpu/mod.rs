//! Shared parts of the GPU benches: their start, and their process group.
#[path = "../start/mod.rs"]
mod start;

use candle_ddp::backend::nccl;
use candle_ddp::{Backend, InitOptions, ProcessGroup, Result, init_process_group};
use clap::Parser;
use std::process::ExitCode;

/// Runs `bench` with the options of the command line, or with `smoke` under cargo test's own harness, whose other arguments
/// are not for it. Without a GPU, it says so.
pub(crate) fn main<O: Parser>(smoke: O, bench: impl FnOnce(&O) -> Result<()>) -> ExitCode {
    if let Err(reason) = nccl::device_count() {
        println!("skipped: {reason}");
        return ExitCode::SUCCESS;
    }
    let options = if start::is_bench() { start::options() } else { smoke };
    start::exit_code(bench(&options))
}

/// A world of one over NCCL.
pub(crate) fn world_of_one() -> Result<ProcessGroup> {
    let store = std::env::temp_dir().join(format!("candle-ddp-bench-{}", std::process::id()));
    init_process_group(InitOptions {
        backend: Backend::Nccl,
        init_method: format!("file://{}", store.display()),
        rank: Some(0),
        world_size: Some(1),
        ..Default::default()
    })
}
