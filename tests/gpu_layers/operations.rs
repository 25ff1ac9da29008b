//! Upper bounds of what a training step asks of a GPU, as the emulated GPU counts it: operations (launches, copies, memsets, and
//! calls of cuBLAS and cuDNN) and allocations. They do not depend on the sizes of the model, as long as attention's scores fit
//! into one block, so the models are small.
#[path = "../../examples/char_gpt/block.rs"]
mod block;

use crate::common::{new_var, skip, tensor};
use crate::on_gpu;
use block::Block;
use candle_core::{DType, Device, Module, ModuleT, Result, Tensor, Var};
use candle_ddp::nn::{
    AttentionOptions, GroupNorm, Linear, RNNOptions, StackedGRU, StackedLSTM, add, cross_entropy, embedding,
    layer_norm, linear_cross_entropy, linear_no_bias, scaled_dot_product_attention,
    scaled_dot_product_attention_qkvpacked,
};
use candle_ddp::optim::{AdamW, FusedOptimizer, ParameterGroup, ParamsAdamW, ParamsLamb, ParamsSgd, UpdateRule};
use candle_ddp::vision::models::{ResNetOptions, resnet50};
use candle_ddp::{Backend, DistributedDataParallel, InitOptions, init_process_group};
use candle_ddp_testing::{is_operation, take_counts};
use candle_nn::{Init, Optimizer, VarBuilder, VarMap};
use std::cmp::Reverse;

/// A model with its loss, of inputs and targets.
pub(crate) type LossNet = Box<dyn Fn(&Tensor, &Tensor) -> Result<Tensor>>;

/// A model, and a batch for it.
pub(crate) struct Model {
    pub(crate) build: fn(VarBuilder) -> Result<LossNet>,
    pub(crate) input: Tensor,
    pub(crate) targets: Tensor,
}

fn resnet(device: &Device) -> Model {
    let build = |vb: VarBuilder| -> Result<LossNet> {
        let net = resnet50(ResNetOptions { width: 4, num_classes: Some(5), ..Default::default() }, vb)?;
        Ok(Box::new(move |x, targets| cross_entropy(&net.forward_t(x, true)?, targets)))
    };
    let input = tensor(&[2, 3, 40, 40], 1).to_device(device).unwrap();
    Model { build, input, targets: Tensor::new(&[1i64, 3], device).unwrap() }
}

const VOCABULARY: usize = 11;
const TOKENS: usize = 80;

/// The GPT of the bench `step`, with its number of layers, and a batch of so many tokens that a bias's gradient needs two launches.
pub(crate) fn gpt<const WIDTH: usize>(device: &Device) -> Model {
    let build = |vb: VarBuilder| -> Result<LossNet> {
        let tokens = embedding(VOCABULARY, WIDTH, vb.pp("tokens"))?;
        let positions = vb.get_with_hints((TOKENS, WIDTH), "positions", Init::Randn { mean: 0., stdev: 0.02 })?;
        let block = |layer| Block::new(WIDTH, 2, vb.pp(format!("blocks.{layer}")));
        let blocks = (0..6).map(block).collect::<Result<Vec<_>>>()?;
        let norm = layer_norm(WIDTH, 1e-5, vb.pp("norm"))?;
        let head = linear_no_bias(WIDTH, VOCABULARY, vb.pp("head"))?;
        Ok(Box::new(move |x, next| {
            let x = add(&tokens.forward(x)?, &positions)?;
            let x = blocks.iter().try_fold(x, |x, block| block.forward(&x))?;
            linear_cross_entropy(&norm.forward(&x)?, head.weight(), None, next)
        }))
    };
    let numbers: Vec<i64> = (0..2 * TOKENS as i64).map(|i| i * i % VOCABULARY as i64).collect();
    let targets = Tensor::from_vec(numbers, (2, TOKENS), device).unwrap();
    Model { build, input: targets.clone(), targets }
}

/// What a step asks for.
#[derive(Debug)]
struct Asked {
    operations: usize,
    allocations: usize,
    /// Calls for no bytes: candle's and ours for the tensors without elements that carry gradients.
    for_nothing: usize,
}

