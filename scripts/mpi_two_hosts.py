#!/usr/bin/env python3
"""Trains the example `digits` over MPI on two hosts, which are network namespaces, with Open MPI or MPICH.

    MPICC=mpicc.openmpi python3 scripts/mpi_two_hosts.py openmpi
    MPICC=mpicc.mpich python3 scripts/mpi_two_hosts.py mpich

Two ranks run on each host. Losses and accuracies must be those of four ranks on one host, and the bytes between the hosts are
counted. Needs root, iproute2, util-linux, cargo and the MPI, for which crates/candle-ddp-mpi must have been built (`--binary`
names the program, if it is built already).
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from compare.harness import ROOT, TIMEOUT, TwoHosts, say

RANKS_PER_HOST = 2


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=["openmpi", "mpich"])
    parser.add_argument("--binary", type=Path, help="the program [built in release]")
    parser.add_argument("arguments", nargs="*", default=["--epochs", "3"], help="arguments of the program [--epochs 3]")
    options = parser.parse_args()
    program = (options.binary or build()).absolute()
    with TwoHosts(ranks_per_host=RANKS_PER_HOST) as hosts, tempfile.TemporaryDirectory() as folder:
        addresses = [hosts.address_of(host) for host in range(2)]
        agent = write_agent(Path(folder) / "agent", hosts, addresses)
        count = str(RANKS_PER_HOST * 2)
        results, before = [], 0
        for where in [([], None, None), (addresses, agent, hosts.interface)]:
            before = moved(hosts)
            # Written in the background, over MPI as well.
            arguments = [*options.arguments, "--checkpoints", str(Path(folder) / f"checkpoints{len(results)}")]
            results.append(run([*LAUNCH[options.library](*where), "-n", count], program, arguments, hosts))
        one, two = results
        between = moved(hosts) - before
    say(f"one host:  {one}\ntwo hosts: {two}\n{between / 1e6:.1f} MB went from the first host to the second")
    if one != two:
        sys.exit("the losses and accuracies differ")
    if between < 1e6:
        sys.exit("the ranks did not use the network")


def build():
    manifest = ROOT / "crates" / "candle-ddp-mpi" / "Cargo.toml"
    subprocess.run(["cargo", "build", "--release", "--manifest-path", manifest, "--example", "digits"], check=True)
    target = os.environ.get("CARGO_TARGET_DIR", manifest.parent / "target")
    return Path(target) / "release" / "examples" / "digits"


def write_agent(path, hosts, addresses):
    """Writes what MPI's launcher calls in the place of ssh: the host, and a command for its shell."""
    lines = ["#!/bin/sh", "# MPICH gives ssh's option -x as well.", '[ "$1" = -x ] && shift', "host=$1; shift", 'case "$host" in']
    for host, address in enumerate(addresses):
        lines.append(f'{address}) exec {shlex.join(hosts.enter(host * RANKS_PER_HOST))} sh -c "$*" ;;')
    path.write_text("\n".join([*lines, "esac", 'echo "unknown host $host" >&2; exit 1', ""]))
    path.chmod(0o755)
    return path


def open_mpi(addresses, agent, interface):
    command = ["mpirun.openmpi", "--allow-run-as-root", "--bind-to", "none", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]
    if addresses:
        slots = ",".join(f"{address}:{RANKS_PER_HOST}" for address in addresses)
        command += ["--host", slots, "--mca", "plm_rsh_agent", agent]
        command += ["--mca", "btl_tcp_if_include", interface, "--mca", "oob_tcp_if_include", interface, "--mca", "btl", "tcp,self,vader"]
        command += ["-x", "RAYON_NUM_THREADS", "-x", f"MASTER_ADDR={addresses[0]}"]
    return command


def mpich(addresses, agent, interface):
    command = ["mpirun.mpich"]
    if addresses:
        command += ["-launcher", "ssh", "-launcher-exec", agent, "-hosts", ",".join(addresses), "-ppn", str(RANKS_PER_HOST)]
        command += ["-iface", interface, "-genv", "MASTER_ADDR", addresses[0]]
        # Both hosts are on one kernel, where UCX and libfabric would find shared memory.
        command += ["-genv", "UCX_TLS", "tcp,self", "-genv", "FI_PROVIDER", "tcp"]
    return command


LAUNCH = {"openmpi": open_mpi, "mpich": mpich}


def run(launch, program, arguments, hosts):
    """Runs the program from the first host, and returns what it says about each epoch, without its speed."""
    command = [*hosts.enter(0), *map(str, launch), str(program), *arguments]
    environment = {**os.environ, "RAYON_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT)
    if result.returncode:
        sys.exit(f"{shlex.join(command)} ended with {result.returncode}:\n{result.stdout}")
    epochs = re.findall(r"epoch +\d+: (loss .*? %)", result.stdout)
    if not epochs:
        sys.exit(f"no epochs in:\n{result.stdout}")
    return epochs


def moved(hosts):
    """The bytes that the first host has sent to the second."""
    command = ["ip", "-n", hosts.names[0], "-s", "-j", "link", "show", "dev", hosts.interface]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(found)[0]["stats64"]["tx"]["bytes"]


main()
