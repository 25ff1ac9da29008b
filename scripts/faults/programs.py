"""The launcher, and the test binary that contains the program of ranks."""

import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The entry points of ranks in the test binary: one that trains, others that continue when a rank dies, or when asked to stop.
MATRIX = "faults::rank_of_the_fault_matrix"
ELASTIC, STOPPING = "elastic_groups::rank_of_another_test", "elastic_stop::rank_of_another_test"
# Whose states are spread over the ranks.
SPREAD = "elastic_zero::rank_of_another_test"


class Programs:
    """Both, and the prefix of the launcher's command."""

    def __init__(self, launcher, program, prefix=()):
        self.launcher, self.program, self.prefix = launcher, program, list(prefix)

    def command(self, world, *options, labels=False, entry=MATRIX):
        """Returns the command that starts the ranks, with `labels` two on each host."""
        launch = [self.launcher, "--standalone", "--nproc-per-node", str(world), *options]
        label = ["sh", "-c", 'CANDLE_DDP_CPU_HOST=$((RANK / 2)) exec "$0" "$@"'] if labels else []
        return [*map(str, [*self.prefix, *launch, *label, self.program]), *arguments(entry)]


def arguments(entry):
    """Returns the arguments with which the test binary is a rank."""
    return [entry, "--exact", "--include-ignored", "--nocapture", "--test-threads=1"]


def build(nccl=False, built=None, release=False):
    """Builds both, with NCCL for the emulated GPU, unless they are given."""
    prefix = [ROOT / "scripts" / "emulated_gpu.sh"] if nccl else []
    if built:
        return Programs(*built, prefix)
    profile = ["--release"] if nccl or release else []
    features = ["--features", "nccl,cudnn"] if nccl else []
    built = {}
    for command in (["test", "--no-run", "--test", "processes", *features], ["build", "--bin", "ddprun"]):
        command = ["cargo", *command, *profile, "--locked", "--message-format=json"]
        output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
        for message in map(json.loads, output.splitlines()):
            if executable := message.get("executable"):
                built[message["target"]["name"]] = executable
    return Programs(built["ddprun"], built["processes"], prefix)
