//! What is known to go wrong between several GPUs. The emulated GPU shows it.
use crate::common::{Between, tiny};
use crate::launch::{Ranks, Worker, emulated_gpus, gpus};
use crate::{STORE, left_out};
use candle_core::{DType, ModuleT, Result as CandleResult, Tensor};
use candle_ddp::backend::nccl::NcclOptions;
use candle_ddp::nn::{BatchNorm, sync_batch_norm};
use candle_ddp::{
    Backend, DdpOptions, DistributedDataParallel, InitOptions, ProcessGroup, ReduceOp, Result, Unused,
    init_process_group,
};
use candle_nn::{Init, VarBuilder, VarMap};
use cudarc::driver::result;
use std::time::Duration;

/// Runs the job of a rank, if it is one of these.
pub(crate) fn run(worker: &Worker, group: impl Fn(u64) -> ProcessGroup) -> bool {
    match worker.job.as_str() {
        "end of a barrier" => group(30).barrier().unwrap(),
        "end" => end(&group(30)),
        "broken links" => worker.report(&until_an_error(worker)),
        "first pass" => first_pass(&group(30)).unwrap(),
        "full pool" => full_pool(&group(30)).unwrap(),
        "late memory" => worker.report(&late_memory(&group(30))),
        "few queues" => worker.report(&few_queues(worker, &group(30))),
        "priority" => priority(worker),
        "options" => drop(with_options(
            worker,
            NcclOptions {
                min_ctas: Some(2),
                max_ctas: Some(3),
                net_name: Some("Socket".to_string()),
                traffic_class: Some(7),
                ..Default::default()
            },
        )),
        "unknown network" => {
            let options = NcclOptions { net_name: Some("Carrier pigeon".to_string()), ..Default::default() };
            worker.report(&with_options(worker, options).unwrap_err().to_string());
        }
        _ => return false,
    }
    true
}

fn all_reduce(pg: &ProcessGroup) -> Vec<f32> {
    let tensor = Tensor::full(1f32, 1000, pg.device()).unwrap();
    pg.all_reduce(&tensor, ReduceOp::Sum).unwrap();
    tensor.to_vec1().unwrap()
}

fn with_options(worker: &Worker, nccl: NcclOptions) -> Result<ProcessGroup> {
    assert!(std::env::var_os(STORE).is_none());
    let init_method = format!("file://{}", worker.store().display());
    let pg = init_process_group(InitOptions { backend: Backend::Nccl, init_method, nccl, ..Default::default() })?;
    assert_eq!(all_reduce(&pg), [worker.world_size as f32; 1000]);
    Ok(pg)
}

/// Has a communicator for messages, next to that for collectives.
fn end(pg: &ProcessGroup) {
    let tensor = Tensor::ones(3, DType::F32, pg.device()).unwrap();
    if pg.rank() == 0 { pg.send(&tensor, 1) } else { pg.recv(&tensor, 0) }.unwrap();
    pg.barrier().unwrap();
}

/// Since 2.31.2, `ncclCommDestroy` waits for all ranks of its host. One rank aborts its first communicator, after having finalized it.
#[test]
fn an_end_that_waits_for_another_rank_holds_up_no_other_communicator() {
    let Some(_) = emulated_gpus("an_end_that_waits_for_another_rank_holds_up_no_other_communicator") else { return };
    let variables = |rank| {
        let aborted = (rank == 1).then_some(("EMULATED_NCCL_ABORT_AT_END", "0"));
        [("EMULATED_GPUS", "2"), ("EMULATED_NCCL_VERSION", "23102"), ("NCCL_DEBUG", "INFO")].into_iter().chain(aborted)
    };
    let outputs = Ranks::start_with(2, "end", false, variables).finish_with_outputs();
    assert_eq!(outputs[0].matches("Destroy COMPLETE").count(), 1, "{outputs:?}");
    // Without an abort, all of them end.
    let variables = |_| [("EMULATED_GPUS", "2"), ("EMULATED_NCCL_VERSION", "23102"), ("NCCL_DEBUG", "INFO")];
    for output in Ranks::start_with(2, "end", false, variables).finish_with_outputs() {
        assert_eq!(output.matches("Destroy COMPLETE").count(), 2, "{output}");
    }
}

