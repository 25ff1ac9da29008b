#!/usr/bin/env python3
"""Writes crates/candle-ddp-nn/tests/golden/autocast.{txt,safetensors}: PyTorch's lists for autocast, and outputs and gradients of
torch.nn.functional under it.

    pip install torch safetensors expecttest
    python3 scripts/golden_autocast_layers.py

The README.md next to the files describes them.
"""

import pathlib

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.testing._internal.autocast_test_lists import AutocastTestLists

FOLDER = pathlib.Path(__file__).parent.parent / "crates" / "candle-ddp-nn" / "tests" / "golden"

tensors = {}


def lists():
    """The functions of each of CUDA's lists, from those that PyTorch's tests go through."""
    tested = {name: [entry[0] for entry in entries] for name, entries in vars(AutocastTestLists(torch.device("cpu"))).items()
              if isinstance(entries, list)}
    found = {
        "16 bits": tested["torch_fp16"] + tested["nn_fp16"],
        "f32": tested["torch_fp32"] + tested["nn_fp32"],
        "widest": tested["torch_expect_builtin_promote"] + tested["torch_need_autocast_promote"],
    }
    # The tests leave it out, but it is on the list.
    attention = torch._C._dispatch_dump_table("aten::scaled_dot_product_attention")
    assert any("AutocastCUDA: registered" in line for line in attention.splitlines())
    found["16 bits"].append("scaled_dot_product_attention")
    return {name: sorted(set(functions)) for name, functions in found.items()}


def wave(shape, index):
    """Input number `index` of a case, as the tests make it."""
    j = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return (2 * torch.sin(1.7 * j + index + 0.3)).reshape(shape)


def case(name, run, *shapes, sixteen=()):
    """Inputs are f32, those in `sixteen` bf16."""
    dtype = lambda index: torch.bfloat16 if index in sixteen else torch.float32
    inputs = [wave(shape, index).to(dtype(index)).requires_grad_() for index, shape in enumerate(shapes)]
    with torch.autocast("cpu", torch.bfloat16):
        y = run(*inputs)
    j = torch.arange(y.numel(), dtype=torch.float64)
    y.backward(torch.cos(0.9 * j + 0.1).reshape(y.shape).to(y.dtype))
    results = {"y": y.detach()} | {f"d{index}": x.grad for index, x in enumerate(inputs)}
    for key, value in results.items():
        tensors[f"{name}|{key}"] = value.contiguous()


classes = torch.arange(6) * 3 % 10

case("linear", F.linear, (5, 37), (18, 37), (18,))
case("linear of 16 bits", F.linear, (5, 37), (18, 37), (18,), sixteen=[0])
case("conv1d", lambda x, w, b: F.conv1d(x, w, b, padding=1), (2, 5, 8), (6, 5, 3), (6,))
case("conv2d", lambda x, w, b: F.conv2d(x, w, b, padding=1), (2, 5, 8, 8), (6, 5, 3, 3), (6,))
case("conv_transpose1d", lambda x, w, b: F.conv_transpose1d(x, w, b, 2, 1, 1), (2, 4, 5), (4, 3, 3), (3,))
case("conv_transpose2d", lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1), (2, 4, 4, 5), (4, 3, 3, 3), (3,))
case("attention", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *[(1, 2, 6, 8)] * 3)
case("linear_cross_entropy", lambda x, w, b: F.cross_entropy(F.linear(x, w, b), classes), (6, 8), (10, 8), (10,))
# On CPUs these take 16 bits as they are. On CUDA they are on the list of f32.
case("softmax", lambda x: F.softmax(x.float(), 1), (4, 33), sixteen=[0])
case("log_softmax", lambda x: F.log_softmax(x.float(), 1), (4, 33), sixteen=[0])
case("layer_norm", lambda x, w, b: F.layer_norm(x.float(), (24,), w, b), (5, 24), (24,), (24,), sixteen=[0])
case("rms_norm", lambda x, w: F.rms_norm(x.float(), (24,), w, 1e-5), (5, 24), (24,), sixteen=[0])
case("group_norm", lambda x, w, b: F.group_norm(x.float(), 3, w, b), (2, 6, 4, 5), (6,), (6,), sixteen=[0])
case("instance_norm", F.instance_norm, (2, 3, 4, 5), sixteen=[0])
case("cross_entropy", lambda x: F.cross_entropy(x.float(), classes), (6, 10), sixteen=[0])
ctc_loss = lambda x: F.ctc_loss(F.log_softmax(x.float(), -1), torch.tensor([[1, 2], [3, 0]]), (5, 4), (2, 1))
case("ctc_loss", ctc_loss, (5, 2, 4), sixteen=[0])
case("mse_loss", lambda x, y: F.mse_loss(x.float(), y.float()), (6, 10), (6, 10), sixteen=[0, 1])
case("matmul", torch.matmul, (2, 3, 5, 7), (2, 3, 7, 4))
case("matmul of 16 bits", torch.matmul, (2, 5, 7), (7, 4), sixteen=[0])
case("cat", lambda x, y: torch.cat([x, y], 1), (3, 17), (3, 5), sixteen=[1])
case("add", torch.add, (3, 17), (3, 17), sixteen=[1])


def lstm(x, h, c, w_ih, w_hh, b_ih, b_hh):
    y = torch._VF.lstm(x, (h, c), [w_ih, w_hh, b_ih, b_hh], True, 1, 0.0, True, False, False)
    return torch.cat([y.flatten() for y in y])


# On CPUs, gates of GRU are f32. On CUDA, both return 16 bits.
case("lstm", lstm, (3, 5, 9), (1, 5, 6), (1, 5, 6), (24, 9), (24, 6), (24,), (24,))
save_file(tensors, FOLDER / "autocast.safetensors", {"torch": torch.__version__})
(FOLDER / "autocast.txt").write_text("".join(f"{name}: {' '.join(functions)}\n" for name, functions in lists().items()))
(FOLDER / "autocast.safetensors").chmod(0o644)
