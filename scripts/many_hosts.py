#!/usr/bin/env python3
"""Runs two ranks on each of many hosts, which are network namespaces joined by a bridge, and measures what a host costs.

    python3 scripts/many_hosts.py

- Collectives: the bench `soak`, all of whose results are checked.
- Large all-reduces over links of a given rate (tc tbf), compared with the time that their bytes need there.
- Small all-reduces where every packet takes a given time, compared with that time.
- Connections, messages and bytes of each rank.
- A host dies, and a link is cut.

Writes benches/results/many_hosts.md. Needs root, iproute2, util-linux, strace, Python and cargo.
"""

import argparse
import datetime
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from compare import harness
from compare.harness import DelayedHosts, ManyHosts, say
from faults.cases import DIAGNOSIS
from faults.network import ENDED, SILENT, Scenario, judge
from faults.programs import build
from faults.run import Wrong

KIB, MIB = 1 << 10, 1 << 20
RANKS_PER_HOST = 2
LARGE = 64 * MIB
SMALL = [8, KIB, 2 * KIB, 16 * KIB, 64 * KIB, MIB]
COUNTED = [8, 16 * KIB, MIB, 16 * MIB]
# The host that is lost.
LOST = 7


def main():
    options = parse()
    tools = Tools(options)
    parts = {
        "collectives": collectives,
        "large": large,
        "small": small,
        "counters": counters,
        "faults": faults,
    }
    lines, wrong = [], False
    for name, part in parts.items():
        if name in options.parts:
            say(f"== {name}")
            found, is_right = part(options, tools)
            lines += found
            wrong |= not is_right
            say("\n".join(found))
    if set(options.parts) == set(parts):
        harness.write(options.output / "many_hosts.md", [*heading(options), *lines])
    sys.exit(1 if wrong else 0)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["collectives", "large", "small", "counters", "faults"]
    parser.add_argument("--parts", nargs="+", choices=names, default=names, help="what to run [all, which writes the file]")
    parser.add_argument("--hosts", type=int, nargs="+", default=[4, 8, 16], help="numbers of hosts [4 8 16]")
    parser.add_argument("--rate", type=float, default=200, help="the rate of a link in Mbit/s, for large all-reduces [200]")
    parser.add_argument("--delay", type=float, default=100, help="the time of a packet in ms, for small all-reduces [100]")
    parser.add_argument("--calls", type=int, default=2000, help="collectives of the soak [2000]")
    parser.add_argument("--set", action="append", default=[], metavar="VARIABLE=VALUE", help="a setting of all ranks but the soak's")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="the date in the file [today]")
    parser.add_argument("--output", type=Path, default=harness.ROOT / "benches" / "results", help="the folder")
    options = parser.parse_args()
    options.set = dict(pair.split("=", 1) for pair in options.set)
    return options


class Tools:
    """The programs, built in release."""

    def __init__(self, options):
        self.allreduce = harness.build("--example", "allreduce") / "examples" / "allreduce"
        self.meet = harness.build_bench("meet") if "counters" in options.parts else None
        self.soak = harness.build_bench("soak") if "collectives" in options.parts else None
        self.faults = build(release=True) if "faults" in options.parts else None


def heading(options):
    return [
        "# Two ranks on each of many hosts",
        "",
        f"Hosts are network namespaces, joined by a bridge over one veth pair each. All run on one machine, whose cores they share.",
        "",
        f"- Date: {options.date}",
        f"- Machine: {harness.machine()}",
        f"- Ours: {harness.toolchain()}",
        "- Command: `python3 scripts/many_hosts.py`",
        "",
    ]


def all_reduces(options, tools, hosts, sizes, iterations, prefix=()):
    """Measures all-reduces of some sizes, and returns their rows; fails if a value is wrong."""
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch) / "results.jsonl"
        command = [*prefix, tools.allreduce, "--sizes", ",".join(map(str, sizes)), "--json", results]
        command += ["--warmup", 1, "--iters", iterations]
        harness.run_ranks(command, hosts.count * hosts.ranks_per_host, hosts, options.set)
        rows = harness.json_lines(results.read_text())
    if sum(row["errors"] for row in rows) or [row["bytes"] for row in rows] != sizes:
        sys.exit(f"wrong values, or missing sizes, in {rows}")
    return rows


