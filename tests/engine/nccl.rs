//! The NCCL engine without a GPU: its errors, and the fallback of `Backend::Auto`.
//!
//! Runs with the feature `nccl` on machines without a GPU; `tests/gpu` covers the rest.
use crate::common::assert_error;
use candle_core::Device;
use candle_ddp::backend::nccl;
use candle_ddp::{Backend, InitOptions, init_process_group};
use std::time::Duration;

/// Options for a world of one with its own store.
fn alone(folder: &std::path::Path, backend: Backend) -> InitOptions {
    InitOptions {
        backend,
        init_method: format!("file://{}", folder.join("store").display()),
        rank: Some(0),
        world_size: Some(1),
        timeout: Duration::from_secs(120),
        ..Default::default()
    }
}

/// Returns whether there is no GPU. Otherwise reports that `test` is skipped.
#[cfg(feature = "nccl")]
fn no_gpu(test: &str) -> bool {
    if nccl::device_count().is_err() {
        return true;
    }
    crate::common::skip(test, "it needs a machine without a GPU");
    false
}

#[cfg(feature = "nccl")]
#[test]
fn nccl_is_linked_and_tells_its_version() {
    let version = nccl::version().unwrap();
    assert!((21_800..100_000).contains(&version), "{version}");
}

#[cfg(feature = "nccl")]
#[test]
fn without_a_gpu_every_rank_is_told_what_to_do() {
    if !no_gpu("without_a_gpu_every_rank_is_told_what_to_do") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let rank = |rank| {
        let options = InitOptions { rank: Some(rank), world_size: Some(2), ..alone(folder.path(), Backend::Nccl) };
        init_process_group(options).unwrap_err().to_string()
    };
    let errors = std::thread::scope(|scope| {
        [0, 1].map(|number| scope.spawn(move || rank(number))).map(|rank| rank.join().unwrap())
    });
    for error in errors {
        for part in
            ["a CUDA device is not available", "CUDA_ERROR", "nvidia-smi", "CUDA_VISIBLE_DEVICES", "Backend::Cpu"]
        {
            assert!(error.contains(part), "{part:?} is missing in: {error}");
        }
    }
}

#[cfg(feature = "nccl")]
#[test]
fn without_a_gpu_auto_takes_the_cpu_engine() {
    if !no_gpu("without_a_gpu_auto_takes_the_cpu_engine") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let pg = init_process_group(alone(folder.path(), Backend::Auto)).unwrap();
    assert_eq!(pg.backend(), Backend::Cpu);
    let tensor = candle_core::Tensor::new(&[1f32, 2.0], pg.device()).unwrap();
    pg.all_reduce(&tensor, candle_ddp::ReduceOp::Sum).unwrap();
    assert_eq!(tensor.to_vec1::<f32>().unwrap(), [1.0, 2.0]);
}

#[cfg(feature = "nccl")]
#[test]
fn ranks_without_a_device_all_report_it() {
    use candle_ddp::backend::nccl::{NcclCommunicator, NcclOptions};
    use candle_ddp::rendezvous::{HashStore, Store};
    let store: std::sync::Arc<dyn Store> = std::sync::Arc::new(HashStore::new(Duration::from_secs(120)));
    let errors = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..2)
            .map(|rank| {
                let store = store.clone();
                let options = NcclOptions { timeout: Duration::from_secs(120), ..Default::default() };
                scope.spawn(move || NcclCommunicator::new(store, rank, 2, &Device::Cpu, options).err().unwrap())
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap().to_string()).collect::<Vec<_>>()
    });
    assert!(errors.iter().all(|error| error.contains("cuda")), "{errors:?}");
}

#[test]
fn a_tensor_device_that_is_not_a_gpu_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let options = InitOptions { device: Some(Device::Cpu), ..alone(folder.path(), Backend::Nccl) };
    assert_error(init_process_group(options), &["Backend::Nccl moves tensors on GPUs, but this is the CPU"]);
}

#[cfg(not(feature = "nccl"))]
#[test]
fn without_the_feature_nccl_is_an_error_that_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let refused = init_process_group(alone(folder.path(), Backend::Nccl));
    assert_error(refused, &["without the feature `nccl`", "--features nccl"]);
    assert!(nccl::version().is_err() && nccl::device_count().is_err());
    let pg = init_process_group(alone(folder.path(), Backend::Auto)).unwrap();
    assert_eq!(pg.backend(), Backend::Cpu);
}
