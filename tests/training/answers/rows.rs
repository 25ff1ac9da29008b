//! The answers.
use super::Answer::{Carries, Ends, Refuses, Test};
use super::{Row, Tracked};
use crate::common::{tensor, try_ranks};
use candle_core::{CpuStorage, CustomOp1, CustomOp2, CustomOp3, DType, Device, Layout, Module, ModuleT, Shape, Tensor};
use candle_ddp::amp::{GradScaler, GradScalerOptions};
use candle_ddp::data::{Collate, Dataset, TensorDataset};
use candle_ddp::data_parallel::{self, DataParallel};
use candle_ddp::nn::attention::{self, AttnMask};
use candle_ddp::nn::kv_cache::{Cache, ConcatKvCache, KvCache, RotatingCache, RotatingKvCache};
use candle_ddp::nn::rnn::{GRUState, LSTMState};
use candle_ddp::nn::{self, *};
use candle_ddp::optim::{ParamsSgd, ZeroRedundancyOptimizer};
use candle_ddp::{Block, DistributedDataParallel, Result, block};
use candle_ddp_tensor::function;
use candle_nn::VarMap;

/// A constant.
fn c(shape: &[usize]) -> Tensor {
    tensor(shape, 11)
}

/// The values of batch statistics.
fn statistics() -> [Tensor; 2] {
    [c(&[2]), c(&[2]).sqr().unwrap()]
}

fn norm(weight: Tensor, bias: Tensor) -> candle_core::Result<BatchNorm> {
    let [mean, var] = statistics();
    BatchNorm::new(2, mean, var, weight, bias, 1e-5)
}

/// A tensor whose gradient is not zero if the gradient of `call`'s argument is not: only `ddp.backward` runs through a replica.
fn linear_ddp(
    call: fn(&DistributedDataParallel<candle_nn::Linear>, &Tensor) -> Result<Tensor>,
    t: &Tracked,
) -> Result<Tensor> {
    let mut results = try_ranks(1, |pg| {
        let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), |vb| candle_nn::linear(3, 3, vb))?;
        let grads = ddp.backward(&ddp.forward(&call(&ddp, &t.of(&[4, 3]))?)?.sum_all()?)?;
        Ok(grads.get(&t.0).cloned().unwrap_or(t.0.zeros_like()?))
    })?;
    Ok((t.0.as_tensor() * results.remove(0))?)
}

/// The same for a sharded block.
fn sharded(call: fn(&Block<candle_nn::Linear>, &Tensor) -> candle_core::Result<Tensor>, t: &Tracked) -> Result<Tensor> {
    let mut results = try_ranks(1, |pg| {
        let build = |vb: VarBuilder<'static>| block(vb, |vb| candle_nn::linear(3, 3, vb));
        let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), build, crate::common::sharded())?;
        let _optimizer = ZeroRedundancyOptimizer::new(&ddp, ParamsSgd::default())?;
        let grads = ddp.backward(&ddp.call(|block| call(block, &t.of(&[4, 3])))?.sum_all()?)?;
        Ok(grads.get(&t.0).cloned().unwrap_or(t.0.zeros_like()?))
    })?;
    Ok((t.0.as_tensor() * results.remove(0))?)
}

/// The same for `DataParallel`.
fn parallel(call: fn(&DataParallel<candle_nn::Linear>, &Tensor) -> Result<Tensor>, t: &Tracked) -> Result<Tensor> {
    let devices = [Device::Cpu, Device::Cpu];
    let model = DataParallel::new(&devices, &devices[0], &VarMap::new(), |vb| candle_nn::linear(3, 2, vb))?;
    let grads = model.backward(&call(&model, &t.of(&[4, 3]))?.sum_all()?)?;
    Ok((t.0.as_tensor() * grads.get(&t.0).cloned().unwrap_or(t.0.zeros_like()?))?)
}

/// An operation that adds its arguments.
struct Sum;

fn sum(storages: &[(&CpuStorage, &Layout)]) -> candle_core::Result<(CpuStorage, Shape)> {
    let mut sums = vec![0.; storages[0].1.shape().elem_count()];
    for (storage, layout) in storages {
        let start = layout.start_offset();
        sums.iter_mut().zip(&storage.as_slice::<f32>()?[start..]).for_each(|(sum, value)| *sum += value);
    }
    Ok((CpuStorage::F32(sums), storages[0].1.shape().clone()))
}

impl CustomOp1 for Sum {
    fn name(&self) -> &'static str {
        "sum"
    }

    fn cpu_fwd(&self, a: &CpuStorage, l: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        sum(&[(a, l)])
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, dy: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(Some(dy.clone()))
    }
}

impl CustomOp2 for Sum {
    fn name(&self) -> &'static str {
        "sum"
    }

    fn cpu_fwd(
        &self,
        a: &CpuStorage,
        l: &Layout,
        b: &CpuStorage,
        m: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        sum(&[(a, l), (b, m)])
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        dy: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        Ok((Some(dy.clone()), Some(dy.clone())))
    }
}

impl CustomOp3 for Sum {
    fn name(&self) -> &'static str {
        "sum"
    }

    fn cpu_fwd(
        &self,
        a: &CpuStorage,
        l: &Layout,
        b: &CpuStorage,
        m: &Layout,
        c: &CpuStorage,
        n: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        sum(&[(a, l), (b, m), (c, n)])
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        dy: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        Ok((Some(dy.clone()), Some(dy.clone()), Some(dy.clone())))
    }
}

/// [`Sum`] of one argument, as a function.
impl function::Function for Sum {
    fn name(&self) -> &'static str {
        "sum"
    }

    fn backward(&self, dy: &Tensor, _: &[bool]) -> candle_core::Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(dy.clone())])
    }
}

fn masked(mask: Tensor) -> AttentionOptions {
    AttentionOptions { mask: Some(mask), ..Default::default() }
}

fn pair((k, v): (Tensor, Tensor)) -> candle_core::Result<Tensor> {
    Tensor::cat(&[k, v], 0)
}

/// `$path, $argument => $call`: rows whose gradient arrives.
macro_rules! carries {
    ($rows:ident: $([$($path:literal),+] $argument:literal => |$t:ident| $call:expr;)*) => {
        $($rows.push(Row(vec![$($path.to_string()),+], $argument, Carries(|$t: &Tracked| -> Result<Tensor> { Ok($call) })));)*
    };
}

/// Functions that say that gradients end there.
macro_rules! ends {
    ($rows:ident: $($file:literal: [$($path:literal $argument:literal),* $(,)?];)*) => {
        $($($rows.push(Row(vec![$path.to_string()], $argument, Ends($file)));)*)*
    };
}

