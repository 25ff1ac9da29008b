//! Behaviour of the real driver and of NCCL that made ranks hang, crash or waste memory. The emulated GPU shows it too.
#![allow(unsafe_code)] // the pool of memory is asked through the driver's functions
use crate::launch::{Ranks, SHORT, Worker, emulated_gpus, gpus};
use crate::left_out;
use candle_core::{DType, Device, Result as CandleResult, Tensor};
use candle_ddp::backend::nccl::{NcclCommunicator, NcclOptions};
use candle_ddp::backend::{Collective, Communicator};
use candle_ddp::data::{DataLoader, DistributedSampler, LoaderOptions, SamplerOptions};
use candle_ddp::rendezvous::{FileStore, PrefixStore, Store};
use candle_ddp::{Backend, InitOptions, ProcessGroup, ReduceOp, init_process_group};
use cudarc::driver::{CudaContext, result, sys};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Runs the job of a rank, if it is one of these.
pub(crate) fn run(worker: &Worker, group: impl Fn(u64) -> ProcessGroup) -> bool {
    match worker.job.as_str() {
        "abort in flight" => in_flight(worker, group(100), true),
        "killed in flight" => in_flight(worker, group(100), false),
        "driver waits" => driver_waits(worker, &group(100)),
        "stuck messages" => stuck_messages(worker, &group(100)),
        "stuck aborts" => {
            // SAFETY: the program has no other threads yet that read its environment.
            unsafe { std::env::set_var("CANDLE_DDP_ABORT_TIMEOUT", "2") };
            stuck_aborts(&group(100));
        }
        "many pairs" => many_pairs(&group(40)),
        "many calls" => many_calls(worker, &group(SHORT)),
        "thread ends" => thread_ends(worker, &group(100)),
        "drop elsewhere" => drop_elsewhere(&group(20)).unwrap(),
        "memory" => {
            let pg = group(20);
            assert!(!pg.device().as_cuda_device().unwrap().is_event_tracking(), "two events are made for each tensor");
            worker.report(&kept_memory(&pg).to_string());
        }
        "memory without NCCL" => worker.report(&kept_memory(&single(worker)).to_string()),
        "waits of a call" => waits_of_a_call(&group(20)),
        "load in between" => load_in_between(&group(30)),
        "threads" => threads(worker),
        "loader in between" => loader_in_between(worker, &group(30)),
        "communicator in between" => communicator_in_between(worker, &group(30)),
        _ => return false,
    }
    true
}

fn ones(device: &Device) -> Tensor {
    Tensor::ones(1 << 20, DType::F32, device).unwrap()
}

/// Rank 0 has calls in flight on four communicators when it ends the group, or when rank 1 dies. All of them end, although each
/// end waits for the whole GPU, and the process can make another group.
fn in_flight(worker: &Worker, pg: ProcessGroup, by_abort: bool) {
    let device = pg.device().clone();
    let sub_group = pg.new_group(&[0, 1]).unwrap().unwrap();
    // Connects the ranks and the pairs, so that the calls below are launched at once.
    for group in [&pg, &sub_group] {
        group.all_reduce(&ones(&device), ReduceOp::Sum).unwrap();
    }
    if pg.rank() == 0 {
        pg.send(&ones(&device), 1).unwrap();
        pg.recv(&ones(&device), 1).unwrap();
    } else {
        pg.recv(&ones(&device), 0).unwrap();
        pg.send(&ones(&device), 0).unwrap();
        worker.sign();
        worker.await_report(0);
        return;
    }
    let works = [
        pg.all_reduce_async(&ones(&device), ReduceOp::Sum).unwrap(),
        sub_group.all_reduce_async(&ones(&device), ReduceOp::Sum).unwrap(),
        pg.isend(&ones(&device), 1).unwrap(),
        pg.irecv(&ones(&device), 1).unwrap(),
    ];
    // They are on the GPU now.
    std::thread::sleep(Duration::from_millis(500));
    worker.sign();
    let start = Instant::now();
    if by_abort {
        pg.abort("the test ends it");
    }
    let errors: Vec<String> = works.iter().map(|work| work.synchronize().unwrap_err().to_string()).collect();
    drop((works, sub_group, pg));
    let took = start.elapsed();
    let init_method = format!("file://{}", worker.store().with_extension("next").display());
    let alone = InitOptions {
        backend: Backend::Nccl,
        init_method,
        rank: Some(0),
        world_size: Some(1),
        device: Some(device),
        ..Default::default()
    };
    let next = init_process_group(alone).unwrap();
    let tensor = Tensor::full(3f32, 5, next.device()).unwrap();
    next.all_reduce(&tensor, ReduceOp::Sum).unwrap();
    assert_eq!(tensor.to_vec1::<f32>().unwrap(), [3.0; 5]);
    worker.report(&format!("{}\n{}", took.as_secs(), errors.join("\n")));
}

