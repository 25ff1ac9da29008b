//! The GPU suite:
//!
//! ```text
//! cargo test --release --features nccl --test gpu
//! ```
//!
//! Ranks are processes: this test binary starts itself, with an environment variable that names the job. If there are
//! fewer GPUs than ranks, ranks share GPUs over the loopback interface, as if each were on its own host, which is
//! slow but correct. Without a GPU every test reports that it is skipped, or fails if CANDLE_DDP_REQUIRE_GPU is set.
#![cfg(feature = "nccl")]
#![allow(clippy::unwrap_used)]
mod batch;
#[path = "../common/mod.rs"]
mod common;
mod data;
mod elastic;
mod fences;
mod hazards;
mod hybrid;
mod late;
mod launch;
mod layers;
mod left_out;
mod norms;
mod optim;
mod parts;
mod several;
mod sharded_step;
mod toolbox;
mod training;
mod two_groups;
mod virtual_ranks;

use candle_core::{DType, Device, Tensor};
use candle_ddp::backend::nccl::{NcclCommunicator, NcclOptions};
use candle_ddp::conformance::{self, Case, ConformanceOptions};
use candle_ddp::rendezvous::{FileStore, PrefixStore, Store};
use candle_ddp::{Backend, InitOptions, Precision, ProcessGroup, ReduceOp, Result, init_process_group};
use launch::{Ranks, SHORT, Worker, emulated_gpus, gpus};
use std::sync::Arc;
use std::time::Duration;

/// Runs `cases` of the conformance suite as one of the ranks.
fn conforms(worker: &Worker, cases: &[Case]) {
    let pg = group(worker, Duration::from_secs(60), None);
    let communicator = |name: &str| {
        let store: Arc<dyn Store> = Arc::new(FileStore::open(worker.store(), Duration::from_secs(60)).unwrap());
        let store = Arc::new(PrefixStore::new(name, store));
        let options = NcclOptions { timeout: Duration::from_secs(60), ..Default::default() };
        NcclCommunicator::new(store, worker.rank, worker.world_size, pg.device(), options).unwrap()
    };
    let (first, second) = (communicator("first engine"), communicator("second engine"));
    let options = ConformanceOptions { cases: cases.to_vec(), device: pg.device().clone(), ..Default::default() };
    conformance::run_rank(options, [&first, &second]).unwrap();
}

/// Every collective. The cases that follow make several calls at once.
fn matrix() -> Vec<Case> {
    Case::ALL.iter().copied().take_while(|case| *case != Case::SameBits).collect()
}

/// The init method of a job whose store is not a file.
const STORE: &str = "CANDLE_DDP_TEST_STORE";

/// Returns this rank's group.
fn group(worker: &Worker, timeout: Duration, virtual_ranks: Option<usize>) -> ProcessGroup {
    let init_method = std::env::var(STORE).unwrap_or_else(|_| format!("file://{}", worker.store().display()));
    let options = InitOptions { backend: Backend::Nccl, init_method, timeout, virtual_ranks, ..Default::default() };
    init_process_group(options).unwrap()
}

