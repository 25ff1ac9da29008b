//! An all-reduce over NCCL: this crate's call compared with NCCL's own, in the host's time and in the GPU's.
//!
//! ```text
//! cargo bench --features nccl --bench nccl_call [-- --sizes 1,4,25,256 --calls 50]
//! ddprun --nproc-per-node 2 TARGET/release/deps/nccl_call-… --bench      # several ranks
//! ```
//!
//! As nccl-tests does, it enqueues many calls in place, then waits for the GPU, and divides by their number. The
//! host's time is that of the calls alone, as a backward pass makes them; with several ranks, a thread of this crate launches them. Then
//! candle's stream waits for all. Both kinds of calls alternate. Without a GPU, the bench says so and exits.
#![allow(unsafe_code)] // NCCL is called directly, to compare with it
use candle_core::{DType, Device, Storage, Tensor};
use candle_ddp::backend::nccl;
use candle_ddp::{Backend, Error, InitOptions, ProcessGroup, ReduceOp, Result, Work, init_process_group};
use clap::Parser;
use cudarc::driver::DevicePtr;
use cudarc::nccl::result::{all_reduce, comm_destroy, comm_init_rank, get_uniqueid};
use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};
use median::median;
use std::ffi::c_void;
use std::process::ExitCode;
use std::time::Instant;

#[path = "gpu/mod.rs"]
mod gpu;
#[path = "../examples/common/median.rs"]
mod median;

#[derive(Parser)]
struct Options {
    /// The sizes in MiB.
    #[arg(long, value_delimiter = ',', default_value = "1,4,25,256")]
    sizes: Vec<f64>,
    /// The number of calls that are enqueued together.
    #[arg(long, default_value_t = 50)]
    calls: u32,
    /// The number of measurements of each.
    #[arg(long, default_value_t = 20)]
    rounds: usize,
}

fn main() -> ExitCode {
    gpu::main(Options { sizes: vec![0.001], calls: 2, rounds: 1 }, bench)
}

/// The ranks that ddprun has started, or a world of one.
fn group() -> Result<ProcessGroup> {
    if std::env::var_os("RANK").is_some() {
        return init_process_group(InitOptions { backend: Backend::Nccl, ..Default::default() });
    }
    gpu::world_of_one()
}

fn bench(options: &Options) -> Result<()> {
    let pg = group()?;
    let nccl = Nccl::new(&pg)?;
    if pg.rank() == 0 {
        println!(
            "NCCL {}, {} ranks, medians of {} × {} calls\n",
            nccl::version()?,
            pg.world_size(),
            options.rounds,
            options.calls
        );
        println!(
            "| MiB | NCCL: host, µs | candle-ddp: host, µs | difference, µs | NCCL: call, µs | candle-ddp: call, µs | \
             busbw, GB/s |\n|---|---|---|---|---|---|---|"
        );
    }
    for &size in &options.sizes {
        let count = ((size * f64::from(1 << 20)) as usize / 4).max(1);
        let tensor = Tensor::zeros(count, DType::F32, pg.device())?;
        let (mut raw, mut ours) = (Vec::new(), Vec::new());
        // The first round connects and allocates.
        for round in 0..=options.rounds {
            let times = (nccl.time(&pg, &tensor, options.calls)?, time(&pg, &tensor, options.calls)?);
            if round > 0 {
                raw.push(times.0);
                ours.push(times.1);
            }
        }
        let host = |times: &[Times]| median(times.iter().map(|times| times.host));
        let call = |times: &[Times]| median(times.iter().map(|times| times.call));
        let difference = median(ours.iter().zip(&raw).map(|(ours, raw)| ours.host - raw.host));
        let world_size = pg.world_size() as f64;
        let busbw = count as f64 * 4.0 / (call(&ours) * 1e3) * 2.0 * (world_size - 1.0) / world_size;
        if pg.rank() == 0 {
            println!(
                "| {size} | {:.2} | {:.2} | **{difference:.2}** | {:.1} | {:.1} | {busbw:.1} |",
                host(&raw),
                host(&ours),
                call(&raw),
                call(&ours)
            );
        }
    }
    Ok(())
}

