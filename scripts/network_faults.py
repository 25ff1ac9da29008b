#!/usr/bin/env python3
"""Runs ranks on two hosts, which are network namespaces, and breaks the network between them in the middle of all-reduces.

    python3 scripts/network_faults.py

The run must continue with the right numbers, or every rank must end with an error within its bound. Writes a table to
benches/results/network_faults.md. Needs root, iproute2, util-linux, Python and cargo.
"""

import argparse
import datetime
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from compare.harness import ROOT, TwoHosts, free_port, ip, machine
from faults.programs import MAIN, build
from faults.run import SETTLE, SHUTDOWN, slack

HOSTS = 2


def up(hosts, is_up):
    ip("-n", hosts.names[0], "link", "set", hosts.interface, "up" if is_up else "down")


def down_for(seconds):
    def act(hosts, _):
        up(hosts, False)
        time.sleep(seconds)
        up(hosts, True)

    return act


def flap(hosts, _):
    for _ in range(8):
        up(hosts, False)
        time.sleep(0.3)
        up(hosts, True)
        time.sleep(0.3)


def down(hosts, _):
    up(hosts, False)


def limit(bytes_per_second):
    return lambda hosts, _: hosts.limit(bytes_per_second)


def vanish(hosts, run):
    """Cut, and then everything of the second host is killed: the first one gets no sign of it."""
    up(hosts, False)
    run.kill(1)


def reboot(hosts, run):
    """The same, but the host returns at once, without its connections."""
    vanish(hosts, run)
    up(hosts, True)


@dataclass
class Scenario:
    title: str
    act: Callable
    # The group's time-out in seconds.
    timeout: int
    # Whether the run continues.
    continues: bool
    # The reason in the errors, and how long they take.
    reason: str = ""
    within: float = 0
    # The hosts whose ranks survive.
    survivors: tuple = (0, 1)


SILENT = "does not answer|do not answer|was lost|or the network is"
SCENARIOS = [
    Scenario("no fault", lambda *_: None, 60, True),
    Scenario("the link is down for 3 s", down_for(3), 60, True),
    Scenario("the link goes down and up eight times", flap, 60, True),
    Scenario("the link carries 2 MB/s from now on", limit(2e6), 60, True),
    Scenario("the link goes down and stays down", down, 8, False, SILENT, 8),
    Scenario("the link carries 10 kB/s: less than a call needs", limit(1e4), 8, False, SILENT, 8),
    Scenario("a host vanishes", vanish, 8, False, SILENT, 8, (0,)),
    Scenario("a host vanishes and comes back without its processes", reboot, 30, False, SILENT + "|is gone|has ended", 10, (0,)),
]


class Wrong(Exception):
    """A scenario did not end as expected."""


class TwoLaunchers:
    """A launcher on each host."""

    def __init__(self, programs, hosts, folder, ranks, seconds):
        self.folder, self.ranks, self.processes = folder, ranks, []
        port = str(free_port())
        (folder / "run").mkdir()
        for host in range(HOSTS):
            environment = {
                **os.environ,
                "CANDLE_DDP_TEST_FAULT": "outside all_reduce 0",
                "CANDLE_DDP_TEST_FOLDER": str(folder),
                "CANDLE_DDP_TEST_TIMEOUT": str(seconds),
                # Both are on one kernel, where ranks would share memory.
                "CANDLE_DDP_CPU_HOST": str(host),
                "RAYON_NUM_THREADS": "1",
                "TMPDIR": str(folder),
            }
            launch = [programs.launcher, "--nnodes", str(HOSTS), "--node-rank", str(host), "--nproc-per-node", str(ranks)]
            launch += ["--master-addr", hosts.address_of(0), "--master-port", port, "--shutdown-timeout", str(SHUTDOWN)]
            command = [*hosts.enter(host * ranks), *map(str, launch), str(programs.program), *MAIN]
            with open(folder / f"output{host}", "wb") as output:
                self.processes.append(
                    subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
                )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for host in range(HOSTS):
            self.kill(host)

    def kill(self, host):
        for pid in self.pids(host):
            os.kill(pid, signal.SIGKILL)
        self.processes[host].kill()
        self.processes[host].wait()

    def pids(self, host):
        """Returns the processes of a host's ranks."""
        pids = []
        for rank in self.of(host):
            path = self.folder / f"rank{rank}"
            pid = int(path.read_text().split()[0]) if path.exists() else 0
            if pid and Path(f"/proc/{pid}").exists():
                pids.append(pid)
        return pids

    def of(self, host):
        return range(host * self.ranks, (host + 1) * self.ranks)

    def text(self):
        return "".join((self.folder / f"output{host}").read_text(errors="replace")[-2000:] for host in range(HOSTS))

    def wait_for(self, name, seconds):
        end = time.monotonic() + seconds
        while not (self.folder / name).exists():
            if time.monotonic() > end or any(process.poll() for process in self.processes):
                raise Wrong(f"no {name}: {self.text()}")
            time.sleep(0.01)


