"""Kills whole nodes of an elastic run: two network namespaces with two ranks each, whose ddpruns meet by `--rdzv-backend c10d`.

    python3 scripts/elastic_nodes.py [--binaries target/release]

Needs root, iproute2 and util-linux. It writes benches/results/elastic_nodes.md. In runs of examples/elastic,
- the second node is killed, and one comes in its place later;
- the same, but its network goes away, so that nobody is told;
- the node that hosts the store is killed: the other one ends, and a new run continues from the checkpoint.

The first is done with PyTorch under torchrun as well, if the interpreter in CANDLE_DDP_PYTHON has it.
"""

import argparse
import datetime
import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from compare import harness
from compare.harness import say

PORT = 29400


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binaries", type=Path, help="the folder of ddprun [built in release]")
    parser.add_argument("--steps", type=int, default=20, help="steps of training between two events [20]")
    parser.add_argument("--epochs", type=int, default=12, help="epochs of a run [12]")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds to wait after each step, so that a run lasts [0.1]")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="the date in the table [today]")
    parser.add_argument("--output", type=Path, default=harness.ROOT / "benches" / "results", help="the folder")
    options = parser.parse_args()
    options.binaries = (options.binaries or harness.build("--bin", "ddprun", "--example", "elastic")).absolute()
    cases = [(Run, case) for case in (second_node_killed, second_node_unplugged, store_killed)]
    pytorch = harness.pytorch_version()
    if pytorch:
        cases.append((TorchRun, second_node_killed))
    else:
        harness.skip("PyTorch", f"{harness.PYTHON} does not have it (set CANDLE_DDP_PYTHON)")
    rows = {Run: [], TorchRun: []}
    for kind, case in cases:
        with harness.TwoHosts(ranks_per_host=2) as hosts, tempfile.TemporaryDirectory() as folder:
            run = kind(options, hosts, Path(folder))
            try:
                rows[kind] += [f"| {what} | {result} |" for what, result in case(run)]
            finally:
                run.end()
    write(options, rows[Run], rows[TorchRun], pytorch)


def write(options, rows, peers, pytorch):
    lines = [
        "# A node is killed",
        "",
        "Two network namespaces with two ranks each, whose ddpruns meet by `--nnodes 1:2 --rdzv-backend c10d`, train the network of "
        "the example `digits` with `elastic::run`. The first node hosts the store. Times are from the event to the next step that "
        "all ranks have made, or until the other ddprun has ended.",
        "",
        f"`python3 scripts/elastic_nodes.py`, {options.date}, {harness.machine()}",
        "",
        "| what happens | what follows |",
        "|---|---|",
        *rows,
    ]
    if peers:
        lines += [
            "",
            f"The same with PyTorch {pytorch} under `torchrun --nnodes 1:2 --rdzv-backend c10d --max-restarts 5`, which ends all "
            "workers and starts them again; they load the checkpoint that rank 0 writes after every step:",
            "",
            "| what happens | what follows |",
            "|---|---|",
            *peers,
        ]
    harness.write(options.output / "elastic_nodes.md", lines)


def second_node_killed(run):
    run.start(0, 1)
    run.step(4)
    return without_and_with(run, lambda: run.kill(1), lambda: None, "the second node is killed")


def second_node_unplugged(run):
    run.start(0, 1)
    run.step(4)

    def unplug():
        run.hosts.plug(1, False)

    def plug_in():
        # The rest of the node has lost the store by then.
        code, text = run.wait(1)
        assert code == 1 and ("process that hosts it" in text or "the store of the run is gone" in text), text
        run.hosts.plug(1, True)

    return without_and_with(run, unplug, plug_in, "the second node's network goes away")


def without_and_with(run, kill, revive, what):
    start = time.time()
    kill()
    two = run.step(2)
    yield what, f"the first continues with 2 ranks after {two - start:.1f} s"
    revive()
    start = time.time()
    run.start(1)
    four = run.step(4)
    yield "it comes back", f"all 4 ranks continue after {four - start:.1f} s"
    codes = [run.wait(node) for node in (0, 1)]
    assert all(code == 0 for code, _ in codes), codes
    yield "the end", run.accuracy()


def store_killed(run):
    run.start(0, 1, checkpoint=True)
    run.step(4)
    run.wait_for("a checkpoint", lambda: run.checkpoint.exists())
    start = time.time()
    run.kill(0)
    code, text = run.wait(1)
    assert code == 1 and ("process that hosts it" in text or "the store of the run is gone" in text), text
    yield "the node that hosts the store is killed", f"the other ends after {time.time() - start:.1f} s, and says why"
    done = len(run.events())
    run.start(0, 1, checkpoint=True)
    run.step(4)
    begin = next(event for event in run.events()[done:] if event["event"] == "begin")
    assert begin["epoch"] > 0, begin
    codes = [run.wait(node) for node in (0, 1)]
    assert all(code == 0 for code, _ in codes), codes
    yield "both are started again", f"they continue from the checkpoint of epoch {begin['epoch']}; {run.accuracy()}"