/// Microseconds per call: until it is enqueued, and until the GPU has done it.
struct Times {
    host: f64,
    call: f64,
}

fn measure<W>(
    pg: &ProcessGroup,
    calls: u32,
    mut call: impl FnMut() -> Result<W>,
    wait: impl Fn(W) -> Result<()>,
) -> Result<Times> {
    pg.barrier()?;
    pg.device().synchronize()?;
    let mut works = Vec::with_capacity(calls as usize);
    let start = Instant::now();
    for _ in 0..calls {
        works.push(call()?);
    }
    let host = start.elapsed();
    works.into_iter().try_for_each(wait)?;
    pg.device().synchronize()?;
    let per_call = |time: std::time::Duration| time.as_secs_f64() * 1e6 / f64::from(calls);
    Ok(Times { host: per_call(host), call: per_call(start.elapsed()) })
}

fn time(pg: &ProcessGroup, tensor: &Tensor, calls: u32) -> Result<Times> {
    measure(pg, calls, || pg.all_reduce_async(tensor, ReduceOp::Sum), |work: Work| work.wait())
}

/// A communicator made by NCCL directly, on candle's stream.
struct Nccl(ncclComm_t);

fn failed(call: &str, error: impl std::fmt::Debug) -> Error {
    Error::InvalidArgument { argument: "NCCL", reason: format!("{call}: {error:?}") }
}

impl Nccl {
    fn new(pg: &ProcessGroup) -> Result<Self> {
        let id = get_uniqueid().map_err(|error| failed("ncclGetUniqueId", error))?;
        let bytes: Vec<u8> = id.internal.iter().map(|byte| byte.cast_unsigned()).collect();
        // Rank 0's id counts.
        let id = Tensor::from_vec(bytes, 128, &Device::Cpu)?.to_device(pg.device())?;
        pg.broadcast(&id, 0)?;
        let mut internal = [0; 128];
        internal.iter_mut().zip(id.to_vec1::<u8>()?).for_each(|(to, byte)| *to = byte.cast_signed());
        let mut comm = std::ptr::null_mut();
        // SAFETY: the communicator is written before it is used, and all ranks pass rank 0's id.
        unsafe { comm_init_rank(&mut comm, pg.world_size() as i32, ncclUniqueId { internal }, pg.rank() as i32) }
            .map_err(|error| failed("ncclCommInitRank", error))?;
        Ok(Self(comm))
    }

    fn time(&self, pg: &ProcessGroup, tensor: &Tensor, calls: u32) -> Result<Times> {
        let stream = pg.device().as_cuda_device()?.cuda_stream();
        let address = {
            let (storage, _) = tensor.storage_and_layout();
            let Storage::Cuda(storage) = &*storage else { return Err(failed("the tensor", "is not on a GPU")) };
            storage.as_cuda_slice::<f32>()?.device_ptr(&stream).0
        };
        let (memory, count) = (address as *mut c_void, tensor.elem_count());
        let call = || {
            let (dtype, op, stream) = (ncclDataType_t::ncclFloat32, ncclRedOp_t::ncclSum, stream.cu_stream().cast());
            // SAFETY: the tensor has this many elements, and lives until the GPU has done all calls.
            unsafe { all_reduce(memory, memory, count, dtype, op, self.0, stream) }
                .map(drop)
                .map_err(|error| failed("ncclAllReduce", error))
        };
        measure(pg, calls, call, Ok)
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        // SAFETY: nothing uses it any more.
        if let Err(error) = unsafe { comm_destroy(self.0) } {
            eprintln!("ncclCommDestroy: {error:?}");
        }
    }
}