def judge(programs, scenario, ranks, reference):
    """Returns how long it took, and the results, if the run continued."""
    folder = Path(tempfile.mkdtemp(prefix="network_faults-")).resolve()
    try:
        with TwoHosts(ranks) as hosts, TwoLaunchers(programs, hosts, folder, ranks, scenario.timeout) as run:
            run.wait_for("reached", 120)
            time.sleep(0.1)
            then = time.time()
            scenario.act(hosts, run)
            (folder / "go").touch()
            bound = scenario.within + slack() + SETTLE + SHUTDOWN
            for host in range(HOSTS) if scenario.continues else scenario.survivors:
                try:
                    run.processes[host].wait((120 if scenario.continues else bound) + then - time.time())
                except subprocess.TimeoutExpired:
                    raise Wrong(f"HANG: host {host} has not ended {time.time() - then:.0f} s after the fault: {run.text()}") from None
            if scenario.continues:
                results = [(folder / f"result{rank}") for rank in range(HOSTS * ranks)]
                if not all(result.exists() for result in results):
                    raise Wrong(f"the run must continue: {run.text()}")
                results = {result.read_text() for result in results}
                if len(results) != 1 or (reference and results != {reference}):
                    raise Wrong(f"the results must be {reference}, and are {results}")
                return time.time() - then, results.pop()
            longest = 0
            for rank in (rank for host in scenario.survivors for rank in run.of(host)):
                path = folder / f"error{rank}"
                if not path.exists():
                    raise Wrong(f"rank {rank} says nothing: {run.text()}")
                late, error = path.stat().st_mtime - then, path.read_text()
                longest = max(longest, late)
                if late > scenario.within + slack():
                    raise Wrong(f"rank {rank} took {late:.1f} s: {error}")
                if not re.search(scenario.reason, error):
                    raise Wrong(f"rank {rank} does not give the reason: {error}")
            return longest, error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--built", nargs=2, type=Path, help="a ddprun and a test binary `processes`, instead of building them")
    parser.add_argument("--only", help="scenarios whose title has these words")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="the date in the table [today]")
    parser.add_argument("--output", type=Path, default=ROOT / "benches" / "results", help="the folder")
    options = parser.parse_args()
    programs = build(built=options.built)
    rows, wrong = [], 0
    for ranks in [1, 2]:
        reference = None
        for scenario in SCENARIOS:
            if options.only and options.only not in scenario.title and scenario.title != "no fault":
                continue
            try:
                seconds, text = judge(programs, scenario, ranks, reference)
                reference = reference or text
                verdict = "continues, same bits" if scenario.continues else f"`{text[:160]}…`"
            except Wrong as error:
                seconds, verdict, wrong = 0, f"**WRONG**: {str(error).splitlines()[0][:300]}", wrong + 1
                print(error, file=sys.stderr)
            print(f"{ranks} ranks on each host, {scenario.title}: {seconds:.1f} s, {verdict}", file=sys.stderr, flush=True)
            rows.append(f"| {ranks} | {scenario.title} | {scenario.timeout} s | {seconds:.1f} s | {verdict} |")
    if not options.only:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        lines = [
            "# A network that breaks",
            "",
            f"Two hosts, network namespaces joined by a veth pair, each with a `ddprun`. Each fault happens in the middle of "
            f"all-reduces of 1 MiB. {len(rows)} runs, {len(rows) - wrong} ended as expected, {wrong} did not.",
            "",
            f"- Date: {options.date}",
            f"- Machine: {machine()}",
            f"- Commit: {commit}",
            "- Command: `python3 scripts/network_faults.py`",
            "",
            "The time is from the fault to the end of the run if it continues, and otherwise to the last error.",
            "",
            "| ranks on each host | fault | time-out | time | outcome |",
            "|---|---|---:|---:|---|",
            *rows,
            "",
        ]
        (options.output / "network_faults.md").write_text("\n".join(lines))
    sys.exit(1 if wrong else 0)


main()
