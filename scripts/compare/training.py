"""Shared by PyTorch's counterparts of the example programs: options, the metrics file, starting and ending."""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist


def parser(description):
    """Returns a parser with the options that all programs have, named as in the examples."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--init", required=True, help="the initial weights, a safetensors file of the example's --export-init")
    parser.add_argument("--data", required=True)
    parser.add_argument("--metrics", required=True, help="rank 0 writes one JSON object per step to this file")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def run(train, options):
    """Joins the other ranks and runs `train(options)`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(options)
    dist.barrier()
    # Some versions of PyTorch take long to exit, or fail to.
    os._exit(0)


class Metrics:
    """The losses of all steps, with the seconds since the object was made."""

    def __init__(self, path):
        self.file = open(path, "w") if dist.get_rank() == 0 else None
        self.start = time.perf_counter()

    def write(self, step, loss, **more):
        """Writes the mean of the ranks' losses."""
        loss = torch.tensor(loss, dtype=torch.float64)
        dist.all_reduce(loss)
        self.write_line({"step": step, "loss": loss.item() / dist.get_world_size(), **more})

    def write_line(self, line):
        if self.file:
            print(json.dumps(line | {"seconds": time.perf_counter() - self.start}), file=self.file, flush=True)
