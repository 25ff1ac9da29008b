"""The models of the bench `step`, in PyTorch."""

import math

import torch
import torch.nn.functional as F
from torch import nn

import gpt


def convolution(inputs, outputs, kernel, stride):
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class Block(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.first = convolution(inputs, outputs, 3, stride)
        self.second = convolution(outputs, outputs, 3, 1)
        fits = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if fits else convolution(inputs, outputs, 1, stride)

    def forward(self, x):
        return torch.relu(self.second(torch.relu(self.first(x))) + self.shortcut(x))


def resnet18():
    layers, channels = [convolution(3, 64, 3, 1), nn.ReLU()], 64
    for stage, width in enumerate([64, 128, 256, 512]):
        for block in range(2):
            layers.append(Block(channels, width, 2 if stage > 0 and block == 0 else 1))
            channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


class Bottleneck(nn.Module):
    """Three convolutions with a residual connection."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        self.layers = nn.Sequential(
            *(convolution(inputs, width, 1, 1), nn.ReLU(inplace=True)),
            *(convolution(width, width, 3, stride), nn.ReLU(inplace=True)),
            convolution(width, 4 * width, 1, 1),
        )
        fits = inputs == 4 * width and stride == 1
        self.shortcut = nn.Identity() if fits else convolution(inputs, 4 * width, 1, stride)

    def forward(self, x):
        return torch.relu(self.layers(x) + self.shortcut(x))


def resnet50():
    layers, channels = [convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)], 64
    for stage, blocks in enumerate([3, 4, 6, 3]):
        for block in range(blocks):
            width = 64 << stage
            layers.append(Bottleneck(channels, width, 2 if stage > 0 and block == 0 else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def mlp():
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.ReLU())))


class Separable(nn.Sequential):
    """A depthwise layer and a pointwise one."""

    def __init__(self, inputs, outputs, stride, dilation):
        super().__init__(layer(inputs, inputs, 3, stride, dilation, inputs), layer(inputs, outputs, 1))


def layer(inputs, outputs, kernel, stride=1, dilation=1, groups=1):
    padding = dilation * (kernel // 2)
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class DeepLab(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = layer(3, 32, 3, 2)
        self.low = Separable(32, 64, 2, 1)
        self.body = nn.Sequential(Separable(64, 128, 2, 1), Separable(128, 256, 1, 2), Separable(256, 256, 1, 2))
        kinds = [(1, 1), (3, 2), (3, 4), (3, 6)]
        self.pyramid = nn.ModuleList(layer(256, 64, kernel, 1, dilation) for kernel, dilation in kinds)
        self.pooled = layer(256, 64, 1)
        self.joined = layer(5 * 64, 64, 1)
        self.skip = layer(64, 24, 1)
        self.decoder = Separable(64 + 24, 64, 1, 1)
        self.head = nn.Conv2d(64, 21, 1)

    def forward(self, images):
        upsample = lambda x, like: F.interpolate(x, like.shape[2:], mode="bilinear", align_corners=False)
        low = self.low(self.stem(images))
        x = self.body(low)
        branches = [layer(x) for layer in self.pyramid]
        branches.append(upsample(self.pooled(F.adaptive_avg_pool2d(x, 1)), x))
        x = upsample(self.joined(torch.cat(branches, 1)), low)
        x = self.decoder(torch.cat([x, self.skip(low)], 1))
        return upsample(self.head(x), images)


class InvertedResidual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        inner = 6 * inputs
        self.layers = nn.Sequential(
            *(layer(inputs, inner, 1), layer(inner, inner, 3, stride, groups=inner)),
            *(nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.is_residual = inputs == outputs and stride == 1

    def forward(self, x):
        return x + self.layers(x) if self.is_residual else self.layers(x)


def mobilenet():
    layers, channels = [layer(3, 16, 3, 2)], 16
    for width, count, stride in [(24, 2, 1), (32, 3, 2), (64, 3, 2), (96, 2, 1)]:
        for block in range(count):
            layers.append(InvertedResidual(channels, width, stride if block == 0 else 1))
            channels = width
    return nn.Sequential(*layers, layer(channels, 384, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(384, 100))


class Messages(nn.Module):
    """Messages along the edges of a graph, and an update of the nodes."""

    def __init__(self, width):
        super().__init__()
        self.message, self.own, self.update = (nn.Linear(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(width)

    def forward(self, x, source, target):
        messages = F.relu(self.message(x.index_select(0, source)))
        sums = messages.new_zeros(x.shape).index_add(0, target, messages)
        return self.norm(x + F.relu(self.own(x) + self.update(sums)))


class Gnn(nn.Module):
    def __init__(self, width=128, nodes=256, edges=8):
        super().__init__()
        self.nodes, self.edges = nodes, edges
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, 1)
        self.layers = nn.ModuleList(Messages(width) for _ in range(4))

    def forward(self, x):
        edge = torch.arange(x.shape[0] * self.nodes * self.edges)
        target, turn = edge // self.edges, edge % self.edges
        source = target // self.nodes * self.nodes + (target * (2 * turn + 3) + 17 * turn) % self.nodes
        x = self.first(x.flatten(0, 1))
        for layer in self.layers:
            x = layer(x, source, target)
        return self.last(x)


class Residual(nn.Module):
    """Two convolutions, between which the time is added, and a connection around them."""

    def __init__(self, inputs, outputs, time):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, inputs), nn.GroupNorm(32, outputs)
        self.conv1, self.conv2 = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time, self.dropout = nn.Linear(time, outputs), nn.Dropout(0.1)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x, time):
        hidden = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.shortcut(x) + self.conv2(self.dropout(F.silu(self.norm2(hidden))))


class PixelAttention(nn.Module):
    """Attention of one head between the pixels, with a connection around it."""

    def __init__(self, channels):
        super().__init__()
        self.norm = nn.GroupNorm(32, channels)
        self.q, self.k, self.v, self.out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x):
        normalised = self.norm(x)
        q, k, v = (part(normalised).flatten(2).transpose(1, 2)[:, None] for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y[:, 0].transpose(1, 2).reshape(x.shape))


class ResidualAndAttention(nn.Module):
    def __init__(self, inputs, outputs, time, attention):
        super().__init__()
        self.residual = Residual(inputs, outputs, time)
        self.attention = PixelAttention(outputs) if attention else nn.Identity()

    def forward(self, x, time):
        return self.attention(self.residual(x, time))


class Unet(nn.Module):
    """DDPM's, with half of its channels."""

    def __init__(self, width=64, levels=(1, 2, 2, 2), blocks=2):
        super().__init__()
        self.width, time = width, 4 * width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time), nn.SiLU())
        self.first = nn.Conv2d(3, width, 3, padding=1)
        channels, skips, self.down, self.up = width, [width], nn.ModuleList(), nn.ModuleList()
        for level, multiple in enumerate(levels):
            for _ in range(blocks):
                self.down.append(ResidualAndAttention(channels, multiple * width, time, level == 1))
                channels = multiple * width
                skips.append(channels)
            if level + 1 < len(levels):
                self.down.append(nn.Conv2d(channels, channels, 3, 2, 1))
                skips.append(channels)
        self.middle = nn.ModuleList(ResidualAndAttention(channels, channels, time, number == 0) for number in range(2))
        for level, multiple in reversed(list(enumerate(levels))):
            for _ in range(blocks + 1):
                self.up.append(ResidualAndAttention(channels + skips.pop(), multiple * width, time, level == 1))
                channels = multiple * width
            if level > 0:
                self.up.append(nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(channels, channels, 3, padding=1)))
        self.norm, self.last = nn.GroupNorm(32, channels), nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, images):
        half = self.width // 2
        times = torch.arange(len(images), device=images.device) * (1000 / len(images))
        rates = torch.exp(torch.arange(half, device=images.device) * (-math.log(1e4) / half))
        angles = times[:, None] * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1).to(images.dtype))
        x = self.first(images)
        skips = [x]
        for part in self.down:
            x = part(x, time) if isinstance(part, ResidualAndAttention) else part(x)
            skips.append(x)
        for part in self.middle:
            x = part(x, time)
        for part in self.up:
            x = part(torch.cat([x, skips.pop()], 1), time) if isinstance(part, ResidualAndAttention) else part(x)
        return self.last(F.silu(self.norm(x)))


