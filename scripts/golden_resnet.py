#!/usr/bin/env python3
"""Writes tests/golden/resnet.safetensors: outputs of torchvision's ResNets.

    pip install torch torchvision safetensors
    python3 scripts/golden_resnet.py

tests/golden/README.md describes the content of the file.
"""

import math
import pathlib

import torch
from safetensors.torch import save_file
from torchvision.models import resnet18, resnet34, resnet50

OUTPUT = pathlib.Path(__file__).parent.parent / "tests" / "golden" / "resnet.safetensors"


def ramp(shape):
    """Returns numbers from -0.5 to 0.5 that follow from their places."""
    places = torch.arange(math.prod(shape), dtype=torch.int64)
    return ((places * 2654435761 % 2**32).double() / 2**32 - 0.5).reshape(shape)


def value(name, shape):
    """Returns what the variable of this name and shape has."""
    if len(shape) > 1:
        return ramp(shape) * math.sqrt(12 / math.prod(shape[1:]))
    if name.endswith(("weight", "running_var")):
        return 1 + ramp(shape) / 2
    return ramp(shape) / 2


def outputs(model):
    state = {name: value(name, tensor.shape).float() for name, tensor in model.state_dict().items() if tensor.dim() > 0}
    model.load_state_dict(state, strict=False)
    model = model.double()
    images = ramp((2, 3, 32, 32)) * 4
    evaluated = model.eval()(images)
    return torch.stack([evaluated, model.train()(images)])


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
    save_file({name: tensor.float() for name, tensor in tensors.items()}, OUTPUT)


if __name__ == "__main__":
    main()
