//! Ranks that meet, of which one may not come, die, or bring another model: the worker of `scripts/compare_elastic.py` and
//! `scripts/many_hosts.py`.
//!
//! ```text
//! cargo run --release --bin ddprun -- --nproc-per-node 4 --bench meet -- --rank 2 --fault model
//! ```
#[path = "../start/mod.rs"]
mod start;

use candle_ddp::nn::linear;
use candle_ddp::{Backend, Context, DistributedDataParallel, InitOptions, Result, init_process_group};
use candle_nn::VarMap;
use clap::{Parser, ValueEnum};
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Join the other ranks and build a model, and fail on the way.
#[derive(Parser)]
struct Options {
    /// The failure.
    #[arg(long, value_enum)]
    fault: Option<Fault>,
    /// The rank that fails.
    #[arg(long, default_value_t = 0)]
    rank: usize,
    /// Only join the other ranks.
    #[arg(long)]
    join_only: bool,
    /// Seconds to wait for all ranks.
    #[arg(long, default_value_t = 600.)]
    timeout: f64,
    /// Append one JSON object per event to this file, one per line.
    #[arg(long, value_name = "FILE")]
    events: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Fault {
    /// The rank never joins the others.
    Absent,
    /// The rank is killed a second after it has begun to join, when rank 0 has not come yet.
    Killed,
    /// The rank's model has one output more.
    Model,
}

fn main() -> ExitCode {
    let options: Options = start::options();
    let own = std::env::var("RANK").ok().and_then(|rank| rank.parse().ok()).unwrap_or(0);
    match run(&options, own).and_then(|()| report(&options, own, "done")) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            if let Err(error) = report(&options, own, "error") {
                eprintln!("error: {error}");
            }
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options, own: usize) -> Result<()> {
    let fault = options.fault.filter(|_| options.rank == own);
    if fault == Some(Fault::Absent) || (options.fault == Some(Fault::Killed) && own == 0) {
        // The launcher ends this process.
        std::thread::sleep(Duration::from_secs(3600));
    }
    report(options, own, "begin")?;
    if fault == Some(Fault::Killed) {
        let events = options.events.clone();
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_secs(1));
            let written = append(events.as_ref(), own, "killed");
            let kill = Command::new("kill").args(["-9", &std::process::id().to_string()]).status();
            eprintln!("still alive: {written:?}, {kill:?}");
        });
    }
    let timeout = Duration::from_secs_f64(options.timeout);
    let pg = init_process_group(InitOptions { backend: Backend::Cpu, timeout, ..Default::default() })?;
    report(options, own, "joined")?;
    if options.join_only {
        return Ok(());
    }
    let outputs = if fault == Some(Fault::Model) { 3 } else { 2 };
    DistributedDataParallel::new(&pg, &VarMap::new(), |vb| linear(4, outputs, vb))?;
    pg.barrier()
}

fn report(options: &Options, rank: usize, event: &str) -> Result<()> {
    append(options.events.as_ref(), rank, event)
}

/// Appends an event, with its time.
fn append(events: Option<&PathBuf>, rank: usize, event: &str) -> Result<()> {
    let Some(path) = events else { return Ok(()) };
    let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0., |since| since.as_secs_f64());
    let line = serde_json::json!({ "event": event, "rank": rank, "time": time });
    let mut file = File::options().create(true).append(true).open(path).context("opening the file of events")?;
    // In one piece, since all ranks append to this file.
    file.write_all(format!("{line}\n").as_bytes()).context("writing an event")
}