/// Trains for three steps, and returns what the last asked for. After the first, DDP rebuilds its buckets.
fn asked(what: &str, mut step: impl FnMut() -> Result<()>) -> Option<Asked> {
    for _ in 0..2 {
        step().unwrap();
    }
    take_counts();
    step().unwrap();
    let mut counts = take_counts()?;
    counts.sort_by_key(|(_, count)| Reverse(*count));
    println!("{what}: {counts:#?}");
    let sum =
        |is_one: &dyn Fn(&str) -> bool| counts.iter().filter(|(name, _)| is_one(name)).map(|(_, count)| count).sum();
    Some(Asked {
        operations: sum(&is_operation),
        allocations: sum(&|name| name == "allocation"),
        for_nothing: sum(&|name| name == "call for no bytes"),
    })
}

fn with_ddp(name: &str, model: &Model) -> Option<Asked> {
    let device = Some(model.input.device().clone());
    let pg = init_process_group(InitOptions { backend: Backend::Single, device, ..Default::default() }).unwrap();
    let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), model.build).unwrap();
    let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default()).unwrap();
    asked(&format!("{name} with DDP"), || {
        let loss = ddp.call(|net| net(&model.input, &model.targets))?;
        optimizer.step(&ddp.backward(&loss)?)
    })
}

/// Plain candle, which adds each parameter's gradient to zeros.
fn without_ddp(name: &str, model: &Model, dtype: DType) -> Option<Asked> {
    let varmap = VarMap::new();
    let net = (model.build)(VarBuilder::from_varmap(&varmap, dtype, model.input.device())).unwrap();
    let variables = varmap.data().lock().unwrap().clone();
    let parameters: Vec<Var> =
        variables.into_iter().filter(|(name, _)| !name.contains("running_")).map(|(_, var)| var).collect();
    let mut optimizer = AdamW::new(parameters, ParamsAdamW::default()).unwrap();
    asked(&format!("{name} without DDP"), || {
        let loss = net(&model.input, &model.targets)?;
        optimizer.step(&loss.backward()?)
    })
}

/// Compares with `bounds`: operations, allocations and calls for nothing, with DDP and without.
fn check(name: &str, model: &Model, bounds: [[usize; 3]; 2]) {
    let (Some(with), Some(without)) = (with_ddp(name, model), without_ddp(name, model, DType::F32)) else {
        return skip(name, "only an emulated GPU counts operations");
    };
    println!("{name}: {with:?} with DDP, {without:?} without");
    for (found, bounds) in [with, without].into_iter().zip(bounds) {
        let counts = [found.operations, found.allocations, found.for_nothing];
        assert!(
            counts.iter().zip(bounds).all(|(count, bound)| *count <= bound),
            "{name}: {found:?} must be at most {bounds:?}"
        );
    }
}

/// Optimizers upload a table of their tensors once, although their numbers change in every step.
#[test]
fn tables_of_tensors_that_stay_are_uploaded_once() {
    const NAME: &str = "tables_of_tensors_that_stay_are_uploaded_once";
    fn step<R: UpdateRule>(gpu: &Device, options: R) -> Option<Vec<(String, usize)>> {
        let vars: Vec<Var> = (1..5).map(|size| Var::ones(size, DType::F32, gpu).unwrap()).collect();
        let sums = vars.iter().map(|var| var.sqr().unwrap().sum_all().unwrap());
        let loss = sums.reduce(|a, b| (a + b).unwrap()).unwrap();
        let grads = loss.backward().unwrap();
        let (first, second) = vars.split_at(1);
        let group = |vars: &[Var], options| {
            let parameters =
                vars.iter().enumerate().map(|(index, var)| (format!("{}.{index}", vars.len()), var.clone()));
            ParameterGroup { parameters: parameters.collect(), options }
        };
        let mut other = options.clone();
        other.set_learning_rate(0.5);
        let mut optimizer = FusedOptimizer::from_groups(vec![group(first, options), group(second, other)]).unwrap();
        Optimizer::step(&mut optimizer, &grads).unwrap();
        take_counts();
        Optimizer::step(&mut optimizer, &grads).unwrap();
        take_counts()
    }
    on_gpu(NAME, |gpu| {
        let asked = [
            step(gpu, ParamsAdamW::default()),
            step(gpu, ParamsSgd::default()),
            step(gpu, ParamsLamb { max_grad_norm: None, ..Default::default() }),
        ];
        let [Some(adam), Some(sgd), Some(lamb)] = asked else {
            return skip(NAME, "only an emulated GPU counts operations");
        };
        let counts = |names: &[&str]| names.iter().map(|name| (name.to_string(), 1)).collect::<Vec<_>>();
        assert_eq!(adam, counts(&["adam_f32"]));
        assert_eq!(sgd, counts(&["sgd_f32"]));
        assert_eq!(lamb, counts(&["allocation", "lamb_moments_f32", "lamb_sums", "lamb_update_f32"]));
        // As many as the buckets of a model with a billion parameters.
        let vars: Vec<Var> = (0..100).map(|_| Var::ones(3, DType::F32, gpu).unwrap()).collect();
        let optimizer = |var: &Var| AdamW::new(vec![var.clone()], ParamsAdamW::default()).unwrap();
        let mut optimizers: Vec<_> = vars.iter().map(optimizer).collect();
        let grads = Tensor::cat(&vars.iter().map(Var::as_tensor).collect::<Vec<_>>(), 0)
            .unwrap()
            .sqr()
            .unwrap()
            .sum_all()
            .unwrap()
            .backward()
            .unwrap();
        let mut step = || optimizers.iter_mut().for_each(|optimizer| optimizer.step(&grads).unwrap());
        step();
        take_counts();
        step();
        assert_eq!(take_counts().unwrap(), [("adam_f32".to_string(), 100)]);
    });
}

