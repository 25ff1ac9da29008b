"""Trains the example diloco on two hosts with a slow link: DDP, its hooks, DiLoCo, and DiLoCo in fragments.

    python3 scripts/compare_diloco.py --links 100 1000

Needs root, iproute2 and util-linux. Step times are measured at each number of Mbit/s and without a limit, in runs that take turns; losses
after the same tokens with several seeds, without a limit, since they do not depend on it. The result is benches/results/diloco.md.
"""

import argparse
import datetime
import re
import statistics
from pathlib import Path

from compare import harness
from compare.harness import say, spread

SYSTEMS = {
    "DDP": [],
    "Bf16Compress": ["--comm-hook", "bf16"],
    "PowerSgd": ["--comm-hook", "power-sgd"],
    "DiLoCo": ["--period", "50"],
    "in 5 fragments": ["--period", "50", "--fragments", "5", "--delay", "5", "--alpha", "0.5"],
}
# The systems whose losses are compared: DiLoCo also of a model that DDP has begun to train.
BEGUN = {f"{name}, after 250 steps of DDP": [*SYSTEMS[name], "--warmup", "250"] for name in ("DiLoCo", "in 5 fragments")}
LOSSES = SYSTEMS | BEGUN


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", type=int, default=[100, 1000], metavar="MBIT/S", help="[100 and 1000]")
    parser.add_argument("--steps", type=int, default=501, help="of the runs whose loss counts [501]")
    parser.add_argument("--timed-steps", type=int, default=100, help="of the runs whose time counts, of which the first 50 are not timed [100]")
    parser.add_argument("--rounds", type=int, default=3, help="alternating runs of everything [3]")
    parser.add_argument("--seeds", type=int, default=2, help="[2]")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="the date in the table [today]")
    options = parser.parse_args()
    program = harness.build("--example", "diloco") / "examples" / "diloco"

    def run(hosts, name, steps, seed=0):
        """Returns the milliseconds of a step, and the loss."""
        output = harness.run_ranks([program, "--steps", steps, "--seed", seed, *LOSSES[name]], 2, hosts)
        say(f"{name}, {steps} steps, seed {seed}: {output.strip()}")
        return [float(number) for number in re.search(r"([\d.]+) ms per step, validation loss ([\d.]+)", output).groups()]

    times = {}
    for rate in [*options.links, None]:
        with harness.TwoHosts() as hosts:
            if rate:
                hosts.limit(rate * 1e6 / 8)
            for _ in range(options.rounds):
                for name in SYSTEMS:
                    times.setdefault((rate, name), []).append(run(hosts, name, options.timed_steps)[0])
    with harness.OneHost() as host:
        losses = {name: [run(host, name, options.steps, seed)[1] for seed in range(options.seeds)] for name in LOSSES}

    links = " ".join(map(str, options.links))
    lines = [
        "# DiLoCo on slow links, 2 ranks on two hosts",
        "",
        "The example [`diloco`](../../examples/diloco/main.rs): a GPT of 4 layers of width 128 on this repository's pages, 16 pieces of 128 "
        "characters per rank and step, AdamW with a cosine schedule, one thread per rank. DiLoCo averages parameters every 50 steps, with the "
        "paper's outer step (rate 0.7, Nesterov's momentum 0.9); in 5 fragments, the next one is sent every 10 steps, travels during 5 more, "
        "and is averaged with the local parameters (`alpha` 0.5). Two network namespaces are joined by a veth pair whose rate is limited (tc tbf).",
        "",
        f"- Date: {options.date}",
        f"- Machine: {harness.machine()}",
        f"- Ours: {harness.toolchain()}",
        f"- Command: `python3 scripts/compare_diloco.py --links {links} --rounds {options.rounds}`",
        "",
        f"Milliseconds of a step, as the mean of steps 51 to {options.timed_steps}: the median of {options.rounds} runs, with the lowest and the highest "
        "in brackets. The last row has no limit.",
        "",
        f"| Mbit/s | {' | '.join(SYSTEMS)} |",
        "|---|" + "---:|" * len(SYSTEMS),
    ]
    for rate in [*options.links, None]:
        lines.append(f"| {rate or '–'} | {' | '.join(spread(times[rate, name], '.0f') for name in SYSTEMS)} |")
    lines += [
        "",
        f"Loss per character of text that was not trained on, after {options.steps} steps, with {options.seeds} seeds; for DiLoCo it is the mean of "
        "the losses of the two ranks.",
        "",
        f"| seed | {' | '.join(LOSSES)} |",
        "|---|" + "---:|" * len(LOSSES),
    ]
    for seed in range(options.seeds):
        lines.append(f"| {seed} | {' | '.join(f'{losses[name][seed]:.4f}' for name in LOSSES)} |")
    means = (f"{statistics.mean(losses[name]):.4f}" for name in LOSSES)
    lines.append(f"| mean | {' | '.join(means)} |")
    harness.write(Path(harness.ROOT) / "benches" / "results" / "diloco.md", lines)


main()
