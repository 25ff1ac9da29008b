//! Mixed precision and autocast learn as PyTorch's autocast does: `scripts/golden_autocast.py`.
use crate::common::{golden_json, ranks, reduced_in};
use crate::sixteen_bits::net::block::Block;
use candle_core::{D, DType, Device, IndexOp, Module, Result as CandleResult, Tensor};
use candle_ddp::amp::{Autocast, GradScaler, GradScalerOptions};
use candle_ddp::nn::{
    AttentionOptions, add, conv2d_no_bias, cross_entropy, embedding, gelu_erf, layer_norm, linear, linear_no_bias,
    relu, scaled_dot_product_attention_qkvpacked, sync_batch_norm,
};
use candle_ddp::optim::{AdamW, ParamsAdamW};
use candle_ddp::{DdpOptions, DistributedDataParallel, Precision, ProcessGroup, ReduceOp, Result};
use candle_nn::{Conv2dConfig, Func, FuncT, VarBuilder, VarMap, func, func_t};

const RANKS: usize = 2;

/// A model of the script, and its data.
trait Golden {
    const NAME: &str;
    const SAMPLES: usize;
    const BATCH: usize;
    /// Of the script's 200 steps, those that are compared. The test of the smallest model compares all.
    const STEPS: usize = 60;

    fn model(vb: VarBuilder, pg: &ProcessGroup) -> CandleResult<FuncT<'static>>;
    /// The inputs and targets of all samples.
    fn data() -> CandleResult<(Tensor, Tensor)>;
}

/// Pseudo-random numbers.
fn hashes(count: usize, key: u32) -> impl Iterator<Item = u32> {
    (1..=count as u32).map(move |at| {
        let mut x = at.wrapping_mul(2_654_435_761).wrapping_add((key + 1).wrapping_mul(40503));
        for shift in [15, 13, 16] {
            x = (x ^ (x >> shift)).wrapping_mul(2_246_822_519);
        }
        x ^ (x >> 16)
    })
}

fn noise(shape: &[usize], key: u32) -> CandleResult<Tensor> {
    let values: Vec<f32> =
        hashes(shape.iter().product(), key).map(|hash| (f64::from(hash) / 2f64.powi(31) - 1.0) as f32).collect();
    Tensor::from_vec(values, shape, &Device::Cpu)
}

struct Mlp;

impl Golden for Mlp {
    const NAME: &str = "mlp";
    const STEPS: usize = 200;
    const SAMPLES: usize = 256;
    const BATCH: usize = 32;

    fn model(vb: VarBuilder, _: &ProcessGroup) -> CandleResult<FuncT<'static>> {
        let vb = vb.pp("layers");
        let layers = [linear(32, 64, vb.pp(0))?, linear(64, 64, vb.pp(1))?];
        let last = linear(64, 10, vb.pp(2))?;
        Ok(func_t(move |x, _| last.forward(&layers.iter().try_fold(x.clone(), |x, layer| relu(&layer.forward(&x)?))?)))
    }

    fn data() -> CandleResult<(Tensor, Tensor)> {
        let x = noise(&[Self::SAMPLES, 32], 900)?;
        let targets = x.i((.., ..10))?.argmax(1)?;
        Ok((x, targets))
    }
}

struct ResNet;

impl Golden for ResNet {
    const NAME: &str = "resnet";
    const SAMPLES: usize = 64;
    const BATCH: usize = 16;

    fn model(vb: VarBuilder, pg: &ProcessGroup) -> CandleResult<FuncT<'static>> {
        let (mut conv, mut norm) = (Vec::new(), Vec::new());
        for (index, (inputs, outputs, stride)) in [(3, 8, 1), (8, 8, 1), (8, 8, 1), (8, 16, 2)].into_iter().enumerate()
        {
            let config = Conv2dConfig { padding: 1, stride, ..Default::default() };
            conv.push(conv2d_no_bias(inputs, outputs, 3, config, vb.pp("conv").pp(index))?);
            norm.push(sync_batch_norm(pg, outputs, 1e-5, vb.pp("norm").pp(index))?);
        }
        let head = linear(16, 4, vb.pp("head"))?;
        Ok(func_t(move |x, train| {
            let relu = |index: usize, x: &Tensor| norm[index].forward_relu_t(&conv[index].forward(x)?, train);
            let x = relu(0, x)?;
            let x = norm[2].forward_add_relu_t(&conv[2].forward(&relu(1, &x)?)?, &x, train)?;
            head.forward(&relu(3, &x)?.flatten_from(2)?.mean(D::Minus1)?)
        }))
    }

    fn data() -> CandleResult<(Tensor, Tensor)> {
        let x = noise(&[Self::SAMPLES, 3, 8, 8], 901)?;
        let targets = x.i((.., 0..1))?.to_dtype(DType::F64)?.avg_pool2d(4)?.flatten_from(1)?.argmax(1)?;
        Ok((x, targets))
    }
}

