"""Elastic runs whose ranks are killed at random times: the run continues, with the bits of a run without a death."""

import os
import random
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from .launched import PATIENCE, Launched, Wrong, slack
from .programs import ELASTIC, SPREAD, STOPPING
from .run import shared_memory

SHAPES = {
    "plain": "one group",
    "norm": "SyncBatchNorm",
    "subgroups": "sub-groups",
    "messages": "messages",
    "norm,subgroups,messages": "all of these",
    "zero": "one group, with ZeRO",
    "loop": "one group, sharded",
    "hybrid": "the groups of HSDP",
}
# The states of these are spread over the ranks.
SPREAD_SHAPES = ("zero", "loop", "hybrid")
MODES = {
    "single": "one rank at a time",
    "pair": "a second one within 60 ms, while the others meet",
    "all": "all ranks at once",
    "stop": "one or two ranks within 40 ms of SIGTERM to ddprun",
    "restart": "one rank at a time, of a run that begins again from its checkpoint",
}
TRANSPORTS = {"shm": "shared memory", "tcp": "TCP", "hosts": "two hosts"}
# The modes of a soak, which take turns.
PLAN = [
    *[(mode, shape) for shape in SPREAD_SHAPES for mode in ("single", "restart")],
    *[("single", shape) for shape in SHAPES if shape not in SPREAD_SHAPES],
    ("pair", "plain"),
    ("all", "plain"),
    ("single", "norm"),
    ("pair", "norm,subgroups,messages"),
    ("stop", "plain"),
    ("pair", "norm"),
    ("single", "norm,subgroups,messages"),
    ("all", "norm"),
    ("pair", "subgroups"),
    ("stop", "plain"),
]
# How often a run is hit, except that SIGTERM ends it.
HITS = 6
EPOCHS = 20
# The pause in each step, in milliseconds, so that a run lasts until its last rank has been killed.
PAUSE = 8
# How long a run may take after the last death.
LIMIT = 60


@dataclass(frozen=True)
class Soak:
    """One run of a soak; its number and the seed give all random numbers."""

    number: int
    mode: str
    shape: str
    transport: str
    world: int

    def __str__(self):
        return f"run {self.number}: {MODES[self.mode]}, {SHAPES[self.shape]}, {self.world} ranks, {TRANSPORTS[self.transport]}"

    @property
    def calm(self):
        """Everything that decides the result of the run."""
        return self.shape, self.transport, self.world, self.mode == "restart"


