//! Very many collectives of random kind, dtype, size and group, blocking or not; their results are checked, and the memory,
//! descriptors and threads of every rank, and the store of ddprun, must not grow.
//!
//! ```text
//! cargo bench --bench soak [-- --calls 1000000 --seed 1 --ranks 4 --hosts 1]
//! ```
//!
//! Ranks are processes under ddprun. All draw the same numbers from the seed, so that they agree on the calls; a failed run
//! is repeated with the seed that it prints. With `--hosts 2`, the first half of the ranks is on one host and the second on
//! another, as far as the engine knows; `CANDLE_DDP_CPU_TRANSPORT=tcp` is passed on. Without `--bench` (as under `cargo
//! test`), it runs 2000 calls as a smoke test.
mod call;
mod check;
mod groups;
mod process;
mod random;
#[path = "../start/mod.rs"]
mod start;

use call::Soak;
use candle_ddp::rendezvous::Store;
use candle_ddp::{InitOptions, ProcessGroup, ReduceOp, Result, init_process_group};
use clap::Parser;
use process::{Usage, resident};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Parser)]
struct Options {
    /// The number of collectives that are called, by all groups together.
    #[arg(long, default_value_t = 100_000)]
    calls: u64,
    /// The seed of all random numbers.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The number of ranks, at least 2.
    #[arg(long, default_value_t = 4)]
    ranks: usize,
    /// The number of hosts that the ranks pretend to be on.
    #[arg(long, default_value_t = 1)]
    hosts: usize,
    /// Set for the ranks.
    #[arg(long, hide = true)]
    worker: bool,
}

/// The number of checks of memory. In the second half of the run it must not grow; descriptors and threads never may.
const PARTS: u64 = 10;
fn worker(options: &Options) -> Result<()> {
    let pg = init_process_group(InitOptions { timeout: Duration::from_secs(300), ..Default::default() })?;
    pg.abort_on_error(|| {
        let start = Instant::now();
        let mut soak = Soak::new(&pg, options.seed)?;
        let mut first: Option<Usage> = None;
        let mut first_keys: Option<usize> = None;
        if pg.rank() == 0 {
            println!(
                "| collectives | seconds | GiB per rank | largest rank, MiB | descriptors | threads | ddprun, MiB |"
            );
            println!("|---|---|---|---|---|---|---|");
        }
        for part in 1..=PARTS {
            while soak.calls() < options.calls * part / PARTS {
                soak.step()?;
            }
            soak.rest()?;
            let usage = settled(&pg, first.as_ref())?;
            if pg.rank() == 0 {
                let (seconds, bytes) = (start.elapsed().as_secs_f64(), soak.bytes() as f64 / f64::from(1 << 30));
                let ddprun = resident(&std::os::unix::process::parent_id().to_string()) / f64::from(1 << 20);
                println!("| {} | {seconds:.0} | {bytes:.2} | {usage} | {ddprun:.1} |", soak.calls());
            }
            let first = first.get_or_insert(usage);
            if part <= PARTS / 2 {
                first.bytes = first.bytes.max(usage.bytes);
            }
            if !usage.is_like(first) {
                let reason = format!("it grew from {first} to {usage} (MiB, descriptors, threads)");
                return Err(candle_ddp::Error::RankFailed { rank: pg.rank(), reason });
            }
            // Groups that have ended leave nothing behind in ddprun's store.
            let keys = pg.store().num_keys()?;
            let first_keys = *first_keys.get_or_insert(keys);
            if keys > first_keys {
                let reason = format!("the store has {keys} keys instead of {first_keys}");
                return Err(candle_ddp::Error::RankFailed { rank: pg.rank(), reason });
            }
        }
        if pg.rank() == 0 {
            println!("\n{}", soak.summary());
        }
        Ok(())
    })
}

/// The most that any rank uses, once groups that have ended have closed their connections.
fn settled(pg: &ProcessGroup, first: Option<&Usage>) -> Result<Usage> {
    const TRIES: usize = 100;
    let mut tries = 0;
    loop {
        // All ranks see the same numbers, and so decide alike.
        let before = largest(pg, &Usage::now())?;
        std::thread::sleep(Duration::from_millis(100));
        let usage = largest(pg, &Usage::now())?;
        tries += 1;
        let is_settled = match first {
            Some(first) => usage.is_like(first),
            None => usage.descriptors == before.descriptors && usage.threads == before.threads,
        };
        if is_settled || tries == TRIES {
            return Ok(usage);
        }
    }
}

fn largest(pg: &ProcessGroup, own: &Usage) -> Result<Usage> {
    let all = candle_core::Tensor::new(&[own.bytes, own.descriptors, own.threads], pg.device())?;
    pg.all_reduce(&all, ReduceOp::Max)?;
    let all = all.to_vec1::<f64>()?;
    Ok(Usage { bytes: all[0], descriptors: all[1], threads: all[2] })
}

/// Becomes ddprun, which starts this program for every rank.
fn launch(options: &Options) -> ExitCode {
    let Options { calls, seed, ranks, hosts, .. } = options;
    println!("seed {seed}, {calls} collectives, {ranks} ranks on {hosts} host(s)\n");
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(error) => {
            eprintln!("error: this program's path: {error}");
            return ExitCode::FAILURE;
        }
    };
    let host = format!("export CANDLE_DDP_CPU_HOST=$((RANK * {hosts} / {ranks})); exec \"$0\" \"$@\"");
    let mut command = Command::new(candle_ddp_testing::ddprun());
    command.args(["--standalone", "--nproc-per-node", &ranks.to_string()]);
    if *hosts > 1 {
        command.args(["sh", "-c", &host]);
    }
    let arguments = ["--worker", "--calls", &calls.to_string(), "--seed", &seed.to_string()];
    let error = command.arg(program).args(arguments).exec();
    eprintln!("error: ddprun: {error}");
    ExitCode::FAILURE
}

fn main() -> ExitCode {
    let is_worker = std::env::args().any(|argument| argument == "--worker");
    let options: Options = if is_worker { start::options() } else { start::options_or(&["--calls=2000"]) };
    if !options.worker {
        return launch(&options);
    }
    start::exit_code(worker(&options))
}
