"""PyTorch's counterpart of the example char_gpt, with DistributedDataParallel over Gloo, or fully_shard with --shard: the same model from the same
initial weights, the same text, order of samples, optimizer and schedule.

    torchrun --nproc-per-node 2 scripts/compare/char_gpt_pytorch.py --init FILE --metrics FILE …
"""

import math
from pathlib import Path

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import training
from gpt import Block


class Gpt(nn.Module):
    """The head shares the embedding's weights."""

    def __init__(self, vocabulary, context, width, heads, layers):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return F.linear(self.norm(self.blocks(self.tokens(x) + self.positions)), self.tokens.weight)


class Text(Dataset):
    """The windows of the training part of the text, of which one begins at each character."""

    def __init__(self, path, context):
        files = sorted(path.glob("*.md")) if path.is_dir() else [path]
        text = "".join(file.read_bytes().decode() for file in files)
        self.vocabulary = sorted(set(text))
        numbers = {character: number for number, character in enumerate(self.vocabulary)}
        # As the example: the last tenth is for validation.
        self.tokens = torch.tensor([numbers[character] for character in text[: int(len(text) * 0.9)]])
        self.context = context

    def __len__(self):
        return len(self.tokens) - self.context

    def __getitem__(self, index):
        window = self.tokens[index : index + self.context + 1]
        return window[:-1], window[1:]


def epochs(sampler, loader):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def learning_rate(step, options):
    """Returns the factor for `step`, from 0: warm-up from a tenth, then half a cosine to a tenth."""
    warmup = min(options.warmup, options.steps - 1)
    if step < warmup:
        return 0.1 + 0.9 * step / warmup
    return 0.1 + 0.9 * (1 + math.cos(math.pi * (step - warmup) / (options.steps - warmup))) / 2


def train(options):
    text = Text(Path(options.data), options.context)
    model = Gpt(len(text.vocabulary), options.context, options.width, options.heads, options.layers)
    model.load_state_dict(safetensors.torch.load_file(options.init))
    if options.shard:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = fully_shard(checkpoint_wrapper(block))
        ddp = fully_shard(model, reshard_after_forward=False)
    else:
        ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), options.lr, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, options))
    sampler = DistributedSampler(text, seed=options.seed)
    batches = epochs(sampler, DataLoader(text, options.batch_size, sampler=sampler, drop_last=True))

    metrics = training.Metrics(options.metrics)
    for step in range(1, options.steps + 1):
        optimizer.zero_grad()
        x, y = next(batches)
        loss = F.cross_entropy(ddp(x).flatten(0, 1), y.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(ddp.parameters(), options.clip)
        optimizer.step()
        norm = norm.full_tensor() if options.shard else norm
        metrics.write(step, loss.item(), grad_norm=norm.item())
        schedule.step()


parser = training.parser(__doc__)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--warmup", type=int, required=True)
parser.add_argument("--shard", action="store_true", help="spread the model over the ranks")
parser.add_argument("--clip", type=float, default=1.0)
for size in ["context", "width", "heads", "layers"]:
    parser.add_argument(f"--{size}", type=int, required=True)
training.run(train, parser.parse_args())
