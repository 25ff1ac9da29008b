"""PyTorch's counterpart of the example cifar10_resnet18, with DistributedDataParallel over Gloo: the same model from the same
initial weights, the same images without augmentation, order of samples, optimizer and schedule, and the same test after each
epoch.

    torchrun --nproc-per-node 2 scripts/compare/cifar10_resnet18_pytorch.py --init FILE --metrics FILE …
"""

import numpy
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import training

# Of CIFAR-10's training images.
MEAN, STD = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]


class Block(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if inputs != outputs or stride != 1:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x):
        shortcut = x if self.downsample is None else self.downsample(x)
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(y)) + shortcut, inplace=True)


class ResNet18(nn.Module):
    """As torchvision's, but for the stem, which is for images of 32 × 32."""

    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        inputs, stages = width, []
        for stage in range(4):
            outputs = width << stage
            stages.append(nn.Sequential(Block(inputs, outputs, 2 if stage > 0 else 1), Block(outputs, outputs, 1)))
            inputs = outputs
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(inputs, 10)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def read(folder, names):
    """Returns the images and labels of files whose records are a label, then red, green and blue values, a byte each."""
    records = numpy.concatenate([numpy.fromfile(f"{folder}/{name}.bin", numpy.uint8) for name in names]).reshape(-1, 3073)
    images = torch.tensor(records[:, 1:].reshape(-1, 3, 32, 32)).float() / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return TensorDataset((images - mean) / std, torch.tensor(records[:, 0]).long())


def accuracy(model, loader, dtype):
    """Returns the fraction of the images of all ranks that the model classifies correctly."""
    model.eval()
    counts = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for images, labels in loader:
            counts += torch.tensor([(model(images.to(dtype)).argmax(1) == labels).sum(), len(labels)])
    model.train()
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def load(model, path):
    """Loads all variables but the batch norms' counters, which a fixed momentum does not need."""
    keys = model.load_state_dict(safetensors.torch.load_file(path), strict=False)
    if keys.unexpected_keys or any(not key.endswith("num_batches_tracked") for key in keys.missing_keys):
        raise RuntimeError(f"{path} is not this model's: {keys}")


def train(options):
    train = read(options.data, [f"data_batch_{number}" for number in range(1, 6)])
    test = read(options.data, ["test_batch"])
    dtype = {"f32": torch.float32, "f64": torch.float64}[options.dtype]
    model = ResNet18(options.width).to(dtype)
    load(model, options.init)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), options.lr, momentum=0.9, weight_decay=5e-4, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    sampler = DistributedSampler(train, seed=options.seed)
    loader = DataLoader(train, options.batch_size, sampler=sampler)
    # Every test image counts once, so that some ranks have one less than others.
    part = Subset(test, range(dist.get_rank(), len(test), dist.get_world_size()))
    test_loader = DataLoader(part, options.batch_size)

    metrics, step = training.Metrics(options.metrics), 0
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp(images.to(dtype)), labels)
            loss.backward()
            optimizer.step()
            step += 1
            metrics.write(step, loss.item())
        schedule.step()
        metrics.write_line({"epoch": epoch + 1, "test_accuracy": accuracy(model, test_loader, dtype)})


parser = training.parser(__doc__)
parser.add_argument("--epochs", type=int, required=True)
parser.add_argument("--width", type=int, required=True)
parser.add_argument("--dtype", choices=["f32", "f64"], default="f32")
training.run(train, parser.parse_args())
