"""Helpers of the comparison scripts: starting ranks, on one host or in network namespaces, and describing the machine.
Needs only Python; several hosts need root, iproute2 and util-linux."""

import json
import os
import platform
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("CANDLE_DDP_PYTHON", "python3")
TIMEOUT = 900

# So that ranks and namespaces are removed in this case too.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def say(*words):
    print(*words, file=sys.stderr, flush=True)


def skip(what, reason):
    """Reports that a part is skipped, as `skip` in candle-ddp-testing does."""
    say(f"SKIPPED {what}: {reason}")
    if path := os.environ.get("CANDLE_DDP_SKIPPED"):
        with open(path, "a") as collected:
            collected.write(f"{what}: {reason}\n")


def build(*targets):
    """Builds cargo targets (`--example NAME` …) in release, and returns the folder of the binaries."""
    subprocess.run(["cargo", "build", "--release", *targets], cwd=ROOT, check=True)
    metadata = ["cargo", "metadata", "--no-deps", "--format-version", "1"]
    output = subprocess.run(metadata, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return Path(json.loads(output)["target_directory"]) / "release"


def build_bench(name):
    """Builds a bench in release, and returns its path, which has a hash in it."""
    command = ["cargo", "build", "--release", "--bench", name, "--message-format=json-render-diagnostics"]
    output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    messages = map(json.loads, output.splitlines())
    return Path(next(m["executable"] for m in messages if m.get("target", {}).get("kind") == ["bench"] and m.get("executable")))


def pytorch_version():
    """Returns PyTorch's version, or None if the interpreter in CANDLE_DDP_PYTHON does not have it."""
    command = [PYTHON, "-c", "import torch; print(torch.__version__)"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def mpi_version():
    """Returns the version of mpirun, or None if it or mpicc is missing."""
    if not (shutil.which("mpirun") and shutil.which("mpicc")):
        return None
    lines = subprocess.run(["mpirun", "--version"], check=True, capture_output=True, text=True).stdout.splitlines()
    return lines[0].split()[-1]


class OneHost:
    """All ranks on this machine, with rendezvous on its loopback interface."""

    interface = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def address(self, rank):
        return "127.0.0.1"

    def local(self, rank, world_size):
        """Returns the local rank and local world size."""
        return rank, world_size

    def enter(self, rank):
        """Returns the prefix of a command that runs it as this rank."""
        return []


class Namespaces:
    """Hosts that are network namespaces, each with its own host name: processes in them see different hosts. All have the same
    number of ranks. They exist inside a `with` block."""

    interface = "ddp0"

    def __init__(self, count, ranks_per_host=1):
        self.count, self.ranks_per_host = count, ranks_per_host
        self.names = [f"candle-ddp-{os.getpid()}-{host}" for host in range(count)]

    def __enter__(self):
        try:
            for name in self.all_names():
                ip("netns", "add", name)
            self.join()
            for host, name in enumerate(self.names):
                ip("-n", name, "address", "add", f"{self.address_of(host)}/24", "dev", self.interface)
                ip("-n", name, "link", "set", self.interface, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for name in self.all_names():
            # Deleting one end of a pair deletes both.
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)

    def all_names(self):
        return self.names

    def ends(self):
        """Returns the namespace and the device of every sender of a link."""
        return [(name, self.interface) for name in self.names]

    def limit(self, bytes_per_second):
        """Limits the rate of each link in each direction."""
        # Room for whole TCP packets of up to 64 KiB with headers: network adapters split these in hardware, but here it
        # would cost processor time.
        burst = max(256 << 10, int(bytes_per_second / 500))
        shape = ["tbf", "rate", f"{int(bytes_per_second * 8)}bit", "burst", str(burst), "latency", "50ms"]
        for name, device in self.ends():
            qdisc = ["tc", "qdisc", "replace", "dev", device, "root"]
            subprocess.run(["ip", "netns", "exec", name, *qdisc, *shape], check=True)

    def plug(self, host, is_up):
        """Connects a host to the others, or cuts its link."""
        ip("-n", self.names[host], "link", "set", self.interface, "up" if is_up else "down")

    def host(self, rank):
        return rank // self.ranks_per_host

    def address_of(self, host):
        return f"10.117.0.{host + 1}"

    def address(self, rank):
        return self.address_of(self.host(rank))

    def local(self, rank, world_size):
        return rank % self.ranks_per_host, self.ranks_per_host

    def enter(self, rank):
        rename = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', f"host{self.host(rank)}"]
        return ["ip", "netns", "exec", self.names[self.host(rank)], *rename]


class TwoHosts(Namespaces):
    """Two hosts joined by a veth pair."""

    def __init__(self, ranks_per_host=1):
        super().__init__(2, ranks_per_host)

    def join(self):
        peer = ["peer", "name", self.interface, "netns", self.names[1]]
        ip("-n", self.names[0], "link", "add", self.interface, "type", "veth", *peer)


class ManyHosts(Namespaces):
    """Hosts joined by a bridge in a namespace of its own, each over a veth pair."""

    def __init__(self, count, ranks_per_host=1):
        super().__init__(count, ranks_per_host)
        self.switch = f"candle-ddp-{os.getpid()}-switch"

    def all_names(self):
        return [*self.names, self.switch]

    def ends(self):
        return [*super().ends(), *((self.switch, f"port{host}") for host in range(self.count))]

    def join(self):
        ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.switch, "link", "set", "bridge", "up")
        for host, name in enumerate(self.names):
            port = f"port{host}"
            peer = ["peer", "name", self.interface, "netns", name]
            ip("-n", self.switch, "link", "add", port, "type", "veth", *peer)
            ip("-n", self.switch, "link", "set", port, "master", "bridge", "up")


class DelayedHosts(Namespaces):
    """Hosts joined by a program that delivers every packet after `delay` seconds: most systems here have no netem."""

    def __init__(self, count, ranks_per_host, delay):
        super().__init__(count, ranks_per_host)
        self.delay, self.switch = delay, None

    def join(self):
        devices = [f"ddp{os.getpid()}.{host}" for host in range(self.count)]
        with tempfile.TemporaryDirectory() as folder:
            program = f"{folder}/delayed_switch"
            source = Path(__file__).parent / "delayed_switch.c"
            subprocess.run([os.environ.get("CC", "cc"), "-O2", "-Wall", source, "-o", program], check=True)
            command = [program, str(int(self.delay * 1e6)), *devices]
            self.switch = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            is_ready = self.switch.stdout.readline() == "ready\n"
        if not is_ready:
            raise RuntimeError("the delayed switch did not start")
        for device, name in zip(devices, self.names):
            ip("link", "set", device, "netns", name, "name", self.interface)

    def __exit__(self, *_):
        if self.switch:
            self.switch.kill()
            self.switch.wait()
        super().__exit__()


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True)