/// A group of one rank on the first GPU, without NCCL.
fn single(worker: &Worker) -> ProcessGroup {
    let alone = InitOptions {
        backend: Backend::Single,
        init_method: format!("file://{}", worker.store().display()),
        rank: Some(0),
        world_size: Some(1),
        device: Some(Device::new_cuda_with_stream(0).unwrap()),
        ..Default::default()
    };
    init_process_group(alone).unwrap()
}

fn seconds(report: &str) -> u64 {
    report.lines().next().unwrap().parse().unwrap()
}

#[test]
fn communicators_end_together() {
    let Some(_) = gpus("communicators_end_together") else { return };
    let reports = Ranks::start(2, "abort in flight").finish();
    assert!(reports[0].contains("the test ends it"), "{reports:#?}");
    // Before the time-out of any group.
    assert!(seconds(&reports[0]) < 90, "{reports:#?}");
}

#[test]
fn communicators_end_together_after_a_death() {
    let Some(_) = gpus("communicators_end_together_after_a_death") else { return };
    let mut ranks = Ranks::start(2, "killed in flight");
    ranks.await_signs();
    ranks.kill(1);
    let reports = ranks.reports(&[0]);
    assert!(reports[0].matches("rank 1").count() >= 3 && seconds(&reports[0]) < 90, "{reports:#?}");
}

/// Rank 0 waits in the driver for an all-reduce in which rank 1 does not take part, and is killed.
fn driver_waits(worker: &Worker, pg: &ProcessGroup) {
    let tensor = ones(pg.device());
    pg.all_reduce(&tensor, ReduceOp::Max).unwrap();
    worker.sign();
    if pg.rank() == 1 {
        std::thread::sleep(Duration::from_secs(300));
    }
    pg.all_reduce_async(&tensor, ReduceOp::Max).unwrap().wait().unwrap();
    // The values are no result. They end only when the communicator does.
    let _ = tensor.to_vec1::<f32>();
    worker.report(&pg.barrier().unwrap_err().to_string());
}

#[test]
fn a_death_is_noticed_while_the_driver_waits() {
    let Some(_) = gpus("a_death_is_noticed_while_the_driver_waits") else { return };
    let mut ranks = Ranks::start_in(2, "driver waits", |_| Some(("EMULATED_GPU_DRIVER_LOCK", "1")));
    ranks.await_signs();
    std::thread::sleep(Duration::from_secs(1));
    ranks.kill(1);
    let reports = ranks.reports(&[0]);
    assert!(reports[0].contains("rank 1"), "{reports:#?}");
}

/// The group fails while NCCL has not launched a message yet.
fn stuck_messages(worker: &Worker, pg: &ProcessGroup) {
    let tensor = ones(pg.device());
    let work = if pg.rank() == 0 { pg.isend(&tensor, 1) } else { pg.irecv(&tensor, 0) }.unwrap();
    std::thread::sleep(Duration::from_secs(2));
    if pg.rank() == 0 {
        pg.abort("the test ends it");
    }
    worker.report(&work.synchronize().unwrap_err().to_string());
}

/// The group fails, and NCCL does not end its communicator. The program cannot exit.
fn stuck_aborts(pg: &ProcessGroup) {
    pg.barrier().unwrap();
    if pg.rank() == 0 {
        pg.abort("the test ends it");
    }
    loop {
        std::thread::park();
    }
}

#[test]
fn a_process_that_hangs_in_the_driver_ends_itself() {
    let Some(_) = emulated_gpus("a_process_that_hangs_in_the_driver_ends_itself") else { return };
    for output in Ranks::start_in(2, "stuck aborts", |_| Some(("EMULATED_NCCL_STUCK_ABORTS", "1"))).outputs() {
        assert!(output.contains("this process ends itself"), "{output}");
    }
}

