#!/usr/bin/env python3
"""The example `lora` with PyTorch, transformers and peft: the same files, text, adapters, checkpointing and optimizer, on one rank.

    pip install torch transformers peft
    python3 scripts/compare/lora_pytorch.py FOLDER

FOLDER has the weights that `lora --size 0.5b --folder FOLDER` has made. Prints the seconds of each step, and the peak of the memory.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

LENGTH = 256
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=4)
    options = parser.parse_args()
    config = Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=True, use_cache=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        for path in options.folder.glob("model*.safetensors*"):
            (Path(folder) / path.name).symlink_to(path.resolve())
        model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS)).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    docs = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in docs)), dtype=torch.uint8).long()
    for step in range(options.steps):
        starts = [(step * options.batch_size + index) * LENGTH for index in range(options.batch_size)]
        pieces = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        begun = time.perf_counter()
        logits = model(input_ids=pieces[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), pieces[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}: loss {loss.item():.4f}, {time.perf_counter() - begun:.2f} s", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{sum(parameter.numel() for parameter in trained)} parameters trained, at most {peak / 1e9:.2f} GB of memory")


if __name__ == "__main__":
    main()
