"""How soon all ranks get an error when one does not come, dies, or brings another model."""

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

from . import harness
from .harness import say

RANKS = 4
# The rank that fails.
FAILING = 2
# Seconds until the ranks that came give up.
PATIENCE = 20
CASES = {
    "absent": f"a rank never comes (after the time-out of {PATIENCE} s)",
    "killed": "a rank is killed while the others join",
    "model": "a rank has another model",
}


def measure(command, fault, repetitions):
    """Returns, for each repetition, the seconds from the failure until all ranks that waited have an error, or have been ended
    without one, and until all processes have ended."""
    return [run(command, fault) for _ in range(repetitions)]


def run(command, fault):
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder) / "events"
        # Where nobody fails, only the time-out ends the wait.
        timeout = PATIENCE if fault == "absent" else 10 * PATIENCE
        command = [*command, "--fault", fault, "--rank", FAILING, "--timeout", timeout, "--events", events]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [str(part) for part in command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            output, _ = process.communicate(timeout=15 * PATIENCE)
        finally:
            process.terminate()
        ended = time.time()
        assert process.returncode != 0, output
        lines = [json.loads(line) for line in events.read_text().splitlines()]
        assert not any(line["event"] == "done" for line in lines), output
        errors = {line["rank"]: line["time"] for line in lines if line["event"] == "error"}
        begun, killed = ({line["rank"] for line in lines if line["event"] == event} for event in ("begin", "killed"))
        since = failure(fault, lines)
        seconds = max(errors.get(rank, ended) for rank in begun - killed) - since, ended - since
        say(f"{Path(command[0]).name}, {fault}: error after {seconds[0]:.2f} s, ended after {seconds[1]:.2f} s")
        return seconds


def failure(fault, lines):
    """Returns the moment of the failure."""

    def last(event):
        return max(line["time"] for line in lines if line["event"] == event)

    match fault:
        case "absent":
            return last("begin") + PATIENCE
        case "killed":
            return last("killed")
        case "model":
            return last("joined")


def table(rows):
    """Returns the lines of a table; `rows` are titles with the measurements of each case."""
    lines = ["| run | " + " | ".join(CASES.values()) + " |", "|---|" + "---|" * len(CASES)]
    for title, measured in rows:
        cells = ["; ".join(map(harness.seconds, zip(*pairs))) for pairs in measured]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return lines
