"""Training steps of PyTorch, alternating between a plain model and DistributedDataParallel over Gloo: the counterpart of
the bench `step`, with the same models, the same measurement and the same JSON output.

    torchrun --nproc-per-node 2 scripts/compare/step_pytorch.py MODEL STEPS [MODES [DTYPE [BATCH_SIZE]]] [--no-phases] [--wait-every=N] [--profile]

With CANDLE_DDP_DEVICE=cuda, each rank trains on its GPU, over NCCL. DTYPE is f32, tf32, bf16, or autocast: bf16 with parameters
in f32. Words may follow it, with "-" between them: "channels_last", the layout of images and convolutions; "compile", the model
goes through torch.compile; "autotune", the same in its mode max-autotune-no-cudagraphs; "benchmark", cuDNN measures its algorithms.
MODES, with "," between them: "local"; "ddp"; "zero", DistributedDataParallel with a ZeroRedundancyOptimizer; "fsdp", whose blocks are
sharded by fully_shard, and computed again in the backward pass; "fsdp-kept", whose parameters stay from forward to backward pass.

With --no-phases, a step waits for the GPU once; with --wait-every=N, N steps do. The loss is a part of the compiled model. With --profile, the kernels of the measured
steps are printed too; their times are then a little longer.
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
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import gpu_trace
import step_models

WARMUP = 2
LEARNING_RATE = 1e-5
DEVICE = os.environ.get("CANDLE_DDP_DEVICE", "cpu")


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


class WithLoss(nn.Module):
    """A model and its loss, which torch.compile then sees together."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, targets):
        return loss_of(self.model(x), targets)


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


def step(model, optimizer, x, targets, autocast, phases, waits):
    """Returns the milliseconds of forward, backward and optimizer, and those until the host has nothing left but to wait."""
    start = now(False)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        loss = model(x, targets)
    forward = now(phases)
    optimizer.zero_grad()
    loss.backward()
    backward = now(phases)
    optimizer.step()
    launched = now(False)
    end = now(waits)
    return [1e3 * (forward - start), 1e3 * (backward - forward), 1e3 * (end - backward), 1e3 * (launched - start)]


def steps_of(count, phases, *arguments):
    """Returns the means of `count` steps, after the last of which it waits for the GPU."""
    now()
    measured = [step(*arguments, phases, number == count - 1) for number in range(count)]
    return [sum(part) / count for part in zip(*measured)]


def wrapped(model, mode):
    """Returns the model as `mode` trains it, and its optimizer."""
    if mode.startswith("fsdp"):
        blocks = model.model.blocks
        for index, block in enumerate(blocks):
            blocks[index] = fully_shard(checkpoint_wrapper(block) if mode == "fsdp" else block, reshard_after_forward=mode == "fsdp")
        model = fully_shard(model, reshard_after_forward=False)
    elif mode != "local":
        model = DistributedDataParallel(model)
    if any(isinstance(module, step_models.CappedGpt) for module in model.modules()):
        return model, Optimizers(model)
    if mode == "zero":
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, fused=True)
    return model, torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=True)


def slowest(times):
    """Returns the times on the slowest rank."""
    times = torch.tensor(times, dtype=torch.float64, device=DEVICE)
    all_times = [torch.empty_like(times) for _ in range(dist.get_world_size())]
    dist.all_gather(all_times, times)
    return max((times.tolist() for times in all_times), key=lambda times: sum(times[:3]))


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
    wait_every = next((int(word.split("=")[1]) for word in sys.argv if word.startswith("--wait-every=")), 1)
    phases, is_profiled = "--no-phases" not in sys.argv and wait_every == 1, "--profile" in sys.argv
    arguments = [argument for argument in sys.argv if not argument.startswith("--")]
    name, steps = arguments[1], int(arguments[2])
    build, batch_size, data = step_models.MODELS[name]
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
            elapsed = slowest(steps_of(wait_every, phases, *trainers[index], x, targets, autocast))
            if number >= WARMUP:
                times[index].append(elapsed)
    if profiler:
        now()
        profiler.stop()
        print_kernels(profiler, steps * wait_every * len(modes))
    if dist.get_rank() == 0:
        for mode, (model, _), measured in zip(modes, trainers, times):
            forward, backward, optimizer, host = (statistics.median(part) for part in zip(*measured))
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
                "wait_every": wait_every,
                "step_ms": statistics.median(sum(times[:3]) for times in measured),
                "forward_ms": forward,
                "backward_ms": backward,
                "optimizer_ms": optimizer,
                "host_ms": None if phases else host,
                "peak_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            }
            print(json.dumps(row), flush=True)
    dist.barrier()
    # Some versions of PyTorch take long to exit, or fail to.
    os._exit(0)


if __name__ == "__main__":
    main()
