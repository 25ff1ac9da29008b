#!/usr/bin/env python3
"""Repeats tests next to busy loops, to find those that depend on the machine's speed.

    python3 scripts/stress_tests.py                                           # the whole suite, 8 times
    python3 scripts/stress_tests.py --test ranks::broken_network::a_reset --runs 50  # one test, or all of a module
    python3 scripts/stress_tests.py --test lib::process_group                 # unit tests

Everything is built before the busy loops start. The table has one row for each run; the output of
runs that failed is kept in target/stress.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# A loop that ends with this script, however that ends.
BUSY = "while kill -0 $PPID 2>/dev/null; do :; done"


def main():
    options = parse()
    # SystemExit runs the clean-up below.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    command, environment = build(options)
    options.keep.mkdir(parents=True, exist_ok=True)
    print(f"{'run':>4} {'seconds':>8} {'passed':>7} {'failed':>7}  names of failures", flush=True)
    failed_runs = 0
    with busy_loops(options.busy):
        for run in range(1, options.runs + 1):
            kept = options.keep / f"{(options.test or 'suite').replace('::', '.')}-{os.getpid()}-{run}.txt"
            seconds, passed, failures = attempt(command, environment, options.limit, kept)
            text = ", ".join(failures)
            if failures:
                failed_runs += 1
                text += f" ({kept})"
            else:
                kept.unlink()
            print(f"{run:>4} {seconds:>8.1f} {passed:>7} {len(failures):>7}  {text}", flush=True)
    print(f"{options.runs} runs next to {options.busy} busy loops on {os.cpu_count()} processors, {failed_runs} failed")
    sys.exit(1 if failed_runs else 0)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--test", metavar="NAME::FILTER", help="a test program (or lib) and a part of the tests' names")
    parser.add_argument("--runs", type=int, default=8, help="[8]")
    parser.add_argument("--busy", type=int, default=3, help="the number of busy loops [3]")
    parser.add_argument("--limit", type=float, default=3600, help="seconds until a run counts as hanging [3600]")
    parser.add_argument("--keep", type=Path, default=ROOT / "target" / "stress", help="the folder for outputs of failed runs")
    return parser.parse_args()


def build(options):
    """Builds the tests, and returns their command and environment."""
    if options.test is None:
        subprocess.run(["cargo", "test", "--no-run"], cwd=ROOT, check=True)
        return ["cargo", "test", "--no-fail-fast"], os.environ
    program, _, name = options.test.partition("::")
    target = ["--package", "candle-ddp", "--lib"] if program == "lib" else ["--test", program]
    command = ["cargo", "test", "--no-run", "--message-format=json-render-diagnostics", *target]
    built = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    artifacts = (json.loads(line) for line in built.splitlines() if line.startswith("{"))
    # Tests also use binaries, which are built with them.
    [test] = [made for made in artifacts if made.get("profile", {}).get("test") and made.get("executable")]
    package = str(Path(test["manifest_path"]).parent)
    environment = os.environ | {"RUST_TEST_THREADS": "8", "CARGO_MANIFEST_DIR": package}
    return [test["executable"], *filter(None, [name])], environment


@contextlib.contextmanager
def busy_loops(count):
    loops = [subprocess.Popen(["sh", "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def attempt(command, environment, limit, kept):
    """Runs the tests once, and writes their output to `kept`. Returns the seconds, the number of passed tests, and failures."""
    start = time.monotonic()
    with open(kept, "w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            code = f"none within {limit} s"
        finally:
            # What hangs, and what failed tests have left behind.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = kept.read_text(errors="replace")
    passed = sum(map(int, re.findall(r"^test result: .*? (\d+) passed;", text, re.MULTILINE)))
    failures = sorted(set(re.findall(r"^test (\S+?)(?: - .*)? \.\.\. FAILED", text, re.MULTILINE)))
    # For example a program that was killed, or a filter that no test has.
    if not failures and (code != 0 or passed == 0):
        failures = [f"exit code {code}, {passed} passed"]
    return time.monotonic() - start, passed, failures


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