def runs(number, quick=False):
    """Returns so many runs."""
    found = []
    for index in range(number):
        mode, shape = [("single", "norm,subgroups,messages"), ("pair", "norm"), ("all", "plain")][index % 3] if quick else PLAN[index % len(PLAN)]
        transport = ["shm", "tcp", "shm", "hosts"][index % 4 if quick else index // len(PLAN) % 4]
        world = 4 if transport == "hosts" or mode == "stop" or shape == "hybrid" else 3 + index % 2
        found.append(Soak(index, mode, shape, transport, world))
    return found


def start(programs, soak, folder, pause=PAUSE):
    variables = {
        "CANDLE_DDP_TEST_ELASTIC": "",
        "CANDLE_DDP_TEST_SHAPE": soak.shape,
        "CANDLE_DDP_TEST_EPOCHS": EPOCHS,
        "CANDLE_DDP_TEST_PAUSE": pause,
        # The ranks continue from a checkpoint when all were killed.
        "CANDLE_DDP_TEST_ALL_LOST": "load",
        "CANDLE_DDP_TEST_STOP_FOLDER": folder,
        "CANDLE_DDP_TEST_STOP_MIN": 1,
        "CANDLE_DDP_CPU_TRANSPORT": "tcp" if soak.transport == "tcp" else "auto",
    }
    entry = STOPPING if soak.mode == "stop" else ELASTIC
    if soak.shape in SPREAD_SHAPES:
        entry = SPREAD
        del variables["CANDLE_DDP_TEST_ALL_LOST"]
        if soak.shape != "zero":
            variables["CANDLE_DDP_TEST_SHARDED"] = soak.shape
        if soak.mode == "restart":
            variables["CANDLE_DDP_TEST_RESTARTED"] = 1
    options = ["--max-restarts", "1000", "--shutdown-timeout", str(PATIENCE)]
    command = programs.command(soak.world, *options, labels=soak.transport == "hosts", entry=entry)
    return Launched(command, folder, variables)


def result(run, world):
    results = {run.read(f"result-{rank}") for rank in range(world)}
    if len(results) != 1 or None in results:
        raise Wrong(f"the results differ: {[(result or '')[:60] for result in results]}: {run.text()[-3000:]}")
    return results.pop()


def calm(programs, soak):
    """Returns the result of a run without a death."""
    folder = Path(tempfile.mkdtemp(prefix="fault_matrix-")).resolve()
    try:
        with start(programs, soak, folder, pause=0) as run:
            if code := run.end(PATIENCE):
                raise Wrong(f"the run without a death ended with code {code}: {run.text()[-3000:]}")
            return result(run, soak.world)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def entries(run, soak):
    """Returns how often each rank has begun to train."""
    return [(run.read(f"entered-{rank}") or "").count("\n") for rank in range(soak.world)]


def kill(run, rank):
    """Kills the newest process of a rank. Returns whether there was one."""
    name = f"up{rank}" if (run.folder / f"up{rank}").exists() else f"started-{rank}"
    try:
        pid = int((run.read(name) or "").split()[-1])
        # A rank ends with the exit of its newest process, and its number may belong to something else by then.
        if f"CANDLE_DDP_TEST_FOLDER={run.folder}\0".encode() not in Path(f"/proc/{pid}/environ").read_bytes():
            return False
        os.kill(pid, signal.SIGKILL)
        return True
    except (IndexError, ValueError, OSError):
        return False


def hit(run, soak, chance):
    """Kills ranks once. Returns how many."""
    ranks = list(range(soak.world))
    chance.shuffle(ranks)
    if soak.mode == "all":
        return sum([kill(run, rank) for rank in ranks])
    killed = int(kill(run, ranks[0]))
    if soak.mode == "pair":
        time.sleep(chance.uniform(0, 0.06))
        killed += kill(run, ranks[1])
    return killed


def attempt(programs, soak, seed, results):
    """Returns the error, or None; how many ranks were killed; how long the run took after the last of them."""
    folder = Path(tempfile.mkdtemp(prefix="fault_matrix-")).resolve()
    killed, last = 0, time.monotonic()
    try:
        before = shared_memory()
        chance = random.Random(f"{seed}/{soak.number}")
        with start(programs, soak, folder) as run:
            if soak.mode == "stop":
                killed, last = stop(run, soak, chance)
            else:
                up = lambda: all((folder / f"entered-{rank}").exists() for rank in range(soak.world))
                run.wait_for("the first steps of all ranks", up)
                for _ in range(HITS):
                    time.sleep(chance.uniform(0, 0.5))
                    if run.process.poll() is not None:
                        break
                    before_hit = entries(run, soak)
                    hits = hit(run, soak, chance)
                    killed, last = killed + hits, time.monotonic()
                    if hits and soak.shape in SPREAD_SHAPES:
                        # A shard is lost if the rank that mirrors it dies before all ranks have met again.
                        again = lambda: all(now > then for now, then in zip(entries(run, soak), before_hit))
                        run.wait_for("all ranks to continue", lambda: run.process.poll() is not None or again())
                        last = time.monotonic()
                if code := run.end(LIMIT + 6 * slack()):
                    raise Wrong(f"it ended with code {code}: {run.text()[-4000:]}")
                if result(run, soak.world) != results[soak.calm]:
                    raise Wrong(f"the result is not that of a run without a death: {run.text()[-4000:]}")
            if left := run.processes():
                raise Wrong(f"processes are left: {left}")
            if shared := {name for name in shared_memory() - before if "candle" in name}:
                raise Wrong(f"shared memory is left: {shared}")
        return None, killed, time.monotonic() - last
    except (Wrong, OSError) as error:
        return str(error), killed, 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def stop(run, soak, chance):
    """Asks ddprun to end, and kills ranks meanwhile: the others must save the last step. Returns how many, and when."""
    run.wait_for("the first steps of all ranks", lambda: all((run.folder / f"up{rank}").exists() for rank in range(soak.world)))
    time.sleep(chance.uniform(0, 0.05))
    run.process.send_signal(signal.SIGTERM)
    time.sleep(chance.uniform(0, 0.04))
    victims = chance.sample(range(soak.world), chance.randint(1, 2))
    killed = sum([kill(run, rank) for rank in victims])
    last = time.monotonic()
    # A worker that waits for something that never comes is killed after the launcher's time-out, which is longer.
    run.end(LIMIT + 6 * slack())
    steps = {run.read(f"ended{rank}") for rank in range(soak.world) if rank not in victims}
    errors = [run.read(f"error{rank}") for rank in range(soak.world)]
    if len(steps) != 1 or None in steps:
        raise Wrong(f"the others ended at the steps {steps}: {errors}, {run.text()[-4000:]}")
    saved = run.folder / "run" / f"step-{int(steps.pop()):08}" / "checkpoint.json"
    if not saved.exists():
        raise Wrong(f"there is no {saved.name}: {run.text()[-4000:]}")
    return killed, last


def table(verdicts):
    """Returns rows for each mode and shape: runs, deaths, those that did not end as expected, the slowest end."""
    rows = {}
    for soak, (error, killed, seconds) in verdicts.items():
        row = rows.setdefault((soak.mode, soak.shape), [0, 0, 0, 0.0])
        row[0] += 1
        row[1] += killed
        row[2] += error is not None
        row[3] = max(row[3], seconds)
    for (mode, shape), (number, killed, wrong, longest) in rows.items():
        yield [MODES[mode], SHAPES[shape], str(number), str(killed), str(wrong), f"{longest:.1f} s"]
