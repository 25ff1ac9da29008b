#!/usr/bin/env python3
"""Runs real ranks under the real launcher, with every fault at every moment of a training run, and checks the outcome.

    python3 scripts/fault_matrix.py                 # everything: about ten minutes on 2 cores
    python3 scripts/fault_matrix.py --quick         # every fault once
    python3 scripts/fault_matrix.py --only stop     # cases whose description has these words
    python3 scripts/fault_matrix.py --soak 500      # elastic runs, until 500 ranks were killed at random times; --seed repeats them

Every survivor must end within its bound, with an error that names the rank and the reason; after a pause, or where a fault
does not matter, the run must continue and have the result of a run without it. Afterwards, no process, shared memory, socket or
temporary file may be left, and a run that was interrupted in a checkpoint must continue from a complete one. An elastic run must
continue with the same bits, wherever a death is seen first.

A run of everything writes its tables to benches/results/fault_matrix.md. Needs Linux, Python and cargo, and for ENOSPC the right
to mount a file system. With --nccl the ranks use NCCL, on the emulated GPU (scripts/emulated_gpu.sh): source the env.sh of
scripts/cuda_toolkit.sh first. The CPU engine and NCCL each have a part of the file.
"""

import argparse
import concurrent.futures
import contextlib
import datetime
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from compare.harness import machine, skip
from faults import elastic
from faults.cases import ENGINES, FAULTS, MOMENTS, SHORT, all_cases, quick_cases
from faults.programs import ROOT, build
from faults.launched import Wrong
from faults.run import judge, reference

# How many elastic runs are a part of `--quick`.
QUICK_RUNS = 3


def main():
    options = parse()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.soak:
        sys.exit(1 if soak(options) else 0)
    engines = ["nccl"] if options.nccl else ["shm", "tcp", "hosts"]
    cases, left_out = all_cases(engines)
    if options.quick:
        cases = quick_cases()
    if options.only:
        cases = [case for case in cases if all(word in str(case) for word in options.only)]
    skipped = []
    if not can_mount():
        skipped = [case for case in cases if case.fault == "disk"]
        cases = [case for case in cases if case.fault != "disk"]
        skip(f"ENOSPC, {len(skipped)} cases", "this system does not let this user mount a file system")
    programs = build(options.nccl, options.built)
    started = time.monotonic()
    results = {}
    with workers(options.jobs) as pool:
        pairs = sorted({(case.engine, case.world) for case in cases})
        references = dict(zip(pairs, pool.map(lambda pair: reference(programs, *pair), pairs)))
        running = {pool.submit(attempt, programs, case, references): case for case in cases}
        for future in concurrent.futures.as_completed(running):
            case, verdict = running[future], future.result()
            results[case] = verdict
            say(f"{len(results):3} of {len(cases)}  {case}: {describe(verdict)}")
    seconds = time.monotonic() - started
    wrong = [case for case, (error, *_) in results.items() if error]
    say(f"{len(results)} cases, {len(results) - len(wrong)} as expected, {len(wrong)} not, in {seconds:.0f} s")
    if options.quick and not options.only:
        wrong += soak(options, programs)
    if not (options.quick or options.only):
        path = options.output / "fault_matrix.md"
        replace_part(path, document(options, engines, results, left_out, skipped, seconds))
        say(f"written: {path}")
    sys.exit(1 if wrong else 0)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="every fault once")
    parser.add_argument("--nccl", action="store_true", help="NCCL on the emulated GPU, built with the feature nccl")
    parser.add_argument("--built", nargs=2, type=lambda path: Path(path).resolve(), help="a ddprun and a test binary `processes`, instead of building them")
    parser.add_argument("--soak", type=int, metavar="DEATHS", help="elastic runs, until so many ranks were killed")
    parser.add_argument("--seed", type=int, default=1, help="of the random numbers of --soak [1]")
    parser.add_argument("--runs", type=int, nargs="+", metavar="NUMBER", help="only these runs of --soak")
    parser.add_argument("--only", nargs="+", help="cases, or runs of --soak, whose description has these words")
    parser.add_argument("--jobs", type=int, default=2 * (os.cpu_count() or 1), help="cases at a time [2 for each processor]")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="the date in the table [today]")
    parser.add_argument("--output", type=Path, default=ROOT / "benches" / "results", help="the folder")
    return parser.parse_args()