def collectives(options, tools):
    most = max(options.hosts)
    with ManyHosts(most, RANKS_PER_HOST) as hosts:
        command = [tools.soak, "--worker", "--calls", options.calls]
        output = harness.run_ranks(command, most * RANKS_PER_HOST, hosts)
    summary = output.splitlines()[-1]
    lines = ["## Collectives", "", f"The bench `soak`, {options.calls} calls of random kind, dtype, size and group on {most} hosts:", ""]
    return [*lines, f"> {summary}", ""], summary.startswith("All results were right")


def large(options, tools):
    rate = options.rate * 1e6 / 8
    lines = [
        f"## All-reduce of {size_of(LARGE)} over links of {options.rate:g} Mbit/s",
        "",
        f"Each link is limited by `tc tbf` in both directions. The bound is the time of 2 n (hosts - 1) / hosts bytes, without "
        "TCP's and Ethernet's headers. The time is the median of five batches of one call.",
        "",
        "| hosts | time, s | bound, s | time / bound |",
        "|---:|---:|---:|---:|",
    ]
    is_right = True
    for count in options.hosts:
        with ManyHosts(count, RANKS_PER_HOST) as hosts:
            hosts.limit(rate)
            seconds = all_reduces(options, tools, hosts, [LARGE], 1)[0]["time_us"] / 1e6
        bound = 2 * LARGE * (count - 1) / count / rate
        lines.append(f"| {count} | {seconds:.2f} | {bound:.2f} | {seconds / bound:.2f} |")
        say(lines[-1])
        is_right &= seconds <= 1.3 * bound
    return [*lines, ""], is_right


def small(options, tools):
    lines = [
        f"## Small all-reduces where each packet takes {options.delay:g} ms",
        "",
        "A program between the hosts delivers each packet after that time. Cells are times of a call, in such times.",
        "",
        row("hosts", *map(size_of, SMALL)),
        row(*["---:"] * (1 + len(SMALL))),
    ]
    for count in options.hosts:
        with DelayedHosts(count, RANKS_PER_HOST, options.delay / 1e3) as hosts:
            rows = all_reduces(options, tools, hosts, SMALL, 2)
        lines.append(row(count, *(f"{found['time_us'] / 1e3 / options.delay:.2f}" for found in rows)))
        say(lines[-1])
    return [*lines, ""], True


def counters(options, tools):
    lines = [
        "## Connections, messages and bytes of a rank",
        "",
        "Connections are the ends that each host's system has opened or accepted, divided by its ranks; some lead to the store. "
        "Messages are the calls of `sendmsg` of one rank (the last), and bytes what a host's device has sent, with all headers "
        "and acknowledgements, divided by its ranks. Both are those of one call: the difference between a run and one with more calls. "
        "The processor time, user's and system's on both ends, is that of all ranks in calls of 8 bytes, divided by all messages.",
        "",
        "| hosts | connections after joining | connections | µs of processor per message |" + "".join(f" {size_of(size)}: messages | bytes |" for size in COUNTED),
        "|---:" * (4 + 2 * len(COUNTED)) + "|",
    ]
    for count in options.hosts:
        cells = []
        for size in COUNTED:
            few, more = (1, 3) if size >= MIB else (20, 60)
            found = [counted(options, tools, count, size, iterations) for iterations in (few, more)]
            # The example measures five batches.
            messages, octets = ((two - one) / (5 * (more - few)) for one, two in zip(found[0][1:], found[1][1:]))
            cells += [f"{messages:.1f}", f"{octets:.0f}"]
        lines.append(row(count, f"{joined(tools, count):.1f}", f"{found[0][0]:.1f}", f"{cost(options, tools, count):.1f}", *cells))
        say(lines[-1])
    return [*lines, ""], True


