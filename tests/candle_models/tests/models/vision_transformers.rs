//! Transformers over images, and over images and text.
use crate::check::{check, config, measure, random, tokens, Check, F32, F64, LARGE};

use candle_models::models::{
    beit, blip, blip_text, clip, dinov2, dinov2reg4, eva2, hiera, segformer, siglip, trocr, vit,
};
use candle_nn::{Activation, Module, VarBuilder};
use serde_json::json;

fn vit_config() -> vit::Config {
    vit::Config {
        hidden_size: 8,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        intermediate_size: 12,
        hidden_act: Activation::Gelu,
        layer_norm_eps: 1e-12,
        image_size: 8,
        patch_size: 4,
        num_channels: 3,
        qkv_bias: true,
    }
}

#[test]
fn vit() {
    check(F64, |vb| vit::Model::new(&vit_config(), 3, vb.clone())?.forward(&random((2, 3, 8, 8), &vb)?));
}

#[test]
fn trocr() {
    check(F32, |vb| {
        let decoder = config(json!({
            "vocab_size": 11, "d_model": 8, "cross_attention_hidden_size": 8, "decoder_layers": 1,
            "decoder_attention_heads": 2, "decoder_ffn_dim": 12, "activation_function": "gelu", "max_position_embeddings": 16,
            "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "decoder_start_token_id": 2, "init_std": 0.02,
            "decoder_layerdrop": 0.0, "use_cache": true, "scale_embedding": false, "pad_token_id": 1, "bos_token_id": 0,
            "eos_token_id": 2, "use_learned_position_embeddings": true, "tie_word_embeddings": false,
        }))?;
        let image = random((2, 3, 8, 8), &vb)?;
        let mut model = trocr::TrOCRModel::new(&vit_config(), &decoder, vb)?;
        let encoded = model.encoder().forward(&image)?;
        model.decode(&tokens((2, 1), 11)?, &encoded, 0)
    });
}

#[test]
fn beit() {
    check(LARGE, |vb| beit::BeitVisionTransformer::new(vb.clone(), 1, 8, 2)?.forward(&random((1, 3, 384, 384), &vb)?));
}

#[test]
fn dinov2() {
    check(LARGE, |vb| {
        dinov2::DinoVisionTransformer::new(vb.clone(), 1, 8, 2)?.forward(&random((1, 3, 518, 518), &vb)?)
    });
}

#[test]
fn dinov2reg4() {
    check(LARGE, |vb| {
        dinov2reg4::DinoVisionTransformer::new(vb.clone(), 1, 8, 2)?.forward(&random((1, 3, 518, 518), &vb)?)
    });
}

#[test]
fn eva2() {
    check(LARGE, |vb| eva2::EVA2VisionTransformer::new(vb.clone(), 1, 64, 1)?.forward(&random((1, 3, 448, 448), &vb)?));
}

#[test]
fn hiera() {
    check(Check { absent: &["blocks.0.proj"], ..LARGE }, |vb| {
        let config = config(json!({"channels": 8, "heads": 1, "stages": [1, 1, 1, 1]}))?;
        hiera::hiera(&config, 3, vb.clone())?.forward(&random((1, 3, 224, 224), &vb)?)
    });
}

#[test]
fn segformer() {
    check(F64, |vb| {
        let config = config(json!({
            "id2label": {}, "num_channels": 3, "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1],
            "hidden_sizes": [8, 12], "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2], "hidden_act": "gelu", "layer_norm_eps": 1e-6, "decoder_hidden_size": 12,
        }))?;
        segformer::ImageClassificationModel::new(&config, 3, vb.clone())?.forward(&random((1, 3, 32, 32), &vb)?)
    });
}

#[test]
fn segformer_decoder() {
    check(F64, |vb| {
        let config = config(json!({
            "id2label": {}, "num_channels": 3, "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1],
            "hidden_sizes": [8, 12], "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2], "hidden_act": "gelu", "layer_norm_eps": 1e-6, "decoder_hidden_size": 8,
        }))?;
        segformer::SemanticSegmentationModel::new(&config, 3, vb.clone())?.forward(&random((1, 3, 32, 32), &vb)?)
    });
}

#[test]
fn siglip() {
    check(F64, |vb| {
        let config = config(json!({
            "text_config": {
                "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
                "max_position_embeddings": 8, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "pad_token_id": 1,
                "bos_token_id": 0, "eos_token_id": 2,
            },
            "vision_config": {
                "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "num_channels": 3,
                "image_size": 8, "patch_size": 4, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
            },
        }))?;
        let images = random((2, 3, 8, 8), &vb)?;
        Ok(siglip::Model::new(&config, vb)?.forward(&images, &tokens((2, 8), 11)?)?.0)
    });
}

#[test]
fn clip() {
    check(F32, |vb| {
        let config = clip::ClipConfig {
            text_config: clip::text_model::ClipTextConfig {
                vocab_size: 11,
                embed_dim: 8,
                activation: clip::text_model::Activation::QuickGelu,
                intermediate_size: 12,
                max_position_embeddings: 8,
                pad_with: None,
                num_hidden_layers: 1,
                num_attention_heads: 2,
                projection_dim: 8,
            },
            vision_config: clip::vision_model::ClipVisionConfig {
                embed_dim: 8,
                activation: clip::text_model::Activation::QuickGelu,
                intermediate_size: 12,
                num_hidden_layers: 1,
                num_attention_heads: 2,
                projection_dim: 8,
                num_channels: 3,
                image_size: 8,
                patch_size: 4,
            },
            logit_scale_init_value: 2.6592,
            image_size: 8,
        };
        let images = random((2, 3, 8, 8), &vb)?;
        // The file draws other values each time if these are not there.
        vb.get(8, "vision_model.embeddings.class_embedding")?;
        vb.get((), "logit_scale")?;
        Ok(clip::ClipModel::new(vb, &config)?.forward(&images, &tokens((2, 5), 11)?)?.0)
    });
}

#[test]
fn blip() {
    check(F32, |vb| {
        let text_config: blip_text::Config = config(json!({
            "vocab_size": 11, "hidden_size": 8, "encoder_hidden_size": 8, "intermediate_size": 12, "projection_dim": 8,
            "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 8, "hidden_act": "gelu",
            "layer_norm_eps": 1e-12, "is_decoder": true,
        }))?;
        let vision_config = config(json!({
            "hidden_size": 8, "intermediate_size": 12, "projection_dim": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 8, "patch_size": 4, "hidden_act": "gelu", "layer_norm_eps": 1e-5,
        }))?;
        let config = blip::Config { text_config, vision_config, projection_dim: 8, image_text_hidden_size: 8 };
        let image = random((1, 3, 8, 8), &vb)?;
        let mut model = blip::BlipForConditionalGeneration::new(&config, vb)?;
        let encoded = model.vision_model().forward(&image)?;
        model.text_decoder().forward(&tokens((1, 4), 11)?, &encoded)
    });
}

/// Images of another size than the published one: candle's `upsample_nearest2d` has no gradient here, and no renamed crate
/// reaches a method.
#[test]
fn position_embeddings_are_not_interpolated() {
    let dino = |vb: VarBuilder| {
        dinov2::DinoVisionTransformer::new(vb.clone(), 1, 8, 2)?.forward(&random((1, 3, 56, 56), &vb)?)
    };
    let error = measure(&LARGE, &dino).unwrap_err();
    assert!(error.to_string().contains("upscaling"), "{error}");
}
