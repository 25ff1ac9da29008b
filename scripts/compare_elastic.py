"""Measures how long training stands still when a rank is killed, and how soon all ranks get an error when one fails at the start:
candle-ddp under ddprun, and PyTorch under torchrun.

    python3 scripts/compare_elastic.py
    python3 scripts/compare_elastic.py --part init

Four ranks train on the handwritten digits. A rank is killed by SIGKILL every few seconds: ranks 1, 2, 3 in turn, or rank 0.
Measured is the time from the signal to the next step that all ranks have committed. With `--part init`, a rank never comes, is
killed while the others join, or has another model; measured is the time until all ranks have an error, and until all have
ended. Results are written to benches/results/elastic.md and elastic_init.md. The environment variable CANDLE_DDP_PYTHON names
the Python interpreter with PyTorch and safetensors (default: python3); without PyTorch, that part is skipped with a message.
"""

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from compare import harness, meet
from compare.harness import say

RANKS = 4
TORCHRUN = [harness.PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS]


def main():
    options = parse()
    if options.part == "init":
        return at_the_start(options)
    folder = harness.build("--bin", "ddprun", "--example", "elastic")
    ddprun, example = folder / "ddprun", folder / "examples" / "elastic"
    pytorch = harness.pytorch_version()
    # Other work of this machine, which mainly lengthens starts.
    load = os.getloadavg()[0]
    calm = Run(options, [ddprun, "--nproc-per-node", RANKS, example], None)
    say(f"undisturbed: {calm.words}")
    rows = []
    for title, victims in [("ranks 1, 2, 3 in turn", [1, 2, 3]), ("rank 0", [0])]:
        command = [ddprun, "--nproc-per-node", RANKS, "--max-restarts", options.kills, example]
        rows.append((f"candle-ddp, ddprun, {title} killed", Run(options, command, victims)))
        if pytorch:
            script = Path(__file__).resolve().parent / "compare" / "elastic_pytorch.py"
            data = harness.ROOT / "examples" / "data" / "digits.safetensors"
            command = [*TORCHRUN, "--max-restarts", options.kills, script, "--data", data]
            rows.append((f"PyTorch {pytorch}, torchrun, {title} killed", Run(options, command, victims)))
        else:
            harness.skip("PyTorch", f"{harness.PYTHON} does not have it (set CANDLE_DDP_PYTHON)")
    command = [ddprun, "--nproc-per-node", RANKS, example, "--min-world-size", RANKS - 2]
    rows.append(("candle-ddp, ddprun, ranks 3 and 2 killed, not replaced", Run(options, command, [3, 2], kills=2)))
    harness.write(options.output / "elastic.md", table(options, calm, rows, load))


def at_the_start(options):
    """Measures failures at the start."""
    folder, program = harness.build("--bin", "ddprun"), harness.build_bench("meet")
    load = os.getloadavg()[0]
    runs = [("candle-ddp, ddprun", [folder / "ddprun", "--nproc-per-node", RANKS, program])]
    if pytorch := harness.pytorch_version():
        script = Path(__file__).resolve().parent / "compare" / "meet_pytorch.py"
        runs.append((f"PyTorch {pytorch}, torchrun", [*TORCHRUN, script]))
    else:
        harness.skip("PyTorch", f"{harness.PYTHON} does not have it (set CANDLE_DDP_PYTHON)")
    measured = [(title, [meet.measure(command, fault, options.repetitions) for fault in meet.CASES]) for title, command in runs]
    lines = [
        "# A rank fails at the start",
        "",
        f"{RANKS} ranks on one machine join each other, on the CPU, and build a model. Rank {meet.FAILING} never comes, is killed by "
        "SIGKILL while the others wait for the last one, or has another model. Measured is the time from the failure (where nobody "
        "failed: from the time-out; with another model: from when the last rank had joined). The first number is the time until "
        "all ranks that waited had an error, or had been ended without one; the second, until the launcher and all ranks had "
        "ended. Each is the median, with the least and the most. In the first two cases a rank waits for nothing, but sleeps: "
        "ddprun leaves ranks a second to end on their own before it ends them.",
        "",
        f"`python3 scripts/compare_elastic.py --part init --repetitions {options.repetitions}`, {options.date}, {harness.machine()}, "
        f"load average of other work {load:.0f}",
        "",
        *meet.table(measured),
    ]
    harness.write(options.output / "elastic_init.md", lines)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["deaths", "init"], default="deaths", help="the measurement [deaths]")
    parser.add_argument("--repetitions", type=int, default=3, help="how often each failure at the start is measured [3]")
    parser.add_argument("--kills", type=int, default=5, help="how many ranks are killed in a run [5]")
    parser.add_argument("--every", type=float, default=5, help="seconds of training between two kills [5]")
    parser.add_argument("--epochs", type=int, default=30, help="epochs of a run [30]")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds to wait after each step, so that a run lasts [0.1]")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="the date in the table [today]")
    parser.add_argument("--output", type=Path, default=harness.ROOT / "benches" / "results", help="the folder")
    return parser.parse_args()