#[test]
fn a_message_that_is_not_launched_ends_with_its_group() {
    let Some(_) = emulated_gpus("a_message_that_is_not_launched_ends_with_its_group") else { return };
    for report in Ranks::start_in(2, "stuck messages", |_| Some(("EMULATED_NCCL_STUCK_MESSAGES", "1"))).finish() {
        assert!(report.contains("the test ends it"), "{report}");
    }
}

/// The ranks begin with the messages of different groups, whose kernels must all find room on the GPU.
fn many_pairs(pg: &ProcessGroup) {
    const GROUPS: usize = 8;
    let groups: Vec<_> = (0..GROUPS).map(|_| pg.new_group(&[0, 1]).unwrap().unwrap()).collect();
    let start = |group: &ProcessGroup| {
        let tensor = ones(pg.device());
        if pg.rank() == 0 { group.isend(&tensor, 1) } else { group.irecv(&tensor, 0) }.unwrap()
    };
    // Connects the pairs.
    groups.iter().for_each(|group| start(group).synchronize().unwrap());
    let mut order: Vec<usize> = (0..GROUPS).collect();
    if pg.rank() == 1 {
        order.reverse();
    }
    let mut works = Vec::new();
    for half in order.chunks(GROUPS / 2) {
        works.extend(half.iter().map(|index| start(&groups[*index])));
        std::thread::sleep(Duration::from_secs(1));
    }
    works.iter().for_each(|work| work.synchronize().unwrap());
}

#[test]
fn messages_of_many_pairs_find_room_on_the_gpu() {
    if emulated_gpus("messages_of_many_pairs_find_room_on_the_gpu").is_some() {
        // NCCL's own limit would hide it.
        Ranks::start_in(2, "many pairs", |_| Some(("NCCL_MAX_CTAS", ""))).finish();
    }
}

/// Rank 0 starts many collectives, and rank 1 none.
fn many_calls(worker: &Worker, pg: &ProcessGroup) {
    if pg.rank() == 1 {
        worker.await_report(0);
        return;
    }
    let mut works = Vec::new();
    let tensor = Tensor::ones(1, DType::F32, pg.device()).unwrap();
    let error = (0..400).find_map(|_| match pg.all_reduce_async(&tensor, ReduceOp::Sum) {
        Ok(work) => {
            works.push(work);
            None
        }
        Err(error) => Some(error.to_string()),
    });
    worker.report(&format!("{} {}", works.len(), error.unwrap_or_default()));
}

#[test]
fn calls_that_find_no_room_on_the_stream_wait_outside_of_the_driver() {
    if gpus("calls_that_find_no_room_on_the_stream_wait_outside_of_the_driver").is_some() {
        let report = Ranks::start(2, "many calls").reports(&[0]).swap_remove(0);
        assert!(report.starts_with("192 ") && report.contains("timed out"), "{report}");
    }
}

/// Rank 0's thread ends while NCCL still has to launch its call, in which rank 1 does not take part. Then the group ends.
fn thread_ends(worker: &Worker, pg: &ProcessGroup) {
    if pg.rank() == 1 {
        worker.report("it is in the group");
        worker.await_report(0);
        return;
    }
    worker.await_report(1);
    let start = || pg.all_reduce_async(&ones(pg.device()), ReduceOp::Sum).unwrap();
    let work = std::thread::scope(|scope| scope.spawn(start).join().unwrap());
    pg.abort("the test ends it");
    worker.report(&work.synchronize().unwrap_err().to_string());
}

#[test]
fn a_thread_may_end_before_its_call_is_launched() {
    const TEST: &str = "a_thread_may_end_before_its_call_is_launched";
    if gpus(TEST).is_none() {
        return;
    }
    // Only the emulated NCCL has several versions.
    for version in ["22702", "22703"] {
        let mut ranks = Ranks::start_in(2, "thread ends", |_| {
            // Otherwise the ranks would be connected already.
            [("EMULATED_NCCL_VERSION", version), ("CANDLE_DDP_LINK_TEST", "0")]
        });
        let report = ranks.reports(&[0, 1]).swap_remove(0);
        assert!(report.contains("the test ends it"), "{report}");
    }
}

