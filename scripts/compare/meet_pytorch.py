"""The peer of the example `meet`: ranks that join a group of PyTorch's, of which one does not come, dies, or brings another
model.
"""

import argparse
import datetime
import json
import os
import signal
import threading
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=["absent", "killed", "model"])
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--events")
    options = parser.parse_args()
    own = int(os.environ["RANK"])
    fault = options.fault if own == options.rank else None

    def report(event):
        with open(options.events, "a") as file:
            file.write(json.dumps({"event": event, "rank": own, "time": time.time()}) + "\n")

    def die():
        time.sleep(1)
        report("killed")
        os.kill(os.getpid(), signal.SIGKILL)

    if fault == "absent" or (options.fault == "killed" and own == 0):
        # The launcher ends this process.
        time.sleep(3600)
    torch.set_num_threads(1)
    report("begin")
    if fault == "killed":
        threading.Thread(target=die, daemon=True).start()
    try:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=options.timeout))
        report("joined")
        DistributedDataParallel(torch.nn.Linear(4, 3 if fault == "model" else 2))
        dist.barrier()
    except Exception:
        report("error")
        raise
    report("done")
    # Gloo sometimes aborts at the interpreter's end.
    os._exit(0)


main()
