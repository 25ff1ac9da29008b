//! Virtual ranks: an MLP, a ResNet-18 and a GPT end with the same bits on any number of ranks, which are processes, and while ranks
//! die and come back.
//!
//! `CANDLE_DDP_TEST_STEPS=1000 cargo test --release --test processes virtual_models -- --nocapture` is the long version, with more
//! numbers of ranks and ten deaths.
use crate::common::elastic_ranks::{MIN, Run, event, folder, run_with};
use crate::common::{buckets, fill, of_micro_batch, tensor};
use candle_core::{DType, Device, IndexOp, Module, ModuleT, Result as CandleResult, Tensor};
use candle_ddp::checkpoint::{Parts, StateDict};
use candle_ddp::data::{DataLoader, LoaderOptions, LoaderState, TensorDataset};
use candle_ddp::elastic::State;
use candle_ddp::nn::{self, AttentionOptions, Dropout, Embedding, LayerNorm, Linear, loss};
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW, clip_grad_norm};
use candle_ddp::seed::Generator;
use candle_ddp::vision::models::{ResNet, ResNetOptions, ResNetStem, resnet18};
use candle_ddp::{DdpOptions, DistributedDataParallel, InitOptions, ProcessGroup, Result, backward_with};
use candle_nn::{VarBuilder, VarMap};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Instant;

const VIRTUAL: usize = 16;
/// Samples of a micro-batch.
const BATCH: usize = 2;
/// No multiple of a global batch.
const SAMPLES: usize = 150;
const CLASSES: usize = 5;
const TOKENS: usize = 12;
const VOCABULARY: usize = 20;
/// The model of a rank: `mlp`, `resnet18` or `gpt`.
const MODEL: &str = "CANDLE_DDP_TEST_MODEL";
/// How many steps a run has.
const STEPS: &str = "CANDLE_DDP_TEST_STEPS";

type Random = Arc<Mutex<Generator>>;

/// A network with dropout, of one of three kinds.
enum Net {
    Mlp(Vec<Linear>, Dropout),
    /// With 8 channels instead of 64, and for small images.
    ResNet(ResNet),
    Gpt(Gpt),
}

struct Gpt {
    tokens: Embedding,
    positions: Tensor,
    blocks: Vec<Block>,
    norm: LayerNorm,
}

struct Block {
    norms: [LayerNorm; 2],
    qkv: Linear,
    projection: Linear,
    mlp: [Linear; 2],
    dropout: Dropout,
}

impl Block {
    fn new(width: usize, random: &Random, vb: VarBuilder) -> CandleResult<Self> {
        let linear = |inputs, outputs, name| nn::linear(inputs, outputs, vb.pp(name));
        Ok(Self {
            norms: [nn::layer_norm(width, 1e-5, vb.pp("norm1"))?, nn::layer_norm(width, 1e-5, vb.pp("norm2"))?],
            qkv: linear(width, 3 * width, "qkv")?,
            projection: linear(width, width, "projection")?,
            mlp: [linear(width, 4 * width, "fc1")?, linear(4 * width, width, "fc2")?],
            dropout: Dropout::with_generator(0.1, Arc::clone(random)),
        })
    }

    fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        let options = AttentionOptions { is_causal: true, ..Default::default() };
        let qkv = x.apply(&self.norms[0])?.apply(&self.qkv)?;
        let attended = nn::scaled_dot_product_attention_qkvpacked(&qkv, 2, options)?.apply(&self.projection)?;
        let x = nn::add(x, &self.dropout.forward(&attended, true)?)?;
        let [first, second] = &self.mlp;
        let computed = nn::gelu(&x.apply(&self.norms[1])?.apply(first)?)?.apply(second)?;
        nn::add(&x, &self.dropout.forward(&computed, true)?)
    }
}

impl Net {
    fn new(name: &str, random: &Random, vb: VarBuilder) -> CandleResult<Self> {
        let width = 32;
        Ok(match name {
            "mlp" => {
                let sizes = [24, 64, 64, CLASSES];
                let layer = |at: usize| nn::linear(sizes[at], sizes[at + 1], vb.pp(at));
                let layers = (0..3).map(layer).collect::<CandleResult<_>>()?;
                Self::Mlp(layers, Dropout::with_generator(0.2, Arc::clone(random)))
            }
            "resnet18" => {
                let (num_classes, stem, width) = (Some(CLASSES), ResNetStem::Cifar, 8);
                Self::ResNet(resnet18(ResNetOptions { num_classes, stem, width, ..Default::default() }, vb)?)
            }
            _ => Self::Gpt(Gpt {
                tokens: nn::embedding(VOCABULARY, width, vb.pp("tokens"))?,
                positions: vb.get((TOKENS, width), "positions")?,
                blocks: (0..2).map(|at| Block::new(width, random, vb.pp(at))).collect::<CandleResult<_>>()?,
                norm: nn::layer_norm(width, 1e-5, vb.pp("norm"))?,
            }),
        })
    }

