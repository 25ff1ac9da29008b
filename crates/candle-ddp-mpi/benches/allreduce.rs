//! All-reduce of f32 by MPI itself, with its blocking and its non-blocking function, by this engine over it, and by candle-ddp's
//! own engine, in turns.
//!
//! ```text
//! cargo bench --bench allreduce --no-run    # prints the path of the program
//! mpirun -n 2 target/release/deps/allreduce-… --bench
//! ```
//!
//! A value is the median of the rounds' means on the slowest rank. Without `--bench`, as under `cargo test`, it measures nothing.
#[path = "../src/in_place.rs"]
mod in_place;

use candle_core::{DType, Device, Tensor};
use candle_ddp::backend::{Collective, Communicator, bytes_mut};
use candle_ddp::{Backend, InitOptions, ProcessGroup, ReduceOp, Result};
use candle_ddp_mpi::mpi::ffi::{
    MPI_Allreduce, MPI_Barrier, MPI_Iallreduce, MPI_Test, RSMPI_COMM_WORLD, RSMPI_FLOAT, RSMPI_REQUEST_NULL,
    RSMPI_STATUS_IGNORE, RSMPI_SUM,
};
use candle_ddp_mpi::{MpiCommunicator, MpiOptions};
use in_place::in_place;
use std::ffi::c_int;
use std::time::Instant;

const SIZES: [usize; 10] = [8, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 25 << 20, 64 << 20];
const ROUNDS: usize = 11;
/// About how long a round is, in seconds.
const SECONDS: f64 = 0.1;

fn main() -> Result<()> {
    if !std::env::args().any(|argument| argument == "--bench") || std::env::var_os("CARGO").is_some() {
        println!("start it by mpirun, with --bench");
        return Ok(());
    }
    let engine = MpiCommunicator::world(MpiOptions::default())?;
    let own = candle_ddp::init_process_group(InitOptions { backend: Backend::Cpu, ..InitOptions::default() })?;
    if engine.rank() == 0 {
        println!("{} ranks, {}", engine.world_size(), library());
        println!(
            "| size | MPI_Allreduce, µs | MPI_Iallreduce, µs | candle-ddp-mpi, µs | / the faster | candle-ddp's CPU engine, µs |"
        );
        println!("|---:|---:|---:|---:|---:|---:|");
    }
    for size in SIZES {
        measure(size, &engine, &own)?;
    }
    Ok(())
}

fn library() -> String {
    let version = candle_ddp_mpi::mpi::environment::library_version().unwrap_or_default();
    version.lines().next().unwrap_or_default().split(',').next().unwrap_or_default().replace("Version:\t", "")
}

fn measure(size: usize, engine: &MpiCommunicator, own: &ProcessGroup) -> Result<()> {
    let tensor = Tensor::zeros(size / 4, DType::F32, &Device::Cpu)?;
    let address = bytes_mut(&tensor, |bytes| bytes.as_mut_ptr())?;
    let count = c_int::try_from(size / 4).unwrap_or(c_int::MAX);
    // SAFETY: the tensor lives, has that many elements, and nobody else uses it meanwhile.
    let by_mpi = || unsafe {
        MPI_Allreduce(in_place(), address.cast(), count, RSMPI_FLOAT, RSMPI_SUM, RSMPI_COMM_WORLD);
        Ok(())
    };
    let by_test = || {
        // SAFETY: as above.
        unsafe {
            let (mut request, mut is_over) = (RSMPI_REQUEST_NULL, 0);
            let (address, request) = (address.cast(), &raw mut request);
            MPI_Iallreduce(in_place(), address, count, RSMPI_FLOAT, RSMPI_SUM, RSMPI_COMM_WORLD, request);
            while is_over == 0 {
                MPI_Test(request, &raw mut is_over, RSMPI_STATUS_IGNORE);
            }
        }
        Ok(())
    };
    let by_engine = || engine.run(Collective::AllReduce { tensor: tensor.clone(), op: ReduceOp::Sum });
    let by_own = || own.all_reduce(&tensor, ReduceOp::Sum);
    let systems: [&dyn Fn() -> Result<()>; 4] = [&by_mpi, &by_test, &by_engine, &by_own];
    let mut means = [const { Vec::new() }; 4];
    for round in 0..=ROUNDS {
        for (system, means) in systems.iter().zip(&mut means) {
            // The first round tells how many calls the others have.
            let calls = match means.first() {
                None => 3,
                Some(mean) => ((SECONDS / mean) as usize).clamp(3, 20_000),
            };
            // SAFETY: MPI is initialised.
            unsafe { MPI_Barrier(RSMPI_COMM_WORLD) };
            let start = Instant::now();
            for _ in 0..calls {
                system()?;
            }
            let mean = start.elapsed().as_secs_f64() / calls as f64;
            let slowest = own.all_reduce_scalars([mean], ReduceOp::Max)?[0];
            if round <= 1 {
                means.clear();
            }
            means.push(slowest);
        }
    }
    let [mpi, test, ours, own] = means.map(|mut means| {
        means.sort_by(f64::total_cmp);
        means[means.len() / 2] * 1e6
    });
    if engine.rank() == 0 {
        let ratio = ours / mpi.min(test);
        println!("| {} | {mpi:.1} | {test:.1} | {ours:.1} | {ratio:.2} | {own:.1} |", readable(size));
    }
    Ok(())
}

fn readable(size: usize) -> String {
    match size {
        ..1024 => format!("{size} B"),
        1024..1_048_576 => format!("{} KiB", size >> 10),
        _ => format!("{} MiB", size >> 20),
    }
}