@contextlib.contextmanager
def workers(jobs):
    """A pool of threads. When the script is interrupted, cases that have not begun are left out."""
    pool = concurrent.futures.ThreadPoolExecutor(jobs)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def say(text):
    print(text, file=sys.stderr, flush=True)


def can_mount():
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    command = [*unshare, "mount", "-t", "tmpfs", "none", "/tmp"]
    try:
        return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


def soak(options, programs=None):
    """Kills ranks of elastic runs. Returns the runs that did not end as expected."""
    programs = programs or build(False, options.built)
    started, verdicts = time.monotonic(), {}
    quick = not options.soak
    planned = elastic.runs(QUICK_RUNS if quick else 4 * options.soak, quick)
    if options.runs:
        planned = [planned[number] for number in options.runs]
    if options.only:
        planned = [run for run in planned if all(word in str(run) for word in options.only)]
    with workers(options.jobs) as pool:
        calm, deaths = {}, 0
        for first in range(0, len(planned), options.jobs):
            if not quick and deaths >= options.soak:
                break
            batch = planned[first : first + options.jobs]
            new = {run.calm: run for run in batch if run.mode != "stop" and run.calm not in calm}
            calm |= dict(zip(new, pool.map(lambda run: elastic.calm(programs, run), new.values())))
            futures = {pool.submit(elastic.attempt, programs, run, options.seed, calm): run for run in batch}
            for future in concurrent.futures.as_completed(futures):
                run, verdict = futures[future], future.result()
                verdicts[run] = verdict
                error, killed, seconds = verdict
                deaths += killed
                said = f"WRONG: {error}" if error else f"continues, {seconds:.1f} s after the last"
                say(f"{deaths:4} deaths  {run}: {said}")
    wrong = [run for run, (error, *_) in verdicts.items() if error]
    seconds = time.monotonic() - started
    say(f"{len(verdicts)} elastic runs, {deaths} deaths, {len(wrong)} runs not as expected, in {seconds:.0f} s (seed {options.seed})")
    if options.soak and not (options.runs or options.only):
        path = options.output / "fault_matrix.md"
        replace_part(path, document_of_soak(options, verdicts, deaths, seconds))
        say(f"written: {path}")
    return wrong


def document_of_soak(options, verdicts, deaths, seconds):
    wrong = {run: verdict[0] for run, verdict in verdicts.items() if verdict[0]}
    command = f"python3 scripts/fault_matrix.py --soak {options.soak} --seed {options.seed} --jobs {options.jobs}"
    lines = [
        "# Deaths in elastic runs",
        "",
        f"{len(verdicts)} runs under `ddprun`, most of them of `elastic::run`, in which {deaths} processes were killed at random times: "
        f"**{len(verdicts) - len(wrong)} ended as expected, {len(wrong)} did not**.",
        "",
        *facts(options, command, seconds),
        "- Programs: `tests/processes/elastic_groups_ranks.rs`; `tests/common/elastic_zero.rs` for ZeRO and sharding; `tests/processes/elastic_stop.rs` for SIGTERM",
        "",
        "A run must end with the same bits as one without a death. All parts of its commits (data loader, loss scaling, schedule, "
        "generator; under ZeRO and sharding the optimizer and the weights) belong to a group. After SIGTERM, the ranks that were not killed must end at the same step and save it. No process and no "
        "shared memory may be left.",
        "",
        row_of(["killed", "the ranks communicate in", "runs", "deaths", "not as expected", "from the last death to the end of the run, at most"]),
        row_of(["---"] * 6),
        *map(row_of, elastic.table(verdicts)),
    ]
    if wrong:
        lines += ["", "## Runs that did not end as expected", ""]
        lines += [f"- {run}: `{first_line(error)}`" for run, error in wrong.items()]
    return "\n".join([*lines, ""])


def facts(options, command, seconds):
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return [
        f"- Date: {options.date}",
        f"- Machine: {machine()}",
        f"- Commit: {commit}",
        f"- Command: `{command}`, {seconds:.0f} s",
    ]


def attempt(programs, case, references):
    """Returns the error, or None; how long survivors took; how the run ended."""
    try:
        return None, *judge(programs, case, references)
    except (Wrong, OSError) as error:
        return str(error), 0, ""


