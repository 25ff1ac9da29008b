"""Training steps of PyTorch, alternating between a plain model and DistributedDataParallel over Gloo: the counterpart of
the bench `step`, with the same models, the same measurement and the same JSON output.

    torchrun --nproc-per-node 2 scripts/compare/step_pytorch.py MODEL STEPS [MODES [DTYPE [BATCH_SIZE]]] [--no-phases] [--profile]

With CANDLE_DDP_DEVICE=cuda, each rank trains on its GPU, over NCCL. DTYPE is f32, tf32, bf16, or autocast: bf16 with parameters
in f32. Words may follow it, with "-" between them: "channels_last", the layout of images and convolutions; "compile", the model
goes through torch.compile; "autotune", the same in its mode max-autotune-no-cudagraphs; "benchmark", cuDNN measures its algorithms.
MODES, with "," between them: "local"; "ddp"; "zero", DistributedDataParallel with a ZeroRedundancyOptimizer; "fsdp", whose blocks are
sharded by fully_shard, and computed again in the backward pass; "fsdp-kept", whose parameters stay from forward to backward pass.

With --no-phases, a step waits for the GPU once. The loss is a part of the compiled model. With --profile, the kernels of the measured
steps are printed too; their times are then a little longer.
"""

import json
import math
import os
import resource
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import gpt
import gpu_trace

WARMUP = 2
LEARNING_RATE = 1e-5
DEVICE = os.environ.get("CANDLE_DDP_DEVICE", "cpu")


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


class Bottleneck(nn.Module):
    """Three convolutions with a residual connection."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        self.layers = nn.Sequential(
            *(convolution(inputs, width, 1, 1), nn.ReLU(inplace=True)),
            *(convolution(width, width, 3, stride), nn.ReLU(inplace=True)),
            convolution(width, 4 * width, 1, 1),
        )
        fits = inputs == 4 * width and stride == 1
        self.shortcut = nn.Identity() if fits else convolution(inputs, 4 * width, 1, stride)

    def forward(self, x):
        return torch.relu(self.layers(x) + self.shortcut(x))


def resnet50():
    layers, channels = [convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)], 64
    for stage, blocks in enumerate([3, 4, 6, 3]):
        for block in range(blocks):
            width = 64 << stage
            layers.append(Bottleneck(channels, width, 2 if stage > 0 and block == 0 else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


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


class Residual(nn.Module):
    """Two convolutions, between which the time is added, and a connection around them."""

    def __init__(self, inputs, outputs, time):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, inputs), nn.GroupNorm(32, outputs)
        self.conv1, self.conv2 = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time, self.dropout = nn.Linear(time, outputs), nn.Dropout(0.1)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x, time):
        hidden = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.shortcut(x) + self.conv2(self.dropout(F.silu(self.norm2(hidden))))


class PixelAttention(nn.Module):
    """Attention of one head between the pixels, with a connection around it."""

    def __init__(self, channels):
        super().__init__()
        self.norm = nn.GroupNorm(32, channels)
        self.q, self.k, self.v, self.out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x):
        normalised = self.norm(x)
        q, k, v = (part(normalised).flatten(2).transpose(1, 2)[:, None] for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y[:, 0].transpose(1, 2).reshape(x.shape))


class ResidualAndAttention(nn.Module):
    def __init__(self, inputs, outputs, time, attention):
        super().__init__()
        self.residual = Residual(inputs, outputs, time)
        self.attention = PixelAttention(outputs) if attention else nn.Identity()

    def forward(self, x, time):
        return self.attention(self.residual(x, time))


class Unet(nn.Module):
    """DDPM's, with half of its channels."""

    def __init__(self, width=64, levels=(1, 2, 2, 2), blocks=2):
        super().__init__()
        self.width, time = width, 4 * width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time), nn.SiLU())
        self.first = nn.Conv2d(3, width, 3, padding=1)
        channels, skips, self.down, self.up = width, [width], nn.ModuleList(), nn.ModuleList()
        for level, multiple in enumerate(levels):
            for _ in range(blocks):
                self.down.append(ResidualAndAttention(channels, multiple * width, time, level == 1))
                channels = multiple * width
                skips.append(channels)
            if level + 1 < len(levels):
                self.down.append(nn.Conv2d(channels, channels, 3, 2, 1))
                skips.append(channels)
        self.middle = nn.ModuleList(ResidualAndAttention(channels, channels, time, number == 0) for number in range(2))
        for level, multiple in reversed(list(enumerate(levels))):
            for _ in range(blocks + 1):
                self.up.append(ResidualAndAttention(channels + skips.pop(), multiple * width, time, level == 1))
                channels = multiple * width
            if level > 0:
                self.up.append(nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(channels, channels, 3, padding=1)))
        self.norm, self.last = nn.GroupNorm(32, channels), nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, images):
        half = self.width // 2
        times = torch.arange(len(images), device=images.device) * (1000 / len(images))
        rates = torch.exp(torch.arange(half, device=images.device) * (-math.log(1e4) / half))
        angles = times[:, None] * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1).to(images.dtype))
        x = self.first(images)
        skips = [x]
        for part in self.down:
            x = part(x, time) if isinstance(part, ResidualAndAttention) else part(x)
            skips.append(x)
        for part in self.middle:
            x = part(x, time)
        for part in self.up:
            x = part(torch.cat([x, skips.pop()], 1), time) if isinstance(part, ResidualAndAttention) else part(x)
        return self.last(F.silu(self.norm(x)))


