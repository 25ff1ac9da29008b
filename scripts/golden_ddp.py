#!/usr/bin/env python3
"""Writes tests/golden/ddp.safetensors: 20 steps of PyTorch's DistributedDataParallel on two ranks.

    pip install torch safetensors
    python3 scripts/golden_ddp.py

tests/golden/README.md describes the training and the content of the file.
"""

import pathlib
import tempfile

import numpy
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from safetensors.numpy import load_file, save_file
from torch import nn

ROOT = pathlib.Path(__file__).parent.parent
OUTPUT = ROOT / "tests" / "golden" / "ddp.safetensors"
DIGITS = ROOT / "examples" / "data" / "digits.safetensors"

WORLD_SIZE = 2
STEPS = 20
SAMPLES = 60
BATCH = 12  # over all ranks

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    "adamw": lambda parameters: torch.optim.AdamW(
        parameters, lr=0.005, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, foreach=False, fused=False
    ),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.fc1 = nn.Linear(128, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc2(x)


def data():
    digits = load_file(DIGITS)
    images = digits["images"][:SAMPLES].reshape(SAMPLES, 1, 8, 8).astype(numpy.float32) / 16
    return torch.from_numpy(images), torch.from_numpy(digits["labels"][:SAMPLES].astype(numpy.int64))


def initial():
    torch.manual_seed(0)
    return Net().state_dict()


def train(net, optimizer, dtype, rank, world_size):
    """Trains on rows [rank * B, (rank + 1) * B) of each whole batch, and returns the loss before each step."""
    images, labels = data()
    images, share, losses = images.to(dtype), BATCH // world_size, []
    for step in range(STEPS):
        start = step * BATCH % SAMPLES + rank * share
        optimizer.zero_grad()
        loss = F.cross_entropy(net(images[start : start + share]), labels[start : start + share])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD_SIZE)
    results = {}
    for name, optimizer in OPTIMIZERS.items():
        net = Net()
        net.load_state_dict(initial())
        ddp = nn.parallel.DistributedDataParallel(net)
        results[f"{name}.losses"] = train(ddp, optimizer(ddp.parameters()), torch.float32, rank, WORLD_SIZE)
        results[f"{name}.final"] = net.state_dict()
    torch.save(results, f"{folder}/{rank}")
    dist.destroy_process_group()


def main():
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(folder,), nprocs=WORLD_SIZE)
        ranks = [torch.load(f"{folder}/{rank}") for rank in range(WORLD_SIZE)]

    images, labels = data()
    tensors = {"images": images.numpy(), "labels": labels.numpy().astype(numpy.uint32)}
    tensors |= {f"initial.{key}": value.numpy() for key, value in initial().items()}
    for name, optimizer in OPTIMIZERS.items():
        tensors[f"{name}.losses"] = numpy.array([rank[f"{name}.losses"] for rank in ranks], dtype=numpy.float32)
        final = ranks[0][f"{name}.final"]
        for key, value in final.items():
            assert torch.equal(value, ranks[1][f"{name}.final"][key]), f"the ranks disagree on {key}"
            tensors[f"{name}.{key}"] = value.numpy()

        # The error of float32 itself, compared with one process, the whole batch and float64.
        net = Net().double()
        net.load_state_dict({key: value.double() for key, value in initial().items()})
        losses = torch.tensor(train(net, optimizer(net.parameters()), torch.float64, 0, 1))
        off = max((final[key] - value).abs().max().item() for key, value in net.state_dict().items())
        mean = torch.from_numpy(tensors[f"{name}.losses"]).mean(0)
        print(f"{name}: loss {losses[0]:.4f} -> {losses[-1]:.4f}; compared with one process in float64: "
              f"losses {(mean - losses).abs().max().item():.1e}, weights {off:.1e}")

    save_file({key: numpy.ascontiguousarray(value) for key, value in tensors.items()}, OUTPUT,
              metadata={"torch": torch.__version__.split("+")[0]})
    print(f"{OUTPUT}: {OUTPUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