struct Gpt;

impl Golden for Gpt {
    const NAME: &str = "gpt";
    const SAMPLES: usize = 64;
    const BATCH: usize = 8;

    fn model(vb: VarBuilder, _: &ProcessGroup) -> CandleResult<FuncT<'static>> {
        let tokens = embedding(32, 24, vb.pp("tokens"))?;
        let block = |index: usize| Block::new(24, 2, vb.pp("blocks").pp(index));
        let blocks = [block(0)?, block(1)?];
        let norm = layer_norm(24, 1e-5, vb.pp("norm"))?;
        let head = linear_no_bias(24, 32, vb.pp("head"))?;
        Ok(func_t(move |x, _| {
            let x = blocks.iter().try_fold(tokens.forward(x)?, |x, block| block.forward(&x))?;
            head.forward(&norm.forward(&x)?)?.flatten_to(1)
        }))
    }

    fn data() -> CandleResult<(Tensor, Tensor)> {
        const LENGTH: usize = 16;
        let choices: Vec<u32> = hashes(Self::SAMPLES * LENGTH, 902).map(|hash| hash % 3).collect();
        let sample = |sample: usize| {
            let mut tokens = vec![sample as u32 % 32];
            for choice in &choices[sample * LENGTH..][..LENGTH] {
                tokens.push((5 * tokens[tokens.len() - 1] + 7 + choice) % 32);
            }
            tokens
        };
        let tokens = Tensor::from_iter((0..Self::SAMPLES).flat_map(sample), &Device::Cpu)?;
        let tokens = tokens.reshape((Self::SAMPLES, LENGTH + 1))?;
        Ok((tokens.i((.., ..LENGTH))?, tokens.i((.., 1..))?))
    }
}

fn bert_block(width: usize, vb: VarBuilder) -> CandleResult<Func<'static>> {
    let norm = |index: usize| layer_norm(width, 1e-5, vb.pp("norms").pp(index));
    let [after_attention, last] = [norm(0)?, norm(1)?];
    let (qkv, out) = (linear(width, 3 * width, vb.pp("qkv"))?, linear(width, width, vb.pp("out"))?);
    let (up, down) = (linear(width, 4 * width, vb.pp("up"))?, linear(4 * width, width, vb.pp("down"))?);
    Ok(func(move |x| {
        let seen = scaled_dot_product_attention_qkvpacked(&qkv.forward(x)?, 2, AttentionOptions::default())?;
        let x = after_attention.forward(&add(x, &out.forward(&seen)?)?)?;
        let hidden = down.forward(&gelu_erf(&up.forward(&x)?)?)?;
        last.forward(&add(&x, &hidden)?)
    }))
}

struct Bert;

impl Golden for Bert {
    const NAME: &str = "bert";
    const SAMPLES: usize = 64;
    const BATCH: usize = 16;

    fn model(vb: VarBuilder, _: &ProcessGroup) -> CandleResult<FuncT<'static>> {
        let (tokens, places) = (embedding(16, 24, vb.pp("tokens"))?, embedding(8, 24, vb.pp("tokens_at"))?);
        let block = |index: usize| bert_block(24, vb.pp("blocks").pp(index));
        let blocks = [block(0)?, block(1)?];
        let (norm, head) = (layer_norm(24, 1e-5, vb.pp("norm"))?, linear(24, 4, vb.pp("head"))?);
        Ok(func_t(move |x, _| {
            let numbers = Tensor::arange(0u32, x.dim(1)? as u32, x.device())?;
            let x = norm.forward(&add(&tokens.forward(x)?, &places.forward(&numbers)?)?)?;
            let x = blocks.iter().try_fold(x, |x, block| block.forward(&x))?;
            head.forward(&x.i((.., 0))?)
        }))
    }

    fn data() -> CandleResult<(Tensor, Tensor)> {
        let tokens = Tensor::from_iter(hashes(Self::SAMPLES * 8, 903).map(|hash| hash % 16), &Device::Cpu)?;
        let tokens = tokens.reshape((Self::SAMPLES, 8))?;
        let classes = tokens.i((.., 3))?.to_vec1::<u32>()?;
        Ok((tokens, Tensor::from_iter(classes.into_iter().map(|token| token % 4), &Device::Cpu)?))
    }
}

