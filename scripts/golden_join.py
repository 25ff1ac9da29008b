#!/usr/bin/env python3
"""Writes tests/golden/join.json: PyTorch's DistributedDataParallel on ranks with different numbers of batches.

    pip install torch
    python3 scripts/golden_join.py

tests/golden/README.md describes the training and the content of the file.
"""

import json
import os
import pathlib
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

OUTPUT = pathlib.Path(__file__).parent.parent / "tests" / "golden" / "join.json"
BATCHES = [[5, 3], [1, 4], [2, 4, 1]]


def tensor(*shape, seed):
    count = torch.Size(shape).numel()
    return torch.sin(1.7 * torch.arange(count, dtype=torch.float64) + seed).reshape(shape)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("num_batches_tracked", torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        # By the rank's own inputs: each adds its first element.
        self.num_batches_tracked += x.flatten()[0].detach()
        return self.b(torch.tanh(self.a(x)))


def worker(rank, folder, batches, divide):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(batches))
    net = Net().double()
    with torch.no_grad():
        for seed, parameter in enumerate(net.parameters()):
            parameter.copy_(tensor(*parameter.shape, seed=seed))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    with model.join(divide_by_initial_world_size=divide):
        for step in range(batches[rank]):
            optimizer.zero_grad()
            x, y = tensor(6, 3, seed=10 * rank + step), tensor(6, 2, seed=100 + 10 * rank + step)
            (model(x) - y).square().mean().backward()
            optimizer.step()
    state = {name: value.flatten().tolist() for name, value in net.state_dict().items()}
    pathlib.Path(folder, f"rank{rank}").write_text(json.dumps(state))
    dist.barrier()
    os._exit(0)


def main():
    cases = []
    for batches in BATCHES:
        for divide in [True, False]:
            with tempfile.TemporaryDirectory() as folder:
                mp.start_processes(worker, (folder, batches, divide), len(batches), start_method="spawn")
                states = [json.loads(pathlib.Path(folder, f"rank{rank}").read_text()) for rank in range(len(batches))]
            assert all(state == states[0] for state in states), "ranks differ"
            cases.append({"batches": batches, "divide_by_initial_world_size": divide, "state": states[0]})
    OUTPUT.write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
