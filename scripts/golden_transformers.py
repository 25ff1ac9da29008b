#!/usr/bin/env python3
"""Regenerates tests/golden/transformers: small models of Hugging Face's transformers with random weights, their logits and all gradients.
Requires torch, transformers, safetensors and numpy.

Usage: python3 scripts/golden_transformers.py
"""
import copy
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification,
)

FOLDER = Path(__file__).parent.parent / "tests/golden/transformers"

TRANSFORMER = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24)
BERT = dict(TRANSFORMER, vocab_size=32, hidden_act="gelu", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            max_position_embeddings=16, type_vocab_size=2, initializer_range=0.02, layer_norm_eps=1e-12, pad_token_id=0,
            tie_word_embeddings=False)
VIT = dict(TRANSFORMER, hidden_act="gelu", layer_norm_eps=1e-12, image_size=16, patch_size=8, num_channels=3, qkv_bias=True,
           hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=10)
LLAMA = dict(TRANSFORMER, vocab_size=32, num_key_value_heads=2, hidden_act="silu", max_position_embeddings=16, rms_norm_eps=1e-6,
             rope_theta=10000.0, tie_word_embeddings=False)


def saved(model):
    """Returns the parameters of a model under the names that its checkpoints have."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def write(name, model, config, inputs, labels, logits_of):
    """Saves float32 weights, and the logits and gradients that the model computes with them in float64."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
    tensors = {f"parameter.{key}": value for key, value in saved(model).items()}
    model = model.double().eval()
    logits = logits_of(model)
    torch.nn.functional.cross_entropy(logits, labels).backward()
    gradients = copy.deepcopy(model).float()
    with torch.no_grad():
        for gradient, parameter in zip(gradients.parameters(), model.parameters()):
            gradient.copy_(parameter.grad)
    tensors |= {f"gradient.{key}": value for key, value in saved(gradients).items()}
    tensors |= {"input": inputs, "labels": labels, "logits": logits.detach().float()}
    save_file(tensors, FOLDER / f"{name}.safetensors", {"config": json.dumps(config)})
    (FOLDER / f"{name}.safetensors").chmod(0o644)
    print(name, (FOLDER / f"{name}.safetensors").stat().st_size, "bytes")


def main():
    FOLDER.mkdir(exist_ok=True)
    torch.manual_seed(1)
    tokens, labels = torch.randint(1, 32, (2, 6)), torch.randint(32, (12,))
    eager = dict(attn_implementation="eager")
    bert = BertForMaskedLM(BertConfig(**BERT, **eager))
    # The bias of tied weights, which this model does not use.
    del bert.cls.predictions.bias
    write("bert", bert, BERT, tokens, labels,
          lambda model: model(input_ids=tokens).logits.flatten(0, 1))
    images, labels = torch.randn(2, 3, 16, 16), torch.randint(10, (2,))
    write("vit", ViTForImageClassification(ViTConfig(**VIT, **eager)), VIT, images, labels,
          lambda model: model(pixel_values=images.double()).logits)
    labels = torch.randint(32, (2,))
    write("llama", LlamaForCausalLM(LlamaConfig(**LLAMA, **eager)), LLAMA, tokens, labels,
          lambda model: model(input_ids=tokens, use_cache=False).logits[:, -1])


if __name__ == "__main__":
    main()