class Gpt(nn.Module):
    def __init__(self, vocabulary=256, tokens=256, width=384, heads=6, layers=6):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.blocks = nn.Sequential(*(gpt.Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions)))


class CappedGpt(Gpt):
    """With capped logits. Muon updates the matrices of its blocks."""

    def __init__(self):
        super().__init__(vocabulary=4096, layers=3)

    def forward(self, x):
        return 15 * torch.tanh(super().forward(x) / 15)


class Optimizers:
    """Muon for the matrices of the blocks, and AdamW."""

    def __init__(self, model):
        is_muons = lambda name, parameter: ".blocks." in name and parameter.ndim == 2
        muons = [p for name, p in model.named_parameters() if is_muons(name, p)]
        others = [p for name, p in model.named_parameters() if not is_muons(name, p)]
        self.all = [torch.optim.Muon(muons, LEARNING_RATE), torch.optim.AdamW(others, LEARNING_RATE, fused=True)]

    def zero_grad(self):
        for optimizer in self.all:
            optimizer.zero_grad()

    def step(self):
        for optimizer in self.all:
            optimizer.step()


class WordLm(nn.Module):
    """That of pytorch/examples/word_language_model."""

    def __init__(self, vocabulary=10000, width=650):
        super().__init__()
        self.dropout = nn.Dropout(0.2)
        self.encoder, self.decoder = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.rnn = nn.LSTM(width, width, 2, dropout=0.2)

    def forward(self, x):
        return self.decoder(self.dropout(self.rnn(self.dropout(self.encoder(x)))[0]))


