//! Layers in training: the fused norms compared with candle's operations; GroupNorm, linear layers, convolutions and attention over packed
//! documents compared with PyTorch.
//!
//! ```text
//! cargo bench --bench layers [-- --rounds 30 --threads 1 --python venv/bin/python]
//! ```
//!
//! candle's own fused layers have no backward pass; only `candle_nn::ops::layer_norm_slow` and `rms_norm_slow` can be
//! trained. All alternate, so that other load on the machine affects them equally; PyTorch waits in a separate process until it is
//! asked. Without `--bench` (as under `cargo test`), it runs two rounds with small tensors as a smoke test.
use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_ddp::nn::{
    AttentionOptions, Conv2d, Conv2dConfig, GroupNorm, LayerNorm, Linear, RmsNorm, matmul,
    scaled_dot_product_attention_qkvpacked,
};
use candle_nn::ops::{layer_norm_slow, rms_norm_slow};
use clap::{Parser, ValueEnum};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::time::Instant;

#[path = "../examples/common/median.rs"]
mod median;
mod start;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Parser)]
struct Options {
    /// The number of measurements of each.
    #[arg(long, default_value_t = 30)]
    rounds: usize,
    /// The number of threads of the kernels (RAYON_NUM_THREADS).
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// A Python interpreter that has PyTorch.
    #[arg(long)]
    python: Option<PathBuf>,
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Part::Norms, Part::Groups, Part::Products, Part::Packed])]
    parts: Vec<Part>,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Part {
    Norms,
    Groups,
    Products,
    Packed,
}

const EPS: f32 = 1e-5;

fn main() -> ExitCode {
    let options: Options = start::options_or(&["--rounds=2"]);
    start::with_threads(options.threads, || bench(start::is_bench(), &options))
}

fn bench(measure: bool, options: &Options) -> Result<()> {
    let has = |part| options.parts.contains(&part);
    if has(Part::Norms) {
        bench_norms(measure, options.rounds)?;
    }
    let mut pytorch = options.python.as_deref().map(|python| PyTorch::start(python, options.threads)).transpose()?;
    if has(Part::Groups) {
        bench_groups(measure, options.rounds, pytorch.as_mut())?;
    }
    if has(Part::Products) {
        bench_products(measure, options.rounds, pytorch.as_mut())?;
    }
    if has(Part::Packed) {
        bench_packed(measure, options.rounds, pytorch.as_mut())?;
    }
    Ok(())
}

fn bench_norms(measure: bool, rounds: usize) -> Result<()> {
    let shapes: &[(usize, usize)] = if measure { &[(8192, 256), (4096, 1024), (1024, 4096)] } else { &[(4, 16)] };
    println!("medians of {rounds}, forward and backward, ms\n");
    println!(
        "| layer | rows × size | dtype | candle: forward | backward | fused: forward | backward | candle / fused |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for &(rows, size) in shapes {
        for dtype in [DType::F32, DType::BF16] {
            let var =
                |shape: &[usize]| Var::from_tensor(&Tensor::randn(0f32, 1., shape, &Device::Cpu)?.to_dtype(dtype)?);
            let (x, weight, bias) = (var(&[rows, size])?, var(&[size])?, var(&[size])?);
            let layer = LayerNorm::new(weight.as_tensor().clone(), bias.as_tensor().clone(), f64::from(EPS));
            let rms = RmsNorm::new(weight.as_tensor().clone(), f64::from(EPS));
            let what = format!("{rows} × {size} | {}", dtype.as_str());
            let candles = || layer_norm_slow(&x, &weight, &bias, EPS);
            compare(&format!("LayerNorm | {what}"), rounds, candles, || layer.forward(&x))?;
            compare(&format!("RMSNorm | {what}"), rounds, || rms_norm_slow(&x, &weight, EPS), || rms.forward(&x))?;
        }
    }
    Ok(())
}

