#!/usr/bin/env python3
"""Trains for a long time with checkpoints, and looks at the memory and the descriptors of the ranks.

    scripts/soak_training.py --seconds 3600

It runs the example `cifar10_resnet18` on 2 ranks, which saves a checkpoint after every epoch and keeps the newest ones, and
reads from /proc what each rank uses. What they use in the second half of the time must not be more than a
tenth above the first half, and the same holds for the folder of checkpoints. It prints the table of benches/results/soak.md.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from compare import harness

GROWTH = 0.1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600, help="how long to train [3600]")
    parser.add_argument("--ranks", type=int, default=2, help="the number of ranks [2]")
    parser.add_argument("--width", type=int, default=8, help="the channels of the network's first stage [8]")
    parser.add_argument("--binaries", type=Path, help="a folder such as target/debug, whose programs are taken [built in release]")
    options = parser.parse_args()
    folder = options.binaries or harness.build("--example", "cifar10_resnet18", "--bin", "ddprun")
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(train(options, folder, Path(temporary)))


def train(options, folder, temporary):
    checkpoints, metrics = temporary / "checkpoints", temporary / "metrics"
    command = [folder / "ddprun", "--standalone", "--nproc-per-node", options.ranks, folder / "examples" / "cifar10_resnet18"]
    command += ["--epochs", 1_000_000, "--width", options.width, "--checkpoints", checkpoints, "--metrics", metrics]
    command = [str(word) for word in command]
    with open(temporary / "output", "w") as output:
        run = subprocess.Popen(command, stdout=output, stderr=output)
    samples, start = [], time.monotonic()
    print("| seconds | epochs | largest rank, MiB | descriptors | threads | checkpoints, MiB |\n|---|---|---|---|---|---|")
    try:
        while time.monotonic() - start < options.seconds:
            # The most that is used in every tenth of the time.
            tenth = options.seconds / 10
            end = start + tenth * (len(samples) + 1)
            most = [0] * 4
            while time.monotonic() < end:
                time.sleep(min(1, tenth / 20))
                if run.poll() is not None:
                    print((temporary / "output").read_text(), file=sys.stderr)
                    return f"the training ended with code {run.returncode}"
                seen = look(run.pid, checkpoints)
                most = [max(old, new) for old, new in zip(most, seen)]
            samples.append(most)
            epochs = sum('"epoch"' in line for line in metrics.open()) if metrics.exists() else 0
            memory, descriptors, threads, disk = most
            cells = [f"{time.monotonic() - start:.0f}", epochs, f"{memory:.1f}", descriptors, threads, f"{disk:.1f}"]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    finally:
        run.terminate()
        run.wait()
    half = len(samples) // 2
    names = ["memory", "descriptors", "threads", "checkpoints"]
    pairs = zip(names, map(max, zip(*samples[:half])), map(max, zip(*samples[half:])))
    grown = [f"{name} from {was} to {now}" for name, was, now in pairs if now > was * (1 + GROWTH)]
    if not epochs:
        grown.append("no epoch was finished")
    return "; ".join(grown) and "it grew: " + "; ".join(grown)


def look(ddprun, checkpoints):
    """Returns the most that a rank uses: MiB, descriptors, threads; and the MiB of checkpoints."""
    memory = descriptors = threads = 0
    children = [file.read_text().split() for file in Path(f"/proc/{ddprun}/task").glob("*/children")]
    for child in sum(children, []):
        process = Path("/proc") / child
        try:
            status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines() if ":" in line)
            memory = max(memory, int(status["VmRSS"].split()[0]) / 1024)
            descriptors = max(descriptors, len(list((process / "fd").iterdir())))
            threads = max(threads, int(status["Threads"]))
        except (OSError, KeyError):
            pass  # it has ended
    disk = 0
    for file in checkpoints.rglob("*"):
        try:
            disk += file.stat().st_size / (1 << 20)
        except OSError:
            pass  # it was removed
    return memory, descriptors, threads, disk


if __name__ == "__main__":
    main()
