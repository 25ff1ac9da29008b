#!/usr/bin/env python3
"""Writes crates/candle-ddp-nn/tests/golden/bf16.safetensors: outputs and gradients of torch.nn.functional in bf16.

    pip install torch safetensors
    python3 scripts/golden_bf16.py

The README.md next to it describes the file.
"""

import pathlib

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

OUTPUT = pathlib.Path(__file__).parent.parent / "crates" / "candle-ddp-nn" / "tests" / "golden" / "bf16.safetensors"

tensors = {}


def wave(shape, index):
    """Input number `index` of a case, as the tests make it."""
    j = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return (2 * torch.sin(1.7 * j + index + 0.3)).reshape(shape)


def case(name, run, *shapes):
    inputs = [wave(shape, index).bfloat16().requires_grad_() for index, shape in enumerate(shapes)]
    y = run(*inputs)
    j = torch.arange(y.numel(), dtype=torch.float64)
    y.backward(torch.cos(0.9 * j + 0.1).reshape(y.shape).to(y.dtype))
    results = {"y": y.detach()} | {f"d{index}": x.grad for index, x in enumerate(inputs)}
    for key, value in results.items():
        tensors[f"{name}|{key}"] = value.float().contiguous()


indices = torch.arange(12).reshape(3, 4) * 5 % 7
classes = torch.arange(6) * 3 % 10

case("linear", F.linear, (5, 37), (18, 37), (18,))
case("conv2d", lambda x, w, b: F.conv2d(x, w, b, padding=1), (2, 5, 8, 8), (6, 5, 3, 3), (6,))
case("conv2d stride 2", lambda x, w, b: F.conv2d(x, w, b, 2, 1), (2, 4, 9, 7), (6, 4, 3, 3), (6,))
case("conv2d 1x1", F.conv2d, (2, 9, 4, 4), (6, 9, 1, 1), (6,))
case("conv2d groups", lambda x, w: F.conv2d(x, w, padding=2, dilation=2, groups=2), (1, 6, 7, 6), (4, 3, 3, 3))
case("conv2d depthwise", lambda x, w: F.conv2d(x, w, padding=1, groups=4), (2, 4, 6, 5), (4, 1, 3, 3))
case("conv_transpose2d", lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1), (2, 4, 4, 5), (4, 3, 3, 3), (3,))
case("relu", F.relu, (3, 17))
case("gelu", lambda x: F.gelu(x, approximate="tanh"), (3, 17))
case("gelu_erf", F.gelu, (3, 17))
case("silu", F.silu, (3, 17))
case("softmax", lambda x: F.softmax(x, 1), (4, 33))
case("log_softmax", lambda x: F.log_softmax(x, 1), (4, 33))
case("layer_norm", lambda x, w, b: F.layer_norm(x, (24,), w, b), (5, 24), (24,), (24,))
case("group_norm", lambda x, w, b: F.group_norm(x, 3, w, b), (2, 6, 4, 5), (6,), (6,))
case("instance_norm", F.instance_norm, (2, 3, 4, 5))
case("rms_norm", lambda x, w: F.rms_norm(x, (24,), w, 1e-5), (5, 24), (24,))
case("cross_entropy", lambda x: F.cross_entropy(x, classes), (6, 10))
log_softmax = lambda x: F.log_softmax(x.float(), -1)
case("ctc_loss", lambda x: F.ctc_loss(log_softmax(x), torch.tensor([[1, 2], [3, 0]]), (5, 4), (2, 1)).bfloat16(), (5, 2, 4))
case("embedding", lambda w: F.embedding(indices, w), (7, 9))
case("attention", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *[(1, 2, 6, 8)] * 3)
case("max_pool2d", lambda x: F.max_pool2d(x, 3, 2, 1), (2, 3, 7, 8))
case("avg_pool2d", lambda x: F.avg_pool2d(x, 3, 2, 1), (2, 3, 7, 8))
case("bilinear", lambda x: F.interpolate(x, (7, 9), mode="bilinear"), (1, 2, 4, 5))
case("add", torch.add, (3, 17), (3, 17))


def recurrent(run, *inputs):
    x, *states, w_ih, w_hh, b_ih, b_hh = inputs
    states = tuple(states) if len(states) > 1 else states[0]
    y = run(x, states, [w_ih / 2, w_hh / 2, b_ih, b_hh], True, 1, 0.0, True, False, False)
    return torch.cat([y.flatten() for y in y])


state = (1, 5, 6)
case("lstm", lambda *inputs: recurrent(torch._VF.lstm, *inputs), (3, 5, 9), state, state, (24, 9), (24, 6), (24,), (24,))
case("gru", lambda *inputs: recurrent(torch._VF.gru, *inputs), (3, 5, 9), state, (18, 9), (18, 6), (18,), (18,))
save_file(tensors, OUTPUT, {"torch": torch.__version__})
