//! Encoders of text, and encoder-decoders.
use crate::check::{check, config, tokens, F32, F64};
use candle::{DType, Device, Tensor};
use candle_models::models::{bert, debertav2, distilbert, jina_bert, marian, modernbert, nomic_bert, t5, xlm_roberta};
use candle_nn::Module;
use serde_json::json;

const CPU: Device = Device::Cpu;

#[test]
fn bert() {
    check(F64, |vb| {
        let config = config(json!({
            "vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12,
            "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "max_position_embeddings": 8, "type_vocab_size": 2,
            "initializer_range": 0.02, "layer_norm_eps": 1e-12, "pad_token_id": 0,
        }))?;
        let ids = tokens((2, 5), 11)?;
        bert::BertModel::load(vb, &config)?.forward(&ids, &ids.zeros_like()?, None)
    });
}

#[test]
fn distilbert() {
    check(F32, |vb| {
        let config = config(json!({
            "vocab_size": 11, "dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 12, "activation": "gelu",
            "max_position_embeddings": 8, "initializer_range": 0.02, "pad_token_id": 0,
        }))?;
        let mask = Tensor::zeros((5, 5), DType::U8, &CPU)?;
        distilbert::DistilBertModel::load(vb, &config)?.forward(&tokens((2, 5), 11)?, &mask)
    });
}

#[test]
fn xlm_roberta() {
    check(F64, |vb| {
        let config = config(json!({
            "hidden_size": 8, "layer_norm_eps": 1e-5, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0,
            "num_attention_heads": 2, "position_embedding_type": "absolute", "intermediate_size": 12, "hidden_act": "gelu",
            "num_hidden_layers": 2, "vocab_size": 11, "max_position_embeddings": 9, "type_vocab_size": 1, "pad_token_id": 1,
        }))?;
        let ids = tokens((2, 5), 11)?;
        let model = xlm_roberta::XLMRobertaForSequenceClassification::new(3, &config, vb)?;
        model.forward(&ids, &ids.ones_like()?, &ids.zeros_like()?)
    });
}

#[test]
fn debertav2() {
    check(F32, |vb| {
        let config = config(json!({
            "vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12,
            "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
            "max_position_embeddings": 16, "type_vocab_size": 0, "initializer_range": 0.02, "layer_norm_eps": 1e-7,
            "relative_attention": true, "max_relative_positions": -1, "pad_token_id": 0, "position_biased_input": false,
            "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "share_att_key": true, "norm_rel_ebd": "layer_norm",
        }))?;
        debertav2::DebertaV2Model::load(vb, &config)?.forward(&tokens((2, 5), 11)?, None, None)
    });
}

#[test]
fn modernbert() {
    check(F32, |vb| {
        let config = config(json!({
            "vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 12,
            "max_position_embeddings": 16, "layer_norm_eps": 1e-5, "pad_token_id": 0, "global_attn_every_n_layers": 2,
            "global_rope_theta": 10000.0, "local_attention": 4, "local_rope_theta": 10000.0,
        }))?;
        let ids = tokens((2, 5), 11)?;
        modernbert::ModernBertForMaskedLM::load(vb, &config)?.forward(&ids, &ids.ones_like()?)
    });
}

#[test]
fn nomic_bert() {
    check(F64, |vb| {
        let config = config(json!({
            "vocab_size": 11, "n_embd": 8, "n_head": 2, "n_layer": 2, "n_inner": 12, "n_positions": 16, "type_vocab_size": 2,
            "rotary_emb_fraction": 1.0, "qkv_proj_bias": true,
        }))?;
        nomic_bert::NomicBertModel::load(vb, &config)?.forward(&tokens((2, 5), 11)?, None, None)
    });
}

#[test]
fn jina_bert() {
    check(F32, |vb| {
        let config = config(json!({
            "vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12,
            "hidden_act": "gelu", "max_position_embeddings": 8, "type_vocab_size": 2, "initializer_range": 0.02,
            "layer_norm_eps": 1e-12, "pad_token_id": 0, "position_embedding_type": "alibi",
        }))?;
        jina_bert::BertModel::new(vb, &config)?.forward(&tokens((2, 5), 11)?)
    });
}

#[test]
fn t5() {
    check(F32, |vb| {
        let config = config(json!({
            "vocab_size": 11, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2,
            "relative_attention_num_buckets": 8, "dropout_rate": 0.0, "layer_norm_epsilon": 1e-6, "initializer_factor": 1.0,
            "feed_forward_proj": "gated-gelu", "is_encoder_decoder": true, "pad_token_id": 0, "eos_token_id": 1,
        }))?;
        t5::T5ForConditionalGeneration::load(vb, &config)?.forward(&tokens((2, 5), 11)?, &tokens((2, 4), 11)?)
    });
}

#[test]
fn marian() {
    check(F32, |vb| {
        let config = config(json!({
            "vocab_size": 11, "max_position_embeddings": 8, "encoder_layers": 2, "encoder_ffn_dim": 12,
            "encoder_attention_heads": 2, "decoder_layers": 2, "decoder_ffn_dim": 12, "decoder_attention_heads": 2,
            "use_cache": true, "is_encoder_decoder": true, "activation_function": "swish", "d_model": 8,
            "decoder_start_token_id": 1, "scale_embedding": true, "pad_token_id": 1, "eos_token_id": 0,
            "forced_eos_token_id": 0, "share_encoder_decoder_embeddings": true,
        }))?;
        let mut model = marian::MTModel::new(&config, vb)?;
        let encoded = model.encoder().forward(&tokens((2, 5), 11)?, 0)?;
        model.decode(&tokens((2, 4), 11)?, &encoded, 0)
    });
}