/// The first parameter whose gradient is complete is used by rank 0 alone, so that rank 1 sends its bucket last.
fn first_pass(pg: &ProcessGroup) -> Result<()> {
    struct Net(BatchNorm, Tensor, Tensor);
    let build = |vb: VarBuilder| -> CandleResult<Net> {
        let factor = vb.get_with_hints((1, 3, 1, 1), "factor", Init::Const(2.))?;
        let norm = sync_batch_norm(pg, 3, 1e-5, vb.pp("norm"))?;
        Ok(Net(norm, factor, vb.get_with_hints(5, "own", Init::Const(1.))?))
    };
    let options = DdpOptions { unused: Unused::Allow, ..tiny() };
    let ddp = DistributedDataParallel::with_options(pg, &VarMap::new(), build, options)?;
    let x = Tensor::arange(0f32, 24., pg.device())?.reshape((2, 3, 2, 2))?;
    // So long that a bucket that was sent is on the GPU.
    let slow = || {
        std::thread::sleep(Duration::from_secs(1));
        Ok(())
    };
    for _ in 0..2 {
        let loss = ddp.call(|Net(norm, factor, own)| {
            let loss = norm.forward_t(&x.broadcast_mul(factor)?, true)?.sin()?.sum_all()?.apply_op1(Between(slow))?;
            if pg.rank() == 0 { loss + own.sum_all()? } else { Ok(loss) }
        })?;
        ddp.backward(&loss)?;
    }
    Ok(())
}

#[test]
fn kernels_of_the_first_backward_pass_are_loaded_before_buckets_are_sent() {
    if emulated_gpus("kernels_of_the_first_backward_pass_are_loaded_before_buckets_are_sent").is_some() {
        Ranks::start_in(2, "first pass", |_| Some(("EMULATED_GPU_LOADS_WAIT", "1"))).finish();
    }
}

/// Data may arrive in good order on some ranks, which hear of the error before their first call ends.
fn until_an_error(worker: &Worker) -> String {
    let init_method = format!("file://{}", worker.store().display());
    let options = InitOptions { backend: Backend::Nccl, init_method, ..Default::default() };
    init_process_group(options).and_then(|pg| pg.barrier()).unwrap_err().to_string()
}

#[test]
fn broken_links_between_gpus_are_an_error() {
    const TEST: &str = "broken_links_between_gpus_are_an_error";
    let Some(_) = emulated_gpus(TEST) else { return };
    let broken = |rank| (rank == 1).then_some(("EMULATED_NCCL_CORRUPT", "1"));
    for report in Ranks::start_in(2, "broken links", broken).finish() {
        assert!(
            report.contains("the sum over all ranks is wrong") && report.contains("NCCL_P2P_DISABLE=1"),
            "{report}"
        );
    }
    // The test is left out on all ranks if one of them leaves it out.
    let untested = |rank| broken(rank).into_iter().chain((rank == 0).then_some(("CANDLE_DDP_LINK_TEST", "0")));
    Ranks::start_in(2, "auto", untested).finish();
}

/// The pool of the driver keeps memory that NCCL needs for a sub-group.
fn full_pool(pg: &ProcessGroup) -> Result<()> {
    let tensor = Tensor::zeros(40 << 20, DType::F32, pg.device())?;
    pg.device().synchronize()?;
    drop(tensor);
    pg.device().synchronize()?;
    let group = pg.new_group(&[0, 1])?.expect("both ranks are members");
    assert_eq!(all_reduce(&group), [2.0; 1000]);
    Ok(())
}

#[test]
fn nccl_gets_memory_that_the_pool_keeps() {
    if emulated_gpus("nccl_gets_memory_that_the_pool_keeps").is_some() {
        // 256 MiB, of which the tensor needs 160, and each communicator 64.
        Ranks::start_in(2, "full pool", |_| Some(("EMULATED_GPU_MEMORY", "268435456"))).finish();
    }
}

/// The pool of the driver keeps memory that NCCL needs for calls of other sizes. Returns the first error.
fn late_memory(pg: &ProcessGroup) -> String {
    let tensor = Tensor::zeros(38 << 20, DType::F32, pg.device()).unwrap();
    pg.device().synchronize().unwrap();
    drop(tensor);
    pg.device().synchronize().unwrap();
    let calls = (0..6).try_for_each(|power| {
        let tensor = Tensor::ones(1 << power, DType::F32, pg.device())?;
        pg.all_reduce(&tensor, ReduceOp::Sum)?;
        pg.barrier()
    });
    calls.map_or_else(|error| error.to_string(), |()| String::new())
}

#[test]
fn nccl_finds_memory_for_calls_of_a_new_kind() {
    let Some(_) = emulated_gpus("nccl_finds_memory_for_calls_of_a_new_kind") else { return };
    // 256 MiB, of which the tensor needs 152, the communicator 64, and each kind of calls 8.
    let reports = |reserve| {
        let variables = move |_| [("EMULATED_GPU_MEMORY", "268435456"), ("CANDLE_DDP_NCCL_RESERVE", reserve)];
        Ranks::start_in(2, "late memory", variables).finish()
    };
    assert_eq!(reports("16777216"), ["", ""]);
    for report in reports("0") {
        assert!(report.contains("out of memory") && report.contains("CANDLE_DDP_NCCL_RESERVE"), "{report}");
    }
}

