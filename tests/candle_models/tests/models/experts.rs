//! Mixtures of experts.
use crate::check::{check, config, measure, tokens, Check, F32};
use candle::{DType, Result, Tensor};
use candle_models::models::{deepseek2, granitemoehybrid, mixtral, qwen2_moe, qwen3_moe};
use candle_nn::VarBuilder;
use serde_json::json;

/// With one expert, the weights of a router are constant.
const ONE_EXPERT: Check = Check { unused: &["gate.weight"], ..F32 };

/// Some files take the routers' weights out of the graph (`to_vec2`), so routers get no gradient, and earlier layers
/// get none through them.
fn check_router(model: impl Fn(VarBuilder) -> Result<Tensor>) {
    let wrong = measure(&F32, &model).unwrap();
    let without: Vec<_> = wrong.iter().filter_map(|line| line.strip_suffix(": no gradient")).collect();
    assert!(!without.is_empty() && without.iter().all(|name| name.ends_with("gate.weight")), "{wrong:?}");
}

fn mixtral(experts: usize, vb: VarBuilder) -> Result<Tensor> {
    let config = config(json!({
        "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "hidden_act": "silu", "max_position_embeddings": 16, "rms_norm_eps": 1e-5,
        "rope_theta": 1e4, "sliding_window": 16, "num_experts_per_tok": experts, "num_local_experts": experts, "use_flash_attn": false,
    }))?;
    mixtral::Model::new(&config, vb)?.forward(&tokens((2, 5), 11)?, 0)
}

#[test]
fn mixtral_but_its_router() {
    check(ONE_EXPERT, |vb| mixtral(1, vb));
    check_router(|vb| mixtral(2, vb));
}

fn qwen2_moe(experts: usize, vb: VarBuilder) -> Result<Tensor> {
    let config = config(json!({
        "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "hidden_act": "silu", "max_position_embeddings": 16, "rms_norm_eps": 1e-5,
        "rope_theta": 1e4, "sliding_window": 16, "max_window_layers": 2, "tie_word_embeddings": false,
        "use_sliding_window": false, "decoder_sparse_step": 1, "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8, "num_experts_per_tok": experts, "num_experts": experts, "norm_topk_prob": true,
    }))?;
    qwen2_moe::Model::new(&config, vb)?.forward(&tokens((2, 5), 11)?, 0)
}

#[test]
fn qwen2_moe_but_its_router() {
    check(Check { dtype: DType::F64, ..ONE_EXPERT }, |vb| qwen2_moe(1, vb));
    check_router(|vb| qwen2_moe(2, vb));
}

fn qwen3_moe(experts: usize, vb: VarBuilder) -> Result<Tensor> {
    let config = config(json!({
        "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
        "head_dim": 4, "attention_bias": false, "num_key_value_heads": 1, "hidden_act": "silu",
        "max_position_embeddings": 16, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_window_layers": 2,
        "tie_word_embeddings": false, "use_sliding_window": false, "decoder_sparse_step": 1, "moe_intermediate_size": 8,
        "num_experts_per_tok": experts, "num_experts": experts, "norm_topk_prob": true,
    }))?;
    qwen3_moe::ModelForCausalLM::new(&config, vb)?.forward(&tokens((2, 5), 11)?, 0)
}

#[test]
fn qwen3_moe_but_its_router() {
    check(ONE_EXPERT, |vb| qwen3_moe(1, vb));
    check_router(|vb| qwen3_moe(2, vb));
}

#[test]
fn deepseek2() {
    check(F32, |vb| {
        let config = config(json!({
            "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "moe_intermediate_size": 8, "num_hidden_layers": 2,
            "num_attention_heads": 2, "n_shared_experts": 1, "n_routed_experts": 2, "num_experts_per_tok": 2,
            "first_k_dense_replace": 1, "max_position_embeddings": 16, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
            "attention_bias": false, "q_lora_rank": 6, "qk_rope_head_dim": 4, "kv_lora_rank": 6, "v_head_dim": 4,
            "qk_nope_head_dim": 4, "n_group": 1, "topk_group": 1,
        }))?;
        deepseek2::DeepSeekV2::new(&config, vb)?.forward(&tokens((2, 5), 11)?, 0)
    });
}

#[test]
fn granitemoehybrid() {
    check(F32, |vb| {
        let config: granitemoehybrid::GraniteMoeHybridConfig = config(json!({
            "hidden_size": 8, "intermediate_size": 12, "vocab_size": 11, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "max_position_embeddings": 16,
            "layer_types": ["attention", "attention"], "shared_intermediate_size": 12,
        }))?;
        let config = config.into_config(false);
        let mut cache = granitemoehybrid::GraniteMoeHybridCache::new(false, DType::F32, &config, &candle::Device::Cpu)?;
        granitemoehybrid::GraniteMoeHybrid::load(vb, &config)?.forward(&tokens((2, 5), 11)?, 0, &mut cache)
    });
}