/// The entry point of ranks.
#[test]
#[ignore = "started by other tests"]
fn rank_of_another_test() {
    let worker = Worker::of_this_process();
    let pg = |seconds| group(&worker, Duration::from_secs(seconds), None);
    let with_virtual_ranks = || group(&worker, Duration::from_secs(60), Some(virtual_ranks::VIRTUAL));
    match worker.job.as_str() {
        "matrix" => conforms(&worker, &matrix()),
        "messages" => conforms(&worker, &[Case::MessagesPassCollectives, Case::LargeMessages]),
        "dropped" => conforms(&worker, &[Case::DroppedWork]),
        "auto" => {
            let options =
                InitOptions { init_method: format!("file://{}", worker.store().display()), ..Default::default() };
            assert_eq!(init_process_group(options).unwrap().backend(), Backend::Nccl);
        }
        "subgroups" => subgroups(&pg(60)).unwrap(),
        "first fence" => fences::first(&pg(60)).unwrap(),
        "second fence" => fences::second(&pg(60)).unwrap(),
        "fences of a backward pass" => fences::backward(&pg(60)).unwrap(),
        "train" => report_floats(&worker, &training::train(&pg(60), Precision::default()).unwrap()),
        "train in f16" => report_floats(&worker, &training::train_mixed(&pg(60), DType::F16).unwrap()),
        "train in bf16" => report_floats(&worker, &training::train_mixed(&pg(60), DType::BF16).unwrap()),
        "train on two devices" => report_floats(&worker, &training::train_split(&pg(60), false).unwrap()),
        "train on two devices with a hook" => report_floats(&worker, &training::train_split(&pg(60), true).unwrap()),
        "trace" => training::traced(&pg(60), &worker.traces()).unwrap(),
        "unused" => training::unused(&pg(20)).unwrap(),
        "layers" => report_floats(&worker, &layers::train(&pg(60)).unwrap()),
        "sync batch norm" => norms::batches_join(&pg(20)).unwrap(),
        "other blocks" => toolbox::refuse_other_blocks(&pg(20)),
        "sharded step" => sharded_step::asks_for_little(&pg(60)).unwrap(),
        "freed weight" => sharded_step::refuses_freed_weights(&pg(60)).unwrap(),
        "elsewhere" => toolbox::refuse_variables_elsewhere(&pg(20)),
        "scaler" => {
            let pg = pg(60);
            optim::scales(&pg).and_then(|()| optim::skips(&pg)).unwrap();
        }
        "zero" => optim::shards(&pg(60)).unwrap(),
        "parts" => parts::same_bits(&pg(60)).unwrap(),
        "early part" => parts::early(&pg(60)).unwrap(),
        "leave" => leave(&worker, &pg(200)),
        "killed" => worker.report(&all_reduces(&worker, &pg(300))),
        "desync" => worker.report(&disagree(&pg(SHORT))),
        "wrong device" => wrong_device(&pg(20)),
        "virtual ranks" => report_floats(&worker, &virtual_ranks::train(&with_virtual_ranks(), false).unwrap()),
        "virtual ranks with shards" => {
            report_floats(&worker, &virtual_ranks::train(&with_virtual_ranks(), true).unwrap())
        }
        "virtual ranks in any order" => {
            worker.report(&virtual_ranks::train(&with_virtual_ranks(), false).unwrap_err().to_string());
        }
        "varied" => virtual_ranks::varied(&pg(60)).unwrap(),
        _ if hazards::run(&worker, pg)
            || hybrid::run(&worker, pg)
            || batch::run(&worker, pg)
            || late::run(&worker, pg)
            || several::run(&worker, pg)
            || two_groups::run(&worker, pg) => {}
        other => {
            let tool = other.strip_prefix("tool ").unwrap_or_else(|| panic!("no such job: {other}"));
            report_floats(&worker, &toolbox::train(&pg(60), tool).unwrap());
        }
    }
}

/// Reports values in a form that is parsed back to the same bits.
fn report_floats(worker: &Worker, values: &[f32]) {
    worker.report(&values.iter().map(f32::to_string).collect::<Vec<_>>().join(" "));
}

fn floats_of(reports: &[String]) -> Vec<Vec<f32>> {
    let floats = |report: &String| report.split(' ').map(|value| value.parse().unwrap()).collect();
    reports.iter().map(floats).collect()
}

/// Runs ranks with the job `job` for the test `test`, if there is a GPU.
fn finish(test: &str, world_size: usize, job: &str) {
    if gpus(test).is_some() {
        Ranks::start(world_size, job).finish();
    }
}

/// Tests that are the job of so many ranks.
macro_rules! jobs {
    ($($test:ident: $world_size:literal, $job:literal)*) => {
        $(
            #[test]
            fn $test() {
                finish(stringify!($test), $world_size, $job);
            }
        )*
    };
}

jobs! {
    collectives_in_a_world_of_one: 1, "matrix"
    collectives_in_a_world_of_two: 2, "matrix"
    collectives_in_a_world_of_three: 3, "matrix"
    messages_cross_and_do_not_wait_for_collectives: 2, "messages"
    dropped_works_are_carried_out: 3, "dropped"
    auto_selects_nccl_if_there_is_a_gpu: 2, "auto"
    subgroups_are_split_off: 3, "subgroups"
    a_call_runs_after_candles_previous_work: 2, "first fence"
    candles_work_after_a_wait_runs_after_the_call: 2, "second fence"
    gradients_are_read_after_their_all_reduce: 2, "fences of a backward pass"
    variables_on_other_devices_are_refused_by_name: 2, "elsewhere"
    blocks_in_another_order_are_refused_by_name: 2, "other blocks"
    a_weight_that_is_not_there_is_never_read: 2, "freed weight"
    a_step_of_a_sharded_model_asks_for_little: 2, "sharded step"
    a_trace_has_the_times_of_the_gpu: 2, "trace"
    unused_parameters_hang_no_rank: 2, "unused"
    sync_batch_norm_matches_one_batch_on_the_cpu: 2, "sync batch norm"
    tensors_of_other_devices_are_refused: 1, "wrong device"
}