/// A thread that has never used the GPU drops the last copy of a tensor, after work that reads it.
fn drop_elsewhere(pg: &ProcessGroup) -> CandleResult<()> {
    for round in 0..20 {
        let tensor = Tensor::full(round as f32, 100_000, pg.device())?;
        let next = (&tensor + 1.0)?;
        std::thread::spawn(move || drop(tensor)).join().unwrap();
        let other = Tensor::full(-1f32, 100_000, pg.device())?;
        let values = next.to_vec1::<f32>()?;
        assert!(values.iter().all(|value| *value == round as f32 + 1.0), "{:?}", &values[..5]);
        drop(other);
    }
    Ok(())
}

#[test]
fn a_tensor_may_be_dropped_on_any_thread() {
    crate::finish("a_tensor_may_be_dropped_on_any_thread", 1, "drop elsewhere");
}

/// How many MiB the driver's pool holds after 64 MiB were freed, and the device was waited for.
fn kept_memory(pg: &ProcessGroup) -> u64 {
    let tensor = Tensor::zeros(16 << 20, DType::F32, pg.device()).unwrap();
    pg.device().synchronize().unwrap();
    drop(tensor);
    pg.device().synchronize().unwrap();
    // Only now does the pool know of the free.
    pg.device().synchronize().unwrap();
    let mut bytes = 0u64;
    // SAFETY: the device exists, and the attribute is such a number.
    unsafe {
        let pool = result::device::get_mem_pool(CudaContext::new(0).unwrap().cu_device()).unwrap();
        let reserved = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
        result::mem_pool::get_attribute(pool, reserved, (&raw mut bytes).cast()).unwrap();
    }
    bytes >> 20
}

#[test]
fn freed_memory_stays_with_the_process_unless_asked_for() {
    let Some(_) = gpus("freed_memory_stays_with_the_process_unless_asked_for") else { return };
    for (job, keep, expected) in [("memory", "1", true), ("memory", "0", false), ("memory without NCCL", "1", true)] {
        let reports = Ranks::start_in(1, job, |_| Some(("CANDLE_DDP_KEEP_GPU_MEMORY", keep))).finish();
        assert_eq!(reports[0].parse::<u64>().unwrap() >= 64, expected, "{job}, {keep}: {reports:?} MiB");
    }
}

/// A collective makes NCCL's stream wait once, for candle's, and candle's stream once, for NCCL's.
fn waits_of_a_call(pg: &ProcessGroup) {
    let tensor = ones(pg.device());
    pg.all_reduce(&tensor, ReduceOp::Sum).unwrap();
    let before = left_out::waits();
    let work = pg.all_reduce_async(&tensor, ReduceOp::Sum).unwrap();
    assert_eq!(left_out::waits() - before, 1);
    work.wait().unwrap();
    assert_eq!(left_out::waits() - before, 2);
}

#[test]
fn a_call_waits_for_two_events() {
    crate::finish("a_call_waits_for_two_events", 1, "waits of a call");
}

/// Rank 0 connects another communicator while it has an all-reduce in flight; rank 1 connects it first.
fn communicator_in_between(worker: &Worker, pg: &ProcessGroup) {
    let tensor = ones(pg.device());
    pg.all_reduce(&tensor, ReduceOp::Max).unwrap();
    let another = || {
        let timeout = Duration::from_secs(20);
        let store: Arc<dyn Store> = Arc::new(FileStore::open(worker.store(), timeout).unwrap());
        let (store, options) =
            (Arc::new(PrefixStore::new("another", store)), NcclOptions { timeout, ..Default::default() });
        NcclCommunicator::new(store, pg.rank(), 2, pg.device(), options).unwrap()
    };
    let all_reduce = || pg.all_reduce_async(&tensor, ReduceOp::Max).unwrap();
    let (work, communicator) = if pg.rank() == 0 {
        let work = all_reduce();
        (work, another())
    } else {
        let communicator = another();
        (all_reduce(), communicator)
    };
    communicator.start(Collective::Barrier).unwrap().synchronize().unwrap();
    work.synchronize().unwrap();
}

#[test]
fn a_communicator_is_connected_while_calls_are_in_flight() {
    crate::finish("a_communicator_is_connected_while_calls_are_in_flight", 2, "communicator in between");
}