/// Shapes of a U-Net's, and numbers of groups.
const GROUPS: [([usize; 4], usize); 5] = [
    ([16, 64, 32, 32], 8),
    ([16, 128, 32, 32], 32),
    ([16, 128, 16, 16], 8),
    ([16, 256, 16, 16], 32),
    ([16, 256, 8, 8], 8),
];

fn bench_groups(measure: bool, rounds: usize, mut pytorch: Option<&mut PyTorch>) -> Result<()> {
    println!(
        "\n| shape, groups | dtype | candle: forward | backward | PyTorch: forward | backward | fused: forward | backward | candle / fused | fused / PyTorch |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    let cases = if measure { &GROUPS[..] } else { &[([2, 4, 2, 2], 2)] };
    for &(shape, groups) in cases {
        for dtype in [DType::F32, DType::BF16] {
            let var =
                |shape: &[usize]| Var::from_tensor(&Tensor::randn(0f32, 1., shape, &Device::Cpu)?.to_dtype(dtype)?);
            let channels = shape[1];
            let (x, weight, bias) = (var(&shape)?, var(&[channels])?, var(&[channels])?);
            let [weight, bias] = [weight.as_tensor().clone(), bias.as_tensor().clone()];
            let candles = candle_nn::GroupNorm::new(weight.clone(), bias.clone(), channels, groups, f64::from(EPS))?;
            let fused = GroupNorm::new(weight, bias, channels, groups, f64::from(EPS))?;
            // As inside of a model: its gradient is calculated, but not added to the zeros that candle makes for a variable.
            let inner = x.detach();
            let (sizes, name) = (shape.map(|size| size.to_string()).join("×"), dtype.as_str());
            let case = format!("norm {sizes} {groups} {name}");
            let times = in_turn(rounds, &mut pytorch, &case, |theirs| {
                Ok([time(|| candles.forward(&x))?, theirs, time(|| fused.forward(&inner))?])
            })?;
            let median = |value: &dyn Fn(&[[f64; 2]; 3]) -> f64| median::median(times.iter().map(value));
            let sum = |times: [f64; 2]| times[0] + times[1];
            print!("| {sizes}, {groups} | {name} |");
            for (who, pass) in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)] {
                print!(" {:.2} |", median(&|times| times[who][pass]));
            }
            let ratio = |a: usize, b: usize| median(&|times| sum(times[a]) / sum(times[b]));
            println!(" {:.1} | **{:.2}** |", ratio(0, 2), ratio(2, 1));
        }
    }
    Ok(())
}

/// Rows, outputs and inputs of linear layers: an MLP's, and those of a GPT's blocks.
const LINEAR: [[usize; 3]; 5] =
    [[256, 1024, 1024], [2048, 1536, 384], [2048, 384, 1536], [2048, 1152, 384], [1024, 1024, 1024]];
/// Images, input and output channels, size of the images and of the kernel, and stride of a ResNet-18's convolutions.
const CONVOLUTIONS: [[usize; 6]; 5] = [
    [32, 64, 64, 32, 3, 1],
    [32, 128, 128, 16, 3, 1],
    [32, 256, 256, 8, 3, 1],
    [32, 512, 512, 4, 3, 1],
    [32, 64, 128, 32, 1, 2],
];

