#!/usr/bin/env python3
"""Compares an AdamW step on 6.3 million f32 parameters, on one thread, with PyTorch's, in alternating runs.

    pip install torch
    cargo build --release --bench optimizer     # or: cargo bench --no-run --bench optimizer
    python3 scripts/bench_optim.py target/release/deps/optimizer-* [--runs 5] [--rounds 30]

Each run is a separate process; the script prints medians of the runs' medians.
"""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import time


def pytorch(rounds):
    """Returns PyTorch's median AdamW step in milliseconds: fused, and the default on a CPU."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    candidates = {}
    for name, fused in [("PyTorch fused", True), ("PyTorch for-each", False)]:
        layers = [torch.nn.Linear(1024, 1024) for _ in range(6)]
        parameters = [parameter for layer in layers for parameter in layer.parameters()]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter) * 1e-3
        options = {"fused": True} if fused else {"foreach": True}
        candidates[name] = (torch.optim.AdamW(parameters, lr=1e-5, **options), [])
        candidates[name][0].step()
    for _ in range(rounds):
        for optimizer, times in candidates.values():
            start = time.perf_counter()
            optimizer.step()
            times.append((time.perf_counter() - start) * 1e3)
    for name, (_, times) in candidates.items():
        print(f"{name}: {statistics.median(times):.2f} ms")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", nargs="?", type=pathlib.Path, help="path of the bench's binary")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--pytorch", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.pytorch:
        return pytorch(arguments.rounds)
    if arguments.bench is None:
        parser.error("give the path of the bench's binary")
    rounds = str(arguments.rounds)
    commands = [[str(arguments.bench), "--bench", "--rounds", rounds],
                [sys.executable, __file__, "--pytorch", "--rounds", rounds]]
    environment = os.environ | {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    medians = {}
    for run in range(arguments.runs):
        for command in commands if run % 2 == 0 else commands[::-1]:
            output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
            for line in output.splitlines():
                name, value = line.removesuffix(" ms").split(": ")
                medians.setdefault(name, []).append(float(value))
    print("| step | median of runs, ms | all runs, ms |\n|---|---|---|")
    for name, values in medians.items():
        print(f"| {name} | {statistics.median(values):.2f} | {', '.join(f'{value:.2f}' for value in values)} |")


if __name__ == "__main__":
    main()
