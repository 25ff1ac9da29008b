"""Runs one case: ranks under the launcher, the fault, and the leftovers afterwards."""

import contextlib
import os
import random
import re
import shutil
import signal
import tempfile
import time
from pathlib import Path

from . import sockets
from .cases import LIMITS, LONG, OWN, PAUSE, Case, expected, names, timeout
from .launched import PATIENCE, Launched, Wrong, slack

# How long the launcher gives ranks to exit by themselves (its own constant), and then to handle SIGTERM.
SETTLE, SHUTDOWN = 1, 3
DISK = "8m"


class Run(Launched):
    """One run of a case."""

    def __init__(self, programs, case, folder, plan):
        self.case = case
        (folder / "run").mkdir(exist_ok=True)
        variables = {
            "CANDLE_DDP_TEST_FAULT": plan,
            "CANDLE_DDP_TEST_TIMEOUT": timeout(case),
            "CANDLE_DDP_TEST_LATE": (case.victim + 1) % case.world if " rendezvous " in plan else -1,
        }
        if case.engine == "nccl":
            # One GPU for each rank. Their kernels are compiled once for all runs, and so not into the folder of one.
            variables["EMULATED_GPUS"] = case.world
            if "EMULATED_GPU_CACHE" not in os.environ:
                variables["EMULATED_GPU_CACHE"] = Path(tempfile.gettempdir()) / f"emulated-gpu-cache-{os.getuid()}"
        else:
            variables["CANDLE_DDP_CPU_TRANSPORT"] = "tcp" if case.engine == "tcp" else "auto"
        command = programs.command(case.world, "--shutdown-timeout", str(SHUTDOWN), labels=case.engine == "hosts")
        if plan.startswith("disk "):
            command = on_small_disk(command, folder)
        super().__init__(command, folder, variables)

    def rank(self, rank):
        """Returns the process and the store's port of a rank."""
        pid, port = self.wait_for(f"rank {rank}", lambda: self.read(f"rank{rank}")).split()
        return int(pid), int(port)


def on_small_disk(command, folder):
    """Returns the command with the checkpoints on their own small disk, which are copied when it has ended."""
    inside = 'mount -t tmpfs -o size="$0" none "$1/run" || exit 99; folder=$1; shift; "$@"; code=$?; cp -a "$folder/run" "$folder/kept"; exit $code'
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    return [*unshare, "sh", "-c", inside, DISK, str(folder), *command]


def cause(run, case):
    """Causes the fault. Returns when that was."""
    if case.fault in OWN | LIMITS:
        run.wait_for("the fault", lambda: run.read("reached") is not None)
        run.tell("go")
        return (run.folder / "reached").stat().st_mtime
    run.wait_for("the fault", lambda: run.read("reached") is not None)
    pid, port = run.rank(case.victim)
    match case.moment:
        case "rendezvous":
            run.wait_for("connection to the store", lambda: to_store(pid, port))
            time.sleep(random.uniform(0, 0.2))
        case "all_reduce":
            time.sleep(random.uniform(0, 0.1))
        case "checkpoint":
            unfinished = lambda: any(".tmp" in path.name for path in (run.folder / "run").rglob("*"))
            try:
                run.wait_for("temporary file", unfinished, 1)
            except Wrong:
                pass  # it was quick
    then = time.time()
    match case.fault:
        case "kill":
            os.kill(pid, signal.SIGKILL)
        case "stop":
            os.kill(pid, signal.SIGSTOP)
            run.tell("go")
        case "pause":
            os.kill(pid, signal.SIGSTOP)
            if case.moment == "rendezvous":
                run.tell("go")
            time.sleep(PAUSE)
            os.kill(pid, signal.SIGCONT)
        case "closed":
            each(run, case, sockets.close)
        case "half_open":
            each(run, case, sockets.deafen)
        case "garbage":
            each(run, case, sockets.disturb)
    run.tell("go")
    return then


def to_store(pid, port, ends=None):
    return [(fd, own, other) for fd, own, other in sockets.of(pid, ends) if sockets.port(other) == port]


def each(run, case, act):
    """Harms the victim's connections: in the rendezvous its connections to the store, later to other ranks."""
    # A connection may just be made.
    for _ in range(40):
        if harm(run, case, act):
            return
        time.sleep(0.05)


def harm(run, case, act):
    """Harms the connections that there are; returns whether there is one."""
    pid, port = run.rank(case.victim)
    ends = sockets.table(sockets.ESTABLISHED)
    store = to_store(pid, port, ends)
    if case.moment == "rendezvous":
        chosen = [(pid, store)]
    else:
        mine = [connection for connection in sockets.of(pid, ends) if connection not in store]
        chosen = [(pid, mine)]
        if case.fault == "half_open":
            opposite = {(other, own) for _, own, other in mine}
            for peer in (rank for rank in range(case.world) if rank != case.victim):
                theirs = run.rank(peer)[0]
                chosen.append((theirs, [one for one in sockets.of(theirs, ends) if one[1:] in opposite]))
    # All are taken first: the victim may end as soon as one is touched.
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(sockets.take(owner, fd)) for owner, connections in chosen for fd, *_ in connections]
        # Between the ranks of this engine, data waits for a header at these moments only: elsewhere, garbage would be a
        # part of the payload.
        in_data = case.engine != "shm" and case.moment in ["construction", "forward", "comparison"]
        is_all = case.fault != "garbage" or case.moment == "rendezvous"
        harmed = [sock for sock in taken if is_all or sockets.is_control(sock) != in_data]
        for sock in harmed:
            act(sock)
        return bool(harmed)


