"""Training steps of PyTorch, alternating between a plain model and DistributedDataParallel over Gloo: the counterpart of
the example `step`, with the same models, the same measurement and the same JSON output.

    torchrun --nproc-per-node 2 scripts/compare/step_pytorch.py MODEL STEPS [MODES]
"""

import json
import os
import resource
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


class Separable(nn.Sequential):
    """A depthwise layer and a pointwise one."""

    def __init__(self, inputs, outputs, stride, dilation):
        super().__init__(layer(inputs, inputs, 3, stride, dilation, inputs), layer(inputs, outputs, 1))


def layer(inputs, outputs, kernel, stride=1, dilation=1, groups=1):
    padding = dilation * (kernel // 2)
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class DeepLab(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = layer(3, 32, 3, 2)
        self.low = Separable(32, 64, 2, 1)
        self.body = nn.Sequential(Separable(64, 128, 2, 1), Separable(128, 256, 1, 2), Separable(256, 256, 1, 2))
        kinds = [(1, 1), (3, 2), (3, 4), (3, 6)]
        self.pyramid = nn.ModuleList(layer(256, 64, kernel, 1, dilation) for kernel, dilation in kinds)
        self.pooled = layer(256, 64, 1)
        self.joined = layer(5 * 64, 64, 1)
        self.skip = layer(64, 24, 1)
        self.decoder = Separable(64 + 24, 64, 1, 1)
        self.head = nn.Conv2d(64, 21, 1)

    def forward(self, images):
        upsample = lambda x, like: F.interpolate(x, like.shape[2:], mode="bilinear", align_corners=False)
        low = self.low(self.stem(images))
        x = self.body(low)
        branches = [layer(x) for layer in self.pyramid]
        branches.append(upsample(self.pooled(F.adaptive_avg_pool2d(x, 1)), x))
        x = upsample(self.joined(torch.cat(branches, 1)), low)
        x = self.decoder(torch.cat([x, self.skip(low)], 1))
        return upsample(self.head(x), images)


class GptBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        samples, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(samples, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(y.transpose(1, 2).reshape(samples, tokens, width))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, vocabulary=256, tokens=256, width=384, heads=6, layers=6):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.blocks = nn.Sequential(*(GptBlock(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions)))


# What builds a model, and its input.
MODELS = {
    "mlp": (mlp, lambda: torch.randn(256, 1024)),
    "resnet18": (resnet18, lambda: torch.randn(32, 3, 32, 32)),
    "deeplab": (DeepLab, lambda: torch.randn(8, 3, 64, 64)),
    "gpt": (Gpt, lambda: torch.randint(256, (8, 256))),
}


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
    modes = sys.argv[3].split(",") if len(sys.argv) > 3 else ["local", "ddp"]
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
                "peak_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            }
            print(json.dumps(row), flush=True)
    dist.barrier()
    # Some versions of PyTorch take long to exit, or fail to.
    os._exit(0)


main()
