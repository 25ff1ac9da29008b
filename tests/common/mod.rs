//! Helpers that several test files share.
#![allow(dead_code, clippy::unwrap_used)] // each test file uses only some helpers, and a failed test may panic
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_ddp::checkpoint::{Checkpointer, CheckpointerOptions};
use candle_ddp::data::Dataset;
use candle_ddp::data_parallel::DataParallel;
use candle_ddp::seed::Generator;
use candle_ddp::{
    Backward, Buckets, DdpOptions, DistributedDataParallel, Error, Precision, ProcessGroup, Result, Role, Sharding,
    SpawnOptions, spawn_with,
};
use candle_nn::{Func, VarBuilder, VarMap, func};
use serde_json::Value;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub(crate) mod bad_batches;
pub(crate) mod elastic_ranks;
pub(crate) mod elastic_zero;
pub(crate) mod programs;
pub(crate) mod single;
pub(crate) mod virtual_ranks;

#[allow(unused_imports)] // as above
pub(crate) use candle_ddp_testing::{
    Between, Mlp, assert_close, assert_error, bits, ddprun, example, failing, fill, floats, free_port, gradients,
    launch_example, launch_nodes, launch_test, new_var, pass_on_a_full_disk, peak_memory, plain, sine, skip,
    skip_unless, start_ranks, succeed, tensor, test_arguments, test_process, values, var, waves,
};

fn golden_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// The tensors of a file in tests/golden, which has its origin in a README there.
pub(crate) fn golden(name: &str) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(golden_path(name), &Device::Cpu).unwrap()
}

/// The numbers of such a file.
pub(crate) fn golden_json(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(golden_path(name)).unwrap()).unwrap()
}

/// The lines of a file, each of which is JSON.
pub(crate) fn json_lines(path: &Path) -> Vec<Value> {
    std::fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Runs ranks as threads, all of which must succeed, and returns their results.
#[track_caller]
pub(crate) fn ranks<T: Send>(world_size: usize, work: impl Fn(ProcessGroup) -> Result<T> + Sync) -> Vec<T> {
    try_ranks(world_size, work).unwrap()
}

/// Runs ranks as threads, with a time-out short enough that a hang fails the test.
pub(crate) fn try_ranks<T: Send>(world_size: usize, work: impl Fn(ProcessGroup) -> Result<T> + Sync) -> Result<Vec<T>> {
    spawn_with(SpawnOptions { world_size, timeout: Duration::from_secs(300), ..Default::default() }, work)
}

/// The same in a group with `count` virtual ranks.
pub(crate) fn with_virtual_ranks<T: Send>(
    count: usize,
    world_size: usize,
    work: impl Fn(ProcessGroup) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    spawn_with(SpawnOptions { world_size, timeout: Duration::from_secs(300), virtual_ranks: Some(count) }, work)
}

/// The options of the backward pass of a micro-batch under virtual ranks.
pub(crate) fn of_micro_batch(number: usize) -> Backward<'static> {
    Backward { micro_batch: Some(number), ..Default::default() }
}

/// The options of the backward pass of a loss that is a sum over so many samples.
pub(crate) fn counted(count: f64) -> Backward<'static> {
    Backward { count: Some(count), ..Default::default() }
}

/// The options of a backward pass whose gradients are added to these.
pub(crate) fn added_to(grads: &mut GradStore) -> Backward<'_> {
    Backward { into: Some(grads), ..Default::default() }
}

/// The checkpointer of a run that continues from the last checkpoint in the folder.
pub(crate) fn going_on(pg: &ProcessGroup, folder: impl AsRef<Path>) -> Result<Checkpointer> {
    Checkpointer::new(pg, folder.as_ref(), CheckpointerOptions { resume: true, ..Default::default() })
}

/// A dataset of so many samples, which a function makes.
pub(crate) struct Made<F>(pub(crate) usize, pub(crate) F);

impl<T: Send, F: Fn(usize, &mut Generator) -> Result<T> + Send + Sync> Dataset for Made<F> {
    type Sample = T;

