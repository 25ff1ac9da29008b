#!/usr/bin/env python3
"""Runs ranks on two hosts, which are network namespaces, and breaks the network between them in the middle of all-reduces.

    python3 scripts/network_faults.py

The run must continue with the right numbers, or every rank must end with an error within its bound. Writes a table to
benches/results/network_faults.md. Needs root, iproute2, util-linux, Python and cargo.
"""

import argparse
import datetime
import subprocess
import sys
import time
from pathlib import Path

from compare.harness import ROOT, TwoHosts, machine
from faults.network import ENDED, SILENT, Scenario, judge
from faults.programs import build
from faults.run import Wrong


def down_for(seconds):
    def act(hosts, _):
        hosts.plug(0, False)
        time.sleep(seconds)
        hosts.plug(0, True)

    return act


def flap(hosts, _):
    for _ in range(8):
        hosts.plug(0, False)
        time.sleep(0.3)
        hosts.plug(0, True)
        time.sleep(0.3)


def down(hosts, _):
    hosts.plug(0, False)


def limit(bytes_per_second):
    return lambda hosts, _: hosts.limit(bytes_per_second)


def vanish(hosts, run):
    """Cut, and then everything of the second host is killed: the first one gets no sign of it."""
    hosts.plug(0, False)
    run.kill(1)


def reboot(hosts, run):
    """The same, but the host returns at once, without its connections."""
    vanish(hosts, run)
    hosts.plug(0, True)


SCENARIOS = [
    Scenario("no fault", lambda *_: None, 60, True),
    Scenario("the link is down for 3 s", down_for(3), 60, True),
    Scenario("the link goes down and up eight times", flap, 60, True),
    Scenario("the link carries 2 MB/s from now on", limit(2e6), 60, True),
    Scenario("the link goes down and stays down", down, 8, False, SILENT, 8),
    # Launchers may miss each other too, and end their ranks.
    Scenario("the link carries 10 kB/s: less than a call needs", limit(1e4), 8, False, f"{SILENT}|{ENDED}", 8),
    Scenario("a host vanishes", vanish, 8, False, SILENT, 8, (0,)),
    Scenario("a host vanishes and comes back without its processes", reboot, 30, False, f"{SILENT}|{ENDED}", 10, (0,)),
]


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
                seconds, text = judge(programs, scenario, TwoHosts(ranks), reference)
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
