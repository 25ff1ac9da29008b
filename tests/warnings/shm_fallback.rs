//! Ranks that cannot share memory, or are configured not to, use TCP and report it once.
#![cfg(target_os = "linux")]
use crate::common::assert_error;
use crate::logger::{self, LOG};
use candle_core::{DType, Device, Tensor};
use candle_ddp::backend::cpu::{CpuCommunicator, CpuOptions, CpuTransport};
use candle_ddp::backend::{Collective, Communicator};
use candle_ddp::rendezvous::{HashStore, Store};
use candle_ddp::{ReduceOp, Result};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::sync::Arc;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(120);

/// Returns whether this process maps memory of an engine.
fn is_mapped() -> bool {
    std::fs::read_to_string("/proc/self/maps").unwrap().contains("/memfd:candle-ddp-")
}

/// Runs ranks with the given options. Returns whether memory was mapped during their all-reduce, and the warnings.
fn run(options: &[CpuOptions]) -> (Vec<Result<bool>>, Vec<String>) {
    LOG.0.lock().unwrap().clear();
    let store: Arc<dyn Store> = Arc::new(HashStore::new(TIMEOUT));
    let world_size = options.len();
    let results = std::thread::scope(|scope| {
        let rank = |(rank, options): (usize, &CpuOptions)| {
            let (store, options) = (store.clone(), CpuOptions { timeout: TIMEOUT, ..options.clone() });
            scope.spawn(move || {
                let communicator = CpuCommunicator::new(store, rank, world_size, options)?;
                for count in [1, 100_000] {
                    let tensor = Tensor::ones(count, DType::F32, &Device::Cpu)?;
                    communicator.run(Collective::AllReduce { tensor: tensor.clone(), op: ReduceOp::Sum })?;
                    assert_eq!(tensor.to_vec1::<f32>()?, vec![world_size as f32; count]);
                }
                let is_mapped = is_mapped();
                communicator.run(Collective::Barrier)?;
                Ok(is_mapped)
            })
        };
        let ranks: Vec<_> = options.iter().enumerate().map(rank).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    (results, LOG.0.lock().unwrap().clone())
}

fn over(transport: CpuTransport) -> CpuOptions {
    CpuOptions { transport: Some(transport), ..CpuOptions::default() }
}

/// A single test, because the log and the mappings belong to the process.
#[test]
fn ranks_that_cannot_share_memory_use_tcp() {
    let _turn = logger::collect();

    // The normal case.
    let (results, warnings) = run(&[over(CpuTransport::Auto), over(CpuTransport::Auto), over(CpuTransport::Auto)]);
    assert!(results.into_iter().all(|is_mapped| is_mapped.unwrap()));
    assert!(warnings.is_empty(), "{warnings:?}");
    assert!(!is_mapped(), "memory stays mapped after the communicators are gone");

    // TCP by configuration.
    let (results, warnings) = run(&[over(CpuTransport::Tcp), over(CpuTransport::Tcp)]);
    assert!(results.into_iter().all(|is_mapped| !is_mapped.unwrap()));
    assert!(warnings.is_empty(), "{warnings:?}");

    // More memory than the system has.
    let greedy = CpuOptions { segment_bytes: Some(1 << 50), ..over(CpuTransport::Auto) };
    let (results, warnings) = run(&[greedy.clone(), greedy.clone()]);
    assert!(results.into_iter().all(|is_mapped| !is_mapped.unwrap()));
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    for warning in warnings {
        assert!(warning.contains("bytes of shared memory: ") && warning.contains("TCP, which is slower"), "{warning}");
    }

    // A limit on file sizes, beyond which the system would kill the process.
    let limit = getrlimit(Resource::Fsize);
    setrlimit(Resource::Fsize, Rlimit { current: Some(1 << 20), ..limit }).unwrap();
    let (results, warnings) = run(&[over(CpuTransport::Auto), over(CpuTransport::Auto)]);
    setrlimit(Resource::Fsize, limit).unwrap();
    assert!(results.into_iter().all(|is_mapped| !is_mapped.unwrap()));
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    for warning in warnings {
        assert!(warning.contains("files may have 1048576 bytes here: raise the limit with ulimit -f"), "{warning}");
    }

    // One rank uses TCP by configuration: the others report which one.
    let (results, warnings) = run(&[over(CpuTransport::Auto), over(CpuTransport::Tcp)]);
    assert!(results.into_iter().all(|is_mapped| !is_mapped.unwrap()));
    assert!(
        warnings.len() == 1 && warnings[0].contains("rank 0: no memory is shared with rank(s) [1]"),
        "{warnings:?}"
    );

    // The other ranks still share memory with each other.
    let [auto, tcp] = [CpuTransport::Auto, CpuTransport::Tcp].map(over);
    let (results, warnings) = run(&[auto.clone(), tcp, auto]);
    assert!(results.into_iter().all(|is_mapped| is_mapped.unwrap()));
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(warnings.iter().all(|warning| warning.contains("no memory is shared with rank(s) [1]")), "{warnings:?}");

    // On different hosts, TCP is expected.
    let on = |host: &str| CpuOptions { host: Some(host.to_string()), ..over(CpuTransport::Auto) };
    let (results, warnings) = run(&[on("a"), on("b"), on("c")]);
    assert!(results.into_iter().all(|is_mapped| !is_mapped.unwrap()) && warnings.is_empty(), "{warnings:?}");

    // Shared memory is required, but there are several hosts.
    let on = |host: &str| CpuOptions { transport: Some(CpuTransport::SharedMemory), ..on(host) };
    for (rank, result) in run(&[on("a"), on("a"), on("b")]).0.into_iter().enumerate() {
        let error = result.unwrap_err().to_string();
        let expected = if rank == 2 { "[0, 1]" } else { "[2]" };
        assert!(error.contains(expected) && error.contains("they share no memory with this rank"), "{error}");
    }

    // Shared memory is required but cannot be allocated.
    let greedy = CpuOptions { transport: Some(CpuTransport::SharedMemory), ..greedy };
    for result in run(&[greedy.clone(), greedy]).0 {
        assert_error(result, &["they share no memory with this rank", "bytes of shared"]);
    }
}