    /// The logits, of as many rows as there are targets.
    fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        match self {
            Self::Mlp(layers, dropout) => {
                let [first, second, last] = &layers[..] else { unreachable!() };
                let x = nn::relu(&x.apply(first)?)?.apply(second)?;
                dropout.forward(&nn::relu(&x)?, true)?.apply(last)
            }
            Self::ResNet(net) => net.forward_t(x, true),
            Self::Gpt(Gpt { tokens, positions, blocks, norm }) => {
                let x = tokens.forward(x)?.broadcast_add(positions)?;
                let x = blocks.iter().try_fold(x, |x, block| block.forward(&x))?.apply(norm)?;
                // The head shares the embedding's weights.
                Linear::new(tokens.embeddings().clone(), None).forward(&x.flatten_to(1)?)
            }
        }
    }
}

/// Inputs and targets that follow from the sample's number.
fn data(name: &str) -> Result<TensorDataset<(Tensor, Tensor)>> {
    let numbers = |count: usize, below: usize| (0..count).map(move |i| (i * 7919 % 1009 % below) as u32);
    let tensor_of =
        |count, below, shape: &[usize]| Tensor::from_iter(numbers(count, below), &Device::Cpu)?.reshape(shape);
    let classes = tensor_of(SAMPLES, CLASSES, &[SAMPLES])?;
    TensorDataset::new(match name {
        "mlp" => (tensor(&[SAMPLES, 24], 1), classes),
        "resnet18" => (tensor(&[SAMPLES, 3, 16, 16], 1), classes),
        _ => {
            let text = tensor_of(SAMPLES * (TOKENS + 1), VOCABULARY, &[SAMPLES, TOKENS + 1])?;
            (text.i((.., ..TOKENS))?.contiguous()?, text.i((.., 1..))?.contiguous()?)
        }
    })
}

/// What a run commits after each step.
struct Training {
    varmap: VarMap,
    random: Random,
    optimizer: AdamW,
    progress: LoaderState,
    /// A hash of the losses of all micro-batches so far, of 32 bits.
    losses: f64,
}

impl Parts for Training {
    fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
        let Self { varmap, optimizer, progress, losses, .. } = self;
        vec![("model", varmap), ("optimizer", optimizer), ("progress", progress), ("losses", losses)]
    }
}

impl Training {
    fn new(name: &str) -> Self {
        let (varmap, random) = (VarMap::new(), Arc::new(Mutex::new(Generator::new(0))));
        Net::new(name, &random, VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu)).unwrap();
        fill(&varmap, 3);
        let vars = varmap.data().lock().unwrap().clone();
        let mut trained: Vec<_> = vars.into_iter().filter(|(name, _)| !name.contains("running")).collect();
        trained.sort_by(|(name, _), (other, _)| name.cmp(other));
        for (name, var) in varmap.data().lock().unwrap().iter().filter(|(name, _)| name.ends_with("running_var")) {
            var.set(&var.ones_like().unwrap()).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
        let optimizer = AdamW::new(trained, ParamsAdamW { lr: 0.003, ..Default::default() }).unwrap();
        Self { varmap, random, optimizer, progress: LoaderState::default(), losses: 0. }
    }
}

