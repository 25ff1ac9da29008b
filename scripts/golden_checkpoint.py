#!/usr/bin/env python3
"""Writes tests/golden/checkpoint*: checkpoints of a model under PyTorch's DistributedDataParallel, and the model's outputs.

    pip install torch numpy safetensors
    python3 scripts/golden_checkpoint.py

tests/golden/checkpoint.md describes the content of the files.
"""

import pathlib
import tempfile

import numpy
import torch
import torch.distributed as dist
from safetensors.numpy import save_file
from torch import nn

FOLDER = pathlib.Path(__file__).parent.parent / "tests" / "golden"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.bn = nn.BatchNorm2d(3)
        self.fc = nn.Linear(12, 2)

    def forward(self, x):
        return self.fc(torch.relu(self.bn(self.conv(x))).flatten(1))


def main():
    torch.manual_seed(0)
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
        ddp = nn.parallel.DistributedDataParallel(Net())
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        for _ in range(3):
            loss = ddp(torch.randn(8, 1, 4, 4) + 0.5).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        state = ddp.state_dict()

        # The file that most training programs save, and the one that they should save.
        torch.save(state, FOLDER / "checkpoint.pt")
        # A file that resumes a run and so contains more than the weights. Some tensors are views, Fortran-ordered, expanded,
        # or of another dtype.
        odd = {name.replace("module.", "module._orig_mod."): value for name, value in state.items()}
        weights = torch.arange(30, dtype=torch.float32)
        weights[3 : 3 + 24].view(12, 2)[:] = state["module.fc.weight"].t()
        odd["module._orig_mod.fc.weight"] = weights[3 : 3 + 24].view(12, 2).t()
        odd["module._orig_mod.fc.bias"] = state["module.fc.bias"].double()
        odd["module._orig_mod.bn.weight"] = nn.Parameter(state["module.bn.weight"].clone())
        torch.save(
            {"epoch": 3, "seed": 2**62, "model": odd, "optimizer": optimizer.state_dict(), "lr": [0.1, 0.01], "best": None},
            FOLDER / "checkpoint_run.pth",
        )

        arrays = {name: numpy.ascontiguousarray(value.numpy()) for name, value in state.items()}
        save_file(arrays, FOLDER / "checkpoint.safetensors")

        ddp.eval()
        x = torch.randn(5, 1, 4, 4)
        with torch.no_grad():
            y = ddp(x)
        save_file({"x": x.numpy(), "y": y.numpy()}, FOLDER / "checkpoint_output.safetensors")
        dist.destroy_process_group()
    for file in sorted(FOLDER.glob("checkpoint*")):
        print(f"{file}: {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