class Gpt(nn.Module):
    def __init__(self, vocabulary=256, tokens=256, width=384, heads=6, layers=6):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.blocks = nn.Sequential(*(gpt.Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions)))


class CappedGpt(Gpt):
    """With capped logits. Muon updates the matrices of its blocks."""

    def __init__(self):
        super().__init__(vocabulary=4096, layers=3)

    def forward(self, x):
        return 15 * torch.tanh(super().forward(x) / 15)


class WordLm(nn.Module):
    """That of pytorch/examples/word_language_model."""

    def __init__(self, vocabulary=10000, width=650):
        super().__init__()
        self.dropout = nn.Dropout(0.2)
        self.encoder, self.decoder = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.rnn = nn.LSTM(width, width, 2, dropout=0.2)

    def forward(self, x):
        return self.decoder(self.dropout(self.rnn(self.dropout(self.encoder(x)))[0]))


class EncoderBlock(nn.Module):
    """Attention and a network of two layers, with norms before them or after."""

    def __init__(self, width, heads, eps, norm_first):
        super().__init__()
        self.heads, self.norm_first = heads, norm_first
        self.norm1, self.norm2 = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x):
        samples, tokens, width = x.shape
        q, k, v = self.qkv(x).view(samples, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        return self.projection(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(samples, tokens, width))

    def network(self, x):
        return self.fc2(F.gelu(self.fc1(x)))

    def forward(self, x):
        if self.norm_first:
            x = x + self.attention(self.norm1(x))
            return x + self.network(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.network(x))


class Vit(nn.Module):
    """Of the size of ViT-S/16, with a mean over the tokens."""

    def __init__(self, width=384):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.positions = nn.Parameter(0.02 * torch.randn(14 * 14, width))
        self.blocks = nn.Sequential(*(EncoderBlock(width, 6, 1e-6, True) for _ in range(12)))
        self.norm, self.head = nn.LayerNorm(width, 1e-6), nn.Linear(width, 1000)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


class Bert(nn.Module):
    """Of the size of BERT-base, with a row of logits for each token."""

    def __init__(self, vocabulary, width=768):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Parameter(0.02 * torch.randn(512, width))
        self.norm = nn.LayerNorm(width, 1e-12)
        self.blocks = nn.Sequential(*(EncoderBlock(width, 12, 1e-12, False) for _ in range(12)))
        self.transform, self.transform_norm = nn.Linear(width, width), nn.LayerNorm(width, 1e-12)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x):
        x = self.blocks(self.norm(self.tokens(x) + self.positions))
        return self.head(self.transform_norm(F.gelu(self.transform(x))))