pub(super) fn all() -> Vec<Row> {
    let mut rows = Vec::new();
    groups(&mut rows);
    training(&mut rows);
    layers(&mut rows);
    recurrent(&mut rows);
    functions(&mut rows);
    rows
}

/// The collectives; the calls are in the tests of the engines, over engines of all kinds.
fn groups(rows: &mut Vec<Row>) {
    let mut refuses = |names: &[&str], arguments: &[&'static str]| {
        for (name, argument) in names.iter().flat_map(|name| arguments.iter().map(move |argument| (name, *argument))) {
            let call = format!("pg.{name}(");
            let paths = vec![format!("candle_ddp::ProcessGroup::{name}")];
            rows.push(Row(paths, argument, Test { file: "tests/engine/graphs.rs", call }));
        }
    };
    for name in ["all_reduce", "broadcast", "reduce"] {
        refuses(&[name, &format!("{name}_async")], &["tensor"]);
    }
    for name in ["all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"] {
        refuses(&[name, &format!("{name}_async")], &["output", "input"]);
    }
    refuses(&["all_gather_varied", "all_to_all_varied", "send", "isend", "recv", "irecv"], &["tensor"]);
    refuses(&["batch_isend_irecv"], &["batch"]);
    for (name, argument) in [
        ("all_gather", "x"),
        ("all_gather_varied", "x"),
        ("all_reduce", "x"),
        ("all_to_all", "x"),
        ("all_to_all_varied", "x"),
        ("broadcast", "x"),
        ("recv", "after"),
        ("reduce_scatter", "x"),
        ("send", "after"),
        ("send", "x"),
    ] {
        let call = format!(".{name}(");
        let paths = vec![format!("candle_ddp::WithGrad::{name}")];
        rows.push(Row(paths, argument, Test { file: "tests/training/with_grad.rs", call }));
    }
    ends! { rows:
        "src/backend/mod.rs": [
            "candle_ddp::backend::Communicator::start" "collective",
            "candle_ddp::backend::Communicator::run" "collective",
            "candle_ddp::backend::Communicator::start_batch" "batch",
        ];
        "src/backend/bytes.rs": ["candle_ddp::backend::bytes" "tensor", "candle_ddp::backend::bytes_mut" "tensor"];
    }
}

/// DDP, optimizers, data and checkpoints.
fn training(rows: &mut Vec<Row>) {
    macro_rules! losses {
        ($([$($path:literal),+] $argument:literal $file:literal $call:literal;)*) => {
            $(rows.push(Row(vec![$($path.to_string()),+], $argument, Test { file: $file, call: $call.to_string() }));)*
        };
    }
    // A backward pass is where gradients come from.
    losses! {
        ["candle_ddp::DistributedDataParallel::backward"] "loss" "tests/training/ddp_golden.rs" "ddp.backward(";
        ["candle_ddp::DistributedDataParallel::backward_and_step"]
            "loss" "tests/training/backward_and_step/same_bits.rs" "backward_and_step(";
        ["candle_ddp::backward_with"] "loss" "tests/training/several_models.rs" "backward_with(";
        ["candle_ddp::data_parallel::DataParallel::backward"] "loss" "tests/training/data_parallel.rs" "dp.backward(";
        ["candle_ddp::data_parallel::backward"] "loss" "tests/training/data_parallel.rs" "data_parallel::backward(";
    }
    carries! { rows:
        ["candle_ddp::DistributedDataParallel::forward"] "xs" => |t| linear_ddp(|ddp, x| ddp.forward(x), t)?;
        ["candle_ddp::DistributedDataParallel::forward_t"] "xs" =>
            |t| linear_ddp(|ddp, x| Ok(ModuleT::forward_t(ddp, &ddp.forward_t(x, true)?, true)?), t)?;
        ["candle_ddp::Block::call"] "inputs" => |t| sharded(|block, x| block.call(&[x], |one, x| one.forward(&x[0])), t)?;
        ["candle_ddp::Block::forward"] "x" => |t| sharded(|block, x| block.forward(x), t)?;
        ["candle_ddp::Block::forward_t"] "x" => |t| sharded(|block, x| block.forward_t(x, true), t)?;
        ["candle_ddp::Block::forward_t"] "xs" => |t| sharded(|block, x| ModuleT::forward_t(block, x, true), t)?;
        ["candle_ddp::DistributedDataParallel::cast_forward_inputs"] "xs" =>
            |t| linear_ddp(|ddp, x| ddp.cast_forward_inputs(x), t)?;
        ["candle_ddp::amp::GradScaler::scale"] "loss" => |t| {
            let loss = t.of(&[1]);
            try_ranks(1, |pg| GradScaler::new(&pg, &VarMap::new(), GradScalerOptions::default())?.scale(&loss))?.remove(0)
        };
        ["candle_ddp::data_parallel::DataParallel::forward"] "xs" => |t| parallel(|dp, x| dp.forward(x), t)?;
        ["candle_ddp::data_parallel::DataParallel::forward_t"] "xs" =>
            |t| parallel(|dp, x| dp.forward_t(x, true), t)?;
        ["candle_ddp::data_parallel::DataParallel::call"] "inputs" =>
            |t| parallel(|dp, x| Ok(dp.call(&[x], |m, x| Ok(vec![m.forward(&x[0])?]))?.remove(0)), t)?;
        ["candle_ddp::data_parallel::DataParallel::loss"] "output" =>
            |t| parallel(|dp, x| dp.loss(x, &c(&[4, 3]), candle_nn::loss::mse), t)?;
        ["candle_ddp::data_parallel::DataParallel::loss"] "target" =>
            |t| parallel(|dp, x| dp.loss(&c(&[4, 3]), x, candle_nn::loss::mse), t)?;
        ["candle_ddp::data_parallel::scatter"] "tensor" =>
            |t| data_parallel::scatter(&t.of(&[4, 3]), &[Device::Cpu, Device::Cpu])?.remove(1);
        ["candle_ddp::data_parallel::gather"] "tensors" =>
            |t| data_parallel::gather(&[c(&[2, 3]), t.of(&[2, 3])], &Device::Cpu)?;
        ["candle_ddp_data::TensorDataset::new"] "tensors" => |t| {
            let data = TensorDataset::new(t.of(&[4, 3]))?;
            let row = |index| data.get(index, &mut candle_ddp::seed::Generator::new(1));
            Collate::collate(vec![row(2)?, row(1)?])?
        };
    }
    ends! { rows:
        "src/metrics/confusion_matrix.rs": [
            "candle_ddp::metrics::ConfusionMatrix::update" "predictions",
            "candle_ddp::metrics::ConfusionMatrix::update" "targets",
        ];
        "src/metrics/in_order.rs": ["candle_ddp::metrics::gather_in_order" "rows"];
        "src/metrics/multiclass_auroc.rs": [
            "candle_ddp::metrics::MulticlassAuroc::update" "scores",
            "candle_ddp::metrics::MulticlassAuroc::update" "targets",
        ];
        "src/metrics/perplexity.rs":
            ["candle_ddp::metrics::Perplexity::update" "logits", "candle_ddp::metrics::Perplexity::update" "targets"];
        "src/metrics/scores.rs": [
            "candle_ddp::metrics::TopKAccuracy::update" "scores",
            "candle_ddp::metrics::TopKAccuracy::update" "targets",
            "candle_ddp::metrics::BinaryAuroc::update" "scores",
            "candle_ddp::metrics::BinaryAuroc::update" "targets",
        ];
        "src/metrics/writer/mod.rs":
            ["candle_ddp::metrics::Writer::add_image" "image", "candle_ddp::metrics::Writer::add_histogram" "values"];
        "crates/candle-ddp-state/src/weights/mod.rs": ["candle_ddp::checkpoint::save_tensors" "tensors"];
        "crates/candle-ddp-state/src/weights/load.rs": ["candle_ddp::checkpoint::load_tensors" "tensors"];
        "crates/candle-ddp-nn/src/lora/merge.rs": ["candle_ddp_nn::LoraConfig::merge" "tensors"];
        "crates/candle-ddp-state/src/state/state_dict.rs":
            ["candle_ddp::checkpoint::StateDict::load_state_dict" "state"];
        "src/optim/optimizer.rs": ["candle_ddp::optim::Optimizer::load_known" "state"];
        "src/optim/rule.rs": [
            "candle_ddp::optim::UpdateRule::update" "parameter",
            "candle_ddp::optim::UpdateRule::update" "gradient",
            "candle_ddp::optim::UpdateRule::update" "states",
        ];
        "src/ddp/comm_hook/mod.rs": [
            "candle_ddp::comm_hook::CommHook::load_state_dict" "state",
            "candle_ddp::comm_hook::GradBucket::set_buffer" "values",
        ];
    }
}

