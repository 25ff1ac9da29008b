#!/usr/bin/env python3
"""Writes tests/golden/lora: a small model in several files as Hugging Face's, adapters of peft, and their results.

    pip install torch peft safetensors
    python3 scripts/golden_lora.py

The README.md of tests/golden describes the folder.
"""

import pathlib
import shutil

import torch
from huggingface_hub import save_torch_state_dict
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn

FOLDER = pathlib.Path(__file__).parent.parent / "tests" / "golden" / "lora"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.line = nn.Conv1d(8, 6, 3, padding=1)
        self.image = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.fc = nn.Linear(6, 12)
        self.pool = nn.Linear(36, 12, bias=False)
        self.head = nn.Linear(12, 3)

    def forward(self, ids, image):
        tokens = self.line(self.embed(ids).transpose(1, 2)).transpose(1, 2)
        pooled = self.pool(torch.relu(self.image(image)).flatten(1))
        return self.head(torch.relu(self.fc(tokens)) + pooled.unsqueeze(1))


def wave(shape, phase):
    """Inputs, which the test makes as well."""
    count = torch.Size(shape).numel()
    return torch.sin(1.7 * torch.arange(count, dtype=torch.float64) + phase).reshape(shape).float()


torch.manual_seed(0)
shutil.rmtree(FOLDER, ignore_errors=True)
(FOLDER / "model").mkdir(parents=True)
model = Net()
save_torch_state_dict(model.state_dict(), FOLDER / "model", max_shard_size=1200)
config = LoraConfig(
    r=2, lora_alpha=6, target_modules=["embed", "line", "image", "fc"], bias="lora_only", modules_to_save=["head"]
)
model = get_peft_model(model, config)
for name, parameter in model.named_parameters():
    if parameter.requires_grad:
        nn.init.normal_(parameter, std=0.3)
model.save_pretrained(FOLDER / "adapter")
(FOLDER / "adapter" / "README.md").unlink()

ids = torch.arange(10).reshape(2, 5) * 3 % 11
y = model(ids, wave((2, 3, 6, 6), 0.3))
y.backward(torch.cos(0.9 * torch.arange(y.numel(), dtype=torch.float64) + 0.1).reshape(y.shape).float())


def own(name):
    """The name in the VarMap."""
    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".modules_to_save.default.", ".")
    return name.replace(".default.weight", ".weight").removesuffix(".default")


results = {f"d {own(name)}": p.grad for name, p in model.named_parameters() if p.requires_grad}
results["y"] = y.detach()
merged = model.merge_and_unload()
results |= {f"merged {name}": value for name, value in merged.state_dict().items()}
save_file({name: value.detach().clone().contiguous() for name, value in results.items()}, FOLDER / "results.safetensors")
