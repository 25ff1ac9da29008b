"""Compares the all-reduce of candle-ddp, Gloo (PyTorch) and Open MPI in alternating runs, in a table and a chart.

    python3 scripts/compare_allreduce.py --ranks 2 4
    python3 scripts/compare_allreduce.py --namespaces

The first command compares ranks on this machine. The second, which needs root, compares candle-ddp and Gloo on two hosts,
which are network namespaces joined by a veth pair. Results are written to benches/results/. The environment variable
CANDLE_DDP_PYTHON names the Python interpreter with PyTorch (default: python3). Systems that are not installed are skipped
with a message.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from compare import harness
from compare.harness import say

PEERS = Path(__file__).resolve().parent / "compare"
KIB, MIB = 1 << 10, 1 << 20
SIZES = [8, KIB, 16 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
SIZES_BETWEEN_HOSTS = [MIB, 4 * MIB, 16 * MIB, 64 * MIB]
OURS = "candle-ddp"


def main():
    options = parse()
    hosts = harness.TwoHosts() if options.namespaces else harness.OneHost()
    worlds = [2] if options.namespaces else options.ranks
    folder = harness.build("--example", "allreduce")
    with tempfile.TemporaryDirectory() as scratch, hosts:
        systems = find_systems(options, folder, Path(scratch), hosts)
        results = {}
        for round_number in range(1, options.rounds + 1):
            for world_size in worlds:
                for name, (_, run) in systems.items():
                    say(f"round {round_number} of {options.rounds}: {name}, {world_size} ranks")
                    rows = run(world_size)
                    wrong = sum(row["errors"] for row in rows)
                    if wrong or [row["bytes"] for row in rows] != options.sizes:
                        sys.exit(f"{name}, {world_size} ranks: {wrong} wrong values, or missing sizes, in {rows}")
                    results.setdefault((name, world_size), []).append(rows)
        rows = {curve: harness.medians(runs, "bytes") for curve, runs in results.items()}
        options.output.mkdir(parents=True, exist_ok=True)
        name = "allreduce_two_hosts" if options.namespaces else "allreduce"
        picture = options.output / f"{name}.svg"
        draw(folder, Path(scratch), rows, picture)
        table = options.output / f"{name}.md"
        versions = {system: version for system, (version, _) in systems.items()}
        table.write_text(document(options, rows, results, versions, picture.name))
        say(f"written: {table} and {picture}")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks on this machine")
    parser.add_argument("--namespaces", action="store_true", help="measure two hosts with one rank each instead")
    parser.add_argument("--rounds", type=int, default=5, help="alternating runs of everything [5]")
    parser.add_argument("--seconds", type=float, default=0.1, help="approximate length of each of a size's five batches [0.1]")
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes of the tensors")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="the date in the table [today]")
    parser.add_argument("--output", type=Path, default=harness.ROOT / "benches" / "results", help="the folder")
    options = parser.parse_args()
    options.sizes = options.sizes or (SIZES_BETWEEN_HOSTS if options.namespaces else SIZES)
    return options


def find_systems(options, folder, scratch, hosts):
    """Returns, by name, the version and a function from the number of ranks to the rows of a run."""
    seconds, sizes = str(options.seconds), [str(size) for size in options.sizes]

    def ours(world_size):
        results = scratch / "ours.jsonl"
        options = ["--sizes", ",".join(sizes), "--seconds", seconds, "--json", results]
        harness.run_ranks([folder / "examples" / "allreduce", *options], world_size, hosts)
        return harness.json_lines(results.read_text())

    def gloo(world_size):
        command = [harness.PYTHON, PEERS / "allreduce_gloo.py", seconds, *sizes]
        return harness.json_lines(harness.run_ranks(command, world_size, hosts))

    def mpi(world_size):
        # As with the others, ranks are not bound to cores, and may outnumber them.
        command = ["mpirun", "--bind-to", "none", "--oversubscribe", "-n", str(world_size), scratch / "mpi", seconds]
        if os.geteuid() == 0:
            command.insert(1, "--allow-run-as-root")
        run = subprocess.run([*command, *sizes], stdout=subprocess.PIPE, text=True, timeout=harness.TIMEOUT)
        if run.returncode:
            raise RuntimeError(f"mpirun exited with {run.returncode}")
        return harness.json_lines(run.stdout)

    systems = {OURS: (harness.toolchain(), ours)}
    if version := harness.pytorch_version():
        systems["Gloo"] = (f"PyTorch {version}", gloo)
    else:
        harness.skip("Gloo", f"{harness.PYTHON} has no PyTorch (set CANDLE_DDP_PYTHON)")
    if options.namespaces:
        return systems
    if version := harness.mpi_version():
        subprocess.run(["mpicc", "-O3", PEERS / "allreduce_mpi.c", "-o", scratch / "mpi"], check=True)
        systems["Open MPI"] = (version, mpi)
    else:
        harness.skip("Open MPI", "mpirun or mpicc is not installed (openmpi-bin, libopenmpi-dev)")
    return systems


def draw(folder, scratch, rows, picture):
    command = [folder / "examples" / "allreduce", "--svg", picture]
    names = list(dict.fromkeys(name for name, _ in rows))
    curves = sorted(rows, key=lambda curve: (names.index(curve[0]), curve[1]))
    for index, (name, world_size) in enumerate(curves):
        curve = scratch / f"{index}.jsonl"
        curve.write_text("".join(json.dumps(row) + "\n" for row in rows[name, world_size].values()))
        command += ["--draw", f"{name}, {world_size} ranks={curve}"]
    subprocess.run(command, check=True)


def document(options, rows, results, versions, picture):
    where = "two hosts (network namespaces, veth)" if options.namespaces else "one machine"
    arguments = ["--namespaces"] if options.namespaces else ["--ranks", *map(str, options.ranks)]
    command = ["python3", "scripts/compare_allreduce.py", *arguments, "--rounds", str(options.rounds)]
    command += ["--seconds", str(options.seconds)]
    lines = [
        f"# All-reduce on {where}",
        "",
        f"f32, sum, in place. Medians over {options.rounds} alternating rounds (lowest to highest round in brackets); each "
        "round's value is the median of five batches' means on the slowest rank. Ratios above 1 mean that candle-ddp is "
        "faster. GB/s is size over time (algbw).",
        "",
        f"- Date: {options.date}",
        f"- Machine: {harness.machine()}",
        *(f"- {name}: {version}" for name, version in versions.items() if name != OURS),
        f"- Ours: {versions[OURS]}",
        f"- Command: `{' '.join(command)}`",
        "- Measured by: `examples/allreduce` and its counterparts in `scripts/compare/`, one thread per rank"
        + (", Open MPI under `mpirun --bind-to none --oversubscribe`" if "Open MPI" in versions else ""),
    ]
    peers = [name for name in versions if name != OURS]
    for world_size in sorted({world_size for _, world_size in rows}):
        lines += ["", f"## {world_size} ranks", ""]
        header = ["size", f"{OURS}, µs", "GB/s", *(f"{name}, µs" for name in peers), *(f"{name} / ours" for name in peers)]
        lines += [row_of(header), row_of(["---:"] * len(header))]
        for size in options.sizes:
            own = rows[OURS, world_size][size]
            found = [rows[name, world_size][size]["time_us"] for name in peers]
            cells = [readable(size), spread(results[OURS, world_size], size), f"{own['algbw_gbps']:.3g}"]
            cells += [spread(results[name, world_size], size) for name in peers]
            cells += [f"{time / own['time_us']:.2f}" for time in found]
            lines.append(row_of(cells))
    return "\n".join([*lines, "", f"![bus bandwidth over size]({picture})", ""])


def spread(runs, size):
    times = [row["time_us"] for run in runs for row in run if row["bytes"] == size]
    return f"{number(statistics.median(times))} ({number(min(times))}–{number(max(times))})"


def number(value):
    return f"{value:.{0 if value >= 1000 else 1 if value >= 100 else 2}f}"


def row_of(cells):
    return "| " + " | ".join(cells) + " |"


def readable(size):
    for unit, name in [(MIB, "MiB"), (KIB, "KiB")]:
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


main()
