#!/usr/bin/env python3
"""Trains a model under a memory limit with plain DDP, which is killed, and with sharded blocks, which is not (root).

    scripts/memory_limit.py

It runs the example `char_gpt` on 2 ranks in a cgroup, whose limit counts for all ranks together: first without sharding, then with it,
with the same arguments otherwise. For each it prints how the run ended, and the most memory that the cgroup had; then the table of
benches/results/training.md. It needs cgroup v2 or v1 with the memory controller.

The text is short: a sharded model is gathered once for each batch of the validation, whose batches have one window.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from compare import harness


class Group:
    """A cgroup with a limit of memory, without swap."""

    def __init__(self, limit):
        root = Path("/sys/fs/cgroup")
        self.is_v2 = (root / "cgroup.controllers").exists()
        self.path = (root if self.is_v2 else root / "memory") / f"candle-ddp-{os.getpid()}"
        self.path.mkdir()
        if self.is_v2:
            self.write("memory.max", limit)
            self.write("memory.swap.max", 0)
            self.write("memory.oom.group", 1)
        else:
            self.write("memory.limit_in_bytes", limit)

    def write(self, name, value):
        (self.path / name).write_text(f"{value}\n")

    def enter(self):
        self.write("cgroup.procs", os.getpid())

    def read(self, name):
        return int((self.path / name).read_text())

    def peak(self):
        return self.read("memory.peak" if self.is_v2 else "memory.max_usage_in_bytes")

    def kills(self):
        name = "memory.events" if self.is_v2 else "memory.oom_control"
        lines = (line.split() for line in (self.path / name).read_text().splitlines())
        return next((int(count) for key, count in lines if key == "oom_kill"), 0)

    def close(self):
        # A killed process is there until its memory is free.
        for _ in range(100):
            try:
                return self.path.rmdir()
            except OSError:
                time.sleep(0.1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-mib", type=int, default=2560, help="the limit for all ranks together [2560]")
    parser.add_argument("--ranks", type=int, default=2, help="the number of ranks [2]")
    parser.add_argument("--layers", type=int, default=8, help="the blocks of the model [8]")
    parser.add_argument("--width", type=int, default=1024, help="the length of the model's vectors [1024]")
    parser.add_argument("--steps", type=int, default=5, help="the steps of training [5]")
    parser.add_argument("--binaries", type=Path, help="a folder such as target/debug, whose programs are taken [built in release]")
    options = parser.parse_args()
    folder = options.binaries or harness.build("--example", "char_gpt", "--bin", "ddprun")
    rows = []
    for name, arguments in [("DDP, AdamW", ["--zero", "false"]), ("DDP, ZeRO-2", []), ("sharded blocks", ["--shard"])]:
        rows.append((name, *train(options, folder, arguments)))
    said = f"{options.layers} blocks of width {options.width}, {options.ranks} ranks, {options.limit_mib} MiB for all of them"
    print(f"\n{said}:\n\n| | ended | seconds | most memory, MiB | ranks killed |\n|---|---|---:|---:|---:|")
    for name, ended, seconds, peak, kills in rows:
        print(f"| {name} | {ended} | {seconds:.0f} | {peak} | {kills} |")
    (*_, killed), (_, ended, *_, left) = rows[0], rows[-1]
    is_right = killed > 0 and ended == "code 0" and left == 0
    sys.exit(0 if is_right else "the limit must kill the plain run, and leave the sharded one alone")


def train(options, folder, arguments):
    group = Group(options.limit_mib << 20)
    text = tempfile.NamedTemporaryFile("w", suffix=".txt")
    text.write("Each rank has its part of every parameter. " * 50)
    text.flush()
    command = [folder / "ddprun", "--standalone", "--nproc-per-node", options.ranks, folder / "examples" / "char_gpt"]
    command += ["--steps", options.steps, "--layers", options.layers, "--width", options.width, "--heads", 16]
    command += ["--context", 32, "--batch-size", 1, "--data", text.name, *arguments]
    command = [str(word) for word in command]
    print("$ " + " ".join(command), flush=True)
    try:
        start = time.monotonic()
        with text, tempfile.TemporaryFile("w+") as output:
            run = subprocess.run(command, stdout=output, stderr=output, preexec_fn=group.enter, timeout=harness.TIMEOUT)
            seconds = time.monotonic() - start
            output.seek(0)
            print(output.read()[-1500:], flush=True)
        ended = f"code {run.returncode}" if run.returncode >= 0 else signal.Signals(-run.returncode).name
        return ended, seconds, group.peak() >> 20, group.kills()
    finally:
        group.close()


if __name__ == "__main__":
    main()