    fn len(&self) -> usize {
        self.0
    }

    fn get(&self, index: usize, random: &mut Generator) -> Result<T> {
        (self.1)(index, random)
    }
}

/// How a model is sharded that is trained by a ZeroRedundancyOptimizer, or not.
pub(crate) fn sharding(zero: bool) -> Sharding {
    if zero { Sharding::Optimizer { ranks: None } } else { Sharding::Off }
}

/// Buckets of so many MiB, of which the first has another size.
pub(crate) fn buckets(bucket_cap_mb: f64, first_bucket_mb: f64) -> Buckets {
    Buckets { bucket_cap_mb, first_bucket_mb, ..Default::default() }
}

/// A bucket for each parameter.
pub(crate) fn tiny() -> DdpOptions {
    DdpOptions { buckets: buckets(0., 0.), ..Default::default() }
}

/// The options of a model whose gradients are averaged in this dtype.
pub(crate) fn reduced_in(reduce_dtype: Option<DType>) -> DdpOptions {
    DdpOptions { buckets: Buckets { reduce_dtype, ..Default::default() }, ..Default::default() }
}

/// The options of a model whose variables are in this dtype.
pub(crate) fn pure(dtype: DType) -> DdpOptions {
    DdpOptions { precision: Precision::Pure(dtype), ..Default::default() }
}

/// The options of a model whose variables have these roles, by their names.
pub(crate) fn with_role(role: impl Fn(&str) -> Role + Send + Sync + 'static) -> DdpOptions {
    DdpOptions { role: Arc::new(role), ..Default::default() }
}

/// The options of a model whose blocks are spread over the ranks.
pub(crate) fn sharded() -> DdpOptions {
    DdpOptions { sharding: Sharding::Blocks { reshard_after_forward: true, ranks: None }, ..Default::default() }
}

/// The options of a model that is trained by a ZeroRedundancyOptimizer.
pub(crate) fn of_zero() -> DdpOptions {
    DdpOptions { sharding: Sharding::Optimizer { ranks: None }, ..Default::default() }
}

/// Returns the model that `build` makes, and its variables: [`fill`] has set them.
pub(crate) fn filled<M, E>(
    pg: &ProcessGroup,
    build: impl FnOnce(VarBuilder<'static>) -> Result<M, E>,
    options: DdpOptions,
    seed: u64,
) -> Result<(DistributedDataParallel<M>, VarMap)>
where
    Error: From<E>,
{
    let varmap = VarMap::new();
    let ddp = DistributedDataParallel::with_options(pg, &varmap, build, options)?;
    fill(&varmap, seed);
    Ok((ddp, varmap))
}

/// Adds the number of previous forward passes to its input, and counts this one.
fn counting(vb: VarBuilder) -> candle_core::Result<Func<'static>> {
    // Copied before the buffer, so that a replica is late to read it.
    vb.get((1 << 20, 4), "large")?;
    let passes = Var::from_tensor(&vb.get(1, "num_batches_tracked")?)?;
    Ok(func(move |xs| {
        let before = passes.as_detached_tensor();
        let output = xs.broadcast_add(&before)?;
        passes.set(&(before + 1.0)?)?;
        Ok(output)
    }))
}

/// Checks that in each of `passes`, all replicas on `devices` read a buffer before the first replica writes to it.
pub(crate) fn assert_buffers_are_read_first(devices: &[Device], passes: usize) {
    let varmap = VarMap::new();
    let dp = DataParallel::new(devices, &devices[0], &varmap, counting).unwrap();
    let x = Tensor::zeros((6, 1), DType::F32, &devices[0]).unwrap();
    for pass in 0..passes {
        assert_eq!(floats(&dp.forward(&x).unwrap()), [pass as f32; 6], "{devices:?}, pass {pass}");
        assert_eq!(floats(&var(&varmap, "num_batches_tracked")), [pass as f32 + 1.0]);
    }
}
