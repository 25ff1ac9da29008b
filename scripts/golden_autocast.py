#!/usr/bin/env python3
"""Writes tests/golden/autocast.json: losses of four small models that PyTorch trains in f32 and under autocast to bf16.

    pip install torch
    python3 scripts/golden_autocast.py

tests/golden/README.md describes the training and the content of the file.
"""

import json
import pathlib
import sys

import torch
from torch import nn
from torch.nn import functional

sys.path.append(str(pathlib.Path(__file__).parent / "compare"))
import gpt  # noqa: E402

OUTPUT = pathlib.Path(__file__).parent.parent / "tests" / "golden" / "autocast.json"
STEPS = 200


def hashes(count, key):
    """Returns pseudo-random numbers below 2^32."""
    mask = (1 << 32) - 1
    x = (torch.arange(1, count + 1, dtype=torch.int64) * 2654435761 + (key + 1) * 40503) & mask
    for shift in (15, 13, 16):
        x = ((x ^ (x >> shift)) * 2246822519) & mask
    return x ^ (x >> 16)


def noise(shape, key):
    """Returns f32 from -1 to 1."""
    return (hashes(torch.Size(shape).numel(), key).double() / 2**31 - 1).float().reshape(shape)


class Mlp(nn.Module):
    samples, batch = 256, 32

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 10)])

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return self.layers[-1](x)

    @classmethod
    def data(cls):
        x = noise((cls.samples, 32), 900)
        return x, x[:, :10].argmax(1)


def convolution(inputs, outputs, stride):
    return nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)


class ResNet(nn.Module):
    samples, batch = 64, 16

    def __init__(self):
        super().__init__()
        sizes = [(3, 8, 1), (8, 8, 1), (8, 8, 1), (8, 16, 2)]
        pairs = [convolution(*size) for size in sizes]
        self.conv = nn.ModuleList(conv for conv, _ in pairs)
        self.norm = nn.ModuleList(norm for _, norm in pairs)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        layer = lambda index, x: self.norm[index](self.conv[index](x))
        x = torch.relu(layer(0, x))
        x = torch.relu(x + layer(2, torch.relu(layer(1, x))))
        return self.head(torch.relu(layer(3, x)).mean((2, 3)))

    @classmethod
    def data(cls):
        x = noise((cls.samples, 3, 8, 8), 901)
        return x, functional.avg_pool2d(x[:, 0].double(), 4).flatten(1).argmax(1)


class Gpt(nn.Module):
    samples, batch = 64, 8

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(32, 24)
        self.blocks = nn.Sequential(*(gpt.Block(24, 2) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 32, bias=False)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.tokens(x)))).flatten(0, 1)

    @classmethod
    def data(cls):
        choices = hashes(cls.samples * 16, 902).reshape(cls.samples, 16) % 3
        tokens = [torch.arange(cls.samples) % 32]
        for position in range(16):
            tokens.append((5 * tokens[-1] + 7 + choices[:, position]) % 32)
        tokens = torch.stack(tokens, 1)
        return tokens[:, :-1], tokens[:, 1:]


class BertBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x):
        q, k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        seen = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norms[0](x + self.out(seen))
        return self.norms[1](x + self.down(functional.gelu(self.up(x))))


class Bert(nn.Module):
    samples, batch = 64, 16

    def __init__(self):
        super().__init__()
        self.tokens, self.tokens_at = nn.Embedding(16, 24), nn.Embedding(8, 24)
        self.blocks = nn.Sequential(*(BertBlock(24) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 4)

    def forward(self, x):
        x = self.norm(self.tokens(x) + self.tokens_at(torch.arange(8)))
        return self.head(self.blocks(x)[:, 0])

    @classmethod
    def data(cls):
        tokens = hashes(cls.samples * 8, 903).reshape(cls.samples, 8) % 16
        return tokens, tokens[:, 3] % 4


def train(kind, seed, autocast):
    model = kind()
    with torch.no_grad():
        for index, (name, parameter) in enumerate(sorted(model.named_parameters())):
            if parameter.dim() > 1:
                fan_in = parameter[0].numel() if "tokens" not in name else 1
                parameter.copy_(noise(parameter.shape, 1000 * seed + index) * fan_in**-0.5)
            else:
                parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
    x, targets = kind.data()
    batches = kind.samples // kind.batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for step in range(STEPS):
        start = (3 * step + seed) % batches * kind.batch
        rows = slice(start, start + kind.batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(x[rows])
        loss = functional.cross_entropy(output.float(), targets[rows].flatten())
        losses.append(round(loss.item(), 6))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def main():
    torch.set_num_threads(1)
    golden = {}
    for kind in (Mlp, ResNet, Gpt, Bert):
        f32, bf16, other = (train(kind, *case) for case in ((0, False), (0, True), (1, True)))
        golden[kind.__name__.lower()] = {"f32": f32, "bf16": bf16, "bf16_other_seed": other}
        print(kind.__name__, f32[::40], bf16[::40], other[::40])
    OUTPUT.write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
