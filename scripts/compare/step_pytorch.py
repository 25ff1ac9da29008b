"""Training steps of PyTorch, alternating between a plain model and DistributedDataParallel over Gloo: the counterpart of
the example `step`, with the same models, the same measurement and the same JSON output.

    torchrun --nproc-per-node 2 scripts/compare/step_pytorch.py MODEL STEPS
"""

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WARMUP = 2
LEARNING_RATE = 1e-5


def convolution(inputs, outputs, kernel, stride):
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class Block(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.first = convolution(inputs, outputs, 3, stride)
        self.second = convolution(outputs, outputs, 3, 1)
        fits = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if fits else convolution(inputs, outputs, 1, stride)

    def forward(self, x):
        return torch.relu(self.second(torch.relu(self.first(x))) + self.shortcut(x))


def resnet18():
    layers, channels = [convolution(3, 64, 3, 1), nn.ReLU()], 64
    for stage, width in enumerate([64, 128, 256, 512]):
        for block in range(2):
            layers.append(Block(channels, width, 2 if stage > 0 and block == 0 else 1))
            channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def mlp():
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.ReLU())))


# The function that builds a model, and the shape of its input.
MODELS = {"mlp": (mlp, (256, 1024)), "resnet18": (resnet18, (32, 3, 32, 32))}


def step(model, optimizer, x):
    """Returns the milliseconds of forward, backward and optimizer."""
    start = time.perf_counter()
    loss = model(x).square().mean()
    forward = time.perf_counter()
    optimizer.zero_grad()
    loss.backward()
    backward = time.perf_counter()
    optimizer.step()
    end = time.perf_counter()
    return [1e3 * (forward - start), 1e3 * (backward - forward), 1e3 * (end - backward)]


def slowest(times):
    """Returns the times on the slowest rank."""
    times = torch.tensor(times, dtype=torch.float64)
    all_times = [torch.empty_like(times) for _ in range(dist.get_world_size())]
    dist.all_gather(all_times, times)
    return max((times.tolist() for times in all_times), key=sum)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    name, steps = sys.argv[1], int(sys.argv[2])
    build, data = MODELS[name]
    x = data()
    modes = ["local", "ddp"]
    trainers = []
    for mode in modes:
        model = build()
        model = DistributedDataParallel(model) if mode == "ddp" else model
        trainers.append((model, torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=True)))
    times = [[] for _ in modes]
    for number in range(WARMUP + steps):
        for turn in range(len(modes)):
            index = (turn + number) % len(modes)
            dist.barrier()
            elapsed = slowest(step(*trainers[index], x))
            if number >= WARMUP:
                times[index].append(elapsed)
    if dist.get_rank() == 0:
        for mode, (model, _), measured in zip(modes, trainers, times):
            forward, backward, optimizer = (statistics.median(part) for part in zip(*measured))
            row = {
                "model": name,
                "mode": mode,
                "world_size": dist.get_world_size(),
                "batch_size": x.shape[0],
                "gradient_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
                "step_ms": statistics.median(map(sum, measured)),
                "forward_ms": forward,
                "backward_ms": backward,
                "optimizer_ms": optimizer,
            }
            print(json.dumps(row), flush=True)
    dist.barrier()
    # Some versions of PyTorch take long to exit, or fail to.
    os._exit(0)


main()
