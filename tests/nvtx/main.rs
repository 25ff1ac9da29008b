//! The ranges that Nsight Systems shows. A small tool (`injection.c`) takes its place.
#![allow(clippy::unwrap_used)] // a failed test may panic
use candle_core::{DType, Device, Tensor};
use candle_ddp::optim::{Optimizer, ParamsSgd, Sgd};
use candle_ddp::{DistributedDataParallel, spawn};
use candle_ddp_testing::test_process;
use candle_nn::{VarMap, linear};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::Command;

/// A training step, and a phase whose name NVTX cannot show as it is.
#[test]
#[ignore = "started by other tests"]
fn trains() {
    spawn(1, |pg| {
        let varmap = VarMap::new();
        let ddp = DistributedDataParallel::new(&pg, &varmap, |vb| linear(3, 2, vb))?;
        let mut optimizer = Sgd::new(&ddp, ParamsSgd { lr: 0.1, ..Default::default() })?;
        let x = Tensor::ones((4, 3), DType::F32, &Device::Cpu)?;
        let grads = ddp.backward(&ddp.forward(&x)?.sqr()?.mean_all()?)?;
        ddp.phase("optimizer", || optimizer.step(&grads))?;
        ddp.phase("a\0b ä", || ());
        let panics = AssertUnwindSafe(|| ddp.phase("fails", || panic!("on purpose")));
        catch_unwind(panics).unwrap_err();
        Ok(())
    })
    .unwrap();
}

/// The lines that the tool has written while the step ran.
fn run(folder: &Path, configure: impl FnOnce(&mut Command)) -> Vec<String> {
    let file = folder.join("ranges");
    let mut process = test_process(module_path!(), "trains");
    process.env("NVTX_TEST_FILE", &file).env_remove("NVTX_INJECTION64_PATH").env_remove("CANDLE_DDP_TRACE");
    configure(&mut process);
    let output = process.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    std::fs::read_to_string(file).unwrap_or_default().lines().map(str::to_string).collect()
}

#[test]
fn a_tool_sees_the_phases_of_a_step_in_order_and_nested() {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("libinjection.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/nvtx/injection.c");
    let compiled =
        Command::new("cc").args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"]).args([&library, &source]).status();
    assert!(compiled.unwrap().success());
    let with_tool = |process: &mut Command| {
        process.env("NVTX_INJECTION64_PATH", &library);
    };
    let lines = run(folder.path(), with_tool);
    let depths = lines.iter().scan(0, |depth, line| {
        *depth += i32::from(line.starts_with("push ")) - i32::from(line == "pop");
        Some(*depth)
    });
    let depths: Vec<i32> = depths.collect();
    assert!(depths.last() == Some(&0) && depths.iter().all(|depth| *depth >= 0), "{lines:?}");
    let pushed: Vec<_> = lines.iter().filter_map(|line| line.strip_prefix("push ")).collect();
    let named = ["forward", "backward", "wait for buckets", "optimizer", "ab ä", "fails"];
    let known: Vec<_> = pushed.iter().copied().filter(|name| named.contains(name)).collect();
    assert_eq!(known, named, "{lines:?}");
    // The first bucket is full while the backward pass is going on.
    let at = |line: &str| lines.iter().position(|other| other == line).unwrap_or_else(|| panic!("{lines:?}"));
    let ready = at("mark bucket 0 ready");
    assert!(at("push backward") < ready && depths[ready] > 0, "{lines:?}");

    // With a timeline, they are the same.
    std::fs::remove_file(folder.path().join("ranges")).unwrap();
    let traced = run(folder.path(), |process| {
        with_tool(process);
        process.env("CANDLE_DDP_TRACE", folder.path());
    });
    assert_eq!(traced, lines);
    assert!(folder.path().join("rank0.trace.json").exists());
}

/// Neither is an error: a program with ranges runs anywhere.
#[test]
fn no_tool_and_a_tool_that_is_missing_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(run(folder.path(), |_| ()), [""; 0]);
    let lines = run(folder.path(), |process| {
        process.env("NVTX_INJECTION64_PATH", "/nowhere/tool.so");
    });
    assert_eq!(lines, [""; 0]);
}
