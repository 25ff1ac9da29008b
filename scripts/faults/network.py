"""Ranks on several hosts, which are network namespaces, and what breaks between them in the middle of all-reduces."""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from compare.harness import free_port

from .cases import names
from .programs import MATRIX, arguments
from .run import SETTLE, SHUTDOWN, Wrong, slack

# What ranks say of one that they cannot reach.
SILENT = "does not answer|do not answer|was lost|or the network is"
# What they say of one whose system has closed its connections.
ENDED = "is gone|has ended"
# What launchers say of one that they cannot reach.
NO_SIGN = r"node {} \(host host{}\) has given no sign of life"
NO_STORE = "the store of the run is gone"


@dataclass
class Scenario:
    title: str
    # Called with the hosts and the run.
    act: Callable
    # The group's time-out in seconds.
    timeout: int
    # Whether the run continues.
    continues: bool
    # The reason in the errors, and how long they take.
    reason: str = ""
    within: float = 0
    # The hosts whose ranks survive; `None`: all.
    survivors: tuple | None = None
    # The host that is lost. Those on the others name one of its ranks, or it.
    lost: int = 1
    # How many heartbeats, of two in a second, launchers may miss before they end their ranks.
    heartbeats: int = 10


class Launchers:
    """A launcher on each host."""

    def __init__(self, programs, hosts, folder, scenario):
        self.folder, self.hosts, self.processes = folder, hosts, []
        port, ranks = str(free_port()), hosts.ranks_per_host
        (folder / "run").mkdir()
        for host in range(hosts.count):
            environment = {
                **os.environ,
                "CANDLE_DDP_TEST_FAULT": "outside all_reduce 0",
                "CANDLE_DDP_TEST_FOLDER": str(folder),
                "CANDLE_DDP_TEST_TIMEOUT": str(scenario.timeout),
                # All are on one kernel, where ranks would share memory.
                "CANDLE_DDP_CPU_HOST": str(host),
                "RAYON_NUM_THREADS": "1",
                "TMPDIR": str(folder),
            }
            launch = [programs.launcher, "--nnodes", str(hosts.count), "--node-rank", str(host), "--nproc-per-node", str(ranks)]
            launch += ["--master-addr", hosts.address_of(0), "--master-port", port, "--shutdown-timeout", str(SHUTDOWN)]
            launch += ["--rdzv-conf", f"keep_alive_max_attempt={scenario.heartbeats}"]
            command = [*hosts.enter(host * ranks), *map(str, launch), str(programs.program), *arguments(MATRIX)]
            with open(folder / f"output{host}", "wb") as output:
                self.processes.append(
                    subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
                )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for host in range(self.hosts.count):
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
        ranks = self.hosts.ranks_per_host
        return range(host * ranks, (host + 1) * ranks)

    def text(self):
        return "".join(self.output(host)[-4000 // self.hosts.count :] for host in range(self.hosts.count))

    def output(self, host):
        return (self.folder / f"output{host}").read_text(errors="replace")

    def wait_for(self, name, seconds):
        end = time.monotonic() + seconds
        while not (self.folder / name).exists():
            if time.monotonic() > end or any(process.poll() for process in self.processes):
                raise Wrong(f"no {name}: {self.text()}")
            time.sleep(0.01)


def judge(programs, scenario, hosts, reference):
    """Returns how long it took, and the results, if the run continued, or else one of the errors."""
    folder = Path(tempfile.mkdtemp(prefix="network_faults-")).resolve()
    survivors = range(hosts.count) if scenario.survivors is None else scenario.survivors
    try:
        with hosts, Launchers(programs, hosts, folder, scenario) as run:
            run.wait_for("reached", 120)
            time.sleep(0.1)
            then = time.time()
            scenario.act(hosts, run)
            (folder / "go").touch()
            bound = scenario.within + slack() + SETTLE + SHUTDOWN
            for host in survivors:
                try:
                    run.processes[host].wait(max(0, (120 if scenario.continues else bound) + then - time.time()))
                except subprocess.TimeoutExpired:
                    raise Wrong(f"HANG: host {host} has not ended {time.time() - then:.0f} s after the fault: {run.text()}") from None
            if scenario.continues:
                return time.time() - then, the_same(run, reference)
            return the_errors(run, scenario, survivors, then)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def the_same(run, reference):
    results = [run.folder / f"result{rank}" for host in range(run.hosts.count) for rank in run.of(host)]
    if not all(result.exists() for result in results):
        raise Wrong(f"the run must continue: {run.text()}")
    results = {result.read_text() for result in results}
    if len(results) != 1 or (reference and results != {reference}):
        raise Wrong(f"the results must be {reference}, and are {results}")
    return results.pop()


def the_errors(run, scenario, survivors, then):
    longest = 0
    for host, rank in ((host, rank) for host in survivors for rank in run.of(host)):
        late, error = last_words(run, scenario, host, rank, then)
        longest = max(longest, late)
        if late > scenario.within + slack():
            raise Wrong(f"rank {rank} took {late:.1f} s: {error}")
    return longest, error


def last_words(run, scenario, host, rank, then):
    """Returns when a rank, or its launcher, has said why the run ends, and its words."""
    path, is_lost = run.folder / f"error{rank}", host == scenario.lost
    if not path.exists():
        # The launcher was first.
        reason = NO_STORE if is_lost else NO_SIGN.format(scenario.lost, scenario.lost)
        found = re.search(f".*{reason}.*", run.output(host))
        if not found:
            raise Wrong(f"neither rank {rank} nor its launcher gives the reason: {run.output(host)[-2000:]}")
        return (run.folder / f"output{host}").stat().st_mtime - then, found[0]
    error = path.read_text()
    if not re.search(scenario.reason, error):
        raise Wrong(f"rank {rank} does not give the reason: {error}")
    if not is_lost and not any(names(error, lost) for lost in run.of(scenario.lost)):
        raise Wrong(f"rank {rank} names no rank of host {scenario.lost}: {error}")
    return path.stat().st_mtime - then, error