def counted(options, tools, count, size, iterations):
    """Returns the connections of a rank, the messages of the last one, and the bytes of a rank."""
    with ManyHosts(count, RANKS_PER_HOST) as hosts, tempfile.TemporaryDirectory() as scratch:
        calls = Path(scratch) / "calls"
        # The last rank's calls are counted.
        traced = f'if [ "$RANK" = {count * RANKS_PER_HOST - 1} ]; then exec strace -f -c -e trace=sendmsg -o {calls} "$0" "$@"; fi; exec "$0" "$@"'
        all_reduces(options, tools, hosts, [size], iterations, ["sh", "-c", traced])
        # % of the time, seconds, µs per call, calls, perhaps errors, the call.
        messages = next(int(line.split()[3]) for line in calls.read_text().splitlines() if line.endswith("sendmsg"))
        device = f"/sys/class/net/{hosts.interface}/statistics/tx_bytes"
        sent = sum(int(output("ip", "netns", "exec", name, "cat", device)) for name in hosts.names)
        return opened(hosts), messages, sent / (count * RANKS_PER_HOST)


def joined(tools, count):
    """Returns the connections of a rank that only joins the others."""
    with ManyHosts(count, RANKS_PER_HOST) as hosts:
        harness.run_ranks([tools.meet, "--join-only"], count * RANKS_PER_HOST, hosts)
        return opened(hosts)


def opened(hosts):
    """Returns the ends of connections that the hosts' systems have opened or accepted, for each rank."""
    ends = 0
    for name in hosts.names:
        text = output("ip", "netns", "exec", name, "cat", "/proc/net/snmp")
        names, values = (line.split()[1:] for line in text.splitlines() if line.startswith("Tcp:"))
        tcp = dict(zip(names, map(int, values)))
        ends += tcp["ActiveOpens"] + tcp["PassiveOpens"]
    return ends / (hosts.count * hosts.ranks_per_host)


def cost(options, tools, count):
    """Returns the processor time of a message in microseconds, sent and received."""
    few, more = 200, 1000
    spent = []
    for iterations in (few, more):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with ManyHosts(count, RANKS_PER_HOST) as hosts:
            all_reduces(options, tools, hosts, [8], iterations)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    messages = 5 * (more - few) * count * RANKS_PER_HOST * (count - 1)
    return (spent[1] - spent[0]) / messages * 1e6


def output(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def faults(options, tools):
    most = max(options.hosts)
    others = tuple(host for host in range(most) if host != LOST)

    def kill(_, run):
        run.kill(LOST)

    def cut(hosts, _):
        hosts.plug(LOST, False)

    def vanish(hosts, run):
        hosts.plug(LOST, False)
        run.kill(LOST)

    scenarios = [
        Scenario("no fault", lambda *_: None, 60, True),
        Scenario("all processes of a host are killed", kill, 30, False, ENDED, 0, others, LOST),
        Scenario("a host's link is cut", cut, 8, False, SILENT, 8, None, LOST),
        Scenario("a host's link is cut, and its processes are killed", vanish, 8, False, SILENT, 8, others, LOST),
        Scenario("the same, and launchers wait for 60 s", vanish, 8, False, SILENT, 8 + DIAGNOSIS, others, LOST, 120),
    ]
    lines = [
        "## Faults",
        "",
        f"{most} hosts, each with a `ddprun`. Each fault happens in the middle of all-reduces of 1 MiB. The time is from the fault "
        "to the end of the run if it continues, and otherwise to the last error. Every rank of the other hosts must name a rank of "
        "the lost one, or be ended by a launcher that names it: launchers wait for 5 s.",
        "",
        "| fault | time-out | time | outcome |",
        "|---|---:|---:|---|",
    ]
    reference, is_right = None, True
    for scenario in scenarios:
        try:
            seconds, text = judge(tools.faults, scenario, ManyHosts(most, RANKS_PER_HOST), reference)
            reference = reference or text
            verdict = "continues, same bits" if scenario.continues else f"`{text[:160]}…`"
        except Wrong as error:
            seconds, verdict, is_right = 0, f"**WRONG**: {str(error).splitlines()[0][:300]}", False
            say(error)
        lines.append(f"| {scenario.title} | {scenario.timeout} s | {seconds:.1f} s | {verdict} |")
        say(lines[-1])
    return [*lines, ""], is_right


def size_of(size):
    for unit, name in [(MIB, "MiB"), (KIB, "KiB")]:
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def row(*cells):
    return f"| {' | '.join(map(str, cells))} |"


main()
