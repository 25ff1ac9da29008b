"""Trains the same models with candle-ddp and with PyTorch's DDP over Gloo, on two ranks, and compares them.

    python3 scripts/compare_training.py
    python3 scripts/compare_training.py --check

Both start from the same weights and see the same samples in the same order. Either command fails unless the losses of the
first 50 steps agree to 1e-3, with separate settings. The first then measures how long each takes to reach a loss, in alternating
runs, and writes the table to benches/results/; this takes about 8 minutes on 2 cores, without the builds. The environment variable
CANDLE_DDP_PYTHON names a Python interpreter with torch, numpy and safetensors (default: python3).
"""

import argparse
import datetime
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from compare import harness
from compare.harness import say, spread

PEERS = Path(__file__).resolve().parent / "compare"
SYSTEMS = ["candle-ddp", "PyTorch, Gloo"]
TOLERANCE = 1e-3
CHECKED_STEPS = 50
# The loss of a step is noisy: a target is reached by the mean of this many steps.
MEAN_OF = 10


@dataclass
class Program:
    """An example and its counterpart scripts/compare/NAME_pytorch.py, which have the same options."""

    title: str
    # Options of both; True is a flag.
    settings: dict
    # Options of the example alone.
    ours: dict
    # Options of both that replace these in the check of the first losses.
    check: dict
    # The data for both, or for the counterpart alone if the example makes them itself: their path, given the cache's.
    data: Callable[[Path], Path]
    example_makes_data: bool
    # The training loss to reach.
    target: float
    # The example, if it has another name.
    example: str | None = None


GPT = {"steps": 130, "batch-size": 16, "lr": 0.002, "warmup": 20, "context": 128, "width": 128, "heads": 4, "layers": 4}
PROGRAMS = {
    "char_gpt": Program(
        title="GPT, 4 layers of width 128, 128 characters, batch 16 on each rank, AdamW",
        settings=GPT,
        # PyTorch's counterpart does not shard the optimizer state either.
        ours={"zero": "false"},
        check={"steps": CHECKED_STEPS, "layers": 2},
        data=lambda _: harness.ROOT / "docs",
        example_makes_data=False,
        target=2.9,
    ),
    "char_gpt_sharded": Program(
        title="The same, with blocks that are spread over the ranks; in PyTorch fully_shard with activation checkpointing",
        settings=GPT | {"shard": True},
        ours={},
        check={"steps": CHECKED_STEPS, "layers": 2},
        data=lambda _: harness.ROOT / "docs",
        example_makes_data=False,
        target=2.9,
        example="char_gpt",
    ),
    "cifar10_resnet18": Program(
        title="ResNet-18, 1498 digits in CIFAR-10's format without augmentation, batch 28 on each rank, SGD with momentum",
        settings={"epochs": 2, "batch-size": 28, "lr": 0.01, "width": 64},
        # As many threads as PyTorch's counterpart has.
        ours={"augment": "false", "workers": 0},
        # In f32, rounding alone makes more of a difference: PyTorch's losses differ by up to 10 % in the first 50 steps from its own
        # with initial weights that are changed by half a unit in their last place.
        check={"width": 16, "dtype": "f64"},
        data=lambda cache: next((cache / "candle-ddp").glob("digits-cifar10-*")),
        example_makes_data=True,
        target=0.5,
    ),
}


def main():
    options = parse()
    folder = harness.build(*(word for name in options.programs for word in ("--example", example(name))))
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.programs:
            difference = check(name, folder, Path(scratch))
            times = [] if options.check else measure(name, options.rounds, folder, Path(scratch))
            results[name] = (difference, times)
    if not options.check:
        harness.write(options.output / "training.md", document(options, results))


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare the losses of the first steps only")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--rounds", type=int, default=3, help="alternating runs of both [3]")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="the date in the table [today]")
    parser.add_argument("--output", type=Path, default=harness.ROOT / "benches" / "results", help="the folder")
    return parser.parse_args()


def check(name, folder, scratch):
    """Returns the largest difference of the losses of the first steps. Fails if it is too large."""
    program = PROGRAMS[name]
    settings = program.settings | program.check
    say(f"{name}: the first {CHECKED_STEPS} steps with {settings}")
    return compare(name, *(run(name, settings, folder, scratch) for run in (ours, pytorch)))


def measure(name, rounds, folder, scratch):
    """Returns for each round the times of both systems to the target."""
    program, times = PROGRAMS[name], []
    for number in range(1, rounds + 1):
        times.append([])
        for system, run in zip(SYSTEMS, (ours, pytorch)):
            times[-1].append(time_to(run(name, program.settings, folder, scratch), program.target))
            seconds, steps, _ = times[-1][-1]
            say(f"{name}, round {number} of {rounds}: {system}: {seconds:.1f} s, {steps} steps")
    return times


