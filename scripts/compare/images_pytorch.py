"""Images for `scripts/compare_images.py`, and PyTorch's DataLoader with torchvision over them: the counterpart of the bench
`images`, with the same work and the same JSON output.

    python3 scripts/compare/images_pytorch.py make FOLDER COUNT
    python3 scripts/compare/images_pytorch.py read FOLDER WORKERS BATCH_SIZE EPOCHS
    python3 scripts/compare/images_pytorch.py train FOLDER WORKERS BATCH_SIZE EPOCHS CHANNELS
"""

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

WIDTH, HEIGHT = 500, 400
CLASSES = 4


def picture(rng):
    """Noise whose amplitude falls with its frequency, as in photos, and disks with sharp edges."""
    y, x = np.meshgrid(np.fft.fftfreq(HEIGHT), np.fft.rfftfreq(WIDTH), indexing="ij")
    amplitude = np.maximum(np.hypot(y, x), 1 / WIDTH) ** -1.2
    channels = []
    for _ in range(4):
        spectrum = amplitude * (rng.standard_normal(amplitude.shape) + 1j * rng.standard_normal(amplitude.shape))
        noise = np.fft.irfft2(spectrum, (HEIGHT, WIDTH))
        channels.append(noise / noise.std())
    # The first one is common to all colours.
    pixels = np.stack([120 + 50 * (0.85 * channels[0] + 0.5 * channel) for channel in channels[1:]], axis=-1)
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    for _ in range(12):
        center_x, center_y, radius = rng.uniform(0, WIDTH), rng.uniform(0, HEIGHT), rng.uniform(10, 80)
        pixels[(x - center_x) ** 2 + (y - center_y) ** 2 < radius**2] += rng.uniform(-60, 60, 3)
    return pixels.clip(0, 255).astype(np.uint8)


def make(folder, count):
    rng = np.random.default_rng(0)
    size = 0
    for number in range(count):
        path = folder / f"class{number % CLASSES}" / f"{number:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(rng)).save(path, quality=92, subsampling="4:2:0")
        size += path.stat().st_size
    print(json.dumps({"mean_bytes": size / count}))


def cpu_ms(processes):
    """Returns the processor time that these processes have used."""
    # After the name in brackets, in ticks of 10 ms: user time is the 14th field, and system time the 15th.
    fields = [Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split() for process in processes]
    return sum(10 * (int(row[11]) + int(row[12])) for row in fields)


class Training:
    """Convolutions that halve the sides and double the channels, as in `benches/images.rs`."""

    def __init__(self, channels, classes):
        sizes = [3, channels, 2 * channels, 4 * channels, 8 * channels]
        layers = []
        for inputs, outputs in zip(sizes, sizes[1:]):
            layers += [torch.nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), torch.nn.ReLU()]
        head = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(sizes[-1], classes)]
        self.model = torch.nn.Sequential(*layers, *head)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def step(self, images, labels):
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(images), labels).backward()
        self.optimizer.step()


def read(folder, workers, batch_size, epochs, channels=None):
    # The workers have one thread each, and so has training.
    torch.set_num_threads(1)
    steps = [
        transforms.RandomResizedCrop(224),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ]
    dataset = datasets.ImageFolder(folder, transforms.Compose(steps))
    loader = DataLoader(dataset, batch_size=batch_size, num_workers=workers, persistent_workers=True)
    training = Training(channels, len(dataset.classes)) if channels else None
    before = 0
    for epoch in range(epochs + 1):
        start = time.perf_counter()
        waits, batches = [], iter(loader)
        # That the iterator is made belongs to the first batch.
        asked = start
        while (batch := next(batches, None)) is not None:
            waits.append(time.perf_counter() - asked)
            if training:
                training.step(*batch)
            asked = time.perf_counter()
        seconds = time.perf_counter() - start
        speed = len(dataset) / seconds
        cpu = cpu_ms([os.getpid(), *(child.pid for child in multiprocessing.active_children())])
        # The first one starts the workers.
        if epoch:
            row = {"epoch": epoch, "images_per_second": speed, "cpu_ms": (cpu - before) / len(dataset)}
            if training:
                row |= {"waiting": sum(waits) / seconds, "waiting_later": sum(waits[1:]) / seconds}
            print(json.dumps(row), flush=True)
        before = cpu
    sys.stdout.flush()
    # Workers that are ended with the interpreter sometimes make it abort.
    os._exit(0)


if __name__ == "__main__":
    command, folder, *numbers = sys.argv[1:]
    {"make": make, "read": read, "train": read}[command](Path(folder), *map(int, numbers))