/// The rates of the products of a step: of linear layers, for the gradients of their inputs and weights, and of convolutions.
fn bench_products(measure: bool, rounds: usize, mut pytorch: Option<&mut PyTorch>) -> Result<()> {
    println!("\n| medians of {rounds}, GFLOP/s | dtype | ours | PyTorch | ours / PyTorch |\n|---|---|---:|---:|---:|");
    let (linear, convolutions) =
        if measure { (&LINEAR[..], &CONVOLUTIONS[..]) } else { (&[[4, 3, 2]][..], &[[2, 4, 3, 5, 3, 1]][..]) };
    let sizes = |sizes: &[usize]| sizes.iter().map(ToString::to_string).collect::<Vec<_>>().join("×");
    for dtype in [DType::F32, DType::BF16] {
        let random = |shape: &[usize]| Tensor::randn(0f32, 1., shape, &Device::Cpu)?.to_dtype(dtype);
        let mut each = |name: String, products: usize, forward: &dyn Fn() -> Result<Tensor>| -> Result<()> {
            let case = format!("{name} {}", dtype.as_str());
            let times = in_turn(rounds, &mut pytorch, &case, |[theirs, _]| {
                let start = Instant::now();
                forward()?;
                Ok([start.elapsed().as_secs_f64() * 1e3, theirs])
            })?;
            let median = |value: &dyn Fn(&[f64; 2]) -> f64| median::median(times.iter().map(value));
            let [ours, theirs] = [0, 1].map(|who| 2e-6 * products as f64 / median(&|times| times[who]));
            let ratio = median(&|times| times[1] / times[0]);
            println!("| {name} | {} | {ours:.0} | {theirs:.0} | **{ratio:.2}** |", dtype.as_str());
            Ok(())
        };
        for extents in linear {
            let [rows, outputs, inputs] = *extents;
            let (x, weight, dy) = (random(&[rows, inputs])?, random(&[outputs, inputs])?, random(&[rows, outputs])?);
            let (layer, dy_t) = (Linear::new(weight.clone(), None), dy.t()?);
            let products = rows * outputs * inputs;
            each(format!("linear {}", sizes(extents)), products, &|| layer.forward(&x))?;
            each(format!("dx {}", sizes(extents)), products, &|| matmul(&dy, &weight))?;
            each(format!("dw {}", sizes(extents)), products, &|| matmul(&dy_t, &x))?;
        }
        for extents in convolutions {
            let [images, inputs, outputs, size, kernel, stride] = *extents;
            let x = random(&[images, inputs, size, size])?;
            let config = Conv2dConfig { padding: kernel / 2, stride, ..Conv2dConfig::default() };
            let layer = Conv2d::new(random(&[outputs, inputs, kernel, kernel])?, None, config);
            let products = images * (size / stride).pow(2) * outputs * inputs * kernel * kernel;
            each(format!("conv {}", sizes(extents)), products, &|| layer.forward(&x))?;
        }
    }
    Ok(())
}

/// The lengths of the documents of a row of 2048 tokens.
const DOCUMENTS: [&[usize]; 3] = [&[2048], &[731, 412, 290, 214, 150, 102, 71, 44, 22, 12], &[32; 64]];

/// Causal attention of six heads of 64 over documents that share a row.
fn bench_packed(measure: bool, rounds: usize, mut pytorch: Option<&mut PyTorch>) -> Result<()> {
    println!(
        "\n| documents | dtype | ours: forward, ms | backward | PyTorch: forward | backward | ours / PyTorch |\n|---|---|---:|---:|---:|---:|---:|"
    );
    let cases = if measure { &DOCUMENTS[..] } else { &[&[3, 1, 2][..]] };
    for lengths in cases {
        for dtype in [DType::F32, DType::BF16] {
            let ends = lengths.iter().scan(0, |end, length| {
                *end += *length as u32;
                Some(*end)
            });
            let cu_seq = Tensor::from_iter(std::iter::once(0).chain(ends), &Device::Cpu)?;
            let tokens = lengths.iter().sum::<usize>();
            let qkv = Tensor::randn(0f32, 1., (1, tokens, 3 * 6 * 64), &Device::Cpu)?.to_dtype(dtype)?;
            let qkv = Var::from_tensor(&qkv)?;
            let options =
                || AttentionOptions { cu_seq: Some(cu_seq.clone()), is_causal: true, ..AttentionOptions::default() };
            let joined = lengths.iter().map(ToString::to_string).collect::<Vec<_>>().join("×");
            let case = format!("packed {joined} {}", dtype.as_str());
            let times = in_turn(rounds, &mut pytorch, &case, |theirs| {
                Ok([time(|| scaled_dot_product_attention_qkvpacked(&qkv, 6, options()))?, theirs])
            })?;
            let median = |value: &dyn Fn(&[[f64; 2]; 2]) -> f64| median::median(times.iter().map(value));
            let (documents, shortest, longest) = (lengths.len(), lengths.iter().min(), lengths.iter().max());
            let (Some(shortest), Some(longest)) = (shortest, longest) else { continue };
            print!("| {documents} of {shortest} to {longest} tokens | {} |", dtype.as_str());
            for (who, pass) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                print!(" {:.2} |", median(&|times| times[who][pass]));
            }
            let sum = |times: [f64; 2]| times[0] + times[1];
            println!(" **{:.2}** |", median(&|times| sum(times[0]) / sum(times[1])));
        }
    }
    Ok(())
}

