"""The peer of the example `elastic`: the same digits, network and optimizer with PyTorch's DDP, under torchrun, which starts
all ranks again after a death. They resume from a checkpoint that rank 0 writes after every step.
"""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.Conv2d(16, 32, 3, padding=1)
        self.fc1, self.fc2 = torch.nn.Linear(128, 64), torch.nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--pause", type=float)
    parser.add_argument("--events")
    parser.add_argument("--checkpoint")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = load_file(options.data)
    images, labels = data["images"].float().reshape(-1, 1, 8, 8) / 16, data["labels"].long()
    test = torch.arange(len(labels)) % 5 == 0
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005, weight_decay=0.01)
    epoch, samples, commits = 0, 0, 0
    if os.path.exists(options.checkpoint):
        saved = torch.load(options.checkpoint)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        epoch, samples, commits = saved["progress"]

    def report(event):
        if rank == 0:
            line = {"event": event, "time": time.time(), "world_size": world, "commits": commits}
            with open(options.events, "a") as file:
                file.write(json.dumps(line) + "\n")

    report("begin")
    own_images, own_labels = images[~test], labels[~test]
    while epoch < options.epochs:
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(own_labels), generator=generator)
        order = torch.cat([order, order[: -len(order) % world]])
        batch = order[samples + rank :: world][:32]
        loss = F.cross_entropy(model(own_images[batch]), own_labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        samples += len(batch) * world
        if samples >= len(own_labels):
            epoch, samples = epoch + 1, 0
        commits += 1
        if rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "progress": (epoch, samples, commits)}, options.checkpoint + ".tmp")
            os.replace(options.checkpoint + ".tmp", options.checkpoint)
        report("commit")
        time.sleep(options.pause)
    with torch.no_grad():
        accuracy = (model.module(images[test]).argmax(1) == labels[test]).float().mean().item()
    if rank == 0:
        print(f"test accuracy {100 * accuracy:.2f} %, {commits} steps", flush=True)
    dist.barrier()
    # Gloo sometimes aborts at the interpreter's end.
    os._exit(0)


main()