def judge(programs, case, references):
    """Runs one case. Returns how long survivors took in seconds, and how the run ended. Raises Wrong."""
    folder = Path(tempfile.mkdtemp(prefix="fault_matrix-")).resolve()
    try:
        before = shared_memory()
        how = case.fault if case.fault in OWN | LIMITS else "outside"
        with Run(programs, case, folder, f"{how} {case.moment} {case.victim}") as run:
            then = cause(run, case)
            verdict = follow(run, case, then, references)
            nothing_is_left(run, case, before)
        if case.moment in ["comparison", "checkpoint"]:
            resume(programs, case, folder)
        return verdict
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def follow(run, case, then, references):
    """Checks the outcome of the fault."""
    wanted = expected(case)
    # The launcher reports when all have ended; a run that continues takes as long as it takes.
    limit = wanted.within + slack() + SETTLE + SHUTDOWN
    code = run.end(limit + (LONG if wanted.continues is not False else 0) + slack())
    took, text = time.time() - then, run.text()
    results = [run.read(f"result{rank}") for rank in range(case.world)]
    if code == 0 and wanted.continues is not False:
        reference = references[case.engine, case.world]
        if case.fault == "memory":
            # With the other transport, sums are rounded otherwise.
            sums = {round(float((result or "0 0").split()[1]), 3) for result in results}
            same = len(set(results)) == 1 and sums == {round(float(reference.split()[1]), 3)}
        else:
            same = set(results) == {reference}
        if not same:
            raise Wrong(f"the results must be {reference}, and are {results}")
        return took, "continues"
    if code == 0 or wanted.continues:
        raise Wrong(f"it ended with code {code}: {text[-3000:]}")
    if took > limit:
        raise Wrong(f"the run must end within {limit:.1f} s, and took {took:.1f} s")
    longest, how = 0, "ends"
    for rank in (rank for rank in range(case.world) if rank != case.victim):
        error = run.read(f"error{rank}")
        if error is None:
            # The launcher groups ranks that ended alike.
            ended = rf"(rank {rank}\b|ranks \[(\d+, )*{rank}(, \d+)*\]).* after ddprun asked it to exit"
            if not wanted.launcher_first or not re.search(ended, text):
                raise Wrong(f"rank {rank} says nothing: {text[-3000:]}")
            how = "ddprun ends it"
            continue
        late = (run.folder / f"error{rank}").stat().st_mtime - then
        longest = max(longest, late)
        if late > wanted.within + slack():
            raise Wrong(f"rank {rank} took {late:.1f} s: {error}")
        if not wanted.others and not names(error, case.victim):
            raise Wrong(f"rank {rank} does not name rank {case.victim}: {error}")
        if not re.search(wanted.reason, error):
            raise Wrong(f"rank {rank} does not give the reason: {error}")
    if wanted.headline and not re.search(rf"^ddprun: rank {case.victim} (failed|made the other|ended while)", text, re.M):
        raise Wrong(f"ddprun does not name rank {case.victim} first: {text[-3000:]}")
    return took if how == "ddprun ends it" else longest, how


def nothing_is_left(run, case, before):
    """No process, shared memory, socket or temporary file."""
    if left := run.processes():
        raise Wrong(f"processes are left: {left}")
    if left := list(run.temporary.rglob("*")):
        raise Wrong(f"temporary files are left: {left}")
    if shared := {name for name in shared_memory() - before if "candle" in name}:
        raise Wrong(f"shared memory is left: {shared}")
    port = int(run.read("rank0").split()[1]) if run.read("rank0") else 0
    if port and sockets.is_listening(port):
        raise Wrong(f"a process still listens on the store's port {port}")


def shared_memory():
    return set(os.listdir("/dev/shm")) if Path("/dev/shm").exists() else set()


def resume(programs, case, folder):
    """Checkpoints are whole: the same run continues from the newest, and leaves nothing else in the folder."""
    if (folder / "kept").exists():
        (folder / "run").rmdir()
        (folder / "kept").rename(folder / "run")
    for name in ["reached", "go", *(f"{what}{rank}" for what in ["error", "result", "loaded"] for rank in range(case.world))]:
        (folder / name).unlink(missing_ok=True)
    again = Case(case.engine, case.world, "none", "none", 0)
    with Run(programs, again, folder, "none none 0") as run:
        if code := run.end(PATIENCE):
            raise Wrong(f"the run that continues ended with code {code}: {run.text()[-3000:]}")
        loaded = {run.read(f"loaded{rank}") for rank in range(case.world)}
        if len(loaded) != 1 or not int(loaded.pop()) >= 2:
            raise Wrong(f"the run that continues loaded the checkpoint of step {loaded}")
    for path in (folder / "run").iterdir():
        if not (path / "checkpoint.json").exists() or any(".tmp" in file.name for file in path.iterdir()):
            raise Wrong(f"the save leaves {path} behind: {list(path.iterdir()) if path.is_dir() else ''}")


def reference(programs, engine, world):
    """Returns the result of a run without a fault."""
    folder = Path(tempfile.mkdtemp(prefix="fault_matrix-")).resolve()
    try:
        with Run(programs, Case(engine, world, "none", "none", 0), folder, "none none 0") as run:
            if code := run.end(PATIENCE):
                raise Wrong(f"the run without a fault ended with code {code}: {run.text()[-3000:]}")
            results = {run.read(f"result{rank}") for rank in range(world)}
            if len(results) != 1:
                raise Wrong(f"ranks differ without a fault: {results}")
            return results.pop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
