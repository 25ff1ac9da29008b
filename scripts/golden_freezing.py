#!/usr/bin/env python3
"""Writes tests/golden/freezing.json: PyTorch trains a head, then thaws the backbone with add_param_group.

    pip install torch
    python3 scripts/golden_freezing.py

tests/golden/README.md describes the training and the content of the file.
"""

import json
import pathlib

import torch
from torch import nn
from torch.nn import functional

OUTPUT = pathlib.Path(__file__).parent.parent / "tests" / "golden" / "freezing.json"
EPOCHS, THAWED = 30, 10


def tensor(*shape, seed):
    count = torch.Size(shape).numel()
    return torch.sin(1.7 * torch.arange(count, dtype=torch.float64) + seed).reshape(shape)


def main():
    torch.set_num_threads(1)
    model = nn.ModuleDict({"backbone": nn.Linear(4, 8), "head": nn.Linear(8, 3)}).double()
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(tensor(*parameter.shape, seed=seed))
    x, targets = tensor(24, 4, seed=9), torch.arange(24) % 3
    model["backbone"].requires_grad_(False)
    optimizer = torch.optim.Adam(model["head"].parameters(), lr=0.05)
    losses = []
    for epoch in range(EPOCHS):
        if epoch == THAWED:
            model["backbone"].requires_grad_(True)
            optimizer.add_param_group({"params": model["backbone"].parameters(), "lr": 0.02})
        loss = functional.cross_entropy(model["head"](torch.tanh(model["backbone"](x))), targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    OUTPUT.write_text(json.dumps({"losses": losses}) + "\n")


if __name__ == "__main__":
    main()
