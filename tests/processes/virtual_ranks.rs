//! Virtual ranks with ranks as processes: the same bits on any number of ranks, over every path of the CPU engine, while ranks
//! die and come back, and for any number of threads.
//!
//! The processes are this test binary itself.
use crate::common::elastic_ranks::{Run, append, event, folder, result, run_with};
use crate::common::virtual_ranks::{self, Bits};
use crate::common::{bits, floats, of_micro_batch, plain, succeed, tensor, test_arguments, test_process};
use candle_core::{DType, Device, Module, ModuleT, Result as CandleResult, Tensor, Var};
use candle_ddp::checkpoint::{Parts, StateDict};
use candle_ddp::data::{DataLoader, LoaderOptions, LoaderState, TensorDataset};
use candle_ddp::elastic::State;
use candle_ddp::nn::{
    self, AttentionOptions, AvgPool2dOptions, BatchNorm, Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d, Dropout,
    Embedding, InterpolateMode, LayerNorm, Linear, MaxPool2dOptions, RmsNorm,
};
use candle_ddp::optim::{AdamW, Lamb, Optimizer, ParamsAdamW, ParamsLamb, clip_grad_norm};
use candle_ddp::seed::Generator;
use candle_ddp::{
    DistributedDataParallel, InitOptions, Precision, ProcessGroup, Result, backward_with, init_process_group,
};
use candle_nn::{
    Conv1dConfig, Conv2dConfig, ConvTranspose1dConfig, ConvTranspose2dConfig, Func, VarBuilder, VarMap, func,
};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};

/// The folder to which ranks write their bits.
const FOLDER: &str = "CANDLE_DDP_TEST_FOLDER";
/// The speed of a rank, if they are not equal.
const SPEED: &str = "CANDLE_DDP_TEST_SPEED";

fn write(bits: &Bits, path: &Path) {
    std::fs::write(path, serde_json::to_string(bits).unwrap()).unwrap();
}

fn read(path: &Path) -> Bits {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The entry point of ranks.
#[test]
#[ignore = "started by other tests"]
fn rank_of_another_test() {
    let options = InitOptions { virtual_ranks: Some(virtual_ranks::VIRTUAL), ..Default::default() };
    let pg = init_process_group(options).unwrap();
    let speed = std::env::var(SPEED).ok().map(|speed| speed.parse().unwrap());
    let train = || {
        speed.map_or(Ok(()), |speed| pg.share_by_speed(speed))?;
        virtual_ranks::train(&pg, 2, Precision::default(), None)
    };
    let bits = pg.abort_on_error(train).unwrap();
    write(&bits, &Path::new(&std::env::var(FOLDER).unwrap()).join(format!("rank{}", pg.rank())));
}

/// The bits of all ranks of a run under `ddprun`, in which a shell has set `variables`.
fn run(world_size: usize, variables: &str) -> Vec<Bits> {
    let folder = tempfile::tempdir().unwrap();
    let mut launcher = Command::new(crate::common::ddprun());
    launcher.args(["--nproc-per-node", &world_size.to_string(), "--no-python", "sh", "-c"]);
    launcher.arg(format!("{variables} exec \"$@\"")).arg("sh").arg(std::env::current_exe().unwrap());
    launcher.args(test_arguments(module_path!(), "rank_of_another_test")).env(FOLDER, folder.path());
    succeed(&mut launcher);
    (0..world_size).map(|rank| read(&folder.path().join(format!("rank{rank}")))).collect()
}

#[test]
fn processes_train_with_the_same_bits_on_any_number_of_ranks() {
    let one = run(1, "").remove(0);
    assert!(one.len() > 20);
    let tcp = "CANDLE_DDP_CPU_TRANSPORT=tcp";
    // Two hosts of unequal sizes.
    let hosts = "CANDLE_DDP_CPU_HOST=$((RANK % 3 / 2))";
    // The last rank computes more than the others.
    let speeds = "CANDLE_DDP_TEST_SPEED=$((1 + RANK * RANK))";
    for (world_size, variables) in [(2, ""), (3, ""), (4, tcp), (6, ""), (5, hosts), (8, ""), (2, speeds), (3, speeds)]
    {
        for (rank, other) in run(world_size, variables).into_iter().enumerate() {
            for (name, expected) in &one {
                assert!(other[name] == *expected, "{name} differs on rank {rank} of {world_size}, {variables}");
            }
        }
    }
}

/// The state of an elastic run.
struct Training {
    varmap: VarMap,
    generator: Arc<Mutex<Generator>>,
    optimizer: AdamW,
    progress: LoaderState,
}

impl Parts for Training {
    fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
        vec![("model", &mut self.varmap), ("optimizer", &mut self.optimizer), ("progress", &mut self.progress)]
    }
}