class Run:
    """A run in which ranks are killed, as long as there is one to be killed."""

    def __init__(self, options, command, victims, kills=None):
        with tempfile.TemporaryDirectory() as folder:
            events, checkpoint = Path(folder) / "events", Path(folder) / "checkpoint"
            command = [*command, "--epochs", options.epochs, "--pause", options.pause, "--events", events]
            if "torch.distributed.run" in command:
                command += ["--checkpoint", checkpoint]
            # Otherwise PyTorch 2.15 restarts in the store of the failed attempt, finds the addresses of ranks that have ended,
            # and waits for them.
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            process = subprocess.Popen(
                [str(part) for part in command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            self.times = []
            for kill in range((kills or options.kills) if victims else 0):
                self.wait(process, lambda: any(event["event"] == "commit" for event in self.read(events)))
                time.sleep(options.every)
                victim = victims[kill % len(victims)]
                pid = self.find(process.pid, victim)
                killed = time.time()
                os.kill(pid, signal.SIGKILL)
                # A step that was under way may still end; only steps of the next group count.
                begun = self.wait(process, lambda: self.first(events, "begin", killed))
                self.times.append(self.wait(process, lambda: self.first(events, "commit", begun)) - killed)
                say(f"rank {victim}: {self.times[-1]:.2f} s")
            output, _ = process.communicate()
            assert process.returncode == 0, output
            self.words = [line for line in output.splitlines() if "test accuracy" in line][-1]
            self.accuracy = re.search(r"accuracy ([\d.]+)", self.words)[1]
            found = re.search(r"parameters (\w+)", self.words)
            self.parameters = found and found[1]

    @staticmethod
    def read(events):
        lines = events.read_text().splitlines() if events.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    @staticmethod
    def wait(process, condition):
        deadline = time.time() + 300
        while not (found := condition()):
            assert process.poll() is None, process.communicate()[0]
            assert time.time() < deadline, "the run stands still"
            time.sleep(0.005)
        return found

    def first(self, events, kind, since):
        """Returns the time of the first such event."""
        return min((e["time"] for e in self.read(events) if e["event"] == kind and e["time"] > since), default=None)

    @staticmethod
    def find(parent, rank):
        """Returns the worker with this rank."""
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                if int(stat.read_text().rsplit(") ", 1)[1].split()[1]) != parent:
                    continue
                environment = (stat.parent / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"RANK={rank}".encode() in environment:
                return int(stat.parent.name)
        raise RuntimeError(f"rank {rank} is not there")


def table(options, calm, rows, load):
    command = f"python3 scripts/compare_elastic.py --kills {options.kills} --every {options.every:g} --epochs {options.epochs}"
    lines = [
        "# A rank is killed",
        "",
        f"Four ranks train the network of the example `digits` on the CPU. Every {options.every:g} s one is killed by SIGKILL, "
        f"{options.kills} times in a run. Measured is the time from the signal to the next step that all ranks have made: the "
        "median, and the least and the most of a run. candle-ddp replaces the rank that died (`elastic::run`) and loses no "
        "step; torchrun ends all ranks and starts them again, and they load a checkpoint, which rank 0 writes after every step "
        "(with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which PyTorch 2.15 hangs in the addresses of ranks that have ended).",
        "",
        "Without replacement, two ranks are killed, and the others see the rest of the epoch's samples: fewer at a time, so that "
        "the parameters are others.",
        "",
        f"`{command}`, {options.date}, {harness.machine()}, load average of other work {load:.0f}",
        "",
        "| run | from death to the next step | test accuracy | parameters |",
        "|---|---|---|---|",
        f"| candle-ddp, undisturbed | – | {calm.accuracy} % | `{calm.parameters}` |",
    ]
    for title, run in rows:
        times = harness.seconds(run.times)
        same = "the same" if run.parameters == calm.parameters else f"`{run.parameters}`" if run.parameters else "–"
        lines.append(f"| {title} | {times} | {run.accuracy} % | {same} |")
    return lines


if __name__ == "__main__":
    main()
