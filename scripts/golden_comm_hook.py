#!/usr/bin/env python3
"""Writes tests/golden/comm_hook.safetensors: PyTorch's PowerSGD hook on two ranks over Gloo.

    pip install torch numpy safetensors
    python3 scripts/golden_comm_hook.py

tests/golden/README.md describes the content of the file.
"""

import math
import pathlib
import tempfile

import torch
import torch.distributed as dist
from safetensors.numpy import save_file
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

OUTPUT = pathlib.Path(__file__).parent.parent / "tests" / "golden" / "comm_hook.safetensors"

STEPS = 4
SEED = 3
# All shapes differ, because PyTorch processes the matrices grouped by shape.
SHAPES = {"wide": (6, 40), "bias": (6,), "conv": (16, 3, 3, 3), "small": (3, 4), "tall": (50, 7)}
CASES = {
    "rank_1": {"matrix_approximation_rank": 1},
    "rank_2": {"matrix_approximation_rank": 2, "min_compression_rate": 1.2},
    "no_feedback": {"matrix_approximation_rank": 1, "use_error_feedback": False},
    "cold_start": {"matrix_approximation_rank": 2, "warm_start": False},
    "epsilon": {"matrix_approximation_rank": 1, "orthogonalization_epsilon": 0.5},
}
MASK = (1 << 64) - 1


def factor(name, step, rank, columns):
    """Returns the crate's random initial factor of a matrix (`PowerSgd::random`) in PyTorch's layout: columns × rank."""
    state = 0xCBF29CE484222325
    for byte in name.encode():
        state = ((state ^ byte) * 0x100000001B3) & MASK
    state = (state + SEED + (step << 32)) & MASK

    def uniform():
        nonlocal state
        state = (state + 0x9E3779B97F4A7C15) & MASK
        word = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
        return ((word ^ (word >> 31)) >> 11) / (1 << 53)

    values = []
    for _ in range(rank * columns):
        radius = math.sqrt(-2 * math.log(1 - uniform()))
        values.append(radius * math.cos(math.tau * uniform()))
    return torch.tensor(values, dtype=torch.float64).reshape(rank, columns).t().float()


class Bucket:
    """The part of `dist.GradBucket`'s interface that the hook uses."""

    def __init__(self, gradients):
        self.flat = torch.cat([gradient.flatten() for gradient in gradients.values()])

    def buffer(self):
        return self.flat

    def gradients(self):
        parts = self.flat.split([math.prod(shape) for shape in SHAPES.values()])
        return [part.view(shape) for part, shape in zip(parts, SHAPES.values())]

    def index(self):
        return 0

    def is_last(self):
        return True


def gradients(rank, step):
    generator = torch.Generator().manual_seed(1 + 100 * rank + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def run(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    tensors = {}
    randn = torch.randn
    for case, options in CASES.items():
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, **options)
        state.iter = 2
        for step in range(STEPS):
            bucket = Bucket(gradients(rank, step))

            def compressed(shape):
                rows, columns = shape[0], math.prod(shape[1:])
                rank = min(rows, columns, state.matrix_approximation_rank)
                return powerSGD_hook._should_compress(rows, columns, rank, state.min_compression_rate)[0]

            names = iter([name for name, shape in SHAPES.items() if compressed(shape)])

            def drawn(batch, columns, rank, **_):
                assert batch == 1
                return factor(next(names), step, rank, columns)[None]

            torch.randn = drawn
            powerSGD_hook.powerSGD_hook(state, bucket).wait()
            torch.randn = randn
            for name, gradient in zip(SHAPES, bucket.gradients()):
                tensors[f"{case}.{step}.{name}"] = gradient.clone().numpy()
    if rank == 0:
        for source in range(2):
            for step in range(STEPS):
                for name, gradient in gradients(source, step).items():
                    tensors[f"gradient.{source}.{step}.{name}"] = gradient.numpy()
        save_file(tensors, OUTPUT)
        print(f"{OUTPUT}: {len(tensors)} tensors, PyTorch {torch.__version__}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, args=(f"{folder}/store",), nprocs=2)