def run_ranks(command, world_size, hosts, settings=None):
    """Runs `command` once per rank, in torchrun's environment with `settings` and with one thread each, and returns rank 0's
    output. If a rank fails, ends the others and raises an exception."""
    ranks = []
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        port = free_port()
        try:
            for rank in range(world_size):
                local_rank, local_world_size = hosts.local(rank, world_size)
                environment = {
                    "RANK": rank,
                    "WORLD_SIZE": world_size,
                    "LOCAL_RANK": local_rank,
                    "LOCAL_WORLD_SIZE": local_world_size,
                    "MASTER_ADDR": hosts.address(0),
                    "MASTER_PORT": port,
                    "OMP_NUM_THREADS": 1,
                    "RAYON_NUM_THREADS": 1,
                    # As under ddprun. PyTorch does not use mimalloc.
                    "MIMALLOC_PURGE_DELAY": 10000,
                }
                if hosts.interface:
                    environment["GLOO_SOCKET_IFNAME"] = hosts.interface
                    # The namespaces share this machine's memory, which candle-ddp would detect and use.
                    environment["CANDLE_DDP_CPU_HOST"] = f"host{hosts.host(rank)}"
                environment |= settings or {}
                environment = {name: str(value) for name, value in environment.items()}
                stdout = output if rank == 0 else subprocess.DEVNULL
                ranks.append(
                    subprocess.Popen(
                        [*hosts.enter(rank), *map(str, command)],
                        env={**os.environ, **environment},
                        stdin=subprocess.DEVNULL,
                        stdout=stdout,
                        stderr=errors,
                    )
                )
            wait(ranks, command, errors)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        output.seek(0)
        return output.read()


def wait(ranks, command, errors):
    deadline = time.monotonic() + TIMEOUT
    while True:
        codes = [process.poll() for process in ranks]
        if all(code == 0 for code in codes):
            return
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed or time.monotonic() > deadline:
            errors.seek(0)
            what = f"rank {failed[0]} exited with {codes[failed[0]]}" if failed else f"not over after {TIMEOUT} s"
            raise RuntimeError(f"{' '.join(map(str, command))}: {what}\n{errors.read()}")
        time.sleep(0.02)


def free_port():
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def json_lines(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def medians(runs, key):
    """Returns, for each value of `key`, the median over `runs` (lists of objects) of every number, and the first of other values."""
    rows = {}
    for row in (row for run in runs for row in run):
        rows.setdefault(row[key], []).append(row)

    def middle(name, found):
        numbers = [row[name] for row in found]
        return statistics.median(numbers) if isinstance(numbers[0], float) else numbers[0]

    return {value: {name: middle(name, found) for name in found[0]} for value, found in rows.items()}


def spread(values, form):
    """Returns the median of some numbers, with the least and the most; `form` is how each is written."""
    low, middle, high = (format(value, form) for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} … {high})"


def seconds(times):
    """Returns the median of some seconds, with the least and the most."""
    return f"{statistics.median(times):.2f} s ({min(times):.2f}–{max(times):.2f})"


def write(path, lines):
    """Writes a file of results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines, ""]))
    say(f"written: {path}")


def processor():
    """Returns the number and the kind of the cores."""
    text = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*: (.*)", text)
    wide = " with AVX-512" if "avx512f" in text else ""
    return f"{len(os.sched_getaffinity(0))} cores of {model[1].strip() if model else platform.machine()}{wide}"


def machine():
    """Returns a short description of the machine."""
    memory = re.search(r"MemTotal:\s*(\d+) kB", Path("/proc/meminfo").read_text())
    return (
        f"{processor()}, "
        f"{int(memory[1]) / (1 << 20):.0f} GiB, Linux {platform.release()}"
    )


def toolchain():
    rustc = subprocess.run(["rustc", "--version"], check=True, capture_output=True, text=True).stdout.split()[1]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    dirty = subprocess.run(["git", "status", "--porcelain", "src"], cwd=ROOT, capture_output=True, text=True)
    changed = ", changed" if dirty.stdout.strip() else ""
    return f"candle-ddp at {commit.stdout.strip() or 'no commit'}{changed}, rustc {rustc}"
