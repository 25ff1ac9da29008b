//! Measures the speed of collectives for a range of sizes and checks every result, as nccl-tests does for NCCL.
//!
//! ```text
//! cargo run --release --bin ddprun -- --nproc-per-node 2 --example allreduce -- --min-bytes 8 --max-bytes 64M
//! ```
//!
//! ci: --max-bytes 128K --step-factor 4 --seconds 0.005
mod chart;
mod measure;
mod problem;
mod report;
mod size;
mod values;

use candle_core::DType;
use candle_ddp::{Context, Error, InitOptions, ProcessGroup, ReduceOp, Result, init_process_group};
use clap::Parser;
use problem::{Kind, Problem};
use report::{Measurement, Report};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Measure a collective of candle-ddp for a range of sizes and check its results.
///
/// The columns are those of nccl-tests: the size is that of a rank's larger buffer, the count that of the smaller one;
/// algbw is size over time; busbw is algbw times a factor that depends on the collective and the number of ranks and
/// makes it comparable with the speed of the hardware. The time is the median over batches of a batch's mean, on the
/// slowest rank. Fails if any value is wrong.
#[derive(Parser)]
struct Options {
    /// The collective to measure.
    #[arg(long, value_enum, default_value = "all_reduce")]
    collective: Kind,
    /// The smallest size in bytes; K, M and G stand for KiB, MiB and GiB.
    #[arg(long, value_parser = size::parse, default_value = "8")]
    min_bytes: usize,
    /// The largest size in bytes.
    #[arg(long, value_parser = size::parse, default_value = "64M")]
    max_bytes: usize,
    /// The ratio of each size to the previous one.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..))]
    step_factor: u32,
    /// Sizes to measure instead, separated by commas.
    #[arg(long, value_parser = size::parse, value_delimiter = ',', conflicts_with_all = ["min_bytes", "max_bytes", "step_factor"])]
    sizes: Option<Vec<usize>>,
    /// f32, f64, f16, bf16, i64, u32 or u8.
    #[arg(long, default_value = "f32")]
    dtype: DType,
    /// sum, avg (floating point only), min, max or prod.
    #[arg(long, value_parser = parse_op, default_value = "sum")]
    op: ReduceOp,
    /// Calls before the measurement of each size.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    warmup: u32,
    /// Calls in each of the five batches. [default: as many as take --seconds, from 3 to 10000]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    iters: Option<u32>,
    /// The approximate duration of a batch, if --iters is not given.
    #[arg(long, default_value_t = 0.1)]
    seconds: f64,
    /// Write one JSON object per size to this file, one per line (on rank 0).
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw the bus bandwidth over the size (on rank 0).
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Measure nothing; draw a chart of one or several files that --json wrote. The part of LABEL before a comma
    /// selects the colour, the part after it the dashes.
    #[arg(long, value_name = "LABEL=FILE", value_parser = parse_curve, requires = "svg")]
    draw: Vec<(String, PathBuf)>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let result = if options.draw.is_empty() { sweep(&options) } else { redraw(&options) };
    match result {
        Ok(0) => ExitCode::SUCCESS,
        Ok(errors) => {
            eprintln!("error: {errors} wrong values");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Measures all sizes and returns the number of wrong values.
fn sweep(options: &Options) -> Result<u64> {
    let pg = init_process_group(InitOptions::default())?;
    // An error on one rank alone, such as writing a file, is reported by all ranks.
    pg.abort_on_error(|| measure_all(options, &pg))
}

fn measure_all(options: &Options, pg: &ProcessGroup) -> Result<u64> {
    let (rank, world_size) = (pg.rank(), pg.world_size());
    let mut report = if rank == 0 {
        let engine = format!("{:?} engine, {:?}", pg.backend(), pg.device().location());
        Some(Report::begin(options.collective, world_size, &engine, options.json.as_deref())?)
    } else {
        None
    };
    let mut errors = 0;
    let mut last = None;
    for bytes in sizes(options)? {
        let problem = Problem::new(options.collective, options.op, options.dtype, world_size, bytes);
        // Rounding to whole elements can give the same size again.
        if last.replace(problem.count()) == Some(problem.count()) {
            continue;
        }
        let seconds = measure::time(pg, &problem, options.warmup, options.iters, options.seconds)?;
        let wrong = measure::errors(pg, &problem)?;
        errors += wrong;
        if let Some(report) = &mut report {
            report.add(Measurement::new(&problem, seconds, wrong))?;
        }
    }
    let Some(report) = report else { return Ok(errors) };
    report.end(errors);
    if let Some(path) = &options.svg {
        let label = format!("{}, {world_size} ranks", options.dtype.as_str());
        draw(path, options, &[(label, report.into_points())])?;
    }
    Ok(errors)
}

/// Draws earlier results, which contain no wrong values.
fn redraw(options: &Options) -> Result<u64> {
    let read = |(label, path): &(String, PathBuf)| Ok((label.clone(), report::read_points(path)?));
    let curves = options.draw.iter().map(read).collect::<Result<Vec<_>>>()?;
    if let Some(path) = &options.svg {
        draw(path, options, &curves)?;
    }
    Ok(0)
}

fn draw(path: &Path, options: &Options, curves: &[chart::Curve]) -> Result<()> {
    let svg = chart::draw(&format!("{}: bus bandwidth over size", options.collective.name()), curves);
    svg.map_err(std::io::Error::other)
        .and_then(|svg| std::fs::write(path, svg))
        .with_context(|| format!("cannot write the chart to {}", path.display()))
}

fn sizes(options: &Options) -> Result<Vec<usize>> {
    if let Some(sizes) = &options.sizes {
        return Ok(sizes.clone());
    }
    let Options { min_bytes, max_bytes, step_factor, .. } = *options;
    if min_bytes > max_bytes {
        let reason = format!("{min_bytes} is more than the {max_bytes} of --max-bytes");
        return Err(Error::InvalidArgument { argument: "--min-bytes", reason });
    }
    let next = |bytes: &usize| bytes.checked_mul(step_factor as usize).filter(|next| *next <= max_bytes);
    Ok(std::iter::successors(Some(min_bytes), next).collect())
}

fn parse_op(text: &str) -> Result<ReduceOp, String> {
    let ops = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max, ReduceOp::Prod];
    ops.into_iter().find(|op| op.to_string() == text).ok_or_else(|| "expected sum, avg, min, max or prod".to_string())
}

fn parse_curve(text: &str) -> Result<(String, PathBuf), String> {
    let (label, path) = text.split_once('=').ok_or_else(|| "expected LABEL=FILE".to_string())?;
    Ok((label.to_string(), path.into()))
}