# The function that builds a model, its batch size, and the function that makes its input.
MODELS = {
    "mlp": (mlp, 256, lambda batch: torch.randn(batch, 1024)),
    "resnet18": (resnet18, 32, lambda batch: torch.randn(batch, 3, 32, 32)),
    "resnet50": (resnet50, 32, lambda batch: torch.randn(batch, 3, 224, 224)),
    "deeplab": (DeepLab, 8, lambda batch: torch.randn(batch, 3, 64, 64)),
    "mobilenet": (mobilenet, 32, lambda batch: torch.randn(batch, 3, 64, 64)),
    "gnn": (Gnn, 8, lambda batch: torch.randn(batch, 256, 128)),
    "unet": (Unet, 8, lambda batch: torch.randn(batch, 3, 32, 32)),
    **{
        f"gpt-{layers}": (lambda layers=layers: Gpt(layers=layers), 8, lambda batch: torch.randint(256, (batch, 256)))
        for layers in [12, 24]
    },
    "gpt": (Gpt, 8, lambda batch: torch.randint(256, (batch, 256))),
    "gpt2": (lambda: Gpt(50257, 1024, 768, 12, 12), 8, lambda batch: torch.randint(50257, (batch, 1024))),
    # As its users pad the vocabulary, for faster products.
    "gpt2-padded": (lambda: Gpt(50304, 1024, 768, 12, 12), 8, lambda batch: torch.randint(50257, (batch, 1024))),
    "muon": (CappedGpt, 8, lambda batch: torch.randint(4096, (batch, 256))),
    "lstm": (WordLm, 20, lambda batch: torch.randint(10000, (35, batch))),
    "vit": (Vit, 32, lambda batch: torch.randn(batch, 3, 224, 224)),
    "bert": (lambda: Bert(30522), 8, lambda batch: torch.randint(30522, (batch, 512))),
    "bert-padded": (lambda: Bert(30528), 8, lambda batch: torch.randint(30522, (batch, 512))),
}