fn net(vb: VarBuilder, generator: &Arc<Mutex<Generator>>) -> CandleResult<Func<'static>> {
    let dropout = Dropout::with_generator(0.2, Arc::clone(generator));
    let (first, last) = (nn::linear(4, 16, vb.pp("a"))?, nn::linear(16, 2, vb.pp("b"))?);
    Ok(func(move |x| dropout.forward(&x.apply(&first)?.tanh()?, true)?.apply(&last)))
}

impl Training {
    fn new() -> Self {
        let generator = Arc::new(Mutex::new(Generator::new(0)));
        let (_, varmap) = plain(|vb| net(vb, &generator), DType::F32, 3);
        let optimizer = AdamW::new(&varmap, ParamsAdamW { lr: 0.05, ..Default::default() }).unwrap();
        Self { varmap, generator, optimizer, progress: LoaderState::default() }
    }
}

/// Trains for three epochs of four steps, with a commit after each.
fn train(pg: &ProcessGroup, state: &mut State<Training>, own: usize) -> Result<Vec<f32>> {
    event("begin", own, state.commits())?;
    append(&format!("worlds-{own}"), &pg.world_size().to_string());
    let (varmap, generator) = (state.varmap.clone(), Arc::clone(&state.generator));
    let ddp = DistributedDataParallel::new(pg, &varmap, |vb| net(vb, &generator))?;
    let data = TensorDataset::new(tensor(&[62, 4], 1))?;
    let mut loader = DataLoader::new(data, pg, LoaderOptions { batch_size: 2, ..Default::default() })?;
    if state.commits() > 0 {
        loader.resume(state.progress)?;
    }
    while loader.current_epoch() < 3 {
        for micro_batch in loader.micro_batches()? {
            let micro_batch = micro_batch?;
            micro_batch.seed(&generator);
            let loss = ddp.forward(&micro_batch.batch)?.sqr()?.mean_all()?;
            event("forward", own, state.commits())?;
            let grads = backward_with(&loss, &[&ddp], of_micro_batch(micro_batch.number))?;
            if !micro_batch.is_last {
                continue;
            }
            state.optimizer.step(&grads)?;
            state.progress = loader.state();
            event("step", own, state.commits())?;
            state.commit()?;
        }
    }
    event("end", own, 0)?;
    let mut all: Vec<f32> = ddp.parameters().iter().flat_map(|var| floats(var)).collect();
    let mut moments: Vec<_> = state.optimizer.state_dict()?.into_iter().collect();
    moments.sort_by(|(name, _), (other, _)| name.cmp(other));
    all.extend(moments.iter().flat_map(|(_, tensor)| floats(tensor)));
    Ok(all)
}

/// The entry point of the ranks of an elastic run.
#[test]
#[ignore = "started by other tests"]
fn rank_of_an_elastic_run() {
    let init = InitOptions { virtual_ranks: Some(8), ..Default::default() };
    run_with(init, |_, _| State::new(Training::new()), train);
}

#[test]
fn an_elastic_run_has_the_same_bits_while_ranks_die_and_come_back() {
    const RANK: &str = "virtual_ranks::rank_of_an_elastic_run";
    let worlds = |run: &Run, rank: usize| -> Vec<String> {
        std::fs::read_to_string(run.folder.path().join(format!("worlds-{rank}")))
            .unwrap()
            .lines()
            .map(str::to_string)
            .collect()
    };
    let calm = Run::of(RANK, 1, &[], "", None);
    calm.succeeded();
    let calm = result(calm.folder.path(), &[0]);
    assert!(!calm.contains("NaN"));
    // One process takes the place of the first that dies; the others go on without the next two.
    let events = "3 kill-forward 4,1 kill-step 6,2 kill-forward 9";
    let shrinking = Run::of(RANK, 4, &["--max-restarts", "1"], events, Some(2));
    shrinking.succeeded();
    assert_eq!(worlds(&shrinking, 0), ["4", "4", "3", "2"]);
    assert!(result(shrinking.folder.path(), &[0, 3]) == calm, "after ranks have died");
}

