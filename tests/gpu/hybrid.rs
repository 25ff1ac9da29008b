//! Hybrid sharding, whose calls go over several communicators of each GPU: their kernels find room at once, and the order in which they are
//! started depends on the program alone.
use crate::common::{Between, assert_close, floats, tiny};
use crate::launch::{Ranks, Worker, emulated_gpus, gpus};
use candle_core::{DType, ModuleT, Result as CandleResult, Tensor};
use candle_ddp::nn::{BatchNorm, linear, sync_batch_norm};
use candle_ddp::optim::{Optimizer, ParamsSgd, Sgd};
use candle_ddp::{DdpOptions, DistributedDataParallel, ProcessGroup, ReduceOp, Result, Sharding, Unused, block, spawn};
use candle_ddp_testing::Random;
use candle_nn::{Init, VarBuilder, VarMap};
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

const STEPS: usize = 4;
/// Set if rank 3 ends in the middle of a backward pass.
const DIES: &str = "CANDLE_DDP_TEST_DIES";

/// Runs the job of a rank, if it is one of these.
pub(crate) fn run(worker: &Worker, group: impl Fn(u64) -> ProcessGroup) -> bool {
    match worker.job.as_str() {
        "hybrid with delays" => {
            let pg = group(40);
            let (values, calls) = train(&pg, || calls(worker, &pg)).unwrap();
            worker.report(&format!("{values:?}\n{calls}"));
        }
        "limits" => limits(&group(30)).unwrap(),
        "death of a copy" => {
            let pg = group(200);
            let error = train(&pg, || Ok(String::new())).map(drop).unwrap_err();
            worker.report(&error.to_string());
        }
        "order of launches" => worker.report(&order_of_launches(&group(30))),
        "order of messages" => worker.report(&message(&group(30))),
        "crowd" => {
            let pg = group(30);
            let groups = [(); 3].map(|()| pg.new_group(&[0, 1]).unwrap().unwrap());
            groups.iter().for_each(|group| group.barrier().unwrap());
        }
        _ => return false,
    }
    true
}

/// A model with statistics of all ranks in the middle of its backward pass, whose gradients are ready at different times: rank 1 does not use
/// `second`, and rank 3 not `first`, so that they send its bucket at the end of their backward pass. Until then it occupies the GPU of the rank
/// with which they have a model, next to the part that this rank adds up with its copy.
fn train(pg: &ProcessGroup, calls: impl FnOnce() -> Result<String>) -> Result<(Vec<f32>, String)> {
    struct Net(BatchNorm, [Tensor; 3]);
    let build = |vb: VarBuilder| -> CandleResult<Net> {
        let parameter = |name| vb.get_with_hints((1, 3, 1, 1), name, Init::Const(2.));
        // In the reverse of the order in which buckets are sent.
        let (last, norm) = (parameter("last")?, sync_batch_norm(pg, 3, 1e-5, vb.pp("norm"))?);
        let second = parameter("second")?;
        Ok(Net(norm, [parameter("first")?, second, last]))
    };
    let sharding = Sharding::Optimizer { ranks: Some(2) };
    let options = DdpOptions { sharding, unused: Unused::Allow, ..tiny() };
    let ddp = DistributedDataParallel::with_options(pg, &VarMap::new(), build, options)?;
    let mut optimizer = Sgd::new(&ddp, ParamsSgd { lr: 0.01, ..Default::default() })?;
    let x = Tensor::arange(0f32, 24., pg.device())?.reshape((2, 3, 2, 2))?;
    let mut random = Random(pg.rank() as u64 + 1);
    for step in 0..STEPS {
        // Long enough for all that is on its way to be on the GPU.
        let pauses = [(); 3].map(|()| Duration::from_millis(random.below(150)));
        let [before_norm, before_second, after_norm] = match (step, pg.rank()) {
            (1, 0) => [Duration::from_secs(2), Duration::from_millis(300), Duration::ZERO],
            _ => pauses,
        };
        let dies = step == 1 && pg.rank() == 3 && std::env::var_os(DIES).is_some();
        let pause = |duration| {
            move || {
                std::thread::sleep(duration);
                if dies {
                    std::process::exit(0);
                }
                Ok(())
            }
        };
        let loss = ddp.call(|Net(norm, [first, second, last])| {
            let y = x.broadcast_mul(last)?.apply_op1(Between(pause(after_norm)))?;
            let y = norm.forward_t(&y, true)?.sin()?.apply_op1(Between(pause(before_norm)))?;
            let y = if pg.rank() == 1 { y } else { y.broadcast_mul(second)? };
            let y = y.apply_op1(Between(pause(before_second)))?;
            let y = if pg.rank() == 3 { y } else { y.broadcast_mul(first)? };
            y.sum_all()
        })?;
        optimizer.step(&ddp.backward(&loss)?)?;
    }
    pg.barrier()?;
    Ok((ddp.parameters().iter().flat_map(|var| floats(var)).collect(), calls()?))
}