def example(name):
    return PROGRAMS[name].example or name


def ours(name, settings, folder, scratch):
    """Runs the example, which also writes its initial weights, and returns its metrics by step."""
    program = PROGRAMS[name]
    settings = settings | program.ours | {"export-init": scratch / f"{name}.safetensors"}
    if not program.example_makes_data:
        settings["data"] = program.data(scratch)
    return run([folder / "examples" / example(name)], settings, scratch)


def pytorch(name, settings, _, scratch):
    settings = settings | {"init": scratch / f"{name}.safetensors", "data": PROGRAMS[name].data(scratch)}
    return run([harness.PYTHON, PEERS / f"{example(name)}_pytorch.py"], settings, scratch)


def run(command, settings, scratch):
    settings = settings | {"metrics": scratch / "metrics.jsonl"}
    words = lambda key, value: [f"--{key}"] if value is True else [f"--{key}", value]
    command = [*command, *(word for key, value in settings.items() for word in words(key, value))]
    harness.run_ranks(command, 2, harness.OneHost(), {"XDG_CACHE_HOME": scratch})
    return [row for row in harness.json_lines(settings["metrics"].read_text()) if "loss" in row]


def compare(name, ours, pytorch):
    """Returns the largest difference of the losses of the first steps. Fails unless they agree."""
    pairs = [(a["step"], a["loss"], b["loss"]) for a, b in zip(ours, pytorch, strict=True)][:CHECKED_STEPS]
    differences = {step: abs(a - b) / b for step, a, b in pairs}
    say("step, loss of candle-ddp, loss of PyTorch, relative difference")
    for step, a, b in pairs:
        if step in (1, 2, 5) or step % 10 == 0:
            say(f"{step:>4} {a:.6f} {b:.6f} {differences[step]:.1e}")
    worst = max(differences, key=differences.get)
    say(f"the largest difference in {len(pairs)} steps: {differences[worst]:.1e}, in step {worst}")
    if len(pairs) < CHECKED_STEPS or differences[worst] > TOLERANCE:
        sys.exit(f"{name}: the losses do not agree to {TOLERANCE:g} in {CHECKED_STEPS} steps")
    return differences[worst]


def time_to(rows, target):
    """Returns the seconds to the target, its step, and the seconds per step."""
    losses = [row["loss"] for row in rows]
    for step in range(MEAN_OF, len(losses) + 1):
        if statistics.mean(losses[step - MEAN_OF : step]) <= target:
            return rows[step - 1]["seconds"], step, rows[step - 1]["seconds"] / step
    raise RuntimeError(f"the loss {target} is not reached in {len(losses)} steps; the last was {losses[-1]}")


def document(options, results):
    lines = [
        "# Time to a loss, with PyTorch's DDP next to it, 2 ranks on one machine",
        "",
        "Both start from the same weights and see the same samples in the same order; one thread per rank. The time is from the "
        f"first step to the one in which the mean training loss of {MEAN_OF} steps reaches the target. Medians of {options.rounds} "
        "alternating runs, with the lowest and highest in brackets.",
        "",
        f"- Date: {options.date}",
        f"- Machine: {harness.machine()}",
        f"- Ours: {harness.toolchain()}",
        f"- PyTorch: {harness.pytorch_version()}",
        f"- Command: `python3 scripts/compare_training.py --programs {' '.join(options.programs)} --rounds {options.rounds}`",
    ]
    for name, (difference, rounds) in results.items():
        program = PROGRAMS[name]
        lines += ["", f"## {name}", "", f"{program.title}; to a loss of {program.target:g}.", ""]
        lines += ["| | seconds | steps | ms per step |", "|---|---:|---:|---:|"]
        for system, runs in zip(SYSTEMS, zip(*rounds)):
            seconds, steps, per_step = zip(*runs)
            cells = [spread(seconds, ".1f"), spread(steps, ".0f"), spread([1e3 * second for second in per_step], ".1f")]
            lines.append(f"| {system} | {' | '.join(cells)} |")
        ratios = [ours[0] / pytorch[0] for ours, pytorch in rounds]
        lines += [
            "",
            f"candle-ddp takes {spread(ratios, '.2f')} of PyTorch's time. With {changed(program)}, the losses of the first "
            f"{CHECKED_STEPS} steps differ by at most {difference:.0e} of them.",
        ]
    return lines


def changed(program):
    """The settings of the check, in place of the timed runs' settings."""
    return ", ".join(f"`--{key} {value}`" for key, value in program.check.items())


main()