/// A layer's input and parameters, and the function of both.
type Layer = (&'static str, Vec<Vec<usize>>, fn(&[Tensor]) -> CandleResult<Tensor>);

/// Every layer with a backward pass, with sizes that several threads share.
fn layers() -> Vec<Layer> {
    fn shapes(all: &[&[usize]]) -> Vec<Vec<usize>> {
        all.iter().map(|shape| shape.to_vec()).collect()
    }
    fn conv(x: &[Tensor], stride: usize, groups: usize) -> CandleResult<Tensor> {
        let config = Conv2dConfig { stride, padding: 1, groups, ..Default::default() };
        Conv2d::new(x[1].clone(), Some(x[2].clone()), config).forward(&x[0])
    }
    fn norm(x: &[Tensor]) -> CandleResult<BatchNorm> {
        let (mean, variance) = (x[1].zeros_like()?, x[1].ones_like()?);
        BatchNorm::new(24, mean, variance, x[1].clone(), x[2].clone(), 1e-5)
    }
    fn angles() -> CandleResult<(Tensor, Tensor)> {
        let angles = tensor(&[96, 16], 9);
        Ok((angles.cos()?, angles.sin()?))
    }
    // Enough pixels for several parts of a convolution's sums.
    let (images, many): (&[usize], &[usize]) = (&[3, 24, 20, 20], &[17, 8, 32, 32]);
    let rows: &[usize] = &[100, 300];
    let heads: &[usize] = &[2, 4, 96, 32];
    vec![
        ("linear", shapes(&[rows, &[500, 300], &[500]]), |x| {
            Linear::new(x[1].clone(), Some(x[2].clone())).forward(&x[0])
        }),
        ("conv2d by Winograd's algorithm", shapes(&[&[17, 24, 32, 32], &[28, 24, 3, 3], &[28]]), |x| conv(x, 1, 1)),
        ("conv2d", shapes(&[many, &[12, 8, 3, 3], &[12]]), |x| conv(x, 1, 1)),
        ("conv2d with a stride", shapes(&[&[65, 8, 32, 32], &[12, 8, 3, 3], &[12]]), |x| conv(x, 2, 1)),
        ("conv2d in groups", shapes(&[many, &[12, 2, 3, 3], &[12]]), |x| conv(x, 1, 4)),
        ("depthwise conv2d", shapes(&[many, &[8, 1, 3, 3], &[8]]), |x| conv(x, 1, 8)),
        ("pointwise conv2d", shapes(&[many, &[12, 8, 1, 1], &[12]]), |x| {
            Conv2d::new(x[1].clone(), Some(x[2].clone()), Conv2dConfig::default()).forward(&x[0])
        }),
        ("conv1d", shapes(&[&[70, 8, 256], &[12, 8, 5], &[12]]), |x| {
            Conv1d::new(x[1].clone(), Some(x[2].clone()), Conv1dConfig::default()).forward(&x[0])
        }),
        ("conv_transpose2d", shapes(&[many, &[8, 6, 3, 3], &[6]]), |x| {
            let config = ConvTranspose2dConfig { stride: 2, ..Default::default() };
            ConvTranspose2d::new(x[1].clone(), Some(x[2].clone()), config).forward(&x[0])
        }),
        ("conv_transpose1d", shapes(&[&[70, 8, 256], &[8, 6, 3], &[6]]), |x| {
            ConvTranspose1d::new(x[1].clone(), Some(x[2].clone()), ConvTranspose1dConfig::default()).forward(&x[0])
        }),
        ("batch_norm", shapes(&[images, &[24], &[24]]), |x| norm(x)?.forward_t(&x[0], true)),
        ("batch_norm_relu", shapes(&[images, &[24], &[24]]), |x| norm(x)?.forward_relu_t(&x[0], true)),
        ("batch_norm_add_relu", shapes(&[images, &[24], &[24], images]), |x| {
            norm(x)?.forward_add_relu_t(&x[0], &x[3], true)
        }),
        ("layer_norm", shapes(&[rows, &[300], &[300]]), |x| {
            LayerNorm::new(x[1].clone(), x[2].clone(), 1e-5).forward(&x[0])
        }),
        ("rms_norm", shapes(&[rows, &[300]]), |x| RmsNorm::new(x[1].clone(), 1e-5).forward(&x[0])),
        ("group_norm", shapes(&[images, &[24], &[24]]), |x| {
            nn::GroupNorm::new(x[1].clone(), x[2].clone(), 24, 8, 1e-5)?.forward(&x[0])
        }),
        ("embedding", shapes(&[&[500, 64]]), |x| {
            let indices: Vec<u32> = (0..5_000u32).map(|i| i * i % 499).collect();
            Embedding::new(x[0].clone(), 64).forward(&Tensor::from_vec(indices, 5_000, &Device::Cpu)?)
        }),
        ("dropout", shapes(&[rows]), |x| nn::dropout(&x[0], 0.3, &mut Generator::new(5))),
        ("max_pool2d", shapes(&[images]), |x| nn::max_pool2d(&x[0], 3, MaxPool2dOptions::default())),
        ("avg_pool2d", shapes(&[images]), |x| nn::avg_pool2d(&x[0], 3, AvgPool2dOptions::default())),
        ("adaptive_avg_pool2d", shapes(&[images]), |x| nn::adaptive_avg_pool2d(&x[0], (5, 7))),
        ("nearest", shapes(&[images]), |x| nn::interpolate(&x[0], (45, 50), InterpolateMode::Nearest)),
        ("bilinear", shapes(&[images]), |x| {
            nn::interpolate(&x[0], (45, 50), InterpolateMode::Bilinear { align_corners: false })
        }),
        ("relu", shapes(&[rows]), |x| nn::relu(&x[0])),
        ("gelu", shapes(&[rows]), |x| nn::gelu(&x[0])),
        ("gelu_erf", shapes(&[rows]), |x| nn::gelu_erf(&x[0])),
        ("silu", shapes(&[rows]), |x| nn::silu(&x[0])),
        ("tanh", shapes(&[rows]), |x| nn::tanh(&x[0])),
        ("softmax", shapes(&[rows]), |x| nn::softmax(&x[0], 1)),
        ("softmax over rows", shapes(&[rows]), |x| nn::softmax(&x[0], 0)),
        ("log_softmax", shapes(&[rows]), |x| nn::log_softmax(&x[0], 1)),
        ("attention", shapes(&[heads, heads, heads]), |x| {
            let options = AttentionOptions { is_causal: true, ..Default::default() };
            nn::scaled_dot_product_attention(&x[0], &x[1], &x[2], options)
        }),
        ("rope", shapes(&[heads]), |x| angles().and_then(|(cos, sin)| nn::rope(&x[0], &cos, &sin))),
        ("rope_i", shapes(&[heads]), |x| angles().and_then(|(cos, sin)| nn::rope_i(&x[0], &cos, &sin))),
        ("cross_entropy", shapes(&[rows]), |x| {
            nn::cross_entropy(&x[0], &Tensor::from_vec((0..100u32).collect::<Vec<_>>(), 100, &Device::Cpu)?)
        }),
        ("ctc_loss", shapes(&[&[50, 20, 30]]), |x| {
            let targets = Tensor::from_vec((0..200u32).map(|i| 1 + i * i % 29).collect(), (20, 10), &Device::Cpu)?;
            let log_probs = nn::log_softmax(&x[0], 2)?;
            nn::ctc_loss(&log_probs, &targets, &[50; 20], &[10; 20], Default::default())
        }),
        ("linear_cross_entropy", shapes(&[rows, &[500, 300], &[500]]), |x| {
            let targets = Tensor::from_vec((0..100u32).collect::<Vec<_>>(), 100, &Device::Cpu)?;
            let options = nn::LinearCrossEntropyOptions { batch_chunk_size: Some(40), ..Default::default() };
            nn::linear_cross_entropy_with(&x[0], &x[1], Some(&x[2]), &targets, options)
        }),
        ("lstm", shapes(&[&[4, 23, 40], &[520, 40], &[520, 130]]), |x| {
            let names = ["weight_ih_l0", "weight_hh_l0"].map(String::from);
            let weights = names.into_iter().zip(x[1..].iter().cloned()).collect();
            let vb = VarBuilder::from_tensors(weights, x[0].dtype(), &Device::Cpu);
            let options = nn::RNNOptions { bias: false, ..Default::default() };
            Ok(nn::StackedLSTM::new(40, 130, options, vb)?.forward(&x[0], None, true)?.0)
        }),
        ("mse", shapes(&[rows, rows]), |x| nn::loss::mse(&x[0], &x[1])),
        ("matmul and sums", shapes(&[&[4, 96, 200], &[4, 200, 120]]), |x| x[0].matmul(&x[1])?.sum(1)?.mean(0)),
    ]
}

/// The hash of a tensor's bits.
fn hash(tensor: &Tensor) -> Vec<u32> {
    let step = |hash: u32, bits: u32| (hash.rotate_left(5) ^ bits).wrapping_mul(0x9e37_79b9);
    vec![bits(tensor).into_iter().fold(1, step)]
}

/// The entry point of a process that computes every layer, forward and backward, and steps of the optimizers.
#[test]
#[ignore = "started by other tests"]
fn layers_of_another_test() {
    let mut all = Bits::new();
    for (name, shapes, layer) in layers() {
        for dtype in [DType::F32, DType::BF16] {
            let var = |(number, shape): (usize, &Vec<usize>)| {
                Var::from_tensor(&tensor(shape, number as u64).to_dtype(dtype)?)
            };
            let vars = shapes.iter().enumerate().map(var).collect::<CandleResult<Vec<_>>>().unwrap();
            let arguments: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
            let Ok(y) = layer(&arguments) else {
                // Some of candle's own have only f32.
                assert!(dtype == DType::BF16, "{name}");
                continue;
            };
            let grads = (&y * tensor(y.dims(), 77).to_dtype(y.dtype()).unwrap())
                .unwrap()
                .sum_all()
                .unwrap()
                .backward()
                .unwrap();
            all.insert(format!("{name} {dtype:?}"), hash(&y));
            for (number, var) in vars.iter().enumerate() {
                all.insert(format!("{name} {dtype:?}, gradient {number}"), hash(grads.get(var).unwrap()));
            }
        }
    }
    let vars: Vec<(String, Var)> =
        (0..3).map(|number| (number.to_string(), Var::from_tensor(&tensor(&[300, 500], number)).unwrap())).collect();
    let mut grads = candle_core::backprop::GradStore::default();
    vars.iter().for_each(|(_, var)| drop(grads.insert(var, tensor(&[300, 500], 5))));
    all.insert(
        "norm".to_string(),
        vec![(clip_grad_norm(&mut grads, vars.clone(), 0.1).unwrap().to_scalar::<f64>().unwrap() as f32).to_bits()],
    );
    AdamW::new(vars.clone(), ParamsAdamW::default()).unwrap().step(&grads).unwrap();
    Lamb::new(vars.clone(), ParamsLamb::default()).unwrap().step(&grads).unwrap();
    all.extend(vars.iter().map(|(name, var)| (format!("parameter {name}"), hash(var))));
    write(&all, &folder().join("layers"));
}

#[test]
fn layers_have_the_same_bits_for_any_number_of_threads() {
    let with = |threads: &str| {
        let folder = tempfile::tempdir().unwrap();
        let mut process = test_process(module_path!(), "layers_of_another_test");
        succeed(process.env("RAYON_NUM_THREADS", threads).env(FOLDER, folder.path()));
        read(&folder.path().join("layers"))
    };
    let one = with("1");
    assert!(one.len() > 150, "{}", one.len());
    for threads in ["2", "3"] {
        let other = with(threads);
        let differing: Vec<&String> =
            one.iter().filter(|(name, bits)| other[*name] != **bits).map(|(name, _)| name).collect();
        assert!(differing.is_empty() && other.len() == one.len(), "{threads} threads: {differing:?}");
    }
}