/// Each step of a sequence is a product and a kernel, in both directions of the pass.
#[test]
fn a_sequence_of_an_lstm_or_gru_asks_for_little() {
    const NAME: &str = "a_sequence_of_an_lstm_or_gru_asks_for_little";
    const LENGTH: usize = 50;
    on_gpu(NAME, |gpu| {
        let x = Var::from_tensor(&tensor(&[LENGTH, 3, 8], 1).to_device(gpu).unwrap()).unwrap();
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, gpu);
        let lstm = StackedLSTM::new(8, 8, RNNOptions::default(), vb.pp("lstm")).unwrap();
        let gru = StackedGRU::new(8, 8, RNNOptions::default(), vb.pp("gru")).unwrap();
        let step = |y: Tensor| y.sum_all()?.backward().map(drop);
        let asked = [
            asked("LSTM", || step(lstm.forward(&x, None, true)?.0)),
            asked("GRU", || step(gru.forward(&x, None, true)?.0)),
        ];
        for asked in asked {
            let Some(Asked { operations, allocations, .. }) = asked else {
                return skip(NAME, "only an emulated GPU counts operations");
            };
            assert!(
                operations <= 4 * LENGTH + 40 && allocations <= 45,
                "{operations} operations, {allocations} allocations"
            );
        }
    });
}

#[test]
fn a_step_of_resnet50_asks_for_little() {
    on_gpu("a_step_of_resnet50_asks_for_little", |gpu| {
        let is_cudnn = cfg!(feature = "cudnn") && std::env::var_os("CANDLE_DDP_CUDNN").is_none_or(|value| value != "0");
        let bounds = match is_cudnn {
            true => [[439, 454, 1118], [758, 776, 1440]],
            false => [[771, 855, 1118], [1090, 1177, 1440]],
        };
        check("ResNet-50", &resnet(gpu), bounds);
    });
}

fn is_on(variable: &str) -> bool {
    std::env::var_os(variable).is_none_or(|value| value != "0")
}

/// A bias and its gradient take no operations of their own where cuBLASLt offers them.
#[test]
fn biases_ask_for_nothing() {
    const NAME: &str = "biases_ask_for_nothing";
    on_gpu(NAME, |gpu| {
        let step = |out: usize, dtype: DType| {
            let var = |shape: &[usize]| new_var(shape, 1, dtype, gpu);
            let (x, weight, bias) = (var(&[6, 16]), var(&[out, 16]), var(&[out]));
            let layer = Linear::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone()));
            take_counts();
            layer.forward(&x).unwrap().backward().unwrap();
            take_counts()
        };
        for (out, dtype, is_offered) in [
            (8, DType::F32, true),
            (5, DType::F32, true),
            (8, DType::BF16, true),
            (5, DType::BF16, false),
            (8, DType::F64, false),
        ] {
            let Some(counts) = step(out, dtype) else {
                return skip(NAME, "only an emulated GPU counts operations");
            };
            let of = |name: &str| -> usize {
                counts.iter().filter(|(known, _)| known.starts_with(name)).map(|(_, count)| count).sum()
            };
            let expected = if is_offered && is_on("CANDLE_DDP_CUBLASLT") { [3, 0, 0] } else { [3, 1, 1] };
            assert_eq!(["product", "repeat_row", "sum_columns"].map(of), expected, "{out} in {dtype:?}: {counts:?}");
        }
    });
}