/// Measures a case in rounds: PyTorch, if it is there, and then `own`, which gets PyTorch's times of the round. A first round is not
/// counted.
fn in_turn<T>(
    rounds: usize,
    pytorch: &mut Option<&mut PyTorch>,
    case: &str,
    own: impl Fn([f64; 2]) -> Result<T>,
) -> Result<Vec<T>> {
    let mut round = || own(pytorch.as_mut().map_or(Ok([f64::NAN; 2]), |pytorch| pytorch.time(case))?);
    round()?;
    (0..rounds).map(|_| round()).collect()
}

/// PyTorch's side, `scripts/compare/layers_pytorch.py`.
struct PyTorch {
    process: Child,
    answers: BufReader<ChildStdout>,
}

impl PyTorch {
    fn start(python: &Path, threads: usize) -> Result<Self> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/compare/layers_pytorch.py");
        let mut command = Command::new(python);
        command.arg(script).arg(threads.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn()?;
        let answers = process.stdout.take().ok_or_else(|| candle_core::Error::msg("PyTorch has no output"))?;
        Ok(Self { process, answers: BufReader::new(answers) })
    }

    /// The milliseconds of a forward and of a backward pass.
    fn time(&mut self, case: &str) -> Result<[f64; 2]> {
        if let Some(questions) = &mut self.process.stdin {
            writeln!(questions, "{case}")?;
        }
        let mut answer = String::new();
        self.answers.read_line(&mut answer)?;
        let times: Vec<f64> = answer.split_whitespace().map_while(|time| time.parse().ok()).collect();
        times.try_into().map_err(|_| candle_core::Error::msg(format!("PyTorch does not answer, but: {answer}")))
    }
}

impl Drop for PyTorch {
    fn drop(&mut self) {
        // The end of its input ends it.
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}

fn compare(
    what: &str,
    rounds: usize,
    candles: impl Fn() -> Result<Tensor>,
    fused: impl Fn() -> Result<Tensor>,
) -> Result<()> {
    time(&candles)?;
    time(&fused)?;
    let mut times = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        times.push((time(&candles)?, time(&fused)?));
    }
    let median = |value: fn(&([f64; 2], [f64; 2])) -> f64| median::median(times.iter().map(value));
    // The median of the ratios of neighbouring measurements.
    let ratio = median(|(candle, fused)| (candle[0] + candle[1]) / (fused[0] + fused[1]));
    println!(
        "| {what} | {:.2} | {:.2} | {:.2} | {:.2} | **{ratio:.1}** |",
        median(|times| times.0[0]),
        median(|times| times.0[1]),
        median(|times| times.1[0]),
        median(|times| times.1[1]),
    );
    Ok(())
}

/// Returns the milliseconds of a forward and of a backward pass.
fn time(forward: impl Fn() -> Result<Tensor>) -> Result<[f64; 2]> {
    let start = Instant::now();
    let y = forward()?;
    let middle = Instant::now();
    let grads = y.backward()?;
    let times = [(middle - start).as_secs_f64() * 1e3, middle.elapsed().as_secs_f64() * 1e3];
    drop(grads);
    Ok(times)
}