fn layers(rows: &mut Vec<Row>) {
    carries! { rows:
        ["candle_ddp_nn::Dropout::forward", "candle_ddp_nn::ops::Dropout::forward"] "x" =>
            |t| Dropout::new(0.3).forward(&t.of(&[4, 5]), true)?;
        ["candle_ddp_nn::Dropout::forward_t", "candle_ddp_nn::ops::Dropout::forward_t"] "xs" =>
            |t| Dropout::new(0.3).forward_t(&t.of(&[4, 5]), true)?;
        ["candle_ddp_nn::activation::Activation::forward"] "xs" => |t| Activation::Gelu.forward(&t.of(&[4]))?;
        ["candle_ddp_nn::batch_norm::BatchNorm::forward_t"] "xs" =>
            |t| norm(c(&[2]), c(&[2]))?.forward_t(&t.of(&[4, 2, 3]), true)?;
        ["candle_ddp_nn::batch_norm::BatchNorm::forward_train"] "x" =>
            |t| norm(c(&[2]), c(&[2]))?.forward_train(&t.of(&[4, 2, 3]))?;
        ["candle_ddp_nn::batch_norm::BatchNorm::forward_relu_t"] "x" =>
            |t| norm(c(&[2]), c(&[2]))?.forward_relu_t(&t.of(&[4, 2, 3]), true)?;
        ["candle_ddp_nn::batch_norm::BatchNorm::forward_add_relu_t"] "x" =>
            |t| norm(c(&[2]), c(&[2]))?.forward_add_relu_t(&t.of(&[4, 2, 3]), &c(&[4, 2, 3]), true)?;
        ["candle_ddp_nn::batch_norm::BatchNorm::forward_add_relu_t"] "z" =>
            |t| norm(c(&[2]), c(&[2]))?.forward_add_relu_t(&c(&[4, 2, 3]), &t.of(&[4, 2, 3]), true)?;
        ["candle_ddp_nn::batch_norm::BatchNorm::new"] "weight" =>
            |t| norm(t.of(&[2]), c(&[2]))?.forward_t(&c(&[4, 2, 3]), true)?;
        ["candle_ddp_nn::batch_norm::BatchNorm::new"] "bias" =>
            |t| norm(c(&[2]), t.of(&[2]))?.forward_t(&c(&[4, 2, 3]), true)?;
        ["candle_ddp_nn::batch_norm::BatchNorm::new_with_momentum"] "weight" => |t| {
            let [mean, var] = statistics();
            BatchNorm::new_with_momentum(2, mean, var, t.of(&[2]), c(&[2]), 1e-5, 0.2)?.forward_t(&c(&[4, 2, 3]), false)?
        };
        ["candle_ddp_nn::batch_norm::BatchNorm::new_with_momentum"] "bias" => |t| {
            let [mean, var] = statistics();
            BatchNorm::new_with_momentum(2, mean, var, c(&[2]), t.of(&[2]), 1e-5, 0.2)?.forward_t(&c(&[4, 2, 3]), false)?
        };
        ["candle_ddp_nn::checkpoint"] "inputs" =>
            |t| nn::checkpoint(&[&c(&[4]), &t.of(&[4])], |inputs| &inputs[0] * &inputs[1])?;
        ["candle_ddp_nn::conv::Conv1d::forward"] "xs" =>
            |t| Conv1d::new(c(&[3, 2, 3]), None, Default::default()).forward(&t.of(&[2, 2, 6]))?;
        ["candle_ddp_nn::conv::Conv1d::new"] "weight" =>
            |t| Conv1d::new(t.of(&[3, 2, 3]), None, Default::default()).forward(&c(&[2, 2, 6]))?;
        ["candle_ddp_nn::conv::Conv1d::new"] "bias" =>
            |t| Conv1d::new(c(&[3, 2, 3]), Some(t.of(&[3])), Default::default()).forward(&c(&[2, 2, 6]))?;
        ["candle_ddp_nn::conv::Conv2d::forward"] "xs" =>
            |t| Conv2d::new(c(&[3, 2, 3, 3]), None, Default::default()).forward(&t.of(&[2, 2, 6, 6]))?;
        ["candle_ddp_nn::conv::Conv2d::new"] "weight" =>
            |t| Conv2d::new(t.of(&[3, 2, 3, 3]), None, Default::default()).forward(&c(&[2, 2, 6, 6]))?;
        ["candle_ddp_nn::conv::Conv2d::new"] "bias" =>
            |t| Conv2d::new(c(&[3, 2, 3, 3]), Some(t.of(&[3])), Default::default()).forward(&c(&[2, 2, 6, 6]))?;
        ["candle_ddp_nn::conv::ConvTranspose1d::forward"] "xs" =>
            |t| ConvTranspose1d::new(c(&[2, 3, 3]), None, Default::default()).forward(&t.of(&[2, 2, 6]))?;
        ["candle_ddp_nn::conv::ConvTranspose1d::new"] "weight" =>
            |t| ConvTranspose1d::new(t.of(&[2, 3, 3]), None, Default::default()).forward(&c(&[2, 2, 6]))?;
        ["candle_ddp_nn::conv::ConvTranspose1d::new"] "bias" =>
            |t| ConvTranspose1d::new(c(&[2, 3, 3]), Some(t.of(&[3])), Default::default()).forward(&c(&[2, 2, 6]))?;
        ["candle_ddp_nn::conv::ConvTranspose2d::forward"] "xs" =>
            |t| ConvTranspose2d::new(c(&[2, 3, 3, 3]), None, Default::default()).forward(&t.of(&[2, 2, 6, 6]))?;
        ["candle_ddp_nn::conv::ConvTranspose2d::new"] "weight" =>
            |t| ConvTranspose2d::new(t.of(&[2, 3, 3, 3]), None, Default::default()).forward(&c(&[2, 2, 6, 6]))?;
        ["candle_ddp_nn::conv::ConvTranspose2d::new"] "bias" =>
            |t| ConvTranspose2d::new(c(&[2, 3, 3, 3]), Some(t.of(&[3])), Default::default()).forward(&c(&[2, 2, 6, 6]))?;
        ["candle_ddp_nn::embedding::Embedding::new"] "embeddings" =>
            |t| Embedding::new(t.of(&[5, 3]), 3).forward(&Tensor::new(&[1u32, 4], &Device::Cpu)?)?;
        ["candle_ddp_nn::group_norm::GroupNorm::forward"] "xs" =>
            |t| GroupNorm::new(c(&[4]), c(&[4]), 4, 2, 1e-5)?.forward(&t.of(&[2, 4, 3]))?;
        ["candle_ddp_nn::group_norm::GroupNorm::new"] "weight" =>
            |t| GroupNorm::new(t.of(&[4]), c(&[4]), 4, 2, 1e-5)?.forward(&c(&[2, 4, 3]))?;
        ["candle_ddp_nn::group_norm::GroupNorm::new"] "bias" =>
            |t| GroupNorm::new(c(&[4]), t.of(&[4]), 4, 2, 1e-5)?.forward(&c(&[2, 4, 3]))?;
        ["candle_ddp_nn::InstanceNorm::forward"] "xs" => |t| InstanceNorm::new(4, None, 1e-5)?.forward(&t.of(&[2, 4, 3]))?;
        ["candle_ddp_nn::InstanceNorm::new"] "weight_and_bias" =>
            |t| InstanceNorm::new(4, Some((t.of(&[4]), t.of(&[4]))), 1e-5)?.forward(&c(&[2, 4, 3]))?;
        ["candle_ddp_nn::ctc_loss"] "log_probs" =>
            |t| ctc_loss(&t.of(&[4, 1, 3]), &Tensor::new(&[1u32, 2], &Device::Cpu)?, &[4], &[2], Default::default())?;
        ["candle_ddp_nn::kv_cache::Cache::append"] "src" => |t| {
            let mut cache = Cache::new(0, 8);
            cache.append(&t.of(&[2, 3]))?;
            cache.append(&c(&[2, 3]))?;
            cache.current_data()?.unwrap()
        };
        ["candle_ddp_nn::kv_cache::RotatingCache::append"] "src" => |t| RotatingCache::new(0, 8).append(&t.of(&[2, 3]))?;
        ["candle_ddp_nn::kv_cache::ConcatKvCache::append"] "k" =>
            |t| pair(ConcatKvCache::new(0).append(&t.of(&[2, 3]), &c(&[2, 3]))?)?;
        ["candle_ddp_nn::kv_cache::ConcatKvCache::append"] "v" =>
            |t| pair(ConcatKvCache::new(0).append(&c(&[2, 3]), &t.of(&[2, 3]))?)?;
        ["candle_ddp_nn::kv_cache::KvCache::append"] "k" =>
            |t| pair(KvCache::new(0, 8).append(&t.of(&[2, 3]), &c(&[2, 3]))?)?;
        ["candle_ddp_nn::kv_cache::KvCache::append"] "v" =>
            |t| pair(KvCache::new(0, 8).append(&c(&[2, 3]), &t.of(&[2, 3]))?)?;
        ["candle_ddp_nn::kv_cache::RotatingKvCache::append"] "k" =>
            |t| pair(RotatingKvCache::new(0, 8).append(&t.of(&[2, 3]), &c(&[2, 3]))?)?;
        ["candle_ddp_nn::kv_cache::RotatingKvCache::append"] "v" =>
            |t| pair(RotatingKvCache::new(0, 8).append(&c(&[2, 3]), &t.of(&[2, 3]))?)?;
        ["candle_ddp_nn::layer_norm::LayerNorm::add_norm"] "x" =>
            |t| pair(LayerNorm::new(c(&[5]), c(&[5]), 1e-5).add_norm(&t.of(&[4, 5]), &c(&[4, 5]))?)?;
        ["candle_ddp_nn::layer_norm::LayerNorm::add_norm"] "residual" =>
            |t| pair(LayerNorm::new(c(&[5]), c(&[5]), 1e-5).add_norm(&c(&[4, 5]), &t.of(&[4, 5]))?)?;
        ["candle_ddp_nn::layer_norm::LayerNorm::forward"] "xs" =>
            |t| LayerNorm::new(c(&[5]), c(&[5]), 1e-5).forward(&t.of(&[4, 5]))?;
        ["candle_ddp_nn::layer_norm::LayerNorm::new"] "weight" =>
            |t| LayerNorm::new(t.of(&[5]), c(&[5]), 1e-5).forward(&c(&[4, 5]))?;
        ["candle_ddp_nn::layer_norm::LayerNorm::new"] "bias" =>
            |t| LayerNorm::new(c(&[5]), t.of(&[5]), 1e-5).forward(&c(&[4, 5]))?;
        ["candle_ddp_nn::layer_norm::LayerNorm::new_no_bias"] "weight" =>
            |t| LayerNorm::new_no_bias(t.of(&[5]), 1e-5).forward(&c(&[4, 5]))?;
        ["candle_ddp_nn::layer_norm::LayerNorm::rms_norm"] "weight" =>
            |t| LayerNorm::rms_norm(t.of(&[5]), 1e-5).forward(&c(&[4, 5]))?;
        ["candle_ddp_nn::layer_norm::RmsNorm::add_norm"] "x" =>
            |t| pair(RmsNorm::new(c(&[5]), 1e-5).add_norm(&t.of(&[4, 5]), &c(&[4, 5]))?)?;
        ["candle_ddp_nn::layer_norm::RmsNorm::add_norm"] "residual" =>
            |t| pair(RmsNorm::new(c(&[5]), 1e-5).add_norm(&c(&[4, 5]), &t.of(&[4, 5]))?)?;
        ["candle_ddp_nn::layer_norm::RmsNorm::forward"] "xs" => |t| RmsNorm::new(c(&[5]), 1e-5).forward(&t.of(&[4, 5]))?;
        ["candle_ddp_nn::layer_norm::RmsNorm::forward_diff"] "xs" =>
            |t| RmsNorm::new(c(&[5]), 1e-5).forward_diff(&t.of(&[4, 5]))?;
        ["candle_ddp_nn::layer_norm::RmsNorm::new"] "weight" => |t| RmsNorm::new(t.of(&[5]), 1e-5).forward(&c(&[4, 5]))?;
        ["candle_ddp_nn::linear::Linear::forward"] "xs" => |t| Linear::new(c(&[2, 5]), None).forward(&t.of(&[4, 5]))?;
        ["candle_ddp_nn::linear::Linear::new"] "weight" => |t| Linear::new(t.of(&[2, 5]), None).forward(&c(&[4, 5]))?;
        ["candle_ddp_nn::linear::Linear::new"] "bias" =>
            |t| Linear::new(c(&[2, 5]), Some(t.of(&[2]))).forward(&c(&[4, 5]))?;
    }
    rows.push(Row(
        vec!["candle_ddp_nn::embedding::Embedding::forward".to_string()],
        "xs",
        Refuses("the indices of Embedding", |t| Ok(Embedding::new(c(&[5, 3]), 3).forward(&t.of(&[2]))?)),
    ));
    for (name, argument) in [("forward_t", "xs"), ("features", "images")] {
        let paths = vec![format!("candle_ddp_vision::models::ResNet::{name}")];
        rows.push(Row(
            paths,
            argument,
            Test { file: "crates/candle-ddp-vision/tests/images/models.rs", call: format!(".{name}(") },
        ));
    }
    ends! { rows:
        "crates/candle-ddp-nn/src/normalise.rs": [
            "candle_ddp_nn::batch_norm::BatchNormGroup::check" "x",
            "candle_ddp_nn::batch_norm::BatchNormGroup::all_gather" "mine",
            "candle_ddp_nn::batch_norm::BatchNormGroup::all_reduce" "sums",
        ];
        "crates/candle-ddp-nn/src/batch_norm.rs": [
            "candle_ddp_nn::batch_norm::BatchNorm::new" "running_mean",
            "candle_ddp_nn::batch_norm::BatchNorm::new" "running_var",
            "candle_ddp_nn::batch_norm::BatchNorm::new_no_bias" "running_mean",
            "candle_ddp_nn::batch_norm::BatchNorm::new_no_bias" "running_var",
            "candle_ddp_nn::batch_norm::BatchNorm::new_with_momentum" "running_mean",
            "candle_ddp_nn::batch_norm::BatchNorm::new_with_momentum" "running_var",
            "candle_ddp_nn::batch_norm::BatchNorm::new_no_bias_with_momentum" "running_mean",
            "candle_ddp_nn::batch_norm::BatchNorm::new_no_bias_with_momentum" "running_var",
        ];
    }
}