class EncoderBlock(nn.Module):
    """Attention and a network of two layers, with norms before them or after."""

    def __init__(self, width, heads, eps, norm_first):
        super().__init__()
        self.heads, self.norm_first = heads, norm_first
        self.norm1, self.norm2 = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x):
        samples, tokens, width = x.shape
        q, k, v = self.qkv(x).view(samples, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        return self.projection(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(samples, tokens, width))

    def network(self, x):
        return self.fc2(F.gelu(self.fc1(x)))

    def forward(self, x):
        if self.norm_first:
            x = x + self.attention(self.norm1(x))
            return x + self.network(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.network(x))


class Vit(nn.Module):
    """Of the size of ViT-S/16, with a mean over the tokens."""

    def __init__(self, width=384):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.positions = nn.Parameter(0.02 * torch.randn(14 * 14, width))
        self.blocks = nn.Sequential(*(EncoderBlock(width, 6, 1e-6, True) for _ in range(12)))
        self.norm, self.head = nn.LayerNorm(width, 1e-6), nn.Linear(width, 1000)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


class Bert(nn.Module):
    """Of the size of BERT-base, with a row of logits for each token."""

    def __init__(self, vocabulary, width=768):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Parameter(0.02 * torch.randn(512, width))
        self.norm = nn.LayerNorm(width, 1e-12)
        self.blocks = nn.Sequential(*(EncoderBlock(width, 12, 1e-12, False) for _ in range(12)))
        self.transform, self.transform_norm = nn.Linear(width, width), nn.LayerNorm(width, 1e-12)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x):
        x = self.blocks(self.norm(self.tokens(x) + self.positions))
        return self.head(self.transform_norm(F.gelu(self.transform(x))))