#[test]
fn ranks_on_one_gpu_are_refused_by_name() {
    let Some(count) = gpus("ranks_on_one_gpu_are_refused_by_name") else { return };
    let reports = Ranks::start_without_sharing(count + 1, "auto", None).outputs();
    let refusals = ["each rank needs its own", "are both on the GPU", "ended the group"];
    let refused = |report: &String| refusals.iter().any(|refusal| report.contains(refusal));
    assert!(reports.iter().all(refused), "{reports:#?}");
}

#[test]
fn ranks_with_the_same_visible_gpu_are_refused_by_name() {
    let Some(_) = gpus("ranks_with_the_same_visible_gpu_are_refused_by_name") else { return };
    for report in Ranks::start_without_sharing(2, "auto", Some(("CUDA_VISIBLE_DEVICES", "0"))).outputs() {
        assert!(report.contains("ranks 0 and 1 are both on the GPU 0000:"), "{report}");
    }
}

#[test]
fn versions_of_nccl_that_are_too_old_or_differ_are_refused() {
    let Some(_) = emulated_gpus("versions_of_nccl_that_are_too_old_or_differ_are_refused") else { return };
    for (version, reason) in [("21703", "NCCL 2.17.3"), ("22605", "has 2.26.5")] {
        let variable = |rank| (rank == 1).then_some(("EMULATED_NCCL_VERSION", version));
        for report in Ranks::start_in(2, "auto", variable).outputs() {
            assert!(report.contains(reason), "{report}");
        }
    }
}

/// Groups of ranks 2 and 0, in that order, and of rank 1.
fn subgroups(pg: &ProcessGroup) -> Result<()> {
    let rank = pg.rank();
    let both = pg.new_group(&[2, 0])?;
    let one = pg.new_group(&[1])?;
    assert_eq!((both.is_some(), one.is_some()), (rank != 1, rank == 1));
    if let Some(both) = &both {
        assert_eq!(both.rank(), if rank == 2 { 0 } else { 1 });
        let tensor = Tensor::full(rank as f32 + 1.0, 10, pg.device())?;
        both.broadcast(&tensor, 0)?;
        assert_eq!(tensor.to_vec1::<f32>()?, [3.0; 10]);
        both.all_reduce(&tensor, ReduceOp::Sum)?;
        assert_eq!(tensor.to_vec1::<f32>()?, [6.0; 10]);
    }
    drop((both, one));
    pg.barrier()?;
    // They leave nothing behind in the store.
    let keys = pg.store().num_keys()?;
    pg.barrier()?;
    for _ in 0..3 {
        drop(pg.new_group(&[2, 0])?);
        drop(pg.cpu_group()?.new_group(&[0, 1, 2])?);
        pg.barrier()?;
        assert_eq!(pg.store().num_keys()?, keys);
        pg.barrier()?;
    }
    let tensor = Tensor::ones(5, DType::F32, pg.device())?;
    pg.all_reduce(&tensor, ReduceOp::Sum)?;
    assert_eq!(tensor.to_vec1::<f32>()?, [3.0; 5]);
    Ok(())
}

/// Each fence of collectives is left out once, and the checks see it. Those of the loader's copies are not among them: without
/// them the emulated GPU's results are right by chance.
#[test]
fn without_a_fence_results_are_wrong() {
    use left_out::{VARIABLE, Waits};
    let Some(_) = gpus("without_a_fence_results_are_wrong") else { return };
    for (world_size, job, waits, message) in [
        (2, "first fence", Waits::Others, "the all-reduce ran before its data was written"),
        (2, "second fence", Waits::Candles, "the result was read before it was complete"),
        (2, "fences of a backward pass", Waits::Others, "or averaged before it was complete"),
        (2, "fences of a backward pass", Waits::Candles, "a gradient was read before it was averaged"),
    ] {
        // By chance, the first wrong call is that one, or one of DDP's.
        let mut outputs = Vec::new();
        let is_seen = (0..5).any(|_| {
            outputs = Ranks::start_in(world_size, job, |_| Some((VARIABLE, waits.name()))).outputs();
            outputs.iter().any(|output| output.contains(message))
        });
        assert!(is_seen, "{job}, {}: {outputs:#?}", waits.name());
    }
}