/// Has all communicators of a model.
fn limits(pg: &ProcessGroup) -> Result<()> {
    let sharding = Sharding::Blocks { reshard_after_forward: true, ranks: Some(2) };
    let options = DdpOptions { sharding, ..Default::default() };
    let build = |vb: VarBuilder<'static>| block(vb.pp("block"), |vb| linear(4, 4, vb));
    let ddp = DistributedDataParallel::with_options(pg, &VarMap::new(), build, options)?;
    let x = pg.with_grad()?.all_reduce(&Tensor::ones((1, 4), DType::F32, pg.device())?, ReduceOp::Sum)?;
    ddp.call(|block| block.forward(&x))?;
    pg.barrier()
}

#[test]
fn communicators_have_the_limits_of_their_roles() {
    let Some(_) = emulated_gpus("communicators_have_the_limits_of_their_roles") else { return };
    for (multiprocessors, expected) in [("132", [16, 16, 32, 4, 32]), ("64", [4, 8, 16, 4, 32])] {
        let variables = |_| [("EMULATED_GPUS", "4"), ("EMULATED_GPU_BLOCKS", multiprocessors), ("NCCL_DEBUG", "INFO")];
        for output in Ranks::start_with(4, "limits", false, variables).finish_with_outputs() {
            let after = |line: &str, word| -> u32 {
                let mut words = line.split(' ').skip_while(|other| *other != word);
                words.nth(1).unwrap().parse().unwrap()
            };
            let begun = output.lines().filter(|line| line.ends_with("Init COMPLETE"));
            let mut found: Vec<_> = begun.map(|line| (after(line, "nranks"), after(line, "maxCTAs"))).collect();
            found.sort_unstable();
            let sizes = [2, 2, 2, 4, 4];
            assert_eq!(found, sizes.into_iter().zip(expected).collect::<Vec<_>>(), "{output}");
        }
    }
}

#[test]
fn a_call_behind_one_of_a_group_that_fails_ends() {
    let Some(_) = emulated_gpus("a_call_behind_one_of_a_group_that_fails_ends") else { return };
    let begin = Instant::now();
    let mut ranks = Ranks::start_with(4, "death of a copy", false, |_| [("EMULATED_GPUS", "4"), (DIES, "1")]);
    for report in ranks.reports(&[0, 1, 2]) {
        assert!(report.contains("rank 3"), "{report}");
    }
    // Far from the time-out.
    assert!(begin.elapsed() < Duration::from_secs(100), "{:?}", begin.elapsed());
}

/// The errors of all that makes a second communicator.
fn order_of_launches(pg: &ProcessGroup) -> String {
    let inside = pg.with_grad().map(drop).unwrap_err();
    let sub_group = pg.new_group(&[0, 1]).map(drop).unwrap_err();
    format!("{inside}\n{sub_group}")
}