class Run:
    """Two nodes, the first of which hosts the store."""

    def __init__(self, options, hosts, folder):
        self.options, self.hosts, self.folder = options, hosts, folder
        self.log, self.checkpoint = folder / "events", folder / "checkpoint"
        self.nodes, self.outputs = {}, {}

    always_saves = False

    def programs(self, node):
        """Returns the commands of the launcher and of the program."""
        return [self.options.binaries / "ddprun"], [self.options.binaries / "examples" / "elastic"]

    def start(self, *nodes, checkpoint=False):
        for node in nodes:
            launcher, program = self.programs(node)
            command = [
                *self.hosts.enter(2 * node),
                *launcher,
                *["--nnodes", "1:2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "nodes"],
                *["--rdzv-endpoint", f"{self.hosts.address_of(0)}:{PORT}"],
                *program,
                *["--epochs", self.options.epochs, "--pause", self.options.pause, "--events", self.log],
                *(["--checkpoint", self.checkpoint] if checkpoint or self.always_saves else []),
            ]
            environment = {
                **{name: value for name, value in os.environ.items() if not name.startswith("PET_")},
                # The namespaces share this machine's memory, which candle-ddp would detect and use.
                "CANDLE_DDP_CPU_HOST": f"host{node}",
                "RAYON_NUM_THREADS": "1",
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": self.hosts.interface,
                # Otherwise PyTorch 2.15 finds the addresses of ranks that have ended.
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            }
            self.outputs[node] = open(self.folder / f"output-{node}", "w+")
            self.nodes[node] = subprocess.Popen(
                [str(part) for part in command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self.outputs[node],
                stderr=subprocess.STDOUT,
            )
            say(f"node {node} is started")

    def kill(self, node):
        say(f"node {node} is killed")
        # With all that runs there: torchrun's workers survive it.
        found = subprocess.run(["ip", "netns", "pids", self.hosts.names[node]], check=True, capture_output=True, text=True)
        for pid in found.stdout.split():
            os.kill(int(pid), signal.SIGKILL)
        self.nodes[node].wait()

    def wait(self, node):
        """Waits until a node has ended, and returns its exit code and output."""
        code = self.nodes[node].wait(timeout=300)
        self.outputs[node].seek(0)
        return code, self.outputs[node].read()

    def events(self):
        lines = self.log.read_text().splitlines(keepends=True) if self.log.exists() else []
        # The last one may be in the middle of being written.
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def step(self, world_size):
        """Waits for some more steps with this many ranks, and returns the time of the first of them."""
        before = len(self.events())

        def new():
            after = [event for event in self.events()[before:] if event["event"] == "commit"]
            return [event["time"] for event in after if event["world_size"] == world_size]

        self.wait_for(f"steps with {world_size} ranks", lambda: len(new()) >= self.options.steps)
        return new()[0]

    def wait_for(self, what, done):
        deadline = time.monotonic() + 300
        while not done():
            ended = {node: process.poll() for node, process in self.nodes.items()}
            if time.monotonic() > deadline or all(code is not None for code in ended.values()):
                texts = "\n".join(f"node {node}: {self.wait(node)}" for node in ended if ended[node] is not None)
                raise SystemExit(f"there was not: {what}\n{texts}")
            time.sleep(0.02)

    def accuracy(self):
        text = "".join(self.wait(node)[1] for node in self.nodes)
        return next(line for line in text.splitlines() if line.startswith("test accuracy")).split(",")[0]

    def end(self):
        for process in self.nodes.values():
            process.kill()
            process.wait()


class TorchRun(Run):
    """The same with PyTorch."""

    always_saves = True

    def programs(self, node):
        torchrun = [harness.PYTHON, "-m", "torch.distributed.run", "--max-restarts", "5"]
        script = Path(__file__).resolve().parent / "compare" / "elastic_pytorch.py"
        data = harness.ROOT / "examples" / "data" / "digits.safetensors"
        # The names of the hosts cannot be resolved.
        place = ["--local-addr", self.hosts.address_of(node), "--rdzv-conf", f"is_host={node == 0}"]
        return [*torchrun, *place], [script, "--data", data]


if __name__ == "__main__":
    main()