class WithLoss(nn.Module):
    """A model and its loss, which torch.compile then sees together."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, targets):
        return loss_of(self.model(x), targets)


# The function that builds a model, its batch size, and the function that makes its input.
MODELS = {
    "mlp": (mlp, 256, lambda batch: torch.randn(batch, 1024)),
    "resnet18": (resnet18, 32, lambda batch: torch.randn(batch, 3, 32, 32)),
    "resnet50": (resnet50, 32, lambda batch: torch.randn(batch, 3, 224, 224)),
    "deeplab": (DeepLab, 8, lambda batch: torch.randn(batch, 3, 64, 64)),
    "unet": (Unet, 8, lambda batch: torch.randn(batch, 3, 32, 32)),
    **{
        f"gpt-{layers}": (lambda layers=layers: Gpt(layers=layers), 8, lambda batch: torch.randint(256, (batch, 256)))
        for layers in [12, 24]
    },
    "gpt": (Gpt, 8, lambda batch: torch.randint(256, (batch, 256))),
    "gpt2": (lambda: Gpt(50257, 1024, 768, 12, 12), 8, lambda batch: torch.randint(50257, (batch, 1024))),
    # As its users pad the vocabulary, for faster products.
    "gpt2-padded": (lambda: Gpt(50304, 1024, 768, 12, 12), 8, lambda batch: torch.randint(50257, (batch, 1024))),
    "muon": (CappedGpt, 8, lambda batch: torch.randint(4096, (batch, 256))),
    "lstm": (WordLm, 20, lambda batch: torch.randint(10000, (35, batch))),
    "vit": (Vit, 32, lambda batch: torch.randn(batch, 3, 224, 224)),
    "bert": (lambda: Bert(30522), 8, lambda batch: torch.randint(30522, (batch, 512))),
    "bert-padded": (lambda: Bert(30528), 8, lambda batch: torch.randint(30522, (batch, 512))),
}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def now(wait=True):
    """Returns the time, after the GPU, if there is one, has completed all launches."""
    if wait and DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def loss_of(output, targets):
    """The loss that the bench takes: of tokens the cross entropy, as autocast would calculate it, and else the mean square."""
    if targets is None:
        return output.float().square().mean()
    return F.cross_entropy(output.flatten(0, 1).float(), targets)


def step(model, optimizer, x, targets, autocast, phases):
    """Returns the milliseconds of forward, backward and optimizer."""
    start = now()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        loss = model(x, targets)
    forward = now(phases)
    optimizer.zero_grad()
    loss.backward()
    backward = now(phases)
    optimizer.step()
    end = now()
    return [1e3 * (forward - start), 1e3 * (backward - forward), 1e3 * (end - backward)]


def wrapped(model, mode):
    """Returns the model as `mode` trains it, and its optimizer."""
    if mode.startswith("fsdp"):
        blocks = model.model.blocks
        for index, block in enumerate(blocks):
            blocks[index] = fully_shard(checkpoint_wrapper(block) if mode == "fsdp" else block, reshard_after_forward=mode == "fsdp")
        model = fully_shard(model, reshard_after_forward=False)
    elif mode != "local":
        model = DistributedDataParallel(model)
    if any(isinstance(module, CappedGpt) for module in model.modules()):
        return model, Optimizers(model)
    if mode == "zero":
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, fused=True)
    return model, torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=True)


def slowest(times):
    """Returns the times on the slowest rank."""
    times = torch.tensor(times, dtype=torch.float64, device=DEVICE)
    all_times = [torch.empty_like(times) for _ in range(dist.get_world_size())]
    dist.all_gather(all_times, times)
    return max((times.tolist() for times in all_times), key=sum)


def print_kernels(profiler, steps):
    """Prints the kernels, copies and memsets of a step, whose times are in us."""
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [(1e3 * event.time_range.start, 1e3 * event.time_range.end, event.name) for event in events]
    span = max((end for _, end, _ in kernels), default=0) - min((start for start, _, _ in kernels), default=0)
    gpu_trace.print_kernels(kernels, steps, span)


def main():
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    phases, is_profiled = "--no-phases" not in sys.argv, "--profile" in sys.argv
    arguments = [argument for argument in sys.argv if not argument.startswith("--")]
    name, steps = arguments[1], int(arguments[2])
    build, batch_size, data = MODELS[name]
    modes = arguments[3].split(",") if len(arguments) > 3 else ["local", "ddp"]
    dtype, *words = arguments[4].split("-") if len(arguments) > 4 else ["f32"]
    compile_mode = {"compile": "default", "autotune": "max-autotune-no-cudagraphs"}
    compile_mode = next((compile_mode[word] for word in words if word in compile_mode), None)
    channels_last, torch.backends.cudnn.benchmark = "channels_last" in words, "benchmark" in words
    memory_format = torch.channels_last if channels_last else torch.preserve_format
    autocast, tf32, dtype = dtype == "autocast", dtype == "tf32", dtype if dtype in DTYPES else "f32"
    # By default, candle-ddp does not round f32 to TF32, and PyTorch does in convolutions.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    batch_size = int(arguments[5]) if len(arguments) > 5 else batch_size
    x = data(batch_size).to(DEVICE)
    x = x.to(DTYPES[dtype], memory_format=memory_format) if x.is_floating_point() else x
    targets = None if x.is_floating_point() else x.roll(-1, 1).flatten()
    trainers = []
    for mode in modes:
        model = WithLoss(build()).to(DEVICE, DTYPES[dtype], memory_format=memory_format)
        if compile_mode:
            model.compile(mode=compile_mode)
        trainers.append(wrapped(model, mode))
    times = [[] for _ in modes]
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) if is_profiled else None
    for number in range(WARMUP + steps):
        if profiler and number == WARMUP:
            profiler.start()
        for turn in range(len(modes)):
            index = (turn + number) % len(modes)
            dist.barrier()
            elapsed = slowest(step(*trainers[index], x, targets, autocast, phases))
            if number >= WARMUP:
                times[index].append(elapsed)
    if profiler:
        now()
        profiler.stop()
        print_kernels(profiler, steps * len(modes))
    if dist.get_rank() == 0:
        for mode, (model, _), measured in zip(modes, trainers, times):
            forward, backward, optimizer = (statistics.median(part) for part in zip(*measured))
            row = {
                "model": name,
                "mode": mode,
                "dtype": dtype,
                "amp": "bf16" if autocast else None,
                "tf32": tf32,
                "channels_last": channels_last,
                "compile": compile_mode,
                "benchmark": torch.backends.cudnn.benchmark,
                "world_size": dist.get_world_size(),
                "batch_size": batch_size,
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


if __name__ == "__main__":
    main()