/// Mixes bytes into a hash.
fn mix(hash: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(hash, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

fn train(pg: &ProcessGroup, state: &mut State<Training>, own: usize) -> Result<Vec<f32>> {
    event("begin", own, state.commits())?;
    let name = std::env::var(MODEL).unwrap();
    let steps: u64 = std::env::var(STEPS).unwrap().parse().unwrap();
    let (varmap, random) = (state.varmap.clone(), Arc::clone(&state.random));
    // Several buckets of each model.
    let options = DdpOptions { buckets: buckets(0.05, 0.01), ..Default::default() };
    let ddp = DistributedDataParallel::with_options(pg, &varmap, |vb| Net::new(&name, &random, vb), options)?;
    let options = LoaderOptions { batch_size: BATCH, ..Default::default() };
    let mut loader = DataLoader::new(data(&name)?, pg, options)?;
    if state.commits() > 0 {
        loader.resume(state.progress)?;
    }
    let mut losses = Vec::new();
    // A rank may be lost after the last step.
    while state.commits() < steps {
        for micro_batch in loader.micro_batches()? {
            let micro_batch = micro_batch?;
            micro_batch.seed(&random);
            let (x, y) = &micro_batch.batch;
            let loss = loss::cross_entropy(&ddp.call(|net| net.forward(x))?, &y.flatten_all()?)?;
            losses.push(f64::from(loss.to_scalar::<f32>()?));
            event("forward", own, state.commits())?;
            let mut grads = backward_with(&loss, &[&ddp], of_micro_batch(micro_batch.number))?;
            if !micro_batch.is_last {
                continue;
            }
            clip_grad_norm(&mut grads, &ddp, 1.)?;
            state.optimizer.step(&grads)?;
            let all = ddp.gather_micro_batches(&std::mem::take(&mut losses))?;
            let hash = all.iter().fold(state.losses as u64, |hash, loss| mix(hash, &loss.to_le_bytes()));
            (state.losses, state.progress) = (f64::from(hash as u32), loader.state());
            event("step", own, state.commits())?;
            state.commit()?;
            if state.commits() >= steps {
                break;
            }
        }
    }
    let mut all = BTreeMap::new();
    for (part, dict) in state.parts() {
        for (name, tensor) in dict.state_dict()? {
            let values = tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
            assert!(values.iter().all(|value| value.is_finite()), "{part} {name}");
            let hash = values.iter().fold(0xcbf2_9ce4_8422_2325, |hash, value| mix(hash, &value.to_le_bytes()));
            all.insert(format!("{part} {name}"), (values.len(), hash));
        }
    }
    std::fs::write(folder().join(format!("bits-{own}")), serde_json::to_string(&all).unwrap()).unwrap();
    Ok(Vec::new())
}

/// The entry point of ranks.
#[test]
#[ignore = "started by other tests"]
fn rank_of_another_test() {
    let name = std::env::var(MODEL).unwrap();
    let init = InitOptions { virtual_ranks: Some(VIRTUAL), ..Default::default() };
    run_with(init, |_, _| State::new(Training::new(&name)), train);
}

/// For each tensor of the state, its size and the hash of its values.
type Bits = BTreeMap<String, (usize, u64)>;

/// The bits of all ranks that come to the end of a run.
fn run(model: &str, steps: u64, world_size: usize, options: &[&str], events: &str) -> Vec<Bits> {
    const RANK: &str = "virtual_models::rank_of_another_test";
    let steps = (STEPS, steps.to_string());
    let run = Run::with(RANK, world_size, options, events, [(MODEL, model.to_string()), steps, (MIN, "1".to_string())]);
    run.succeeded();
    for event in events.split(',').filter(|event| !event.is_empty()) {
        let [rank, _, commit] = event.split(' ').collect::<Vec<_>>()[..] else { panic!("{event}") };
        assert!(run.folder.path().join(format!("{event}-{rank}-{commit}")).exists(), "{event} has not happened");
    }
    let read = |path: &Path| serde_json::from_str(&std::fs::read_to_string(path).ok()?).unwrap();
    (0..world_size).filter_map(|rank| read(&run.folder.path().join(format!("bits-{rank}")))).collect()
}

/// Compares runs of a model with that of one rank, of `short` steps unless the environment says otherwise.
fn compare(model: &str, short: u64) {
    let long: Option<u64> = std::env::var(STEPS).ok().map(|steps| steps.parse().unwrap());
    let (steps, worlds): (u64, &[usize]) = match long {
        Some(steps) => (steps, &[2, 3, 4, 6, 8, 12]),
        None => (short, &[2, 3]),
    };
    let begin = Instant::now();
    let one = run(model, steps, 1, &[], "").remove(0);
    let elements: usize = one.values().map(|(elements, _)| elements).sum();
    let report = |what: &str, ranks: &[Bits], begin: Instant| {
        for (rank, other) in ranks.iter().enumerate() {
            let differing: Vec<&String> = one.keys().filter(|name| other.get(*name) != one.get(*name)).collect();
            assert!(differing.is_empty() && other.len() == one.len(), "{model}, {what}, rank {rank}: {differing:?}");
        }
        let (tensors, seconds) = (one.len(), begin.elapsed().as_secs());
        println!("{model}, {steps} steps, {what}: 0 of {tensors} tensors with {elements} elements differ, {seconds} s");
    };
    report("1 rank", &[], begin);
    for &world_size in worlds {
        let begin = Instant::now();
        let ranks = run(model, steps, world_size, &[], "");
        assert_eq!(ranks.len(), world_size);
        report(&format!("{world_size} ranks"), &ranks, begin);
    }
    // Other processes take the places of the first that die; the others go on without the last.
    let (world_size, replaced, dying): (usize, usize, &[usize]) = match long {
        Some(_) => (8, 6, &[3, 1, 6, 2, 7, 4, 5, 2, 7, 1]),
        None => (3, 1, &[1, 2]),
    };
    let place = |number: usize| if number.is_multiple_of(2) { "forward" } else { "step" };
    let commit = |number: usize| (number as u64 + 1) * steps / (dying.len() as u64 + 1);
    let events = dying.iter().enumerate().map(|(at, rank)| format!("{rank} kill-{} {}", place(at), commit(at)));
    let events = events.collect::<Vec<_>>().join(",");
    let begin = Instant::now();
    let ranks = run(model, steps, world_size, &["--max-restarts", &replaced.to_string()], &events);
    assert_eq!(ranks.len(), world_size - (dying.len() - replaced));
    report(&format!("{world_size} ranks with {} deaths", dying.len()), &ranks, begin);
}

#[test]
fn an_mlp() {
    compare("mlp", 6);
}

#[test]
fn a_resnet18() {
    compare("resnet18", 2);
}

#[test]
fn a_gpt() {
    compare("gpt", 6);
}
