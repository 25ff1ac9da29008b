"""In-place f32 all-reduce through PyTorch's process group: the counterpart of the example `allreduce`, with the same
measurement and the same JSON output.

    torchrun --nproc-per-node 2 scripts/compare/allreduce_gloo.py SECONDS_PER_BATCH BYTES...
"""

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

BATCHES = 5
WARMUP = 3


def batch(buffer, calls):
    """Returns the mean seconds of this number of calls."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(buffer)
    return (time.perf_counter() - start) / calls


def slowest(seconds):
    """Returns the maximum of each number over the ranks."""
    seconds = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.tolist()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seconds_per_batch = float(sys.argv[1])
    for size in map(int, sys.argv[2:]):
        buffer = torch.ones(size // 4)
        dist.all_reduce(buffer)
        errors = torch.tensor([int((buffer != world_size).sum())])
        dist.all_reduce(errors)
        estimate = slowest([batch(buffer, WARMUP)])[0]
        calls = int(min(max(seconds_per_batch / estimate, 3), 10_000))
        median = statistics.median(slowest([batch(buffer, calls) for _ in range(BATCHES)]))
        if rank == 0:
            bandwidth = size / median / 1e9
            row = {
                "bytes": size,
                "world_size": world_size,
                "time_us": median * 1e6,
                "algbw_gbps": bandwidth,
                "busbw_gbps": bandwidth * 2 * (world_size - 1) / world_size,
                "errors": int(errors),
            }
            print(json.dumps(row), flush=True)
    dist.barrier()
    # Some versions of PyTorch take long to exit, or fail to.
    os._exit(0)


main()