/// A message needs a communicator too, whose thread finds out.
fn message(pg: &ProcessGroup) -> String {
    let tensor = Tensor::new(1f32, pg.device()).unwrap();
    let work = if pg.rank() == 0 { pg.isend(&tensor, 1) } else { pg.irecv(&tensor, 0) };
    work.and_then(|work| work.synchronize()).unwrap_err().to_string()
}

/// The calls that this rank has started in the groups of two ranks, in their order. The order of all its calls may differ from other ranks',
/// since ranks that lack a gradient send its bucket later.
fn calls(worker: &Worker, pg: &ProcessGroup) -> Result<String> {
    let path = pg.write_flight_record(&worker.traces())?;
    let record: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let mut calls = BTreeMap::new();
    for group in record["groups"].as_array().unwrap() {
        let name = match group["ranks"].as_array().unwrap()[..] {
            [ref first, ref second] if first.as_u64().unwrap() + 1 == second.as_u64().unwrap() => "within",
            [_, _] => "across",
            _ => continue,
        };
        for call in group["calls"].as_array().unwrap() {
            let time = call["scheduled_ns"].as_u64().unwrap();
            calls.insert(time, format!("{name}: {} for {}", call["operation"], call["label"]));
        }
    }
    Ok(calls.into_values().collect::<Vec<_>>().join("\n"))
}

#[test]
fn calls_of_several_communicators_find_room_and_have_one_order() {
    let Some(_) = emulated_gpus("calls_of_several_communicators_find_room_and_have_one_order") else { return };
    let variables = |_| [("EMULATED_GPUS", "4"), ("EMULATED_GPU_BLOCKS", "64")];
    let reports = Ranks::start_with(4, "hybrid with delays", false, variables).finish();
    let sent = |report: &String| report.matches("across: \"all_reduce\" for \"the gradients").count();
    assert_eq!(sent(&reports[0]), 5 * STEPS, "{}", reports[0]);
    let expected = spawn(4, |pg| train(&pg, || Ok(String::new()))).unwrap();
    for (report, (expected, _)) in reports.iter().zip(&expected) {
        assert!(*report == reports[0], "{report}\n\nand on rank 0\n{}", reports[0]);
        let values: Vec<f32> = serde_json::from_str(report.lines().next().unwrap()).unwrap();
        assert_close(&values, expected, 1e-5, "a hybrid model");
    }
}

#[test]
fn an_order_of_launches_is_refused_with_a_second_communicator() {
    let Some(_) = gpus("an_order_of_launches_is_refused_with_a_second_communicator") else { return };
    for (job, errors) in [("order of launches", 2), ("order of messages", 1)] {
        for report in Ranks::start_in(2, job, |_| Some(("NCCL_LAUNCH_ORDER_IMPLICIT", "1"))).finish() {
            let named = |error: &str| error.contains("NCCL_LAUNCH_ORDER_IMPLICIT=\"1\"") && error.contains("unset it");
            assert!(report.lines().count() == errors && report.lines().all(named), "{report}");
        }
    }
}

#[test]
fn communicators_that_may_not_find_room_are_a_warning() {
    const WARNING: &str = "NCCL's kernels of a GPU may take 64 multiprocessors at once, but it has 48";
    let Some(_) = emulated_gpus("communicators_that_may_not_find_room_are_a_warning") else { return };
    let start =
        |blocks| Ranks::start_in(2, "crowd", move |_| [("EMULATED_GPU_BLOCKS", blocks), ("NCCL_MAX_CTAS", "16")]);
    let outputs = start("48").finish_with_outputs();
    // The third sub-group is one too many.
    assert!(outputs[0].matches(WARNING).count() == 1 && !outputs[1].contains(WARNING), "{outputs:?}");
    assert!(outputs[0].contains("(a group of 2 ranks: 16, a sub-group of 2 ranks: 16, a sub-group"), "{outputs:?}");
    for output in start("64").finish_with_outputs() {
        assert!(!output.contains("multiprocessors at once"), "{output}");
    }
}