#[test]
fn ranks_train_like_one_process_with_the_whole_batch() {
    let Some(_) = gpus("ranks_train_like_one_process_with_the_whole_batch") else { return };
    for world_size in [1, 2] {
        training::assert_like_plain_candle(&floats_of(&Ranks::start(world_size, "train").finish()));
    }
}

#[test]
fn a_model_on_the_cpu_and_on_a_gpu_trains_like_one_process() {
    let Some(_) = gpus("a_model_on_the_cpu_and_on_a_gpu_trains_like_one_process") else { return };
    for job in ["train on two devices", "train on two devices with a hook"] {
        training::assert_like_plain_candle(&floats_of(&Ranks::start(2, job).finish()));
    }
}

#[test]
fn mixed_precision_matches_the_cpu() {
    let Some(_) = gpus("mixed_precision_matches_the_cpu") else { return };
    for (dtype, job) in [(DType::F16, "train in f16"), (DType::BF16, "train in bf16")] {
        training::assert_like_the_cpu(dtype, &floats_of(&Ranks::start(2, job).finish()));
    }
}

#[test]
fn hooks_and_averages_match_the_cpu() {
    let Some(_) = gpus("hooks_and_averages_match_the_cpu") else { return };
    for (tool, tolerance) in toolbox::TOOLS {
        let reports = floats_of(&Ranks::start(2, &format!("tool {tool}")).finish());
        toolbox::assert_like_the_cpu(tool, tolerance, &reports);
    }
}

#[test]
fn fused_optimizers_match_the_cpu() {
    if gpus("fused_optimizers_match_the_cpu").is_some() {
        optim::all_train_alike(&Device::new_cuda(0).unwrap());
    }
}

#[test]
fn an_optimizer_accepts_variables_on_several_devices() {
    if gpus("an_optimizer_accepts_variables_on_several_devices").is_some() {
        optim::devices_mix(&Device::new_cuda(0).unwrap());
    }
}

#[test]
fn clipping_matches_the_cpu() {
    if gpus("clipping_matches_the_cpu").is_some() {
        optim::clips_alike(&Device::new_cuda(0).unwrap());
    }
}

#[test]
fn norms_match_the_cpu() {
    if gpus("norms_match_the_cpu").is_some() {
        norms::norms_alike(&Device::new_cuda(0).unwrap());
    }
}

#[test]
fn a_convolutional_model_trains_like_on_the_cpu() {
    if gpus("a_convolutional_model_trains_like_on_the_cpu").is_some() {
        layers::assert_like_the_cpu(&floats_of(&Ranks::start(2, "layers").finish()));
    }
}

#[test]
fn gradients_are_unscaled_and_overflows_found_on_all_ranks() {
    if gpus("gradients_are_unscaled_and_overflows_found_on_all_ranks").is_some() {
        for world_size in [1, 2] {
            Ranks::start(world_size, "scaler").finish();
        }
    }
}

#[test]
fn sharded_optimizers_match_unsharded_ones() {
    if gpus("sharded_optimizers_match_unsharded_ones").is_some() {
        for world_size in [1, 2] {
            Ranks::start(world_size, "zero").finish();
        }
    }
}

#[test]
fn the_death_of_a_rank_ends_all_others_within_seconds() {
    let Some(_) = gpus("the_death_of_a_rank_ends_all_others_within_seconds") else { return };
    // A file notices nothing, but a server does.
    let server = format!("tcp://127.0.0.1:{}", common::free_port()).leak();
    let noticed = "rank 1 ended the group: its process on host ";
    for (store, expected) in [(None, "rank 1"), (Some((STORE, &*server)), noticed)] {
        let mut ranks = Ranks::start_in(3, "killed", |_| store);
        ranks.await_signs();
        ranks.kill(1);
        let start = std::time::Instant::now();
        for report in ranks.reports(&[0, 2]) {
            assert!(report.contains(expected), "{report}");
        }
        println!("all have ended {:?} after the death of a rank", start.elapsed());
        assert!(start.elapsed() < Duration::from_secs(90), "it took {:?}", start.elapsed());
    }
}