fn recurrent(rows: &mut Vec<Row>) {
    const X: &[usize] = &[3, 2, 4];
    const STATE: &[usize] = &[1, 2, 5];
    const ONE: &[usize] = &[2, 5];
    fn vb(gates: usize) -> VarBuilder<'static> {
        let weights = [("weight_ih_l0", vec![gates * 5, 4]), ("weight_hh_l0", vec![gates * 5, 5])];
        let biases = ["bias_ih_l0", "bias_hh_l0"].map(|name| (name, vec![gates * 5]));
        let named = weights.into_iter().chain(biases).map(|(name, shape)| (name.to_string(), c(&shape)));
        VarBuilder::from_tensors(named.collect(), DType::F32, &Device::Cpu)
    }
    fn lstms() -> candle_core::Result<StackedLSTM> {
        StackedLSTM::new(4, 5, RNNOptions::default(), vb(4))
    }
    fn grus() -> candle_core::Result<StackedGRU> {
        StackedGRU::new(4, 5, RNNOptions::default(), vb(3))
    }
    fn one_lstm() -> candle_core::Result<LSTM> {
        nn::lstm(4, 5, Default::default(), vb(4))
    }
    fn one_gru() -> candle_core::Result<GRU> {
        nn::gru(4, 5, Default::default(), vb(3))
    }
    fn lstm_state(t: Tensor) -> LSTMState {
        LSTMState::new(t.clone(), t)
    }
    fn last(mut states: Vec<LSTMState>) -> Tensor {
        states.remove(2).c
    }
    carries! { rows:
        ["candle_ddp_nn::rnn::StackedLSTM::forward"] "x" => |t| lstms()?.forward(&t.of(X), None, true)?.0;
        ["candle_ddp_nn::rnn::StackedLSTM::forward"] "state" =>
            |t| lstms()?.forward(&c(X), Some(&lstm_state(t.of(STATE))), true)?.1.c;
        ["candle_ddp_nn::rnn::StackedLSTM::forward_with_lengths"] "x" =>
            |t| lstms()?.forward_with_lengths(&t.of(X), &[3, 1], None, true)?.1.h;
        ["candle_ddp_nn::rnn::StackedLSTM::forward_with_lengths"] "state" =>
            |t| lstms()?.forward_with_lengths(&c(X), &[1, 2], Some(&lstm_state(t.of(STATE))), true)?.0;
        ["candle_ddp_nn::rnn::StackedGRU::forward"] "x" => |t| grus()?.forward(&t.of(X), None, true)?.0;
        ["candle_ddp_nn::rnn::StackedGRU::forward"] "state" =>
            |t| grus()?.forward(&c(X), Some(&GRUState { h: t.of(STATE) }), true)?.1.h;
        ["candle_ddp_nn::rnn::StackedGRU::forward_with_lengths"] "x" =>
            |t| grus()?.forward_with_lengths(&t.of(X), &[3, 1], None, true)?.1.h;
        ["candle_ddp_nn::rnn::StackedGRU::forward_with_lengths"] "state" =>
            |t| grus()?.forward_with_lengths(&c(X), &[1, 2], Some(&GRUState { h: t.of(STATE) }), true)?.0;
        ["candle_ddp_nn::rnn::LSTM::step"] "input" => |t| one_lstm()?.step(&t.of(&[2, 4]), &lstm_state(c(ONE)))?.h;
        ["candle_ddp_nn::rnn::LSTM::step"] "state" => |t| one_lstm()?.step(&c(&[2, 4]), &lstm_state(t.of(ONE)))?.c;
        ["candle_ddp_nn::rnn::LSTM::seq"] "input" => |t| last(one_lstm()?.seq(&t.of(&[2, 3, 4]))?);
        ["candle_ddp_nn::rnn::LSTM::seq_init"] "input" =>
            |t| last(one_lstm()?.seq_init(&t.of(&[2, 3, 4]), &lstm_state(c(ONE)))?);
        ["candle_ddp_nn::rnn::LSTM::seq_init"] "init_state" =>
            |t| last(one_lstm()?.seq_init(&c(&[2, 3, 4]), &lstm_state(t.of(ONE)))?);
        ["candle_ddp_nn::rnn::LSTM::states_to_tensor"] "states" =>
            |t| one_lstm()?.states_to_tensor(&[lstm_state(t.of(ONE)), lstm_state(c(ONE))])?;
        ["candle_ddp_nn::rnn::GRU::step"] "input" => |t| one_gru()?.step(&t.of(&[2, 4]), &GRUState { h: c(ONE) })?.h;
        ["candle_ddp_nn::rnn::GRU::step"] "state" => |t| one_gru()?.step(&c(&[2, 4]), &GRUState { h: t.of(ONE) })?.h;
        ["candle_ddp_nn::rnn::GRU::seq"] "input" => |t| one_gru()?.seq(&t.of(&[2, 3, 4]))?[2].h.clone();
        ["candle_ddp_nn::rnn::GRU::seq_init"] "input" =>
            |t| one_gru()?.seq_init(&t.of(&[2, 3, 4]), &GRUState { h: c(ONE) })?[2].h.clone();
        ["candle_ddp_nn::rnn::GRU::seq_init"] "init_state" =>
            |t| one_gru()?.seq_init(&c(&[2, 3, 4]), &GRUState { h: t.of(ONE) })?[2].h.clone();
        ["candle_ddp_nn::rnn::GRU::states_to_tensor"] "states" =>
            |t| one_gru()?.states_to_tensor(&[GRUState { h: t.of(ONE) }, GRUState { h: c(ONE) }])?;
    }
}

