"""The peer of the bench tar_shards: samples per second that webdataset reads from the same shards, in one process.

    python3 scripts/compare/tar_webdataset.py FOLDER [--read 200000]

Prints a JSON object for each of two rounds, of which the second finds the shards in the system's cache, and one for the time to
come to the middle of an epoch, which means to read all before it: extrapolated from the samples that were read.
"""

import argparse
import itertools
import json
import time
from pathlib import Path

import webdataset


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--read", type=int, default=200_000, help="how many samples [200000]")
    options = parser.parse_args()
    shards = sorted(str(path) for path in options.folder.glob("*.tar"))
    for number in range(2):
        # Batches are lists of samples, as in the bench.
        data = webdataset.WebDataset(shards, shardshuffle=100, empty_check=False).shuffle(4096)
        start, count, size = time.perf_counter(), 0, 0
        for sample in itertools.islice(data, options.read):
            count, size = count + 1, size + len(sample["bin"]) + len(sample["cls"])
        seconds = time.perf_counter() - start
        print(json.dumps({"round": number, "samples_per_second": count / seconds, "version": webdataset.__version__}))
    print(json.dumps({"seconds_to_500000": 500_000 * seconds / count}))


main()
