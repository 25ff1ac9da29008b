"""Compares the images per second that are read from a folder, with candle-ddp and with PyTorch's DataLoader and torchvision, and
how long the training of small convnets on them waits for data.

    python3 scripts/compare_images.py

JPEG files of 500 × 400 pixels, RandomResizedCrop(224), flip and normalisation, with two worker threads here and two worker
processes in PyTorch, in alternating runs. Training has one thread. The files are made anew, and stay in the system's cache.
Results are written to benches/results/images.md. The environment variable CANDLE_DDP_PYTHON names the Python interpreter with torch, torchvision and
Pillow (default: python3).
"""

import argparse
import datetime
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

from compare import harness
from compare.harness import say, spread

PEER = Path(__file__).resolve().parent / "compare" / "images_pytorch.py"
OURS, PYTORCH = "candle-ddp", "PyTorch, torchvision"


def main():
    options = parse()
    bench = ["cargo", "bench", "--quiet", "--bench", "images"]
    subprocess.run([*bench, "--no-run"], cwd=harness.ROOT, check=True)
    speeds, times, steps = {OURS: [], PYTORCH: []}, {OURS: [], PYTORCH: []}, []
    trained = {(channels, name): [] for channels in options.channels for name in (OURS, PYTORCH)}
    with tempfile.TemporaryDirectory() as folder:
        say(f"making {options.images} images")
        [made] = output([harness.PYTHON, PEER, "make", folder, options.images])
        numbers = [options.workers, options.batch_size, options.epochs]
        arguments = zip(["--workers", "--batch-size", "--epochs"], numbers)
        commands = {
            OURS: [*bench, "--", "--folder", folder, *(word for pair in arguments for word in pair)],
            PYTORCH: [harness.PYTHON, PEER, "read", folder, *numbers],
        }
        load = os.getloadavg()[0]
        for number in range(1, options.rounds + 1):
            for name, command in commands.items():
                rows = output(command)
                epochs = [row for row in rows if "epoch" in row]
                speeds[name].append(statistics.median(row["images_per_second"] for row in epochs))
                times[name].append(statistics.median(row["cpu_ms"] for row in epochs))
                steps += [row["step_ms"] for row in rows if "step_ms" in row]
                say(f"round {number} of {options.rounds}: {name}: {speeds[name][-1]:.0f} images per second")
        for number, channels in ((number, channels) for number in range(options.rounds) for channels in options.channels):
            training = {
                OURS: ["env", "RAYON_NUM_THREADS=1", *commands[OURS], "--train", channels],
                PYTORCH: [harness.PYTHON, PEER, "train", folder, *numbers, channels],
            }
            for name, command in training.items():
                epochs = [row for row in output(command) if "waiting" in row]
                fields = ["images_per_second", "waiting", "waiting_later"]
                row = {field: statistics.median(epoch[field] for epoch in epochs) for field in fields}
                trained[channels, name].append(row)
                say(f"training {number + 1} of {options.rounds}, {channels} channels: {name}: {row}")
    lines = document(options, speeds, times, steps, made["mean_bytes"], load) + waiting(options, trained)
    harness.write(options.output / "images.md", lines)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1000, help="how many files [1000]")
    parser.add_argument("--workers", type=int, default=2, help="threads here, processes there [2]")
    parser.add_argument("--batch-size", type=int, default=64, help="[64]")
    parser.add_argument("--epochs", type=int, default=3, help="measured epochs of a run [3]")
    parser.add_argument("--rounds", type=int, default=5, help="alternating runs of both [5]")
    parser.add_argument(
        "--channels", type=int, nargs="*", default=[4, 8, 16], help="of the first layer of each net that is trained [4 8 16]"
    )
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="the date in the table [today]")
    parser.add_argument("--output", type=Path, default=harness.ROOT / "benches" / "results", help="the folder")
    return parser.parse_args()


def output(command):
    """Returns the rows that a command prints."""
    text = subprocess.run([*map(str, command)], cwd=harness.ROOT, check=True, capture_output=True, text=True).stdout
    return harness.json_lines(text)


def waiting(options, trained):
    """Returns the section on training."""
    if not trained:
        return []

    def cells(runs):
        share = lambda field: spread([100 * run[field] for run in runs], '.1f')
        return f"{spread([run['images_per_second'] for run in runs], '.0f')} | {share('waiting_later')} | {share('waiting')}"

    return [
        "",
        "## Training that waits for data",
        "",
        "A convnet is trained on these batches by SGD, on one thread, while the workers read: four convolutions of 3 × 3 with a "
        "stride of 2 and ReLU, each with twice as many channels as the one before, the mean over all places, and a linear layer. "
        "The share of an epoch's time that the training thread waits for the next batch: without and with the wait for the epoch's "
        "first batch, which no loader can avoid.",
        "",
        "| channels of the first layer | | images per second | waiting, % | with the first batch, % |",
        "|---:|---|---:|---:|---:|",
        *(f"| {channels} | {name} | {cells(runs)} |" for (channels, name), runs in trained.items()),
    ]


def document(options, speeds, times, steps, mean_bytes, load):
    packages = "import torch, torchvision, PIL; print(torch.__version__, torchvision.__version__, PIL.__version__)"
    versions = subprocess.run([harness.PYTHON, "-c", packages], check=True, capture_output=True, text=True).stdout.split()
    faster = [ours / peer for ours, peer in zip(speeds[OURS], speeds[PYTORCH])]
    less = [peer / ours for ours, peer in zip(times[OURS], times[PYTORCH])]
    step = lambda name: f"{statistics.median(row[name] for row in steps):.2f}"
    names = ["decode", "crop", "flip", "normalize"]
    return [
        f"# Images per second from a folder, {options.workers} workers",
        "",
        f"{options.images} JPEG files of 500 × 400 pixels (4:2:0, {mean_bytes / 1024:.0f} KiB each, in the system's cache), "
        f"RandomResizedCrop(224), RandomHorizontalFlip and normalisation, batches of {options.batch_size}. Ours: "
        f"{options.workers} threads. PyTorch: `DataLoader` with {options.workers} processes and torchvision's `ImageFolder`. "
        f"Each number is the median over {options.rounds} alternating runs of a run's median of {options.epochs} epochs, after one "
        "to warm up, with the lowest and highest run in brackets. The processor time is the sum over all threads and processes; other "
        "load on the machine hardly changes it.",
        "",
        f"- Date: {options.date}",
        f"- Machine: {harness.machine()}; load when the runs began: {load:.1f}",
        f"- Ours: {harness.toolchain()}",
        f"- PyTorch: {versions[0]}, torchvision {versions[1]}, Pillow {versions[2]}",
        f"- Command: `python3 scripts/compare_images.py --workers {options.workers} --rounds {options.rounds} --channels "
        f"{' '.join(map(str, options.channels))}`",
        "",
        "| | images per second | processor time per image, ms |",
        "|---|---:|---:|",
        *(f"| {name} | {spread(speeds[name], '.0f')} | {spread(times[name], '.2f')} |" for name in speeds),
        f"| times better | {spread(faster, '.2f')} | {spread(less, '.2f')} |",
        "",
        "The time of each of our steps for one image, in ms on one thread; decoding includes reading the file:",
        "",
        "| decode | crop and resize | flip | normalise, to a tensor |",
        "|---:|---:|---:|---:|",
        f"| {' | '.join(map(step, names))} |",
    ]


if __name__ == "__main__":
    main()
