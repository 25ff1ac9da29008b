//! Attention, key-value caches and quantized products; candle supports them for inference only.
use super::{Case, Missing, Refused, Wrong, case};
use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::attention::{AttnMask, flash_attn, flash_attn_varlen_cpu, flash_attn_varlen_unfused};
use candle_nn::kv_cache::{ConcatKvCache, InterleavedKvCache, KvCache, RotatingKvCache, ScatteredCacheBuilder};
use candle_nn::ops;

const INFERENCE: &str = "for inference only";

fn attention() -> Vec<Case> {
    let lengths = || Tensor::new(&[3u32, 2], &Device::Cpu);
    let packed: [&[usize]; 3] = [&[5, 2, 4]; 3];
    vec![
        case("candle_nn::ops::sdpa", [&[2, 2, 3, 4]; 3], |[q, k, v]| ops::sdpa(q, k, v, None, false, 0.5, 1.0))
            .is(Refused, "for Metal only"),
        case("candle_nn::attention::flash_attn", [&[1, 3, 2, 4]; 3], |[q, k, v]| {
            flash_attn::<f64>(q, k, v, 0.5, AttnMask::None, None, None)
        })
        .is(Missing, INFERENCE)
        .transposed(Wrong),
        case("candle_nn::attention::flash_attn_varlen_cpu", packed, move |[q, k, v]| {
            let (n, none) = (lengths()?, None);
            flash_attn_varlen_cpu(q, k, v, None, &n, &n, 3, 3, 0.5, false, none, none)
        })
        .single()
        .is(Missing, INFERENCE),
        case("candle_nn::attention::flash_attn_varlen_unfused", packed, move |[q, k, v]| {
            let (n, none) = (lengths()?, None);
            flash_attn_varlen_unfused(q, k, v, None, &n, &n, 3, 3, 0.5, false, none, none)
        })
        .is(Missing, "softmax_last_dim"),
    ]
}

fn sum((k, v): (Tensor, Tensor)) -> Result<Tensor> {
    k + (v * 2.0)?
}

fn caches() -> Vec<Case> {
    let kv: [&[usize]; 2] = [&[2, 2, 3, 4]; 2];
    let scattered = |[k, v]: [&Tensor; 2]| {
        let mut builder = ScatteredCacheBuilder::new(2, 5, DType::F64, &Device::Cpu)?;
        let mut cache = builder.make_cache(2, 4)?;
        let indices = builder.indices_and_mask(3, &[true, true])?;
        sum(cache.append(k, v, &indices)?)
    };
    vec![
        case("candle_nn::kv_cache::KvCache", kv, |[k, v]| sum(KvCache::new(2, 5).append(k, v)?))
            .is(Missing, INFERENCE)
            .strided(Refused),
        case("candle_nn::kv_cache::RotatingKvCache", kv, |[k, v]| sum(RotatingKvCache::new(2, 5).append(k, v)?))
            .is(Missing, INFERENCE),
        case("candle_nn::kv_cache::ConcatKvCache", kv, |[k, v]| sum(ConcatKvCache::new(2).append(k, v)?))
            .is(Missing, INFERENCE),
        case("candle_nn::kv_cache::InterleavedKvCache", [&[1, 2, 3, 4]; 2], |[k, v]| {
            InterleavedKvCache::new(4).append(k, v)
        })
        .is(Missing, INFERENCE),
        case("candle_nn::kv_cache::ScatteredKvCache", kv, scattered).is(Missing, INFERENCE).strided(Refused),
        case("candle_nn::moe::moe_gemm", [&[2, 4], &[2, 3, 4]], |[x, w]| {
            let ids = Tensor::new(&[0u32, 1], &Device::Cpu)?;
            candle_nn::moe::moe_gemm(x, w, &None, &ids, &ids, 1, false)
        })
        .is(Refused, "for CUDA only"),
        case("candle_core::quantized::QMatMul", [&[2, 32]], |[x]| {
            let weight = (Tensor::arange(0f32, 128.0, x.device())?.reshape((4, 32))? * 0.05)?.sin()?;
            let product = QMatMul::from_qtensor(QTensor::quantize(&weight, GgmlDType::Q8_0)?)?;
            product.forward(x)
        })
        .single()
        .is(Missing, INFERENCE)
        .strided(Refused),
    ]
}

pub(super) fn cases() -> Vec<Case> {
    [attention(), caches()].into_iter().flatten().collect()
}
