"""Compares the all-reduce of the CPU engine with default and other settings (environment variables) in alternating runs.

    python3 scripts/compare_settings.py --hosts 2 --set CANDLE_DDP_CPU_TRANSPORT=tcp
    python3 scripts/compare_settings.py --set CANDLE_DDP_CPU_SEGMENT_BYTES=131072 --set CANDLE_DDP_CPU_SEGMENT_BYTES=524288

The first command compares the hierarchical engine with TCP between all ranks, on two hosts, which are network namespaces
joined by a veth pair; this needs root. The second command is how the sizes in crates/candle-ddp-engine/src/algorithm/mod.rs are tuned.
The table is written to standard output.
"""

import argparse
import datetime
import shlex
import statistics
import sys
import tempfile
from pathlib import Path

from compare import harness
from compare.harness import say

KIB, MIB = 1 << 10, 1 << 20
DEFAULT = "default"


def main():
    options = parse()
    settings = {DEFAULT: {}} | {text: dict(pair.split("=", 1) for pair in text.split(",")) for text in options.set}
    folder = harness.build("--example", "allreduce")
    hosts = harness.TwoHosts(options.ranks) if options.hosts == 2 else harness.OneHost()
    times = {}
    with tempfile.TemporaryDirectory() as scratch, hosts:
        results = Path(scratch) / "results.jsonl"
        sizes = ",".join(map(str, options.sizes))
        command = [folder / "examples" / "allreduce", "--sizes", sizes, "--seconds", options.seconds, "--json", results]
        for round_number in range(1, options.rounds + 1):
            for name, environment in settings.items():
                say(f"round {round_number} of {options.rounds}: {name}")
                harness.run_ranks(command, options.hosts * options.ranks, hosts, environment)
                rows = harness.json_lines(results.read_text())
                if sum(row["errors"] for row in rows) or [row["bytes"] for row in rows] != options.sizes:
                    sys.exit(f"{name}: wrong values, or missing sizes, in {rows}")
                for row in rows:
                    times.setdefault((name, row["bytes"]), []).append(row["time_us"])
    print(document(options, list(settings), times))


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, choices=[1, 2], default=1, help="this machine, or two namespaces [1]")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on each host [2]")
    parser.add_argument("--set", action="append", default=[], metavar="VARIABLE=VALUE[,…]", help="additional settings to measure")
    parser.add_argument("--rounds", type=int, default=5, help="alternating runs of everything [5]")
    parser.add_argument("--seconds", type=float, default=0.1, help="approximate length of each of a size's five batches [0.1]")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64 * KIB, MIB, 16 * MIB, 64 * MIB], help="in bytes")
    return parser.parse_args()


def document(options, names, times):
    median = {curve: statistics.median(found) for curve, found in times.items()}
    lines = [
        f"f32, sum, in place, {options.hosts} × {options.ranks} ranks; microseconds, medians over {options.rounds} "
        "alternating rounds (lowest to highest round in brackets). Ratios are relative to the default settings.",
        "",
        f"- Date: {datetime.date.today().isoformat()}",
        f"- Machine: {harness.machine()}",
        f"- Ours: {harness.toolchain()}",
        f"- Command: `python3 scripts/compare_settings.py {shlex.join(sys.argv[1:])}`",
        "",
        row("size", *names, *("ratio" for _ in names[1:])),
        row(*["---:"] * (2 * len(names))),
    ]
    for size in options.sizes:
        found = [times[name, size] for name in names]
        cells = [f"{number(statistics.median(runs))} ({number(min(runs))}–{number(max(runs))})" for runs in found]
        ratios = [f"{median[name, size] / median[DEFAULT, size]:.2f}" for name in names[1:]]
        lines.append(row(f"{size // MIB} MiB" if size >= MIB else f"{size / KIB:g} KiB", *cells, *ratios))
    return "\n".join(lines)


def number(value):
    return f"{value:.{0 if value >= 100 else 1}f}"


def row(*cells):
    return "| " + " | ".join(cells) + " |"


main()