/// No operation of candle's, and no copy.
#[test]
fn a_group_norm_is_seven_kernels() {
    const NAME: &str = "a_group_norm_is_seven_kernels";
    on_gpu(NAME, |gpu| {
        let var = |shape: &[usize]| Var::from_tensor(&tensor(shape, 1).to_device(gpu).unwrap()).unwrap();
        let (x, weight, bias) = (var(&[2, 6, 5, 4]).as_detached_tensor(), var(&[6]), var(&[6]));
        let layer = GroupNorm::new(weight.as_tensor().clone(), bias.as_tensor().clone(), 6, 3, 1e-5).unwrap();
        take_counts();
        let y = layer.forward(&x).unwrap();
        let (Some(forward), _) = (take_counts(), y.backward().unwrap()) else {
            return skip(NAME, "only an emulated GPU counts operations");
        };
        let backward = take_counts().unwrap();
        let operations = |counts: &[(String, usize)]| -> Vec<(String, usize)> {
            counts.iter().filter(|(name, _)| is_operation(name)).cloned().collect()
        };
        let of = |counts: &[(String, usize)], names: &[&str]| {
            names.iter().all(|name| counts.contains(&(format!("{name}_f32"), 1)))
        };
        let forward = operations(&forward);
        assert!(forward.len() == 3 && of(&forward, &["moments", "group_statistics", "normalise"]), "{forward:?}");
        let kernels = ["gradient_sums", "group_gradients", "input_gradient", "group_totals"];
        assert!(of(&backward, &kernels), "{backward:?}");
    });
}

pub(crate) fn has_cudnns_attention() -> bool {
    cfg!(feature = "cudnn") && is_on("CANDLE_DDP_CUDNN") && is_on("CANDLE_DDP_CUDNN_ATTENTION")
}

/// With attention in bf16 by cuDNN, a call each way.
#[test]
fn attention_in_bf16_asks_for_little() {
    const NAME: &str = "attention_in_bf16_asks_for_little";
    on_gpu(NAME, |gpu| {
        let is_cudnn = has_cudnns_attention();
        let step = |shape: &[usize], attend: &dyn Fn(&Tensor) -> Result<Tensor>| {
            let qkv = new_var(shape, 1, DType::BF16, gpu);
            let run = || {
                take_counts();
                let y = attend(&qkv)?;
                let forward = take_counts();
                y.backward()?;
                Ok::<_, candle_core::Error>([forward, take_counts()])
            };
            run().unwrap();
            run().unwrap()
        };
        let options = || AttentionOptions { is_causal: true, ..Default::default() };
        let packed = step(&[2, 20, 3 * 4 * 8], &|qkv| scaled_dot_product_attention_qkvpacked(qkv, 4, options()));
        let apart = step(&[2, 4, 20, 8], &|q| scaled_dot_product_attention(q, q, q, options()));
        for (what, counts) in [("packed", packed), ("apart", apart)] {
            let [Some(forward), Some(backward)] = counts else {
                return skip(NAME, "only an emulated GPU counts operations");
            };
            println!("{what}: {forward:?}, {backward:?}");
            let has = |counts: &[(String, usize)], name: &str| counts.iter().any(|(known, _)| known == name);
            assert_eq!(has(&forward, "attention forward"), is_cudnn, "{what}: {forward:?}");
            assert_eq!(has(&backward, "attention backward"), is_cudnn, "{what}: {backward:?}");
            if is_cudnn {
                assert_eq!(forward.iter().filter(|(name, _)| is_operation(name)).count(), 1, "{what}: {forward:?}");
            }
        }
    });
}

#[test]
fn a_step_of_gpt_asks_for_little() {
    on_gpu("a_step_of_gpt_asks_for_little", |gpu| {
        check("GPT", &gpt::<12>(gpu), [[228, 255, 556], [379, 409, 710]]);
    });
}

/// Heads of 8 elements, for which cuDNN has attention.
#[test]
fn a_step_of_gpt_in_bf16_asks_for_little() {
    const NAME: &str = "a_step_of_gpt_in_bf16_asks_for_little";
    on_gpu(NAME, |gpu| {
        let Some(asked) = without_ddp("GPT in bf16", &gpt::<16>(gpu), DType::BF16) else {
            return skip(NAME, "only an emulated GPU counts operations");
        };
        println!("GPT in bf16: {asked:?}");
        let [operations, allocations] = if has_cudnns_attention() { [313, 355] } else { [379, 427] };
        assert!(
            asked.operations <= operations && asked.allocations <= allocations,
            "{asked:?} must be at most {operations} operations and {allocations} allocations"
        );
    });
}
