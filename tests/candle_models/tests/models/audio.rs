//! Models of sound.
use crate::check::{check, config, random, tokens, Check, F32, F64};
use candle_models::models::{dac, encodec, snac, whisper};
use candle_nn::Module;
use serde_json::json;

#[test]
fn whisper() {
    check(F32, |vb| {
        let config = config(json!({
            "num_mel_bins": 4, "max_source_positions": 6, "d_model": 8, "encoder_attention_heads": 2, "encoder_layers": 1,
            "vocab_size": 11, "max_target_positions": 8, "decoder_attention_heads": 2, "decoder_layers": 1,
            "suppress_tokens": [],
        }))?;
        let mel = random((2, 4, 12), &vb)?;
        let mut model = whisper::model::Whisper::load(&vb, config)?;
        let encoded = model.encoder.forward(&mel, true)?;
        let decoded = model.decoder.forward(&tokens((2, 5), 11)?, &encoded, true)?;
        model.decoder.final_linear(&decoded)
    });
}

#[test]
fn encodec() {
    check(F64, |vb| {
        let config = encodec::Config {
            target_bandwidths: vec![0.5],
            sampling_rate: 100,
            audio_channels: 1,
            hidden_size: 8,
            num_filters: 4,
            upsampling_ratios: vec![2, 2],
            num_lstm_layers: 1,
            codebook_size: 11,
            codebook_dim: Some(8),
            ..Default::default()
        };
        let encoded = encodec::Encoder::new(&config, vb.pp("encoder"))?.forward(&random((2, 1, 16), &vb)?)?;
        encodec::Decoder::new(&config, vb.pp("decoder"))?.forward(&encoded)
    });
}

#[test]
fn dac() {
    check(F64, |vb| {
        let sound = random((2, 1, 32), &vb)?;
        let encoded = dac::Encoder::new(4, &[2, 2], 6, vb.pp("encoder"))?.forward(&sound)?;
        dac::Decoder::new(6, 8, &[2, 2], 1, vb.pp("decoder"))?.forward(&encoded)
    });
}

#[test]
fn snac() {
    check(Check { unused: &["encoder.", "in_proj"], ..F64 }, |vb| {
        let config = config(json!({
            "sampling_rate": 100, "encoder_dim": 4, "encoder_rates": [2, 2], "decoder_dim": 8, "decoder_rates": [2, 2],
            "attn_window_size": null, "codebook_size": 11, "codebook_dim": 4, "vq_strides": [2, 1], "noise": false,
            "depthwise": false,
        }))?;
        let codes = [tokens((1, 2), 11)?, tokens((1, 4), 11)?];
        snac::Model::new(&config, vb)?.decode(&codes.iter().collect::<Vec<_>>())
    });
}