#[test]
fn an_asynchronous_error_of_nccl_ends_all_ranks() {
    let Some(_) = emulated_gpus("an_asynchronous_error_of_nccl_ends_all_ranks") else { return };
    let mut ranks = Ranks::start_in(3, "killed", |rank| (rank == 1).then_some(("EMULATED_NCCL_FAIL_AFTER", "5")));
    let reports = ranks.reports(&[0, 1, 2]);
    for report in &reports {
        assert!(report.contains("ncclSystemError"), "{reports:#?}");
    }
    for other in [0, 2] {
        assert!(reports[other].contains("rank 1"), "{reports:#?}");
    }
}

/// Such as one of a version that this crate does not know.
#[test]
fn an_unknown_error_of_nccl_ends_all_ranks() {
    let Some(_) = emulated_gpus("an_unknown_error_of_nccl_ends_all_ranks") else { return };
    let variables = [("EMULATED_NCCL_FAIL_AFTER", "5"), ("EMULATED_NCCL_FAIL_WITH", "77")];
    for report in Ranks::start_in(2, "killed", |rank| variables.into_iter().filter(move |_| rank == 1)).finish() {
        assert!(
            report.contains("rank 1 ended the group: ") && report.contains(": ncclResult_t 77, unknown result"),
            "{report}"
        );
    }
}

#[test]
fn messages_with_a_rank_that_has_left_end_within_seconds() {
    let Some(_) = gpus("messages_with_a_rank_that_has_left_end_within_seconds") else { return };
    let mut ranks = Ranks::start(3, "leave");
    for report in ranks.reports(&[0, 2]) {
        assert!(report.contains("rank 1 left the group after sequence"), "{report}");
    }
}

/// Rank 1 leaves after one message, and the others wait for more.
fn leave(worker: &Worker, pg: &ProcessGroup) {
    let tensor = Tensor::ones(3, DType::F32, pg.device()).unwrap();
    let in_vain = match pg.rank() {
        0 => {
            pg.recv(&tensor, 1).unwrap();
            pg.irecv(&tensor, 1)
        }
        1 => return pg.send(&tensor, 0).unwrap(),
        _ => pg.isend(&tensor, 1),
    };
    worker.report(&in_vain.and_then(|work| work.synchronize()).unwrap_err().to_string());
}

/// Repeats all-reduces until one fails, and returns its error.
fn all_reduces(worker: &Worker, pg: &ProcessGroup) -> String {
    let tensor = Tensor::ones(4 << 20, DType::F32, pg.device()).unwrap();
    worker.until_failure(|| pg.all_reduce_async(&tensor, ReduceOp::Max))
}

#[test]
fn mismatched_calls_are_reported() {
    let Some(_) = gpus("mismatched_calls_are_reported") else { return };
    for report in Ranks::start(2, "desync").finish() {
        assert!(
            report.contains("rank 1 called broadcast(f32[10]) where rank 0 called all_reduce(f32[20])"),
            "{report}"
        );
    }
}

fn disagree(pg: &ProcessGroup) -> String {
    let tensor = |count| Tensor::ones(count, DType::F32, pg.device()).unwrap();
    let work = if pg.rank() == 0 {
        pg.all_reduce_async(&tensor(20), ReduceOp::Sum)
    } else {
        pg.broadcast_async(&tensor(10), 0)
    };
    // The second call matters, because one of NCCL's calls may end without the other side if the data is small.
    work.and_then(|work| work.synchronize()).and_then(|()| pg.barrier()).unwrap_err().to_string()
}

fn wrong_device(pg: &ProcessGroup) {
    let refused = |device: &Device| {
        let tensor = Tensor::ones(3, DType::F32, device).unwrap();
        pg.all_reduce(&tensor, ReduceOp::Sum).unwrap_err().to_string()
    };
    let error = refused(&Device::Cpu);
    assert!(error.contains("is on Cpu") && error.contains("to_device(pg.device())"), "{error}");
    let error = refused(&Device::new_cuda(0).unwrap());
    assert!(error.contains("another candle Device"), "{error}");
    // Nothing was sent, and the group remains usable.
    pg.barrier().unwrap();
}