/// The variables' first values.
fn fill(varmap: &VarMap) -> CandleResult<()> {
    let vars = varmap.data().lock().unwrap();
    let mut vars: Vec<_> = vars.iter().filter(|(name, _)| !name.contains("running_")).collect();
    vars.sort_by_key(|(name, _)| (*name).clone());
    for (key, (name, var)) in vars.into_iter().enumerate() {
        var.set(&match var.dims() {
            [rows, ..] if var.rank() > 1 => {
                let fan_in = if name.contains("tokens") { 1 } else { var.elem_count() / rows };
                (noise(var.dims(), key as u32)? * (fan_in as f64).powf(-0.5))?
            }
            _ if name.contains("norm") && name.ends_with("weight") => var.ones_like()?,
            _ => var.zeros_like()?,
        })?;
    }
    Ok(())
}

/// The losses over both ranks' halves of each batch. f16 gets a [`GradScaler`].
fn train<G: Golden>(level: impl Fn() -> DdpOptions + Sync, scales: bool, steps: usize) -> Vec<f64> {
    let mut losses = ranks(RANKS, |pg| {
        let varmap = VarMap::new();
        G::model(VarBuilder::from_varmap(&varmap, DType::F32, pg.device()), &pg)?;
        fill(&varmap)?;
        let ddp = DistributedDataParallel::with_options(&pg, &varmap, |vb| G::model(vb, &pg), level())?;
        let mut optimizer = AdamW::new(&ddp, ParamsAdamW { lr: 2e-3, ..Default::default() })?;
        let options = GradScalerOptions { init_scale: 1024.0, enabled: scales, ..Default::default() };
        let mut scaler = GradScaler::new(&pg, ddp.named_parameters(), options)?;
        let (x, targets) = G::data()?;
        let part = G::BATCH / RANKS;
        (0..steps)
            .map(|step| {
                let start = 3 * step % (G::SAMPLES / G::BATCH) * G::BATCH + pg.rank() * part;
                let rows = start..start + part;
                let output = ddp.forward_t(&x.i(rows.clone())?, true)?;
                let loss = cross_entropy(&output, &targets.i(rows)?.flatten_all()?)?;
                let mut gradients = ddp.backward(&scaler.scale(&loss)?)?;
                assert!(gradients.get_ids().count() > 0);
                scaler.step(&mut optimizer, &mut gradients)?;
                scaler.update()?;
                Ok(pg.all_reduce_scalars([loss.to_scalar::<f32>()?.into()], ReduceOp::Avg)?[0])
            })
            .collect::<Result<Vec<f64>>>()
    });
    losses.swap_remove(0)
}

/// The largest difference between means over twenty steps.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    let difference = |(a, b): (&[f64], &[f64])| (mean(a) - mean(b)).abs();
    a.chunks(20).zip(b.chunks(20)).map(difference).fold(0.0, f64::max)
}

fn follows_autocast<G: Golden>() {
    let golden = golden_json("autocast.json");
    let golden = |case: &str| -> Vec<f64> {
        let losses = golden[G::NAME][case].as_array().unwrap();
        losses[..G::STEPS].iter().map(|loss| loss.as_f64().unwrap()).collect()
    };
    let [f32, bf16, other] = ["f32", "bf16", "bf16_other_seed"].map(golden);
    // The same model, data and optimizer.
    assert!(distance(&train::<G>(DdpOptions::default, false, 20), &f32[..20]) < 1e-5);
    let seeds = distance(&bf16, &other);
    let follows = |case: &str, losses: &[f64], golden: &[f64]| {
        let ours = distance(losses, golden);
        assert!(
            ours < seeds / 10.0,
            "{case}: the losses differ from PyTorch's by {ours}, and those of two seeds by {seeds}"
        );
    };
    let precision = Precision::Half { param_dtype: DType::BF16, buffer_dtype: None };
    let half = || DdpOptions { precision, ..reduced_in(Some(DType::F32)) };
    follows("half", &train::<G>(half, false, G::STEPS), &bf16);
    let casts = |mode| DdpOptions { precision: Precision::Autocast(mode), ..Default::default() };
    follows("lists", &train::<G>(|| casts(Autocast::Lists(DType::BF16)), false, G::STEPS), &bf16);
    follows("products", &train::<G>(|| casts(Autocast::Products(DType::BF16)), false, 60), &bf16[..60]);
    follows("lists in f16", &train::<G>(|| casts(Autocast::Lists(DType::F16)), true, 60), &f32[..60]);
}

#[test]
fn an_mlp_learns_as_under_autocast() {
    follows_autocast::<Mlp>();
}

#[test]
fn a_resnet_learns_as_under_autocast() {
    follows_autocast::<ResNet>();
}

#[test]
fn a_gpt_learns_as_under_autocast() {
    follows_autocast::<Gpt>();
}

#[test]
fn a_bert_learns_as_under_autocast() {
    follows_autocast::<Bert>();
}
