//! State-space models and linear recurrences.
use crate::check::{check, config, tokens, F32, F64};
use candle::{Device, Tensor};
use candle_models::models::{mamba, mamba2, recurrent_gemma, rwkv_v5, rwkv_v6};
use serde_json::json;

const CPU: Device = Device::Cpu;

#[test]
fn mamba() {
    check(F64, |vb| {
        let config = config(json!({"d_model": 16, "n_layer": 2, "vocab_size": 11, "pad_vocab_size_multiple": 1}))?;
        let mut state = mamba::State::new(1, &config, vb.dtype(), &CPU)?;
        let model = mamba::Model::new(&config, vb)?;
        let tokens = tokens((1, 3), 11)?;
        let outputs = (0..3).map(|step| model.forward(&tokens.narrow(1, step, 1)?.squeeze(1)?, &mut state));
        Tensor::stack(&outputs.collect::<candle::Result<Vec<_>>>()?, 1)
    });
}

#[test]
fn mamba2() {
    check(F64, |vb| {
        let config = config(json!({
            "d_model": 8, "n_layer": 2, "vocab_size": 11, "d_state": 4, "expand": 2, "headdim": 4, "ngroups": 1,
            "pad_vocab_size_multiple": 1,
        }))?;
        let mut state = mamba2::State::new(2, &config, vb.dtype(), &CPU)?;
        mamba2::Model::new(&config, vb)?.forward_prefill(&tokens((2, 6), 11)?, &mut state, 4)
    });
}

#[test]
fn rwkv_v5() {
    check(F32, |vb| {
        let config = config(json!({
            "vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "attention_hidden_size": 8, "num_attention_heads": 4,
            "head_size": 4, "intermediate_size": 12, "layer_norm_epsilon": 1e-5, "rescale_every": 0,
        }))?;
        let mut state = rwkv_v5::State::new(1, &config, &CPU)?;
        let model = rwkv_v5::Model::new(&config, vb)?;
        let tokens = tokens((1, 3), 11)?;
        let outputs = (0..3).map(|step| model.forward(&tokens.narrow(1, step, 1)?, &mut state));
        Tensor::stack(&outputs.collect::<candle::Result<Vec<_>>>()?, 1)
    });
}

#[test]
fn rwkv_v6() {
    check(F32, |vb| {
        let config = config(json!({
            "vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "attention_hidden_size": 8, "num_attention_heads": 4,
            "head_size": 4, "intermediate_size": 12, "layer_norm_epsilon": 1e-5, "rescale_every": 0,
        }))?;
        let mut state = rwkv_v5::State::new(1, &config, &CPU)?;
        let model = rwkv_v6::Model::new(&config, vb)?;
        let tokens = tokens((1, 3), 11)?;
        let outputs = (0..3).map(|step| model.forward(&tokens.narrow(1, step, 1)?, &mut state));
        Tensor::stack(&outputs.collect::<candle::Result<Vec<_>>>()?, 1)
    });
}

#[test]
fn recurrent_gemma() {
    check(F32, |vb| {
        let config = config(json!({
            "num_hidden_layers": 2, "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 4, "attention_window_size": 16, "conv1d_width": 4, "logits_soft_cap": 30.0,
            "hidden_activation": "gelu_pytorch_tanh", "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
            "block_types": ["recurrent", "attention"], "attention_bias": false, "max_seq_len": 16,
        }))?;
        recurrent_gemma::Model::new(&config, vb)?.forward(&tokens((2, 5), 11)?, 0)
    });
}