def describe(verdict):
    error, seconds, how = verdict
    return f"WRONG: {error}" if error else f"{how}, {seconds:.1f} s"


def replace_part(path, part):
    """Replaces the part of a document that has the title of `part`, or appends it."""
    title = part.splitlines()[0]
    parts = re.split(r"^(?=# )", path.read_text() if path.exists() else "", flags=re.MULTILINE)
    kept = [part.strip() if old.startswith(title + "\n") else old.strip() for old in parts if old.strip()]
    if part.strip() not in kept:
        kept.append(part.strip())
    path.write_text("\n\n".join(kept) + "\n")


def document(options, engines, results, left_out, skipped, seconds):
    wrong = {case: verdict[0] for case, verdict in results.items() if verdict[0]}
    command = ["python3", "scripts/fault_matrix.py", *(["--nccl"] if options.nccl else []), "--jobs", str(options.jobs)]
    first = " while ranks meet, or, on two hosts, where a rank waits for the goodbye of a silent one"
    if options.nccl:
        first = ", which sees the end of a process at once, while ranks have ten seconds more to find out which heartbeat is missing"
    lines = [
        "# Faults over NCCL, on an emulated GPU" if options.nccl else "# Faults",
        "",
        f"{len(results)} runs of real ranks under `ddprun`, each with one fault: **{len(results) - len(wrong)} ended as expected, "
        f"{len(wrong)} did not**.",
        "",
        *facts(options, " ".join(command), seconds),
        "- Program: `tests/processes/faults.rs`; expected outcomes: `scripts/faults/cases.py`",
        "",
        "Every survivor must end within its bound, with an error that names the rank and the reason: at once, or at the "
        f"time-out of {SHORT} s where nothing else reveals the fault (plus a second to ask for the cause, two for each group's goodbye, and three more to tell why the checkpointer's group failed); the "
        f"launcher may be first{first}. An allowance of 5 s, or up to 20 s under load, is added. Where the fault does not "
        "matter, and after a pause, the run must continue and end with the same bits as a run without a fault. Afterwards there is no "
        "process, shared memory, socket or temporary file, and a run that was interrupted in a checkpoint continues from a complete one.",
        "",
        "Each cell: runs that ended as expected of all runs (rank 0, a middle one and the last, of 2 and 4; of 4 on two hosts), and the longest "
        "time after the fault: until a survivor's error, or, where the run continues or ddprun ends it, until all have ended. –: the "
        "combination does not apply.",
    ]
    for engine in engines:
        lines += ["", f"## {ENGINES[engine]}", "", row_of(["fault", *MOMENTS.values()]), row_of(["---"] * (len(MOMENTS) + 1))]
        for fault, title in FAULTS.items():
            cells = [cell(engine, fault, moment, results, left_out, skipped) for moment in MOMENTS]
            lines.append(row_of([title, *cells]))
    reasons = dict.fromkeys(left_out.values())
    lines += ["", "## Combinations that do not apply", ""]
    for reason in reasons:
        found = {FAULTS[fault] for (_, fault, _), why in left_out.items() if why == reason}
        lines.append(f"- {', '.join(sorted(found))}: {reason}.")
    if wrong:
        lines += ["", "## Runs that did not end as expected", ""]
        lines += [f"- {case}: `{first_line(error)}`" for case, error in wrong.items()]
    return "\n".join([*lines, ""])


def cell(engine, fault, moment, results, left_out, skipped):
    if (engine, fault, moment) in left_out:
        return "–"
    found = [verdict for case, verdict in results.items() if (case.engine, case.fault, case.moment) == (engine, fault, moment)]
    if not found:
        return "not run" if skipped else ""
    well = [verdict for verdict in found if not verdict[0]]
    longest = max((verdict[1] for verdict in well), default=0)
    hows = sorted({verdict[2] for verdict in well})
    how = hows[0] if len(hows) == 1 else ", ".join(f"{sum(verdict[2] == how for verdict in well)} {how}" for how in hows)
    return f"{len(well)}/{len(found)}: {how}, {longest:.1f} s"


def first_line(text):
    return text.splitlines()[0][:300].replace("`", "'")


def row_of(cells):
    return "| " + " | ".join(cells) + " |"


main()
