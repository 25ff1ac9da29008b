"""Prints the kernels of a training step from a trace of gpu_trace.c, with their share of its time, and the host's time: in calls of the
driver, and before each of them, since its thread's previous call.

    python3 scripts/compare/gpu_trace.py TRACE

A step ends with its last optimizer kernel. Printed are the means over the last steps.
"""

import collections
import re
import subprocess
import sys

STEPS = 4


def demangled(names):
    try:
        output = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
        return dict(zip(names, output.splitlines()))
    except (OSError, subprocess.CalledProcessError):
        return {name: name for name in names}


def short(name):
    name = re.sub(r"^void |\(anonymous namespace\)::|at::native::", "", name)
    return re.sub(r"\(.*", "", name)[:90].replace("|", "/")


def print_kernels(kernels, steps, span):
    """Prints the means of so many steps, which took `span` ns, from the beginnings, ends and names of what the GPU did."""
    totals = collections.defaultdict(lambda: [0, 0])
    busy, until, span = 0, 0, span / steps / 1e6
    for start, end, name in sorted(kernels):
        of = totals[short(name)]
        of[0] += 1
        of[1] += end - start
        busy += max(0, end - max(start, until))
        until = max(until, end)
    print(f"step {span:.2f} ms, the GPU is busy for {busy / steps / 1e6:.2f} ms, {len(kernels) / steps:.0f} kernels and copies\n")
    print("| kernel | count | ms | share |\n|---|---|---|---|")
    for name, (count, time) in sorted(totals.items(), key=lambda of: -of[1][1])[:40]:
        print(f"| {name} | {count / steps:.1f} | {time / steps / 1e6:.3f} | {100 * time / steps / 1e6 / span:.1f} % |")


def main():
    work, calls = [], []
    with open(sys.argv[1]) as file:
        for line in file:
            fields = line.rstrip("\n").split("\t", 5)
            if len(fields) < 6 or not fields[2].isdigit():
                continue
            kind, start, end, where, number, name = fields
            (calls if kind == "A" else work).append((int(start), int(end), where, int(number), name))
    work.sort()
    calls.sort()
    # The ends of steps: optimizer kernels after which other kernels follow for a while.
    optimizer = [index for index, of in enumerate(work) if "adam" in of[4].lower()]
    ends = [index for index, after in zip(optimizer, optimizer[1:] + [len(work) + 99]) if after - index > 50]
    if len(ends) < 2:
        sys.exit(f"{len(work)} kernels and copies, {len(calls)} calls, and no two steps")
    ends = ends[-STEPS - 1 :]
    steps = len(ends) - 1
    first, last = work[ends[0]][1], work[ends[-1]][1]
    chosen = work[ends[0] + 1 : ends[-1] + 1]
    names = demangled(sorted({of[4] for of in chosen}))
    print_kernels([(start, end, names[name]) for start, end, _, _, name in chosen], steps, last - first)
    launched = {number: short(names[name]) for _, _, _, number, name in chosen}
    print_host(calls, launched, steps, first, last)


def print_host(calls, launched, steps, first, last):
    """Prints the means of the host's times between `first` and `last`. A call that launched something has that name."""
    host, until = collections.defaultdict(lambda: [0, 0, 0]), {}
    for start, end, thread, number, name in calls:
        if first <= start < last:
            of = host[launched.get(number, name)]
            of[0] += 1
            of[1] += end - start
            of[2] += start - until.get(thread, start)
        until[thread] = end
    inside, before = (sum(of[part] for of in host.values()) / steps / 1e6 for part in (1, 2))
    print(f"\nThe host is in calls for {inside:.2f} ms and before them for {before:.2f} ms\n")
    print("| call, or what it launched | count | ms in it | ms before it |\n|---|---|---|---|")
    for name, (count, time, gap) in sorted(host.items(), key=lambda of: -sum(of[1][1:]))[:40]:
        print(f"| {name} | {count / steps:.1f} | {time / steps / 1e6:.3f} | {gap / steps / 1e6:.3f} |")


if __name__ == "__main__":
    main()
