#!/usr/bin/env python3
"""Writes tests/golden/resnet.safetensors and resnet18.pth: logits of torchvision's ResNets, and a small file with its names.

    pip install torch torchvision safetensors
    python3 scripts/golden_resnet.py

tests/golden/README.md describes the content of the files.
"""

import math
import pathlib

import torch
from safetensors.torch import save_file
from torchvision.models import resnet18, resnet34, resnet50

FOLDER = pathlib.Path(__file__).parent.parent / "tests" / "golden"
MASK = 2**32 - 1


def hashed(name, shape):
    """Returns numbers from -0.5 to 0.5 that depend on the name and the place of each."""
    start = 2166136261
    for byte in name.encode():
        start = (start ^ byte) * 16777619 & MASK
    # Products wrap around in int64, which leaves the lower 32 bits right.
    value = torch.arange(math.prod(shape), dtype=torch.int64) * 0x9E3779B1 + start & MASK
    value = (value ^ value >> 16) * 0x85EBCA6B & MASK
    value = (value ^ value >> 13) * 0xC2B2AE35 & MASK
    return ((value ^ value >> 16).double() / 2**32 - 0.5).reshape(shape)


def variable(name, shape):
    """Returns the value of the variable with this name and shape."""
    numbers = hashed(name, shape)
    if len(shape) > 1:
        numbers = numbers * math.sqrt(12 / math.prod(shape[1:]))
    elif name.endswith(("weight", "running_var")):
        numbers = numbers / 2 + 1
    else:
        numbers = numbers / 2
    return numbers.float()


def outputs(model):
    """Returns the logits in evaluation mode and in training mode, and prints how far f32 is from them."""
    state = {name: variable(name, tensor.shape) for name, tensor in model.state_dict().items() if tensor.dim() > 0}
    images = (hashed("images", (2, 3, 64, 64)) * 4).float()
    results = []
    for dtype in [torch.float32, torch.float64]:
        model.load_state_dict(state, strict=False)
        model = model.to(dtype)
        evaluated = model.eval()(images.to(dtype))
        results.append(torch.stack([evaluated, model.train()(images.to(dtype))]))
    rounded, exact = results
    errors = [(a - b).abs().max() / b.abs().max() for a, b in zip(rounded, exact)]
    print("relative errors of f32: evaluation {:.1e}, training {:.1e}".format(*errors))
    return exact


def narrow_state():
    """Returns a state dict with all names of ResNet-18, but 64 times fewer channels in each layer."""
    state = {}
    for name, tensor in resnet18(num_classes=10).state_dict().items():
        if tensor.dim() == 0:
            state[name] = torch.tensor(3)
        else:
            shape = [size // 64 if size % 64 == 0 else size for size in tensor.shape]
            state[name] = variable(name, shape)
    return state


def main():
    with torch.no_grad():
        tensors = {
            "resnet18": outputs(resnet18(num_classes=10)),
            "resnet34": outputs(resnet34(num_classes=10)),
            "resnet50": outputs(resnet50(num_classes=10)),
            "dilated": outputs(resnet50(num_classes=10, replace_stride_with_dilation=[False, True, True])),
        }
    for name, tensor in tensors.items():
        print(name, tensor.flatten()[:3], tensor.std())
    save_file({name: tensor.float() for name, tensor in tensors.items()}, FOLDER / "resnet.safetensors")
    torch.save(narrow_state(), FOLDER / "resnet18.pth")


if __name__ == "__main__":
    main()