fn functions(rows: &mut Vec<Row>) {
    fn sdpa(q: Tensor, k: Tensor, v: Tensor) -> candle_core::Result<Tensor> {
        scaled_dot_product_attention(&q, &k, &v, AttentionOptions::default())
    }
    fn flash(q: Tensor, k: Tensor, v: Tensor) -> candle_core::Result<Tensor> {
        attention::flash_attn::<f32>(&q, &k, &v, 0.5, AttnMask::None, None, None)
    }
    fn ops_sdpa(q: Tensor, k: Tensor, v: Tensor) -> candle_core::Result<Tensor> {
        nn::ops::sdpa(&q, &k, &v, None, false, 0.5, 1.)
    }
    fn chunked_head(x: &Tensor, weight: &Tensor, bias: &Tensor, targets: &Tensor) -> candle_core::Result<Tensor> {
        let options = LinearCrossEntropyOptions { batch_chunk_size: Some(2), ..Default::default() };
        linear_cross_entropy_with(x, weight, Some(bias), targets, options)
    }
    const QKV: &[usize] = &[1, 2, 3, 4];
    fn classes() -> Tensor {
        Tensor::new(&[0u32, 2, 1], &Device::Cpu).unwrap()
    }
    carries! { rows:
        ["candle_ddp_nn::cat"] "tensors" => |t| cat(&[&c(&[2, 3]), &t.of(&[4, 3])], 0)?;
        ["candle_ddp_nn::flatten"] "x" => |t| flatten(&t.of(&[4, 3, 2]), 0, 1)?;
        ["candle_ddp_nn::matmul"] "a" => |t| matmul(&t.of(&[4, 3]), &c(&[3, 2]))?;
        ["candle_ddp_nn::matmul"] "b" => |t| matmul(&c(&[4, 3]), &t.of(&[3, 2]))?;
        ["candle_ddp_nn::narrow"] "x" => |t| narrow(&t.of(&[4, 3]), 1, 1, 2)?;
        ["candle_ddp_nn::permute"] "x" => |t| permute(&t.of(&[4, 3, 2]), (2, 0, 1))?;
        ["candle_ddp_nn::reshape"] "x" => |t| reshape(&t.of(&[4, 3]), (2, ()))?;
        ["candle_ddp_nn::transpose"] "x" => |t| transpose(&t.of(&[4, 3]), 0, 1)?;
        ["candle_ddp_nn::activation::gelu"] "x" => |t| nn::activation::gelu(&t.of(&[4]))?;
        ["candle_ddp_nn::activation::gelu_erf"] "x" => |t| nn::activation::gelu_erf(&t.of(&[4]))?;
        ["candle_ddp_nn::activation::mish"] "x" => |t| nn::activation::mish(&t.of(&[4]))?;
        ["candle_ddp_nn::activation::relu"] "x" => |t| nn::activation::relu(&t.of(&[40]))?;
        ["candle_ddp_nn::activation::silu"] "x" => |t| nn::activation::silu(&t.of(&[4]))?;
        ["candle_ddp_nn::activation::tanh"] "x" => |t| nn::activation::tanh(&t.of(&[4]))?;
        ["candle_ddp_nn::ops::selu"] "x" => |t| nn::ops::selu(&t.of(&[4]), 1.6, 1.05)?;
        ["candle_ddp_nn::to_memory_format"] "x" =>
            |t| nn::to_memory_format(&t.of(&[1, 2, 4, 4]), MemoryFormat::ChannelsLast)?;
        ["candle_ddp_nn::ops::swiglu"] "x" => |t| nn::ops::swiglu(&t.of(&[3, 4]))?;
        ["candle_ddp_nn::adaptive_avg_pool2d"] "x" => |t| adaptive_avg_pool2d(&t.of(&[1, 2, 4, 4]), 2)?;
        ["candle_ddp_nn::avg_pool2d"] "x" => |t| avg_pool2d(&t.of(&[1, 2, 4, 4]), 2, Default::default())?;
        ["candle_ddp_nn::max_pool2d"] "x" => |t| max_pool2d(&t.of(&[1, 2, 4, 4]), 2, Default::default())?;
        ["candle_ddp_nn::interpolate"] "x" => |t| interpolate(&t.of(&[1, 2, 4, 4]), 6, InterpolateMode::Nearest)?;
        ["candle_ddp_nn::add", "candle_ddp_tensor::function::add"] "a" => |t| nn::add(&t.of(&[4]), &c(&[4]))?;
        ["candle_ddp_nn::add", "candle_ddp_tensor::function::add"] "b" => |t| nn::add(&c(&[4]), &t.of(&[4]))?;
        ["candle_ddp_nn::attention::scaled_dot_product_attention"] "q" => |t| sdpa(t.of(QKV), c(QKV), tensor(QKV, 3))?;
        ["candle_ddp_nn::attention::scaled_dot_product_attention"] "k" => |t| sdpa(c(QKV), t.of(QKV), tensor(QKV, 3))?;
        ["candle_ddp_nn::attention::scaled_dot_product_attention"] "v" => |t| sdpa(c(QKV), tensor(QKV, 3), t.of(QKV))?;
        ["candle_ddp_nn::attention::flash_attn"] "q" => |t| flash(t.of(QKV), c(QKV), tensor(QKV, 3))?;
        ["candle_ddp_nn::attention::flash_attn"] "k" => |t| flash(c(QKV), t.of(QKV), tensor(QKV, 3))?;
        ["candle_ddp_nn::attention::flash_attn"] "v" => |t| flash(c(QKV), tensor(QKV, 3), t.of(QKV))?;
        ["candle_ddp_nn::ops::sdpa"] "q" => |t| ops_sdpa(t.of(QKV), c(QKV), tensor(QKV, 3))?;
        ["candle_ddp_nn::ops::sdpa"] "k" => |t| ops_sdpa(c(QKV), t.of(QKV), tensor(QKV, 3))?;
        ["candle_ddp_nn::ops::sdpa"] "v" => |t| ops_sdpa(c(QKV), tensor(QKV, 3), t.of(QKV))?;
        ["candle_ddp_nn::attention::scaled_dot_product_attention_qkvpacked"] "qkv" =>
            |t| scaled_dot_product_attention_qkvpacked(&t.of(&[1, 3, 24]), 2, AttentionOptions::default())?;
        ["candle_ddp_nn::cross_entropy", "candle_ddp_nn::loss::cross_entropy"] "logits" =>
            |t| cross_entropy(&t.of(&[3, 4]), &classes())?;
        ["candle_ddp_nn::cross_entropy_with"] "logits" =>
            |t| cross_entropy_with(&t.of(&[3, 4]), &classes(), CrossEntropyOptions { label_smoothing: 0.1, ..Default::default() })?;
        ["candle_ddp_nn::linear_cross_entropy"] "x" => |t| linear_cross_entropy(&t.of(&[3, 2]), &c(&[4, 2]), None, &classes())?;
        ["candle_ddp_nn::linear_cross_entropy"] "weight" => |t| linear_cross_entropy(&c(&[3, 2]), &t.of(&[4, 2]), None, &classes())?;
        ["candle_ddp_nn::linear_cross_entropy"] "bias" =>
            |t| linear_cross_entropy(&c(&[3, 2]), &c(&[4, 2]), Some(&t.of(&[4])), &classes())?;
        ["candle_ddp_nn::linear_cross_entropy_with"] "x" => |t| chunked_head(&t.of(&[3, 2]), &c(&[4, 2]), &c(&[4]), &classes())?;
        ["candle_ddp_nn::linear_cross_entropy_with"] "weight" => |t| chunked_head(&c(&[3, 2]), &t.of(&[4, 2]), &c(&[4]), &classes())?;
        ["candle_ddp_nn::linear_cross_entropy_with"] "bias" => |t| chunked_head(&c(&[3, 2]), &c(&[4, 2]), &t.of(&[4]), &classes())?;
        ["candle_ddp_nn::loss::binary_cross_entropy_with_logit"] "logits" =>
            |t| nn::loss::binary_cross_entropy_with_logit(&t.of(&[4]), &c(&[4]))?;
        ["candle_ddp_nn::loss::binary_cross_entropy_with_logit"] "targets" =>
            |t| nn::loss::binary_cross_entropy_with_logit(&c(&[4]), &t.of(&[4]))?;
        ["candle_ddp_nn::dropout"] "x" => |t| dropout(&t.of(&[4, 5]), 0.3, &mut candle_ddp::seed::Generator::new(1))?;
        ["candle_ddp_nn::ops::dropout"] "x" => |t| nn::ops::dropout(&t.of(&[4, 5]), 0.3)?;
        ["candle_ddp_nn::loss::huber"] "input" => |t| nn::loss::huber(&t.of(&[4]), &c(&[4]), 1.)?;
        ["candle_ddp_nn::loss::huber"] "target" => |t| nn::loss::huber(&c(&[4]), &t.of(&[4]), 1.)?;
        ["candle_ddp_nn::loss::mse"] "input" => |t| nn::loss::mse(&t.of(&[4]), &c(&[4]))?;
        ["candle_ddp_nn::loss::mse"] "target" => |t| nn::loss::mse(&c(&[4]), &t.of(&[4]))?;
        ["candle_ddp_nn::loss::nll"] "input" =>
            |t| nn::loss::nll(&t.of(&[2, 3]), &Tensor::new(&[0u32, 2], &Device::Cpu)?)?;
        ["candle_ddp_nn::log_softmax", "candle_ddp_nn::ops::log_softmax"] "x" => |t| log_softmax(&t.of(&[3, 4]), 1)?;
        ["candle_ddp_nn::softmax", "candle_ddp_nn::ops::softmax"] "x" => |t| softmax(&t.of(&[3, 4]), 1)?;
        ["candle_ddp_nn::softmax_last_dim", "candle_ddp_nn::ops::softmax_last_dim"] "x" =>
            |t| softmax_last_dim(&t.of(&[3, 4]))?;
        ["candle_ddp_nn::ops::layer_norm"] "x" => |t| nn::ops::layer_norm(&t.of(&[3, 4]), &c(&[4]), &c(&[4]), 1e-5)?;
        ["candle_ddp_nn::ops::layer_norm"] "alpha" => |t| nn::ops::layer_norm(&c(&[3, 4]), &t.of(&[4]), &c(&[4]), 1e-5)?;
        ["candle_ddp_nn::ops::layer_norm"] "beta" => |t| nn::ops::layer_norm(&c(&[3, 4]), &c(&[4]), &t.of(&[4]), 1e-5)?;
        ["candle_ddp_nn::ops::rms_norm"] "x" => |t| nn::ops::rms_norm(&t.of(&[3, 4]), &c(&[4]), 1e-5)?;
        ["candle_ddp_nn::ops::rms_norm"] "alpha" => |t| nn::ops::rms_norm(&c(&[3, 4]), &t.of(&[4]), 1e-5)?;
        ["candle_ddp_nn::rope", "candle_ddp_nn::rotary_emb::rope"] "x" =>
            |t| nn::rotary_emb::rope(&t.of(QKV), &c(&[3, 2]), &tensor(&[3, 2], 5))?;
        ["candle_ddp_nn::rope_i", "candle_ddp_nn::rotary_emb::rope_i"] "x" =>
            |t| nn::rotary_emb::rope_i(&t.of(QKV), &c(&[3, 2]), &tensor(&[3, 2], 5))?;
        ["candle_ddp_nn::rope_thd", "candle_ddp_nn::rotary_emb::rope_thd"] "x" =>
            |t| nn::rotary_emb::rope_thd(&t.of(QKV), &c(&[2, 2]), &tensor(&[2, 2], 5))?;
        ["candle_ddp_tensor::function::apply"] "arguments" => |t| {
            let x = t.of(&[4]);
            let values = candle_core::Storage::Cpu(CpuStorage::F32(x.to_vec1()?));
            function::apply(&[&x], (values, x.shape().clone()), Sum)?
        };
        ["candle_ddp_tensor::function::op1"] "x" => |t| function::op1(&t.of(&[4]), Sum)?;
        ["candle_ddp_tensor::function::op2"] "a" => |t| function::op2(&t.of(&[4]), &c(&[4]), Sum)?;
        ["candle_ddp_tensor::function::op2"] "b" => |t| function::op2(&c(&[4]), &t.of(&[4]), Sum)?;
        ["candle_ddp_tensor::function::op3"] "a" => |t| function::op3(&t.of(&[4]), &c(&[4]), &c(&[4]), Sum)?;
        ["candle_ddp_tensor::function::op3"] "b" => |t| function::op3(&c(&[4]), &t.of(&[4]), &c(&[4]), Sum)?;
        ["candle_ddp_tensor::function::op3"] "c" => |t| function::op3(&c(&[4]), &c(&[4]), &t.of(&[4]), Sum)?;
    }
    macro_rules! refuses {
        ($([$($path:literal),+] $argument:literal $text:literal => |$t:ident| $call:expr;)*) => {
            $(rows.push(Row(vec![$($path.to_string()),+], $argument, Refuses($text, |$t: &Tracked| -> Result<Tensor> { Ok($call) })));)*
        };
    }
    refuses! {
        ["candle_ddp_nn::attention::scaled_dot_product_attention"] "options" "the mask of attention" =>
            |t| scaled_dot_product_attention(&c(QKV), &c(QKV), &c(QKV), masked(t.of(&[3, 3])))?;
        ["candle_ddp_nn::attention::scaled_dot_product_attention_qkvpacked"] "options" "the mask of attention" =>
            |t| scaled_dot_product_attention_qkvpacked(&c(&[1, 3, 24]), 2, masked(t.of(&[3, 3])))?;
        ["candle_ddp_nn::ops::sdpa"] "mask" "the mask of attention" =>
            |t| nn::ops::sdpa(&c(QKV), &c(QKV), &c(QKV), Some(&t.of(&[3, 3])), false, 0.5, 1.)?;
        ["candle_ddp_nn::loss::nll"] "target" "the target of nll" => |t| nn::loss::nll(&c(&[2, 3]), &t.of(&[2]))?;
        ["candle_ddp_nn::cross_entropy", "candle_ddp_nn::loss::cross_entropy"] "targets" "the targets of cross_entropy" =>
            |t| cross_entropy(&c(&[3, 4]), &t.of(&[3]))?;
        ["candle_ddp_nn::cross_entropy_with"] "targets" "the targets of cross_entropy" =>
            |t| cross_entropy_with(&c(&[3, 4]), &t.of(&[3]), CrossEntropyOptions::default())?;
        ["candle_ddp_nn::ctc_loss"] "targets" "the targets of ctc_loss" =>
            |t| ctc_loss(&c(&[4, 1, 3]), &t.of(&[2]), &[4], &[2], Default::default())?;
        ["candle_ddp_nn::linear_cross_entropy"] "targets" "the targets of cross_entropy" =>
            |t| linear_cross_entropy(&c(&[3, 2]), &c(&[4, 2]), None, &t.of(&[3]))?;
        ["candle_ddp_nn::linear_cross_entropy_with"] "targets" "the targets of cross_entropy" =>
            |t| chunked_head(&c(&[3, 2]), &c(&[4, 2]), &c(&[4]), &t.of(&[3]))?;
        ["candle_ddp_nn::linear_cross_entropy_with"] "options" "the weights of cross_entropy" => |t| {
            let cross_entropy = CrossEntropyOptions { weight: Some(t.of(&[4])), ..Default::default() };
            let options = LinearCrossEntropyOptions { cross_entropy, ..Default::default() };
            linear_cross_entropy_with(&c(&[3, 2]), &c(&[4, 2]), None, &classes(), options)?
        };
        ["candle_ddp_nn::cross_entropy_with"] "options" "the weights of cross_entropy" =>
            |t| cross_entropy_with(&c(&[3, 4]), &classes(), CrossEntropyOptions { weight: Some(t.of(&[4])), ..Default::default() })?;
    }
    ends! { rows:
        "crates/candle-ddp-tensor/src/function/token.rs": ["candle_ddp_tensor::function::Function::backward" "gradient"];
        "crates/candle-ddp-tensor/src/memory_format.rs":
            ["candle_ddp_nn::MemoryFormat::of" "x", "candle_ddp_tensor::MemoryFormat::of" "x"];
    }
    for (name, argument) in ["rope", "rope_i", "rope_thd"].iter().flat_map(|name| [(name, "cos"), (name, "sin")]) {
        let paths = vec![format!("candle_ddp_nn::{name}"), format!("candle_ddp_nn::rotary_emb::{name}")];
        rows.push(Row(paths, argument, Ends("crates/candle-ddp-nn/src/rope.rs")));
    }
}
