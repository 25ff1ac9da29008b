"""All-reduce of candle-ddp between two hosts with several ranks each: hierarchical, through shared memory inside of a host
and over TCP between hosts, against TCP between all ranks, in alternating runs.

    python3 scripts/compare_hosts.py
    python3 scripts/compare_hosts.py --set CANDLE_DDP_CPU_SEGMENT_BYTES=65536 --set CANDLE_DDP_CPU_SEGMENT_BYTES=262144

The hosts are network namespaces joined by a veth pair, which needs root. --set measures the hierarchical engine once more
with an environment variable set, for tuning. The table goes to the standard output.
"""

import argparse
import datetime
import statistics
import sys
import tempfile
from pathlib import Path

from compare import harness
from compare.harness import say

KIB, MIB = 1 << 10, 1 << 20
SIZES = [64 * KIB, MIB, 16 * MIB, 64 * MIB]
HIERARCHICAL, FLAT = "hierarchical", "flat TCP"


def main():
    options = parse()
    systems = {HIERARCHICAL: {}, FLAT: {"CANDLE_DDP_CPU_TRANSPORT": "tcp"}}
    if options.no_flat:
        del systems[FLAT]
    for setting in options.set:
        systems[setting] = dict(pair.split("=", 1) for pair in setting.split(","))
    folder = harness.build("--example", "allreduce")
    world_size = 2 * options.ranks_per_host
    times = {}
    with tempfile.TemporaryDirectory() as scratch, harness.TwoHosts(options.ranks_per_host) as hosts:
        if options.limit:
            hosts.limit(options.limit)
        results = Path(scratch) / "results.jsonl"
        sizes = ",".join(map(str, options.sizes))
        command = [folder / "examples" / "allreduce", "--sizes", sizes, "--seconds", options.seconds, "--json", results]
        for round_number in range(1, options.rounds + 1):
            for name, settings in systems.items():
                say(f"round {round_number} of {options.rounds}: {name}")
                harness.run_ranks(command + ["--dtype", options.dtype], world_size, hosts, settings)
                rows = harness.json_lines(results.read_text())
                if sum(row["errors"] for row in rows) or [row["bytes"] for row in rows] != options.sizes:
                    sys.exit(f"{name}: wrong values, or sizes left out, in {rows}")
                for row in rows:
                    times.setdefault((name, row["bytes"]), []).append(row["time_us"])
    print(document(options, list(systems), times))


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks-per-host", type=int, default=2, help="ranks on each of the two hosts [2]")
    parser.add_argument("--rounds", type=int, default=5, help="alternating runs of everything [5]")
    parser.add_argument("--seconds", type=float, default=0.1, help="length of each of a size's five batches, about [0.1]")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of the tensors")
    parser.add_argument("--dtype", default="f32", help="of the tensors [f32]")
    parser.add_argument("--set", action="append", default=[], metavar="VARIABLE=VALUE[,…]", help="measure this, too")
    parser.add_argument("--no-flat", action="store_true", help="leave out TCP between all ranks")
    parser.add_argument("--limit", type=float, metavar="BYTES", help="limits the link to so many bytes per second")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="the date in the table [today]")
    return parser.parse_args()


def document(options, names, times):
    median = {curve: statistics.median(found) for curve, found in times.items()}
    lines = [
        f"{options.dtype}, sum, in place, two hosts of {options.ranks_per_host} ranks; microseconds, medians over "
        f"{options.rounds} alternating rounds (lowest to highest in brackets). Ratios are to the first column.",
        "",
        f"- Date: {options.date}",
        f"- Machine: {harness.machine()}",
        f"- Ours: {harness.toolchain()}",
        f"- Command: `python3 scripts/compare_hosts.py {' '.join(sys.argv[1:])}`",
        "",
        row("size", *names, *(f"{name} / {names[0]}" for name in names[1:])),
        row(*["---:"] * (2 * len(names))),
    ]
    for size in options.sizes:
        cells = [f"{median[name, size]:.0f} ({min(times[name, size]):.0f}–{max(times[name, size]):.0f})" for name in names]
        ratios = [f"{median[name, size] / median[names[0], size]:.2f}" for name in names[1:]]
        lines.append(row(f"{size / KIB:.0f} KiB" if size < MIB else f"{size / MIB:.0f} MiB", *cells, *ratios))
    return "\n".join(lines)


def row(*cells):
    return "| " + " | ".join(cells) + " |"


main()