/// Collectives work with any number of queues, but not those inside a model, nor messages.
fn few_queues(worker: &Worker, pg: &ProcessGroup) -> String {
    assert_eq!(all_reduce(pg), [2.0; 1000]);
    let layer = sync_batch_norm(pg, 3, 1e-5, VarBuilder::from_varmap(&VarMap::new(), DType::F32, pg.device())).unwrap();
    let x = Tensor::ones((2, 3), DType::F32, pg.device()).unwrap();
    let in_a_model = layer.forward_t(&x, true).unwrap_err().to_string();
    let tensor = Tensor::ones(3, DType::F32, pg.device()).unwrap();
    let work = if worker.rank == 0 { pg.isend(&tensor, 1) } else { pg.irecv(&tensor, 0) };
    let message = work.and_then(|work| work.synchronize()).unwrap_err().to_string();
    format!("{in_a_model}\n{message}")
}

#[test]
fn streams_that_would_share_a_queue_are_refused() {
    let Some(_) = gpus("streams_that_would_share_a_queue_are_refused") else { return };
    for report in Ranks::start_in(2, "few queues", |_| Some(("CUDA_DEVICE_MAX_CONNECTIONS", "1"))).finish() {
        let named =
            |error: &str| error.contains("CUDA_DEVICE_MAX_CONNECTIONS") && error.contains("unset it, or set 32");
        assert!(report.lines().count() == 2 && report.lines().all(named), "{report}");
    }
}

/// The stream of collectives has the highest priority, unless the options say otherwise.
fn priority(worker: &Worker) {
    drop(with_options(worker, NcclOptions { high_priority: false, ..Default::default() }).unwrap());
    assert!(left_out::priorities().is_empty());
    let pg = with_options(worker, NcclOptions::default()).unwrap();
    let (_, highest) = result::stream::get_priority_range().unwrap();
    assert_eq!(left_out::priorities(), [highest]);
    drop(pg);
}

#[test]
fn collectives_have_the_highest_priority() {
    crate::finish("collectives_have_the_highest_priority", 1, "priority");
}

#[test]
fn nccl_gets_its_options() {
    let Some(_) = emulated_gpus("nccl_gets_its_options") else { return };
    // A limit in the environment would count more.
    let version =
        |version| move |_| [("EMULATED_NCCL_VERSION", version), ("NCCL_DEBUG", "INFO"), ("NCCL_MAX_CTAS", "")];
    for output in Ranks::start_in(2, "options", version("22605")).finish_with_outputs() {
        assert!(output.contains("minCTAs 2 maxCTAs 3 netName Socket trafficClass 7"), "{output}");
    }
    for output in Ranks::start_in(1, "options", version("22505")).outputs() {
        assert!(!output.contains("trafficClass 7"), "{output}");
    }
    for report in Ranks::start_in(2, "unknown network", version("22605")).finish() {
        assert!(report.contains("Carrier pigeon"), "{report}");
    }
}

#[test]
fn kernels_that_may_be_loaded_late_are_a_warning() {
    let Some(_) = gpus("kernels_that_may_be_loaded_late_are_a_warning") else { return };
    let warned = |world_size, loading| {
        let outputs = Ranks::start_in(world_size, "end of a barrier", |_| Some(("CUDA_MODULE_LOADING", loading)));
        outputs
            .finish_with_outputs()
            .iter()
            .map(|output| output.matches("CUDA_MODULE_LOADING is").count())
            .sum::<usize>()
    };
    assert_eq!([warned(2, "LAZY"), warned(2, "EAGER"), warned(1, "LAZY")], [1, 0, 0]);
}

#[test]
fn gpus_of_several_kinds_are_a_warning_and_instances_of_one_an_error() {
    let Some(_) = emulated_gpus("gpus_of_several_kinds_are_a_warning_and_instances_of_one_an_error") else { return };
    let start = |variable| Ranks::start_with(2, "auto", false, move |_| [("EMULATED_GPUS", "2"), variable]);
    let outputs = start(("EMULATED_GPU_NAMES", "A100,H100")).finish_with_outputs();
    assert!(outputs[0].contains("rank 0 has a GPU A100, rank 1 a GPU H100"), "{outputs:?}");
    for output in start(("EMULATED_GPU_MIG", "1")).outputs() {
        assert!(output.contains("on instances (MIG) of it"), "{output}");
    }
}