/// Rank 0 loads its first batch while it has an all-reduce in flight, in which rank 1 takes part only afterwards.
fn loader_in_between(worker: &Worker, pg: &ProcessGroup) {
    let tensor = ones(pg.device());
    let all_reduce = || pg.all_reduce_async(&tensor, ReduceOp::Max).unwrap();
    all_reduce().synchronize().unwrap();
    if pg.rank() == 1 {
        worker.await_report(0);
        return all_reduce().synchronize().unwrap();
    }
    let work = all_reduce();
    let sampler = DistributedSampler::new(2, 0, 1, SamplerOptions::default()).unwrap();
    let options = LoaderOptions { batch_size: 2, num_workers: 1, ..Default::default() };
    let collate = |samples: Vec<usize>| Ok(Tensor::ones(samples.len(), DType::F32, &Device::Cpu)?);
    let loader = DataLoader::from_sampler(0..2, sampler, options, collate).unwrap().to_device(pg.device());
    let batch = loader.iter().next().unwrap().unwrap();
    worker.report("it has a batch");
    work.synchronize().unwrap();
    assert_eq!(batch.to_vec1::<f32>().unwrap(), [1.0; 2]);
}

#[test]
fn batches_are_loaded_while_calls_are_in_flight() {
    crate::finish("batches_are_loaded_while_calls_are_in_flight", 2, "loader in between");
}

/// Rank 0 uses kernels for the first time while it has an all-reduce in flight, and then makes the call of another group that rank 1
/// makes first.
fn load_in_between(pg: &ProcessGroup) {
    let other = pg.new_group(&[0, 1]).unwrap().unwrap();
    let tensor = ones(pg.device());
    let (rows, weight) = (tensor.reshape((1024, 1024)).unwrap(), Tensor::ones(1024, DType::F32, pg.device()).unwrap());
    let all_reduce = |group: &ProcessGroup| group.all_reduce_async(&tensor, ReduceOp::Max).unwrap();
    for group in [pg, &other] {
        all_reduce(group).synchronize().unwrap();
    }
    if pg.rank() == 0 {
        let work = all_reduce(pg);
        let kernels =
            candle_ddp::nn::relu(&rows).and_then(|rows| candle_ddp::nn::ops::rms_norm(&rows, &weight, 1e-5)).unwrap();
        all_reduce(&other).synchronize().unwrap();
        work.synchronize().unwrap();
        drop(kernels);
    } else {
        all_reduce(&other).synchronize().unwrap();
        all_reduce(pg).synchronize().unwrap();
    }
}

#[test]
fn kernels_are_loaded_before_the_first_call() {
    if emulated_gpus("kernels_are_loaded_before_the_first_call").is_some() {
        Ranks::start_in(2, "load in between", |_| Some(("EMULATED_GPU_LOADS_WAIT", "1"))).finish();
    }
}

/// Two ranks in one process.
fn threads(worker: &Worker) {
    let device = Device::new_cuda_with_stream(0).unwrap();
    let connect = &|rank: usize| {
        let timeout = Duration::from_secs(20);
        let store: Arc<dyn Store> = Arc::new(FileStore::open(worker.store(), timeout).unwrap());
        NcclCommunicator::new(store, rank, 2, &device, NcclOptions { timeout, ..Default::default() })
    };
    let errors = std::thread::scope(|scope| {
        [0, 1].map(|rank| scope.spawn(move || connect(rank))).map(|rank| rank.join().unwrap().unwrap_err().to_string())
    });
    assert!(errors.iter().all(|error| error.contains("ranks 0 and 1 are threads of one process")), "{errors:?}");
}

#[test]
fn ranks_that_are_threads_of_one_process_are_refused() {
    if gpus("ranks_that_are_threads_of_one_process_are_refused").is_some() {
        Ranks::start_in(1, "threads", |_| Some(("CANDLE_DDP_ALLOW_SHARED_GPU", "1"))).finish();
    }
}

#[test]
fn blocking_communicators_and_invalid_settings_are_refused() {
    let Some(_) = gpus("blocking_communicators_and_invalid_settings_are_refused") else { return };
    for variable in
        [("NCCL_COMM_BLOCKING", "1"), ("CANDLE_DDP_ABORT_TIMEOUT", "5 min"), ("CANDLE_DDP_NCCL_RESERVE", "1 GB")]
    {
        for report in Ranks::start_in(2, "auto", |_| Some(variable)).outputs() {
            assert!(report.contains(variable.0), "{report}");
        }
    }
}
