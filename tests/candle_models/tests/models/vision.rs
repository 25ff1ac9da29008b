//! Convolutional networks.
use crate::check::{check, config, measure, random, Check, LARGE, LARGE_F32};
use candle_models::models::{convnext, efficientnet, efficientvit, fastvit, mobilenetv4, mobileone, repvgg, resnet};
use candle_nn::Module;
use serde_json::json;

#[test]
fn convnext() {
    // Otherwise a channel of GRN, whose norm has no gradient at zero, underflows in f32.
    check(Check { gain: 0.3, ..LARGE }, |vb| {
        convnext::convnext(&convnext::Config::atto(), 3, vb.clone())?.forward(&random((1, 3, 32, 32), &vb)?)
    });
}

#[test]
fn efficientnet() {
    check(LARGE, |vb| {
        let blocks = efficientnet::MBConvConfig::b0();
        efficientnet::EfficientNet::new(vb.clone(), blocks, 3)?.forward(&random((1, 3, 32, 32), &vb)?)
    });
}

#[test]
fn efficientvit() {
    check(Check { gain: 0.5, ..LARGE }, |vb| {
        efficientvit::efficientvit(&efficientvit::Config::m0(), 3, vb.clone())?.forward(&random((1, 3, 224, 224), &vb)?)
    });
}

/// Scales of 1 × 1 kernels, identities between different numbers of channels, and the parts that the published models have elsewhere.
const FASTVIT_ABSENT: [&str; 10] = [
    "stem.2.conv_scale",
    "proj.1.conv_scale",
    "stem.0.identity",
    "stages.0.downsample",
    "stem.0.se",
    "stem.1.se",
    "stem.2.se",
    "er.se",
    "norm.se",
    "proj.1.se",
];

#[test]
fn fastvit() {
    check(Check { absent: &FASTVIT_ABSENT, gain: 0.5, ..LARGE_F32 }, |vb| {
        let config = config(
            json!({"exp_ratio": 2, "in_channels": 8, "blocks": [1, 1, 1, 1], "attn": true, "lkc_use_act": true}),
        )?;
        fastvit::fastvit(&config, 3, vb.clone())?.forward(&random((1, 3, 64, 64), &vb)?)
    });
}

#[test]
fn mobilenetv4() {
    check(Check { unused: &["dw_start.bn", "dw_mid.bn"], ..LARGE }, |vb| {
        mobilenetv4::mobilenetv4(&mobilenetv4::Config::small(), 3, vb.clone())?.forward(&random((1, 3, 32, 32), &vb)?)
    });
}

#[test]
fn mobileone() {
    check(Check { gain: 0.3, ..LARGE_F32 }, |vb| {
        mobileone::mobileone(&mobileone::Config::s0(), 3, vb.clone())?.forward(&random((1, 3, 32, 32), &vb)?)
    });
}

#[test]
fn repvgg() {
    check(Check { gain: 0.4, ..LARGE_F32 }, |vb| {
        repvgg::repvgg(&repvgg::Config::a0(), 3, vb.clone())?.forward(&random((1, 3, 32, 32), &vb)?)
    });
}

/// Methods of candle's tensors, which no renamed crate reaches: this file would have to call `candle_ddp_nn::max_pool2d`.
#[test]
fn resnet_has_candles_max_pool() {
    let error =
        measure(&LARGE, &|vb| resnet::resnet18(3, vb.clone())?.forward(&random((1, 3, 32, 32), &vb)?)).unwrap_err();
    assert!(error.to_string().contains("maxpool2d"), "{error}");
}
