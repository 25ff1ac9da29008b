#!/usr/bin/env python3
"""Writes crates/candle-ddp-data/tests/golden/sampler.json: the results of PyTorch's DistributedSampler and randperm.

    python3 scripts/golden_sampler.py          (needs PyTorch; about 1 GB of memory and half a minute)

Long lists are stored as their first and last indices and a hash of all indices.
"""

import itertools
import json
import pathlib

import torch
from torch.utils.data.distributed import DistributedSampler

OUTPUT = pathlib.Path(__file__).parent.parent / "crates" / "candle-ddp-data" / "tests" / "golden" / "sampler.json"
WHOLE = 12  # lists up to this length are stored completely
ENDS = 3


def fold(indices):
    """Returns the FNV-1a hash of the indices as 64-bit words, as 16 hexadecimal digits."""
    state = 0xCBF29CE484222325
    for index in indices:
        state = ((state ^ index) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"{state:016x}"


def summary(indices):
    if len(indices) <= WHOLE:
        return {"indices": indices}
    return {"len": len(indices), "first": indices[:ENDS], "last": indices[-ENDS:], "hash": fold(indices)}


def permutation(n, seed):
    generator = torch.Generator()
    generator.manual_seed(seed)
    return torch.randperm(n, generator=generator)


def large(n, seed):
    """Returns the ends and some entries of a permutation that is too long to hash in Python."""
    indices = permutation(n, seed)
    positions = list(range(0, n, n // 64))
    return {
        "n": n,
        "seed": seed,
        "first": indices[:8].tolist(),
        "last": indices[-8:].tolist(),
        "positions": positions,
        "at": indices[positions].tolist(),
    }


def sampler(n, world_size, rank, shuffle, drop_last, seed, epoch):
    it = DistributedSampler(range(n), world_size, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
    it.set_epoch(epoch)
    return {
        "n": n,
        "world_size": world_size,
        "rank": rank,
        "shuffle": shuffle,
        "drop_last": drop_last,
        # JSON numbers above 2^63 are not portable; a negative seed is stored as its two's complement.
        "seed": str(seed % 2**64),
        "epoch": epoch,
        "num_samples": len(it),
        "total_size": it.total_size,
        **summary(list(it)),
    }


def main():
    sizes = [0, 1, 2, 3, 5, 7, 10, 16, 33, 100, 1797]
    samplers = []
    for n, world_size, shuffle, drop_last in itertools.product(sizes, [1, 2, 3, 5, 8], [True, False], [True, False]):
        for rank in sorted({0, 1 % world_size, world_size - 1}):
            samplers.append(sampler(n, world_size, rank, shuffle, drop_last, seed=0, epoch=0))
    seeds = [1, 42, 2**31, 2**32 - 1, 2**32, 2**32 + 5, 2**63 - 1, 2**63, 2**64 - 8, -1, -3]
    for seed, epoch in itertools.product(seeds, [0, 1, 7]):
        samplers.append(sampler(101, 3, 1, True, False, seed, epoch))
    for n in [65535, 65536, 65537, 100_000]:
        samplers.append(sampler(n, 4, 3, True, False, seed=2**32 + 7, epoch=3))

    threshold = (2**32 - 1) // 20
    golden = {
        "torch": torch.__version__.split("+")[0],
        "samplers": samplers,
        "large": [large(threshold - 1, 7), large(threshold, 7)],
    }
    rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in golden["samplers"])
    larges = ",\n".join(json.dumps(row, separators=(",", ":")) for row in golden["large"])
    OUTPUT.write_text(f'{{"torch":"{golden["torch"]}","samplers":[\n{rows}\n],"large":[\n{larges}\n]}}\n')
    print(f"{OUTPUT}: {len(samplers)} samplers, {OUTPUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
